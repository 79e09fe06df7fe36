"""Keeps the batch stage consuming the lanes of every model, from when they are made until they are removed."""

from __future__ import annotations

import asyncio

import structlog

from ...schemas.errors import StartupError, Transient
from ...schemas.jobs import Priority
from ...streams.port import Consumer
from ...streams.topology import PRIORITIES, batch_stream
from ..contract import Intake, Pipe

log = structlog.get_logger(__name__)

RETRY = 1.0  # seconds until a lane is tried again that could not be consumed


async def consume_lanes(pipe: Pipe, intake: Intake) -> None:
    """Run until cancelled."""
    registry = pipe.registry
    opened: dict[tuple[str, Priority], Consumer] = {}
    while True:
        changed = asyncio.create_task(registry.lanes_changed())
        await asyncio.sleep(0)  # it listens from here on
        wanted = {(lanes, priority) for lanes in registry.lanes for priority in PRIORITIES}
        for lane in opened.keys() - wanted:
            await opened.pop(lane).close()
        for lane in sorted(wanted - opened.keys()):
            lanes, priority = lane
            subject = pipe.subjects.batch_of(lanes, priority)
            try:
                opened[lane] = await intake.consume(batch_stream(lanes, priority), f"batch-{priority}", subject)
            except (Transient, StartupError) as error:  # it has just been removed, or the broker is away
                log.warning("a lane cannot be consumed yet", model=registry.lanes[lanes].model, reason=str(error))
        await asyncio.wait({changed}, timeout=None if opened.keys() == wanted else RETRY)
        changed.cancel()
