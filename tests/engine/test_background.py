"""A thread of the engine that does what it is given."""

from __future__ import annotations

import pytest

from penstock.engine.background import Background


class PanicException(BaseException):
    """What a panic in Rust is in Python."""


def test_a_panic_is_told_to_who_waits_and_the_thread_goes_on() -> None:
    def panic() -> None:
        raise PanicException

    thread = Background("test")
    failed, done = thread.submit(panic), thread.submit(lambda: 5)
    with pytest.raises(PanicException):
        failed.result(timeout=60)
    assert done.result(timeout=60) == 5
    thread.close(timeout=60)
