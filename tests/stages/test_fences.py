"""What happens once does so by its fence alone: here no stream remembers a message id, as after a long standstill."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from memory_pipeline import MODEL, Pipeline, validated
from raw_events import PATIENCE, TEXT, Forgetful, check, dispatch, ended, job_named, publish, stored

from penstock.config.settings import Settings
from penstock.schemas.events import Accepted, Delta, Done, Event, Failed, Output, Queued, Started, Token
from penstock.schemas.wire import codec
from penstock.stages import Pipe
from penstock.stages.cancellations import Cancellations
from penstock.stages.stream import EventPublisher
from penstock.stages.validate.stage import MIN_DUPLICATE_CHECK
from penstock.streams.memory.broker import MemoryBroker
from penstock.streams.stores.registry import Registry
from penstock.streams.topology import Subjects, batch_stream, lanes_of, topology

EXAMPLES = settings(max_examples=100, deadline=None, phases=[Phase.generate])  # a failure waits; once is enough


@pytest.fixture(scope="module")
def forgetful() -> Iterator[Pipeline]:
    with asyncio.Runner() as runner:
        pipeline = runner.run(Pipeline.start(memory=Forgetful))
        pipeline.runner = runner
        yield pipeline
        runner.run(pipeline.stop())


async def settled(pipeline: Pipeline) -> None:
    """Nothing is in any work queue."""
    lane = batch_stream(lanes_of(MODEL), "normal")
    async with asyncio.timeout(PATIENCE):
        while any(  # noqa: ASYNC110
            [
                (await pipeline.pipe.broker.held(name)).messages
                for name in ("JOBS_NORMAL", "STAGE_QUEUE_NORMAL", lane, "INFER")
            ]
        ):
            await asyncio.sleep(0)


def test_one_job_published_many_times_is_one_request(forgetful: Pipeline) -> None:
    @EXAMPLES
    @given(st.integers(2, 6), st.booleans(), st.booleans())
    def at_any_time(times: int, at_once: bool, is_long: bool) -> None:
        async def scene() -> None:
            job = job_named(f"r-{uuid.uuid4().hex}", user="x" * MIN_DUPLICATE_CHECK if is_long else "")
            await settled(forgetful)  # repetitions of the example before, which may run once more
            before = forgetful.engine.stats().num_requests
            for _ in range(times):
                await publish(forgetful, job)
                if not at_once:
                    await ended(forgetful, str(job.id))
            assert check(await ended(forgetful, str(job.id))) == TEXT
            outputs = await forgetful.pipe.broker.replay("STREAM", forgetful.pipe.outputs_of("default", str(job.id)))
            said = [one for message in outputs for one in codec.decode_outputs(message.data)]
            end = next(place for place, one in enumerate(said) if isinstance(one, Delta) and one.finish_reason)
            assert sum(isinstance(one, Started) for one in said[:end]) == 1
            assert at_once or not is_long or forgetful.engine.stats().num_requests == before + 1

        forgetful.runner.run(scene())

    at_any_time()


def test_a_refused_job_that_is_repeated_stays_refused_once(forgetful: Pipeline) -> None:
    async def scene() -> None:
        job = job_named(f"r-{uuid.uuid4().hex}", temperature=-1)
        for _ in range(3):
            await publish(forgetful, job)
            events = await ended(forgetful, str(job.id))
        assert [type(event) for event in events] == [Failed]

    forgetful.runner.run(scene())


def test_a_job_dispatched_to_many_is_run_by_one(forgetful: Pipeline) -> None:
    @EXAMPLES
    @given(st.lists(st.integers(0, 2), min_size=2, max_size=5))
    def any_epochs(epochs: list[int]) -> None:
        """By copies that know of no holder (0), and by some that take over."""

        async def scene() -> None:
            job = validated(f"r-{uuid.uuid4().hex}", forgetful.pipe)
            job = job.model_copy(update={"prompts": (tuple(TEXT.encode()),)})
            for epoch in epochs:
                await dispatch(forgetful, job, epoch)
            assert check(await ended(forgetful, job.id)) == TEXT
            outputs = await forgetful.pipe.broker.replay("STREAM", forgetful.pipe.outputs_of(job.tenant, job.id))
            started = [
                one.epoch
                for message in outputs
                for one in codec.decode_outputs(message.data)
                if isinstance(one, Started)
            ]
            assert len(set(started)) == len(started)

        forgetful.runner.run(scene())

    any_epochs()


def test_a_holder_that_stood_still_publishes_nothing_twice(forgetful: Pipeline) -> None:
    """A copy of the stream stage gets all outputs of a request again, long after another one has published them."""

    @EXAMPLES
    @given(st.lists(st.tuples(st.integers(0, 100), st.booleans()), max_size=60))
    def in_any_order(again: list[tuple[int, bool]]) -> None:
        async def scene() -> None:
            pipe = forgetful.pipe
            request = f"r-{uuid.uuid4().hex}"
            await publish(forgetful, job_named(request, stream=True))
            before = await ended(forgetful, request)
            outputs = await pipe.broker.replay("STREAM", pipe.outputs_of("default", request))
            pipe.trails.clear()  # it knows of nothing
            publisher = EventPublisher(pipe, 0)
            for place, is_new in again:
                message = outputs[place % len(outputs)]
                publisher = EventPublisher(pipe, 0) if is_new else publisher
                await publisher.publish(codec.decode_outputs(message.data), message)
            assert await stored(forgetful, request) == before

        forgetful.runner.run(scene())

    in_any_order()


async def test_copies_at_once_publish_one_stream() -> None:
    """Where each takes itself for the holder of the partition, and none has read what the others publish meanwhile."""
    broker, chosen = Forgetful(), Settings(backend="echo")
    await broker.ensure(*topology(chosen.namespace, chosen.job_stages))
    subjects, registry = Subjects(chosen.namespace), Registry(broker, interval=1.0)
    pipes = [Pipe(broker, subjects, chosen, registry, Cancellations()) for _ in range(3)]
    job = validated("shared", pipes[0])
    started = Started(job.id, 1, "holder", job.tenant, job.bridge, 1, job.prompt_tokens)
    words = [Delta(job.id, 1, 0, place, (place,), "x") for place in range(20)]
    words[-1] = replace(words[-1], finish_reason="stop")
    said: list[list[Output]] = [[started, words[0]]]
    for word in words[1:]:
        said.append([word])
    for place, outputs in enumerate(said):
        subject = pipes[0].outputs_of(job.tenant, job.id)
        await broker.publish(subject, codec.encode_outputs(outputs), message_id=str(place))
    messages = await broker.replay("STREAM", subject)

    async def publish(pipe: Pipe) -> None:
        publisher = EventPublisher(pipe, 0)
        for message in messages:
            await publisher.publish(codec.decode_outputs(message.data), message)

    await asyncio.gather(*map(publish, pipes))
    events = await broker.replay("EVENTS", subjects.events(job.tenant, job.bridge, job.id))
    assert check([codec.decode_event(message.data) for message in events], accepted=False) == "x" * 20


async def test_nothing_is_published_behind_what_was_pushed_out() -> None:
    """As where many requests wait for long; whoever listens would hear the first token twice."""
    broker, chosen = MemoryBroker(), Settings(backend="echo")
    subjects = Subjects(chosen.namespace)
    await broker.ensure(*topology(chosen.namespace, chosen.job_stages))
    first, later = (Pipe(broker, subjects, chosen, Registry(broker, interval=1.0), Cancellations()) for _ in range(2))
    heard: list[Event] = []
    await broker.listen(subjects.events_of("test"), lambda message: heard.append(codec.decode_event(message.data)))
    accepted, token = Accepted("r", MODEL, 0, 1), Token("r", 0, 0, (7,), "x")
    await first.open(accepted, tenant="anna", bridge="test")
    (stored_one,) = await broker.replay("EVENTS", subjects.events("anna", "test", "r"))
    await broker.delete("EVENTS", stored_one.sequence)
    await later.open(accepted, tenant="anna", bridge="test")
    await later.emit(token, tenant="anna", bridge="test", key="0.0")
    await asyncio.sleep(0)
    assert [event for event in heard if isinstance(event, Token)] == [token]
    stored_now = await broker.replay("EVENTS", subjects.events("anna", "test", "r"))
    assert [codec.decode_event(message.data) for message in stored_now] == [token]


def test_nothing_follows_a_final_event(forgetful: Pipeline) -> None:
    """A request that one stage has ended is not ended again by another, nor gets it another token."""

    async def scene() -> None:
        pipe, request = forgetful.pipe, f"r-{uuid.uuid4().hex}"
        where: dict[str, Any] = {"tenant": "default", "bridge": "test"}
        await publish(forgetful, job_named(request))
        before = await ended(forgetful, request)
        async with asyncio.timeout(PATIENCE):  # until who stored the end knows that it is stored
            while not pipe.trails[pipe.subjects.events("default", "test", request)].over:  # noqa: ASYNC110
                await asyncio.sleep(0)
        end = before[-1]
        assert isinstance(end, Done)
        late: list[Event] = [
            Token(request, 0, 900, (1,), "late"),
            Accepted(request, MODEL, 0, 1),
            Queued(request, 3),
            end,
            replace(end, finish_reasons=("length",)),
        ]
        for copy in (pipe, replace(pipe, trails=type(pipe.trails)())):
            for event in late:
                assert await copy.emit(event, **where, key=f"late.{event.type}")
        assert await stored(forgetful, request) == before

    forgetful.runner.run(scene())


def test_two_tenants_may_use_one_id(forgetful: Pipeline) -> None:
    async def scene() -> None:
        texts = {"one": "the words of one tenant", "other": "what the other has to say"}
        for tenant, text in texts.items():
            await publish(forgetful, job_named("job-1", prompt=text), tenant)
        for tenant, text in texts.items():
            assert check(await ended(forgetful, "job-1", tenant)) == text

    forgetful.runner.run(scene())


async def test_a_tenant_cannot_cancel_what_is_another_ones() -> None:
    pipeline = await Pipeline.start(echo_rate=50.0)
    for tenant in ("one", "other"):
        await publish(pipeline, job_named("job-1", max_tokens=40, ignore_eos=True), tenant)
    async with asyncio.timeout(PATIENCE):
        while not all([len(await stored(pipeline, "job-1", tenant)) > 2 for tenant in ("one", "other")]):  # noqa: ASYNC110
            await asyncio.sleep(0)
    await pipeline.pipe.broker.notify(pipeline.pipe.subjects.cancel("other", "job-1"), b"")
    assert (await ended(pipeline, "job-1", "other"))[-1].type == "cancelled"
    assert (await ended(pipeline, "job-1", "one"))[-1].type == "done"
    await pipeline.stop()


@pytest.mark.parametrize("with_header", [False, True])
def test_a_time_out_that_would_outlive_what_is_kept_is_refused(forgetful: Pipeline, with_header: bool) -> None:
    async def scene() -> Event:
        pipe, request = forgetful.pipe, f"r-{uuid.uuid4().hex}"
        job = job_named(request)
        headers = {}
        if with_header:
            headers["Penstock-Deadline"] = str(pipe.now() + 700)
        else:
            job = job.model_copy(update={"timeout": 700.0})
        subject = pipe.subjects.jobs("normal", "default")
        await pipe.broker.publish(subject, codec.encode(job), message_id=request, headers=headers)
        return (await ended(forgetful, request))[-1]

    final = forgetful.runner.run(scene())
    assert isinstance(final, Failed)
    assert (final.error.status, final.error.param) == (400, "timeout")
    assert "600 s at most" in final.error.message and "events_ttl" in final.error.message
