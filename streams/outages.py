"""What a part does while the broker is unavailable: retry a call until it succeeds, or log the outage and go on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from itertools import count
from typing import TypeVar

import structlog

from ..schemas.errors import Transient

RETRY_PAUSE = 0.2  # seconds between two attempts

log = structlog.get_logger(__name__)
Result = TypeVar("Result")


async def through_outages(call: Callable[[], Awaitable[Result]], target: object) -> Result:
    """Await `call()` until it raises no `Transient`, however long that takes; `target` names its subject in the log.

    Thousands of requests may wait for the broker at once: each is logged less and less often.
    """
    for attempt in count(1):
        try:
            return await call()
        except Transient as error:
            if attempt.bit_count() == 1:  # 1, 2, 4, 8, …
                log.warning("broker unavailable, retrying", target=str(target), attempt=attempt, reason=str(error))
            await asyncio.sleep(RETRY_PAUSE)
    raise AssertionError("unreachable")


@contextlib.contextmanager
def outage_logged(event: str, **fields: str) -> Iterator[None]:
    """Log `event` with the reason instead of raising `Transient`: for periodic tasks, which try again anyway."""
    try:
        yield
    except Transient as error:
        log.warning(event, reason=str(error), **fields)
