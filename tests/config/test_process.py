"""What a process asks of its interpreter."""

from __future__ import annotations

import gc

from penstock.config.process import keep_loaded


def test_a_collection_looks_through_nothing_that_was_loaded() -> None:
    kept: list[object] = [[]]
    try:
        keep_loaded()
        assert not any(found is kept for found in gc.get_objects())
        later: list[object] = [[]]
        assert any(found is later for found in gc.get_objects())
    finally:
        gc.unfreeze()
