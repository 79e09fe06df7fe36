"""Runs asynchronous work for callers that block."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from contextvars import copy_context
from typing import Any, TypeVar

Result = TypeVar("Result")

_LOOK = 0.5  # seconds between two looks at whether a signal has come


def wait_for(work: Coroutine[Any, Any, Result]) -> Result:
    """Run `work` in an event loop of its own and wait for it, even where the caller's thread runs a loop already.

    Ctrl-C cancels the work. The event loop that the caller's thread has stays its current one.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _run(work)
    started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any] | None]] = Future()

    async def tell() -> Result:
        started.set_result((asyncio.get_running_loop(), asyncio.current_task()))
        return await work

    with ThreadPoolExecutor(1) as thread:  # in a notebook, for example
        try:
            return result_of(thread.submit(copy_context().run, _run, tell()))
        except KeyboardInterrupt:
            thread.shutdown(wait=False, cancel_futures=True)
            with suppress(RuntimeError, TimeoutError):  # it has ended, or not begun
                loop, task = started.result(timeout=1)
                loop.call_soon_threadsafe(task.cancel if task else loop.stop)
            raise


def result_of(running: Future[Result]) -> Result:
    """Wait for a result that may take long. Ctrl-C ends the wait, also where another thread gets the signal, or the
    wait is just about to begin: neither breaks off a lock's."""
    while not wait([running], _LOOK).done:
        pass
    return running.result()


def _run(work: Coroutine[Any, Any, Result]) -> Result:
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        return runner.run(work)
