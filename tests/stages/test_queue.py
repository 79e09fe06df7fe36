"""Waiting: order, company, room, limits, deadlines, cancellation, and what clients hear meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from memory_pipeline import MODEL, Pipeline, events_of

from penstock.api.bridge.reading import Reading
from penstock.config.settings import Settings
from penstock.schemas.errors import Overloaded
from penstock.schemas.events import Cancelled, Done, Event, Expired, Failed, Queued, Token
from penstock.schemas.jobs import InferenceBatch, Job, Priority, ValidatedJob
from penstock.schemas.registry import Admission, ModelLanes
from penstock.schemas.wire import codec
from penstock.stages import JobStage, Pipe, Runner
from penstock.stages.admission import Hysteresis
from penstock.stages.batch.stage import Batch
from penstock.stages.cancellations import Cancellations
from penstock.stages.queue import Queue
from penstock.streams.lanes import open_lanes, streams_of
from penstock.streams.memory.broker import MemoryBroker
from penstock.streams.nats.servers.server import EmbeddedServer
from penstock.streams.port import Held, Message
from penstock.streams.stores.registry import Registry
from penstock.streams.topology import PRIORITIES, Subjects, batch_stream, lanes_of, topology

PATIENCE = 10.0  # seconds until a wait counts as endless
EXAMPLES = settings(max_examples=100, deadline=None, phases=[Phase.generate])  # a failure waits; once is enough


@pytest.fixture(params=["memory", "jetstream"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dict[str, str]]:
    """Where a pipeline runs: what `Pipeline.start` is told of it."""
    if request.param == "memory":
        yield {}
        return
    with asyncio.Runner() as runner:
        server = runner.run(EmbeddedServer.start(tmp_path / "nats"))
        yield {"nats_url": server.url}
        runner.run(server.stop())


@contextlib.asynccontextmanager
async def pipeline_of(**values: Any) -> AsyncIterator[Pipeline]:
    pipeline = await Pipeline.start(**values)
    try:
        yield pipeline
    finally:
        await pipeline.stop()


async def publish(pipeline: Pipeline, priority: Priority = "normal", tenant: str = "default", **fields: Any) -> Reading:
    body = {"model": MODEL, "prompt": "hello", "max_tokens": 4} | fields.pop("body", {})
    job = Job(id=f"t-{uuid.uuid4().hex}", endpoint="/v1/completions", bridge="test", body=body, **fields)
    return await pipeline.bridge.open(job, priority=priority, tenant=tenant)


async def whole(reading: Reading) -> list[Event]:
    return await events_of(reading, PATIENCE)


def batches(pipeline: Pipeline, into: list[InferenceBatch]) -> Any:
    def hear(message: Message) -> None:
        into.append(codec.decode_model(InferenceBatch, message.data, codec.BATCH))

    return pipeline.pipe.broker.listen(pipeline.pipe.subjects.root + ".infer.*", hear)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)


async def in_lanes(pipeline: Pipeline, count: int) -> None:
    async with asyncio.timeout(PATIENCE):
        while True:
            held = [await pipeline.pipe.broker.held(batch_stream(lanes_of(MODEL), priority)) for priority in PRIORITIES]
            if sum(each.messages for each in held) == count:
                return
            await asyncio.sleep(0)


def run(pipeline_values: dict[str, Any], examples: Any) -> None:
    """Let Hypothesis drive one pipeline: `examples` gets it and a runner, and checks."""
    with asyncio.Runner() as runner:
        pipeline = runner.run(Pipeline.start(**pipeline_values))
        try:
            examples(pipeline, runner)
        finally:
            runner.run(pipeline.stop())


def test_p4_requests_inside_the_window_form_one_batch() -> None:
    """P4: N ≤ `max_batch_size` requests inside the batching window form one batch of exactly N."""

    def examples(pipeline: Pipeline, runner: asyncio.Runner) -> None:
        seen: list[InferenceBatch] = []
        runner.run(batches(pipeline, seen))

        async def scene(count: int) -> None:
            seen.clear()
            readings = await asyncio.gather(*(publish(pipeline) for _ in range(count)))
            for reading in readings:
                assert isinstance((await whole(reading))[-1], Done)
            assert [len(batch.jobs) for batch in seen] == [1] * count  # each in a message of its own
            assert len({batch.id for batch in seen}) == 1

        @EXAMPLES
        @given(st.integers(1, 16))
        def check(count: int) -> None:
            runner.run(scene(count))

        check()

    run({"batch_window": 0.03, "max_batch_size": 16, "lease": 60.0}, examples)  # as below


async def test_jobs_go_out_in_order_of_priority_and_never_more_than_there_is_room_for() -> None:
    async with pipeline_of(max_batch_size=2, heartbeat_interval=0.05, lease=60.0) as pipeline:
        seen: list[InferenceBatch] = []
        await batches(pipeline, seen)
        pipeline.backend.goes.clear()
        busy = [await publish(pipeline) for _ in range(2)]
        await until(lambda: sum(len(batch.jobs) for batch in seen) == 2)
        readings = {}
        for priority in ("low", "normal", "low", "normal"):
            readings[await publish(pipeline, priority)] = priority
            await in_lanes(pipeline, len(readings))
        assert sum(len(batch.jobs) for batch in seen) == 2
        urgent = await publish(pipeline, "high")  # for which one seat is kept
        await until(lambda: sum(len(batch.jobs) for batch in seen) == 3)
        assert seen[-1].jobs[0].id == urgent.request
        pipeline.backend.goes.set()
        for reading in (*busy, urgent, *readings):
            assert isinstance((await whole(reading))[-1], Done)
        order = [job.priority for batch in seen[-4:] for job in batch.jobs][-4:]
        assert order == ["normal", "normal", "low", "low"]


async def test_a_request_for_more_answers_than_a_batch_holds_leaves_urgent_ones_their_seat() -> None:
    async with pipeline_of(max_batch_size=2, heartbeat_interval=0.05, echo_rate=50.0) as pipeline:
        seen: list[InferenceBatch] = []
        await batches(pipeline, seen)
        wide = await publish(pipeline, body={"n": 8, "max_tokens": 20, "ignore_eos": True})
        await until(lambda: len(seen) == 1)
        urgent = await publish(pipeline, "high")
        assert isinstance((await whole(urgent))[-1], Done)
        assert wide.final is None
        assert isinstance((await whole(wide))[-1], Done)


def test_p8_who_waits_past_the_deadline_is_removed_and_hears_408(where: dict[str, str]) -> None:
    """P8: a request queued past its deadline is removed and its client gets 408."""

    def examples(pipeline: Pipeline, runner: asyncio.Runner) -> None:
        runner.run(pipeline.lose_worker())

        async def scene(waits: list[float]) -> None:
            readings = [
                await publish(pipeline, PRIORITIES[place % 3], timeout=wait) for place, wait in enumerate(waits)
            ]
            for reading in readings:
                events = await whole(reading)
                assert isinstance(events[-1], Expired)
                assert events[-1].error.status == 408
                assert not any(isinstance(event, Token) for event in events)
            await in_lanes(pipeline, 0)

        @EXAMPLES
        @given(st.lists(st.floats(0.001, 0.1), min_size=1, max_size=10))
        def check(waits: list[float]) -> None:
            runner.run(scene(waits))

        check()

    run(where, examples)


async def test_a_deadline_stops_what_runs_and_says_so() -> None:
    async with pipeline_of(echo_rate=50.0) as pipeline:
        reading = await publish(pipeline, timeout=3.0, body={"max_tokens": 400, "ignore_eos": True})
        events = await whole(reading)
        done = events[-1]
        assert isinstance(done, Done)
        assert done.finish_reasons == ("deadline",)
        said = sum(len(event.token_ids) for event in events if isinstance(event, Token))
        assert 0 < said == done.usage.completion_tokens < 400
        assert pipeline.engine.stats().num_running == 0


async def test_a_cancelled_job_leaves_its_lane_at_once(where: dict[str, Any]) -> None:
    async with pipeline_of(**where) as pipeline:
        await pipeline.lose_worker()
        readings = [await publish(pipeline, PRIORITIES[place % 3]) for place in range(9)]
        await in_lanes(pipeline, 9)
        for reading in readings:
            await reading.ask_to_stop()
        for reading in readings:
            assert isinstance((await whole(reading))[-1], Cancelled)
        await in_lanes(pipeline, 0)


async def test_a_job_far_behind_is_deleted_where_it_waits() -> None:
    """Behind more than the batch stage holds in its hands."""
    async with pipeline_of() as pipeline:
        await pipeline.lose_worker()
        readings = [await publish(pipeline) for _ in range(700)]
        await in_lanes(pipeline, 700)
        await readings[-1].ask_to_stop()
        assert isinstance((await whole(readings[-1]))[-1], Cancelled)
        await in_lanes(pipeline, 699)


async def test_a_full_queue_refuses_and_a_tenant_over_its_own_limit_too(where: dict[str, Any]) -> None:
    async with pipeline_of(**where, queue_limit=20, tenant_limit=5, high_watermark=1.0) as pipeline:
        await pipeline.lose_worker()
        for _ in range(5):
            await publish(pipeline, tenant="greedy")
        await in_lanes(pipeline, 5)
        refused = (await whole(await publish(pipeline, tenant="greedy")))[-1]
        assert isinstance(refused, Failed)
        assert (refused.error.status, refused.error.code) == (429, "quota_exceeded")
        assert refused.error.retry_after is not None
        for place in range(15):
            await publish(pipeline, tenant=f"modest{place}")
        await in_lanes(pipeline, 20)
        with pytest.raises(Overloaded) as caught:  # by the queue, or by the bridge once it has heard of it
            events = await whole(await publish(pipeline, tenant="late"))
            assert isinstance(events[-1], Failed)
            assert events[-1].error.status == 503
            raise Overloaded(events[-1].error.message, code=events[-1].error.code, retry_after=1.0)
        assert (caught.value.code, caught.value.retry_after is None) == ("queue_full", False)
        await publish(pipeline, "high", tenant="late")
        await in_lanes(pipeline, 21)


async def test_a_tenant_with_more_than_a_lower_limit_is_refused_until_less_waits(where: dict[str, Any]) -> None:
    """The lane has room for what waited before the limit was lowered."""
    async with pipeline_of(**where, tenant_limit=2) as pipeline:
        broker, settings = pipeline.pipe.broker, pipeline.pipe.settings
        higher = settings.model_copy(update={"tenant_limit": 9})
        await broker.reconfigure(streams_of(higher, lanes_of(MODEL)), [])
        await pipeline.lose_worker()
        seen = asyncio.Event()

        def measured(message: Message) -> None:
            if Admission.model_validate_json(message.data).depth["normal"] == 3:
                seen.set()

        async with asyncio.timeout(PATIENCE):
            await broker.listen(pipeline.pipe.subjects.admission(), measured)
            for _ in range(3):
                await (await publish(pipeline, tenant="greedy")).take(PATIENCE)
            await seen.wait()
        refused = (await whole(await publish(pipeline, tenant="greedy")))[-1]
        assert isinstance(refused, Failed)
        assert (refused.error.status, refused.error.code) == (429, "quota_exceeded")
        await publish(pipeline, tenant="modest")
        await in_lanes(pipeline, 4)


class Early(JobStage):
    name = "early"

    async def process(self, job: ValidatedJob) -> ValidatedJob:
        return job


class Late(Early):
    name = "late"


async def test_stages_that_are_down_make_jobs_wait_and_full_ones_refuse_with_503(where: dict[str, Any]) -> None:
    """The job between two stages waits as well, and none ends in 500; other priorities have room of their own."""
    stages = ("validate", "early", "late", "queue", "batch", "infer", "stream")
    async with pipeline_of(**where, pipeline=stages, queue_limit=1, high_watermark=1.0) as pipeline:
        broker, pipe = pipeline.pipe.broker, pipeline.pipe
        runners = [early, late] = [Runner(Early(pipe), pipe), Runner(Late(pipe), pipe)]
        running = [asyncio.create_task(early.run())]
        try:
            waiting = [await publish(pipeline)]
            async with asyncio.timeout(PATIENCE):
                while not (await broker.held("STAGE_LATE_NORMAL")).messages:  # noqa: ASYNC110
                    await asyncio.sleep(0)
            waiting.append(await publish(pipeline))  # in front of a stage that is full
            async with asyncio.timeout(PATIENCE):
                while not (await broker.held("STAGE_EARLY_NORMAL")).messages:  # noqa: ASYNC110
                    await asyncio.sleep(0)
            refused = (await whole(await publish(pipeline)))[-1]
            assert isinstance(refused, Failed)
            assert (refused.error.status, refused.error.code) == (503, "queue_full")
            assert refused.error.message == "The queue of the stage early is full for normal priority; try again later."
            waiting.append(await publish(pipeline, "high"))
            job = Job(id="expires", endpoint="/v1/completions", bridge="test", body={"model": MODEL, "prompt": "hello"})
            deadline = pipe.now() + 0.5
            expired = (
                await whole(await pipeline.bridge.open(job, priority="low", tenant="default", deadline=deadline))
            )[-1]
            assert isinstance(expired, Failed | Expired) and expired.error.status == 408
            early.stop()  # the queue, too, has room for one, and refuses a second that comes too soon
            first, second, high = waiting
            running.append(asyncio.create_task(late.run()))
            for reading in (first, high):
                assert isinstance((await whole(reading))[-1], Done)
            state = await broker.bucket("state")
            async with asyncio.timeout(PATIENCE):
                # None: the first has come and gone between two looks at the lanes, which were open all the time.
                while (told := await state.get(f"admission.{lanes_of(MODEL)}")) is not None and not (  # noqa: ASYNC110
                    Admission.model_validate_json(told.value).accepting["normal"]
                ):
                    await asyncio.sleep(0)
            again = Runner(Early(pipe), pipe)
            runners.append(again)
            running.append(asyncio.create_task(again.run()))
            assert isinstance((await whole(second))[-1], Done)
        finally:
            for runner in runners:
                runner.stop()
            await asyncio.gather(*running)


async def test_clients_hear_where_they_stand() -> None:
    async with pipeline_of() as pipeline:
        await pipeline.lose_worker()
        readings = [await publish(pipeline) for _ in range(3)]
        heard: dict[str, int] = {}
        async with asyncio.timeout(PATIENCE):
            for reading in readings:
                while reading.request not in heard:
                    for event in await reading.take(1.0):
                        if isinstance(event, Queued):
                            heard[event.request] = event.position
        assert [heard[reading.request] for reading in readings] == [1, 2, 3]


def test_p6_lanes_of_the_whole_pipeline_keep_their_order(where: dict[str, Any]) -> None:
    """P6: all high before normal before low, FIFO inside each; seen from the worker."""

    def examples(pipeline: Pipeline, runner: asyncio.Runner) -> None:
        seen: list[InferenceBatch] = []
        runner.run(batches(pipeline, seen))
        (stage,) = (runner._stage for runner in pipeline._runners if isinstance(runner._stage, Batch))

        def waiting() -> int:
            return sum(1 for lanes in stage._lanes.values() for _ in lanes)

        @EXAMPLES
        @given(st.lists(st.sampled_from(PRIORITIES), min_size=1, max_size=12))
        def check(priorities: list[Priority]) -> None:
            async def scene() -> None:
                seen.clear()
                pipeline.backend.goes.clear()
                busy = []
                for priority in ("normal", "high"):  # every seat there is
                    busy.append(await publish(pipeline, priority))
                    await until(lambda: len(seen) == len(busy))
                published = []
                for priority in priorities:
                    published.append((await publish(pipeline, priority), priority))
                    await until(lambda: waiting() == len(published))
                pipeline.backend.goes.set()
                for reading in (*busy, *(reading for reading, _ in published)):
                    await whole(reading)
                wanted = [reading.request for rank in PRIORITIES for reading, priority in published if priority == rank]
                assert [job.id for batch in seen[2:] for job in batch.jobs] == wanted

            runner.run(scene())

        check()

    run({**where, "max_batch_size": 1, "lease": 60.0}, examples)  # no lease is lost, however busy the machine


LANES = ModelLanes(model=MODEL)
NORMAL = batch_stream(lanes_of(MODEL), "normal")


class Depth(MemoryBroker):
    """Tells of the normal lane what a test sets."""

    depth = 0

    async def held(self, stream: str, subject: str = ">") -> Held:
        if stream == NORMAL:
            return Held({"x": self.depth}, self.depth, self.depth)
        return await super().held(stream, subject)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 12)), max_size=30))
def test_p7_all_copies_of_the_queue_share_one_gate(looks: list[tuple[int, int]]) -> None:
    """P7 for a deployment: whichever copy looks at the lanes, the gate is that of one copy that always looks."""

    async def scene() -> None:
        chosen = Settings(queue_limit=10, high_watermark=0.8, low_watermark=0.5)
        broker, subjects = Depth(), Subjects("penstock")
        await broker.ensure(*topology("penstock", chosen.job_stages))
        await open_lanes(broker, chosen, MODEL)
        pipe = Pipe(broker, subjects, chosen, Registry(broker, interval=1.0), Cancellations())
        copies, expected = [Queue(pipe) for _ in range(3)], Hysteresis()
        for copy, broker.depth in looks:
            await copies[copy]._update_admission(copies[copy]._gate(LANES))
            is_open = expected.update(broker.depth, 4.0, 8.0)
            assert copies[copy]._gate(LANES).control.last.accepting["normal"] == is_open

    asyncio.run(scene())


async def test_of_two_copies_that_look_at_once_one_decides() -> None:
    broker, subjects = Depth(), Subjects("penstock")
    chosen = Settings(queue_limit=10)
    await broker.ensure(*topology("penstock", chosen.job_stages))
    await open_lanes(broker, chosen, MODEL)
    pipe = Pipe(broker, subjects, chosen, Registry(broker, interval=1.0), Cancellations())
    copies = [Queue(pipe) for _ in range(2)]
    broker.depth = 10
    await asyncio.gather(*(copy._update_admission(copy._gate(LANES)) for copy in copies))
    await asyncio.gather(*(copy._update_admission(copy._gate(LANES)) for copy in copies))
    entry = await (await broker.bucket("state")).get(f"admission.{lanes_of(MODEL)}")
    assert entry is not None and Admission.model_validate_json(entry.value).accepting["normal"] is False
    assert len(await (await broker.bucket("state")).entries("admission.")) == 1
    assert not any(copy._gate(LANES).control.last.accepting["normal"] for copy in copies)
