"""What a process asks of its interpreter."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
from types import ModuleType

import pytest

from penstock.config.process import keep_loaded, stop_signal, uncollected


def test_a_collection_looks_through_nothing_that_was_loaded() -> None:
    kept: list[object] = [[]]
    try:
        keep_loaded()
        assert not any(found is kept for found in gc.get_objects())
        later: list[object] = [[]]
        assert any(found is later for found in gc.get_objects())
    finally:
        gc.unfreeze()


def test_nothing_is_collected_while_modules_are_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[object] = [[]]
    try:
        with uncollected():
            assert not gc.isenabled()
            monkeypatch.setitem(sys.modules, "imported", ModuleType("imported"))
        assert gc.isenabled() and not any(found is kept for found in gc.get_objects())
        later: list[object] = [[]]
        with uncollected():  # which imports nothing, so that its garbage is still found
            pass
        assert any(found is later for found in gc.get_objects())
    finally:
        gc.unfreeze()
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


async def test_a_signal_that_is_ignored_stays_so() -> None:
    """`nohup` has a process outlive its terminal."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        stopping = stop_signal()
        os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        os.kill(os.getpid(), signal.SIGTERM)
        await stopping.wait()
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().remove_signal_handler(number)
        signal.signal(signal.SIGHUP, before)
