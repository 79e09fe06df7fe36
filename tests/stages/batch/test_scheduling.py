"""Which worker is picked, what goes there together, what a filling memory takes away, and who counts as alive."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from listed_candidates import Listed
from memory_pipeline import validated
from structlog.testing import capture_logs

from penstock.config.settings import Settings
from penstock.schemas.events import Failed
from penstock.schemas.jobs import InferenceBatch, Priority, ValidatedJob
from penstock.schemas.params import GenerationParams
from penstock.schemas.registry import Admission, ModelCard, Room, WorkerCard
from penstock.schemas.wire import codec
from penstock.simulation.clock import VirtualLoop
from penstock.stages import Pipe, Runner, Stage
from penstock.stages.batch import stage as batch_stage
from penstock.stages.batch.scheduling import Candidate, LeastLoaded, MemoryAware, RoundRobin
from penstock.stages.batch.stage import Batch
from penstock.stages.batch.strategies import STRATEGIES
from penstock.stages.cancellations import Cancellations
from penstock.stages.degradation import slots
from penstock.stages.queue import Queue
from penstock.streams.lanes import open_lanes
from penstock.streams.memory.broker import MemoryBroker
from penstock.streams.port import NEXT, SCHEMA, Message
from penstock.streams.stores.registry import Registry
from penstock.streams.topology import INFER, Subjects, lane_of, topology

EXAMPLES = settings(max_examples=100, deadline=None)
JOB = ValidatedJob(
    id="r",
    endpoint="/v1/completions",
    bridge="test",
    tenant="default",
    priority="normal",
    model="m",
    prompts=((1,),),
    params=GenerationParams(max_tokens=1),
    created=0.0,
    deadline=1.0,
    body={},
)
workers = st.lists(
    st.builds(Candidate, st.uuids().map(str), st.integers(0, 50), st.integers(0, 10_000)),
    min_size=1,
    max_size=8,
    unique_by=lambda candidate: candidate.worker,
).map(Listed)


@EXAMPLES
@given(workers, st.integers(1, 10))
def test_p16_least_loaded_picks_one_with_the_fewest(among: Listed, rounds: int) -> None:
    """P16: least-loaded picks a worker with the fewest active batches."""
    strategy = LeastLoaded()
    for _ in range(rounds):
        picked = strategy.pick(among, JOB)
        assert picked in among
        assert picked.active == min(candidate.active for candidate in among)


@EXAMPLES
@given(workers, st.integers(2, 12_000))
def test_p17_memory_aware_picks_one_with_room_or_refuses(among: Listed, tokens: int) -> None:
    """P17: memory-aware picks a worker with room for the batch, or refuses."""
    job = JOB.model_copy(update={"params": GenerationParams(max_tokens=tokens - 1)})
    picked = MemoryAware().pick(among, job)
    if picked is None:
        assert all(candidate.free_tokens < tokens for candidate in among)
    else:
        assert picked in among and picked.free_tokens >= tokens


@EXAMPLES
@given(workers)
def test_round_robin_gives_everyone_a_turn(among: Listed) -> None:
    strategy = RoundRobin()
    picked = [strategy.pick(among, JOB) for _ in range(2 * len(among))]
    assert all(picked.count(candidate) == 2 for candidate in among)


def card(name: str) -> WorkerCard:
    model = ModelCard(name="m", source="m", backend="echo", context_length=10, created=int(time.time()))
    return WorkerCard(id=name, model=model, capacity=1, pid=1, incarnation=uuid.uuid4().hex)


@EXAMPLES
@given(st.lists(st.booleans(), min_size=1, max_size=6))
def test_p18_p19_p20_who_beats_is_eligible_and_nobody_else(lives: list[bool]) -> None:
    """P18: a worker that fails its check gets no batch after the interval. P19: one that recovers is eligible again.
    P20: N configured workers means N ready workers."""

    async def check() -> None:
        loop, interval = asyncio.get_running_loop(), 5.0
        assert isinstance(loop, VirtualLoop)
        broker = MemoryBroker(now=loop.now)
        await broker.ensure(*topology("penstock", (), workers_ttl=3 * interval))
        registry = Registry(broker, interval=interval)
        cards = [card(f"w{place}") for place in range(len(lives))]

        async def seen() -> list[str]:
            await registry.refresh()
            return [worker.id for worker in registry.workers_for("m", 1)]

        for each in cards:
            await registry.announce_worker(each)
        assert await seen() == [each.id for each in cards]
        for _ in range(4):
            await asyncio.sleep(interval)
            for each, alive in zip(cards, lives, strict=True):
                if alive:
                    await registry.announce_worker(each)
        assert await seen() == [each.id for each, alive in zip(cards, lives, strict=True) if alive]
        for each in cards:
            await registry.announce_worker(each)
        assert await seen() == [each.id for each in cards]

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(check())


@EXAMPLES
@given(st.floats(0, 1), st.floats(0, 1), st.integers(1, 64))
def test_a_fuller_memory_never_takes_more(one: float, other: float, size: int) -> None:
    less, more = slots(min(one, other), size, 2), slots(max(one, other), size, 2)
    assert less.high >= more.high and less.others >= more.others


def test_memory_takes_away_speed_first_then_the_low_then_all() -> None:
    assert [slots(pressure, 16, 2) for pressure in (0.69, 0.70, 0.89, 0.90, 0.94, 0.95)] == [
        (18, 16),
        (18, 8),
        (18, 8),
        (18, 0),
        (18, 0),
        (0, 0),
    ]


@contextlib.asynccontextmanager
async def alone(kind: Callable[[Pipe], Stage], **values: Any) -> AsyncIterator[Pipe]:
    """One stage, and nobody before or behind it."""
    chosen = Settings(backend="echo", **values)
    broker, subjects = MemoryBroker(), Subjects(chosen.namespace)
    await broker.ensure(*topology(chosen.namespace, chosen.job_stages))
    await open_lanes(broker, chosen, "echo")
    pipe = Pipe(broker, subjects, chosen, Registry(broker, interval=1.0), Cancellations())
    await pipe.registry.refresh()
    runner = Runner(kind(pipe), pipe)
    running = asyncio.create_task(runner.run())
    await turns()
    yield pipe
    runner.stop()
    await running


async def turns() -> None:
    """Of the loop, in which everything gets where it goes."""
    for _ in range(100):
        await asyncio.sleep(0)


async def batches_of(pipe: Pipe) -> list[InferenceBatch]:
    """Filled as they go out."""
    seen: list[InferenceBatch] = []
    subject = pipe.subjects.root + ".infer.*"
    await pipe.broker.listen(
        subject, lambda message: seen.append(codec.decode_model(InferenceBatch, message.data, codec.BATCH))
    )
    return seen


async def tell_room(pipe: Pipe, *, free: int, free_high: int, total_tokens: int = 0) -> None:
    """As a worker does that has received nothing so far."""
    worker = WorkerCard(
        id="w0",
        model=ModelCard(name="echo", source="echo", backend="echo", context_length=512, created=0),
        capacity=16,
        pid=1,
        incarnation="i",
    )
    await pipe.registry.announce_worker(worker)
    await pipe.registry.refresh()
    room = Room(
        worker="w0",
        incarnation="i",
        free=free,
        free_high=free_high,
        received={},
        active=0,
        free_tokens=total_tokens or 1 << 20,
        total_tokens=total_tokens,
    )
    await pipe.broker.notify(pipe.subjects.room("w0"), room.model_dump_json().encode())


async def submit(
    pipe: Pipe,
    stage: str,
    name: str,
    priority: Priority = "normal",
    *,
    age: float = 0.0,
    n: int = 1,
    tenant: str = "default",
) -> None:
    """Put a job for `n` choices before the stage, which came in so many seconds ago."""
    change = {"priority": priority, "created": pipe.now() - age, "params": GenerationParams(n=n), "tenant": tenant}
    job = validated(name, pipe).model_copy(update=change)
    headers = {SCHEMA: codec.VALIDATED_JOB, NEXT: lane_of(pipe.subjects, job)}
    subject = lane_of(pipe.subjects, job) if stage == "batch" else pipe.subjects.stage(stage, priority, tenant)
    await pipe.broker.publish(subject, codec.encode(job), message_id=name, headers=headers)
    await turns()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)


async def test_p4_who_comes_within_the_window_goes_along() -> None:
    """P4, where the others do not come at once."""
    windows: list[float] = []
    is_over = asyncio.Event()

    async def pause(seconds: float) -> None:
        windows.append(seconds)
        await is_over.wait()

    async with alone(lambda pipe: Batch(pipe, pause), batch_window=0.25) as pipe:
        seen = await batches_of(pipe)
        await submit(pipe, "batch", "first")
        await tell_room(pipe, free=4, free_high=4)
        for name in ("second", "third"):
            await submit(pipe, "batch", name)
        assert windows == [0.25] and not seen
        is_over.set()
        await until(lambda: len(seen) == 3)
        assert [job.id for batch in seen for job in batch.jobs] == ["first", "second", "third"]
        assert len({batch.id for batch in seen}) == 1


async def sent_by_tenant(pipe: Pipe, seen: list[InferenceBatch]) -> Counter[str]:
    await turns()
    return Counter(job.tenant for batch in seen for job in batch.jobs)


async def test_a_tenant_alone_takes_every_seat() -> None:
    async with alone(Batch) as pipe:
        seen = await batches_of(pipe)
        await tell_room(pipe, free=16, free_high=16)
        for number in range(20):
            await submit(pipe, "batch", f"a{number}", tenant="many")
        await until(lambda: len(seen) == 16)
        assert await sent_by_tenant(pipe, seen) == {"many": 16}


async def test_beside_another_tenant_none_takes_every_seat() -> None:
    """Whoever floods a worker leaves room for one that came lately, however many of its own wait in front."""
    async with alone(Batch) as pipe:
        seen = await batches_of(pipe)
        await tell_room(pipe, free=16, free_high=16)
        await submit(pipe, "batch", "b0", tenant="few")
        for number in range(20):
            await submit(pipe, "batch", f"a{number}", tenant="many")
        await until(lambda: len(seen) == 13)
        assert await sent_by_tenant(pipe, seen) == {"few": 1, "many": 12}
        await submit(pipe, "batch", "wide", tenant="many", n=128)
        await submit(pipe, "batch", "b1", tenant="few")
        await until(lambda: len(seen) == 14)
        assert await sent_by_tenant(pipe, seen) == {"few": 2, "many": 12}


async def test_tenants_whose_jobs_wait_take_turns() -> None:
    async with alone(Batch) as pipe:
        seen = await batches_of(pipe)
        for number in range(8):
            await submit(pipe, "batch", f"a{number}", tenant="many")
        for number in range(2):
            await submit(pipe, "batch", f"b{number}", tenant="few")
        await tell_room(pipe, free=16, free_high=16)
        await until(lambda: len(seen) == 10)
        order = [job.id for batch in seen for job in batch.jobs]
        assert order == ["a0", "b0", "a1", "b1", *(f"a{number}" for number in range(2, 8))]


@pytest.mark.parametrize("scheduling", STRATEGIES)
async def test_what_fits_no_worker_is_refused_at_once_and_holds_up_nobody(scheduling: str) -> None:
    """Before, `memory_aware` waited for room that no worker has, and so did everybody behind."""
    refused: list[Failed] = []

    def hear(message: Message) -> None:
        event = codec.decode_event(message.data)
        if isinstance(event, Failed):
            refused.append(event)

    async with alone(Batch, scheduling=scheduling) as pipe:
        await pipe.broker.listen(pipe.subjects.root + ".events.>", hear)
        seen = await batches_of(pipe)
        await submit(pipe, "batch", "before", n=8)  # 8 choices of 256 tokens: nobody is there yet who is too small
        await submit(pipe, "batch", "fits")
        await tell_room(pipe, free=99, free_high=99, total_tokens=1_000)
        await until(lambda: "fits" in {job.id for batch in seen for job in batch.jobs})
        await submit(pipe, "batch", "after", n=8)
        await submit(pipe, "batch", "small")
        await until(lambda: "small" in {job.id for batch in seen for job in batch.jobs})
        large = {"before", "after"}
        if scheduling == "memory_aware":
            await until(lambda: {event.request for event in refused} == large)
            assert {(event.error.status, event.error.code) for event in refused} == {(503, "no_worker_fits")}
            assert "2053 tokens, and the largest KV cache holds 1000" in refused[0].error.message
        else:  # the engine lets the choices wait for each other
            await until(lambda: {job.id for batch in seen for job in batch.jobs} >= large)
            await tell_room(pipe, free=99, free_high=99, total_tokens=5)
            await submit(pipe, "batch", "long")
            await until(lambda: [event.request for event in refused] == ["long"])


async def test_whose_turn_it_is_keeps_the_others_back_but_no_high_one_from_its_reserved_seat() -> None:
    async with alone(Batch) as pipe:
        seen = await batches_of(pipe)
        await tell_room(pipe, free=1, free_high=2)
        await submit(pipe, "batch", "large", age=1_000.0, n=2)
        await submit(pipe, "batch", "small", "low", age=1_000.0)
        await submit(pipe, "batch", "urgent", "high")
        await until(lambda: seen)
        assert [[job.id for job in batch.jobs] for batch in seen] == [["urgent"]]
        await tell_room(pipe, free=3, free_high=4)  # the urgent one is still on its way
        await until(lambda: len(seen) == 2)
        assert [job.id for job in seen[1].jobs] == ["large"]


async def test_what_infer_has_no_room_for_waits_at_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where more requests run than `infer_limit`: whatever is urgent still goes first once one has ended."""
    monkeypatch.setattr(batch_stage, "FULL_PAUSE", 0.01)
    async with alone(Batch) as pipe:
        infer = next(one for one in topology(pipe.subjects.root, ())[0] if one.name == INFER)
        await pipe.broker.reconfigure([replace(infer, max_bytes=1)], [])
        await tell_room(pipe, free=4, free_high=4)
        with capture_logs() as logs:
            await submit(pipe, "batch", "small", "low")
            await until(lambda: logs)
            await submit(pipe, "batch", "urgent", "high")
            await submit(pipe, "batch", "usual")
            await asyncio.sleep(0.05)  # some more tries
            await pipe.broker.reconfigure([infer], [])
            async with asyncio.timeout(10):
                while len(stored := await pipe.broker.replay(INFER, pipe.subjects.infer("w0"))) < 3:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        batches = [codec.decode_model(InferenceBatch, message.data, codec.BATCH) for message in stored]
        assert [job.id for batch in batches for job in batch.jobs] == ["urgent", "usual", "small"]
        assert [entry["event"] for entry in logs] == ["too many requests run"]


async def test_a_lane_that_fills_up_is_closed_before_the_next_regular_look() -> None:
    class Rare(Queue):
        interval = 60.0

    async with alone(Rare, queue_limit=20, high_watermark=0.5) as pipe:
        told: list[Admission] = []
        await pipe.broker.listen(
            pipe.subjects.admission(), lambda message: told.append(Admission.model_validate_json(message.data))
        )
        for place in range(9):
            await submit(pipe, "queue", f"r{place}")
        assert all(one.accepting["normal"] for one in told)
        await submit(pipe, "queue", "r9")
        assert told[-1].accepting == {"high": True, "normal": False, "low": True}
