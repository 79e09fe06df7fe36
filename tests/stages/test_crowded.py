"""Consumers that the broker refuses, as when NATS clients have as many as the account may have."""

from __future__ import annotations

import asyncio

import pytest
from structlog.testing import capture_logs

from penstock.config.settings import Settings
from penstock.schemas.errors import StartupError
from penstock.stages import Pipe, Runner
from penstock.stages.cancellations import Cancellations
from penstock.stages.stream import Stream
from penstock.streams.memory.broker import MemoryBroker
from penstock.streams.memory.consumer import MemoryConsumer
from penstock.streams.port import ConsumerSpec
from penstock.streams.stores.registry import Registry
from penstock.streams.topology import Subjects, topology

FULL = "maximum consumers limit reached"


class Crowded(MemoryBroker):
    """Refuses consumers whose names begin with `refused`, each once."""

    def __init__(self, refused: str) -> None:
        super().__init__()
        self._prefix = refused
        self._refused: set[str] = set()
        self.admitted = asyncio.Event()  # one that was refused before

    async def consume(self, spec: ConsumerSpec, *, prefetch: int) -> MemoryConsumer:
        if spec.name.startswith(self._prefix) and spec.name not in self._refused:
            self._refused.add(spec.name)
            raise StartupError(FULL)
        consumer = await super().consume(spec, prefetch=prefetch)
        if spec.name in self._refused:
            self.admitted.set()
        return consumer


async def streaming(broker: MemoryBroker) -> asyncio.Task[None]:
    """The stage stream, which opens a consumer for each of its partitions."""
    settings = Settings()
    await broker.ensure(*topology("penstock", settings.job_stages))
    pipe = Pipe(broker, Subjects("penstock"), settings, Registry(broker, interval=1.0), Cancellations())
    return asyncio.create_task(Runner(Stream(pipe), pipe).run())


async def test_a_stage_that_runs_outlives_a_consumer_that_is_refused() -> None:
    broker = Crowded("stream-2")
    with capture_logs() as logs:
        running = await streaming(broker)
        await broker.admitted.wait()
    told = [line for line in logs if line["event"] == "leases are stale"]
    assert [line["reason"] for line in told] == [FULL]
    assert not running.done()
    running.cancel()


async def test_a_stage_whose_first_consumer_is_refused_does_not_start() -> None:
    with pytest.raises(StartupError, match=FULL):
        await (await streaming(Crowded("stream-")))
