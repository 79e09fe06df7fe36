"""Who is taken for dead, and who was only not heard of."""

from __future__ import annotations

import asyncio
import sys
import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from memory_pipeline import MODEL, Pipeline, validated
from structlog.testing import capture_logs

from penstock.config.process import host
from penstock.schemas.events import Done, Event
from penstock.schemas.jobs import InferenceBatch, Priority
from penstock.schemas.registry import WorkerCard
from penstock.schemas.wire import codec
from penstock.stages import Pipe, Runner
from penstock.stages.batch.dead_workers import Reclaimer
from penstock.stages.infer.stage import Infer
from penstock.streams.memory.broker import MemoryBroker
from penstock.streams.port import SCHEMA, Consumer, ConsumerSpec

LONG = 3600.0  # seconds


class Shaky(MemoryBroker):
    """Loses its connection as often as it is told."""

    lost = 0

    @property
    def outages(self) -> int:
        return self.lost


class Remembering(MemoryBroker):
    """Notes which consumers are deleted."""

    def __init__(self) -> None:
        super().__init__()
        self.forgotten: list[str] = []

    async def forget(self, stream: str, consumer: str) -> None:
        self.forgotten.append(consumer)
        await super().forget(stream, consumer)


class Opening:
    """Opens the consumers that are asked for."""

    def __init__(self, pipe: Pipe) -> None:
        self._broker = pipe.broker

    async def consume(
        self, stream: str, name: str, subject: str, *, takeover: bool = False, idle_limit: float = 0.0
    ) -> Consumer:
        return await self._broker.consume(
            ConsumerSpec(stream, name, subject, ack_wait=LONG, max_deliver=-1), prefetch=1
        )

    async def consume_lanes(self, stream: str, name: str, subjects: Callable[[Priority], str]) -> None:
        raise NotImplementedError


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


async def looks(reclaimer: Reclaimer) -> bool:
    """Whether the reclaimer takes somebody for dead now."""
    try:
        await reclaimer._look()
    except asyncio.CancelledError:
        return True
    return False


async def pipeline_with_work_for_nobody() -> Pipeline:
    pipeline = await Pipeline.start(memory=Shaky, heartbeat_interval=0.05)
    subject = pipeline.pipe.subjects.infer("gone")
    await pipeline.pipe.broker.publish(subject, b"{}", message_id="a batch")
    return pipeline


async def test_nobody_waits_for_the_leases_of_a_worker_that_died_here(dead: int) -> None:
    """Its card lives on, and what it had in hand was lent to it for longer than this test takes."""
    pipeline = await Pipeline.start(lease=LONG)
    pipe = pipeline.pipe
    card = WorkerCard(
        id="w7", model=pipe.registry.models[MODEL], capacity=4, pid=dead, incarnation=uuid.uuid4().hex, host=host()
    )
    job = validated(f"r-{uuid.uuid4().hex}", pipe)
    batch = InferenceBatch(id=uuid.uuid4().hex, worker="w7", jobs=(job,), incarnation=card.incarnation)
    subject = pipe.subjects.infer("w7")
    spec = ConsumerSpec(stream="INFER", name="infer-w7", subject=subject, ack_wait=LONG, max_deliver=-1)
    own = await pipe.broker.consume(spec, prefetch=1)
    await pipe.broker.publish(subject, codec.encode(batch), message_id=batch.id, headers={SCHEMA: codec.BATCH})
    assert len(await own.take(1)) == 1
    await own.close()
    await pipe.registry.announce_worker(card)
    async with asyncio.timeout(60):
        events = pipe.subjects.events(job.tenant, job.bridge, job.id)
        while not any(isinstance(event, Done) for event in await told(pipe, events)):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert "w7" not in [card.id for card in pipe.registry.workers]
    await pipeline.stop()


async def told(pipe: Pipe, subject: str) -> list[Event]:
    return [codec.decode_event(message.data) for message in await pipe.broker.replay("EVENTS", subject)]


async def test_the_log_tells_a_worker_that_ends_from_one_that_died(dead: int) -> None:
    pipeline = await Pipeline.start(heartbeat_interval=60.0)  # so that only this test looks
    pipe = pipeline.pipe
    model = pipe.registry.models[MODEL]

    async def logged(worker: str) -> set[tuple[str, str]]:
        await pipe.broker.publish(pipe.subjects.infer(worker), b"{}", message_id=worker)
        with capture_logs() as logs:
            assert await looks(Reclaimer(pipe, Intake(pipe)))
        return {(entry["log_level"], entry["event"]) for entry in logs if entry.get("worker") == worker}

    card = WorkerCard(id="w7", model=model, capacity=4, pid=dead, incarnation=uuid.uuid4().hex, host=host())
    await pipe.registry.announce_worker(card)
    await pipe.registry.refresh()
    await pipe.registry.withdraw(card)  # which the registry has yet to learn
    assert await logged("w7") == {("info", "a worker is ending, others take what it has not begun")}
    await pipe.registry.announce_worker(card)  # the next process of this name, which is killed
    assert await logged("w7") == {("warning", "a worker is gone, others take over its requests")}
    await pipeline.stop()


async def test_the_next_process_of_a_name_keeps_its_consumer() -> None:
    """It opens the consumer before it announces itself, so nobody can know yet that it is there."""
    pipeline = await Pipeline.start(memory=Remembering, heartbeat_interval=60.0)  # so that only this test looks
    pipe = pipeline.pipe
    subject, name = pipe.subjects.infer("gone"), "infer-gone"
    reclaimer, opening = Reclaimer(pipe, Opening(pipe)), ConsumerSpec("INFER", name, subject, ack_wait=LONG)
    await pipe.broker.publish(subject, b"{}", message_id="a batch")
    await reclaimer._look()
    await (await reclaimer._held["gone"].take(1))[0].ack()
    following = await pipe.broker.consume(opening, prefetch=1)
    await reclaimer._look()
    broker: Any = pipe.broker
    assert (reclaimer._held, broker.forgotten) == ({}, [])
    await pipe.broker.publish(subject, b"{}", message_id="the next batch")
    assert len(await following.take(1)) == 1
    await pipeline.stop()


async def test_a_request_of_a_dead_worker_goes_on_at_the_next_one_of_its_name_with_a_single_seat() -> None:
    """The new one comes while the messages of its name are still taken back, as after a restart of everything."""
    pipeline = await Pipeline.start(max_batch_size=1)
    await pipeline.lose_worker()
    pipe, old = pipeline.pipe, pipeline.infer._card
    job = validated(f"r-{uuid.uuid4().hex}", pipe)
    batch = InferenceBatch(id=uuid.uuid4().hex, worker=old.id, jobs=(job,), incarnation=old.incarnation)
    with capture_logs() as logs:
        subject = pipe.subjects.infer(old.id)
        await pipe.broker.publish(subject, codec.encode(batch), message_id=batch.id, headers={SCHEMA: codec.BATCH})
        async with asyncio.timeout(60):
            while "others take" not in str(logs):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    following = Runner(Infer(pipe, pipeline.engine, old.model_copy(update={"incarnation": "next"})), pipe)
    running = asyncio.create_task(following.run())
    async with asyncio.timeout(60):
        events = pipe.subjects.events(job.tenant, job.bridge, job.id)
        while not any(isinstance(event, Done) for event in await told(pipe, events)):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    following.stop()
    await running
    await pipeline.stop()


async def test_a_worker_that_is_back_keeps_its_messages_before_the_next_heartbeat() -> None:
    """Until then they would be taken back, one by one."""
    pipeline = await Pipeline.start()
    card = pipeline.infer._card
    rare = replace(pipeline.pipe, settings=pipeline.pipe.settings.model_copy(update={"heartbeat_interval": LONG}))
    reclaimer = Reclaimer(rare, Opening(rare))
    reclaimer._held[card.id] = await Opening(rare).consume("INFER", "back", rare.subjects.infer("none"))
    assert card.id in {one.id for one in rare.registry.workers}
    async with asyncio.timeout(60):
        await reclaimer._pause()
    await pipeline.stop()


async def test_the_death_of_a_worker_of_this_host_is_heard_of_before_the_next_heartbeat() -> None:
    pipeline = await Pipeline.start()
    rare = replace(pipeline.pipe, settings=pipeline.pipe.settings.model_copy(update={"heartbeat_interval": LONG}))
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "input()", stdin=asyncio.subprocess.PIPE)
    card = WorkerCard(
        id="w7", model=rare.registry.models[MODEL], capacity=4, pid=process.pid, incarnation="one", host=host()
    )
    await rare.registry.announce_worker(card)
    await rare.registry.refresh()
    pausing = asyncio.create_task(Reclaimer(rare, Intake(rare))._pause())
    await asyncio.sleep(0)
    process.kill()
    async with asyncio.timeout(60):
        await pausing
    assert rare.registry.ended == {"w7": card}
    await process.wait()
    await pipeline.stop()


async def test_after_an_outage_nobody_is_dead_before_he_could_say_that_he_lives() -> None:
    pipeline = await pipeline_with_work_for_nobody()
    broker: Any = pipeline.pipe.broker
    reclaimer = Reclaimer(pipeline.pipe, Intake(pipeline.pipe))
    assert await looks(reclaimer)
    broker.lost += 1
    assert not await looks(reclaimer)
    async with asyncio.timeout(60):
        while not await looks(reclaimer):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await pipeline.stop()
