"""Preparers are loaded once in a process, and stay."""

from __future__ import annotations

import asyncio
import gc
import weakref
from contextvars import ContextVar

from penstock.engine.preparing.preparers import PreparerCache, PreparerKey


async def test_a_preparer_keeps_nothing_of_the_request_that_needed_it_first() -> None:
    class Request:
        pass

    current = ContextVar[Request]("current")
    cache = PreparerCache()

    async def ask() -> weakref.ref[Request]:
        current.set(request := Request())
        await cache.start(PreparerKey("echo", "echo", "auto", "auto"))
        return weakref.ref(request)

    kept = await asyncio.create_task(ask())
    await asyncio.sleep(0)  # the loop forgets the task
    gc.collect()
    assert kept() is None
