"""Who is taken for dead, and who was only not heard of."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from memory_pipeline import Pipeline

from penstock.schemas.jobs import Priority
from penstock.stages import Pipe
from penstock.stages.guard import Guard
from penstock.streams.memory import MemoryBroker
from penstock.streams.port import Consumer


class Shaky(MemoryBroker):
    """Loses its connection as often as it is told."""

    lost = 0

    @property
    def outages(self) -> int:
        return self.lost


class Intake:
    """Notes whose work is taken back."""

    def __init__(self, pipe: Pipe) -> None:
        self.taken: list[str] = []

    async def consume(
        self, stream: str, name: str, subject: str, *, takeover: bool = False, idle_limit: float = 0.0
    ) -> Consumer:
        self.taken.append(name)
        raise asyncio.CancelledError  # enough is seen

    async def consume_lanes(self, stream: str, name: str, subjects: Callable[[Priority], str]) -> None:
        raise NotImplementedError


async def looks(guard: Guard) -> bool:
    """Whether the guard takes somebody for dead now."""
    try:
        await guard._look()
    except asyncio.CancelledError:
        return True
    return False


async def pipeline_with_work_for_nobody() -> Pipeline:
    pipeline = await Pipeline.start(memory=Shaky, heartbeat_interval=0.05)
    subject = pipeline.pipe.subjects.infer("gone")
    await pipeline.pipe.broker.publish(subject, b"{}", message_id="a batch")
    return pipeline


async def test_after_an_outage_nobody_is_dead_before_he_could_say_that_he_lives() -> None:
    pipeline = await pipeline_with_work_for_nobody()
    broker: Any = pipeline.pipe.broker
    guard = Guard(pipeline.pipe, Intake(pipeline.pipe))
    assert await looks(guard)
    broker.lost += 1
    assert not await looks(guard)
    async with asyncio.timeout(60):
        while not await looks(guard):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await pipeline.stop()
