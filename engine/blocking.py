"""Asynchronous work for callers without an event loop, and for those whose loop is busy calling us."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

Result = TypeVar("Result")


def wait_for(work: Coroutine[Any, Any, Result]) -> Result:
    """Run `work` to its end in an event loop of its own."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as thread:  # in a notebook, say
        return thread.submit(asyncio.run, work).result()
