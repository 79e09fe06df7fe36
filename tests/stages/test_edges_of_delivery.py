"""Rare turns of a request's life: what was pushed out, came again, or came at the wrong moment still has one end."""

from __future__ import annotations

import asyncio
import uuid

import pytest
from memory_pipeline import MODEL, Pipeline, validated
from raw_events import PATIENCE, Forgetful, check, dispatch, ended, job_named, publish, stored

from penstock.schemas.errors import GenerationFailed, Overloaded
from penstock.schemas.events import FINAL, Delta, Event, Failed, Token
from penstock.schemas.jobs import Job
from penstock.schemas.registry import ModelLanes, Room
from penstock.schemas.wire import codec
from penstock.stages.batch.workers import Workers
from penstock.stages.infer.relay import OutputPublisher
from penstock.stages.infer.request_metrics import RequestMetrics, WorkerMetrics
from penstock.stages.queue import Queue
from penstock.stages.trail import Trail
from penstock.streams.memory.broker import MemoryBroker
from penstock.streams.port import NEXT, SCHEMA, Message
from penstock.streams.topology import batch_stream, lane_of, lanes_of


def test_jobs_without_ids_in_two_lanes_are_two_requests(pipeline: Pipeline) -> None:
    async def scene() -> list[Event]:
        job = Job(endpoint="/v1/completions", bridge="nameless", body={"model": MODEL, "prompt": "words"})
        for priority in ("normal", "high"):
            subject = pipeline.pipe.subjects.jobs(priority, "default")
            await pipeline.pipe.broker.publish(subject, codec.encode(job), message_id=f"no token: {priority}")
        ends: list[Event] = []
        async with asyncio.timeout(PATIENCE):
            while len(ends) < 2:
                await asyncio.sleep(0)
                told = await pipeline.pipe.broker.replay("EVENTS", pipeline.pipe.subjects.events_of("nameless"))
                ends = [event for one in told if isinstance(event := codec.decode_event(one.data), FINAL)]
        return ends

    assert len({event.request for event in pipeline.runner.run(scene())}) == 2


def test_a_request_whose_beginning_was_pushed_out_still_hears_its_end(pipeline: Pipeline) -> None:
    async def scene() -> None:
        pipe, request = pipeline.pipe, f"r-{uuid.uuid4().hex}"
        await pipe.emit(Token(request, 0, 0, (1,), "x"), tenant="default", bridge="test", key="0.0")
        delta = Delta(request, 1, 0, 5, (1,), "x")
        subject = pipe.outputs_of("default", request)
        headers = {SCHEMA: codec.OUTPUTS}
        await pipe.broker.publish(subject, codec.encode_outputs([delta]), message_id=request, headers=headers)
        assert isinstance((await ended(pipeline, request))[-1], Failed)

    pipeline.runner.run(scene())


async def test_an_answer_whose_events_were_pushed_out_is_told_again() -> None:
    """The id is asked for again, as by a bridge that finds no event of it."""
    pipeline = await Pipeline.start(memory=Forgetful)
    pipe = pipeline.pipe
    job = validated(f"r-{uuid.uuid4().hex}", pipe)
    await dispatch(pipeline, job)
    first = check(await ended(pipeline, job.id))
    for message in await pipe.broker.replay("EVENTS", pipe.subjects.events(job.tenant, job.bridge, job.id)):
        await pipe.broker.delete("EVENTS", message.sequence)
    assert not await stored(pipeline, job.id)
    await dispatch(pipeline, job)
    assert check(await ended(pipeline, job.id)) == first == "hello"
    await pipeline.stop()


def test_half_of_an_event_is_not_taken_for_the_whole(pipeline: Pipeline) -> None:
    async def scene() -> None:
        pipe, request = pipeline.pipe, f"r-{uuid.uuid4().hex}"

        async def emit(*token: Token) -> None:
            for one in token:
                await pipe.emit(one, tenant="default", bridge="test", key=str(one.index))

        await emit(Token(request, 0, 0, (1, 2, 3), "abc"), Token(request, 0, 0, (1,), "a"))  # all of that is there
        with pytest.raises(GenerationFailed):
            await emit(Token(request, 0, 2, (3, 4), "cd"))
        pipe.trails[pipe.subjects.events("default", "test", request)] = Trail()  # it was not known that anything is
        with pytest.raises(GenerationFailed):
            await emit(Token(request, 0, 2, (3, 4), "cd"))

    pipeline.runner.run(scene())


async def test_what_has_its_place_is_not_refused_when_it_comes_again() -> None:
    pipeline = await Pipeline.start()
    pipe = pipeline.pipe
    job = validated("again", pipe)
    headers = {SCHEMA: codec.VALIDATED_JOB, NEXT: lane_of(pipe.subjects, job)}

    class Again:
        message = Message(pipe.subjects.stage("queue", "normal", "default"), codec.encode(job), headers, 1)
        attempt = 1

    queue = Queue(pipe)
    queue._gate(ModelLanes(model=MODEL)).control.wait = lambda priority, tenant: 1e6  # type: ignore[method-assign]
    with pytest.raises(Overloaded):
        await queue.handle(Again())  # type: ignore[arg-type]
    Again.attempt = 2
    await queue.handle(Again())  # type: ignore[arg-type]
    await pipeline.stop()


def test_a_deadline_that_comes_before_the_work_is_not_forgotten(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline.backend, "_rate", 10.0)  # or it may have said everything before it hears of it

    async def scene() -> None:
        job = validated(f"r-{uuid.uuid4().hex}", pipeline.pipe)
        job = job.model_copy(update={"params": job.params.model_copy(update={"max_tokens": 400, "ignore_eos": True})})
        infer = pipeline.infer
        publisher = OutputPublisher(pipeline.pipe, job, lambda: 0.0, RequestMetrics(job, WorkerMetrics("model", "w0")))
        publisher.expire()
        await infer._continue(publisher, await pipeline.pipe.transcript(job.tenant, job.id))
        said = await pipeline.pipe.transcript(job.tenant, job.id)
        assert said.finish_reasons == ["deadline"]
        assert sum(map(len, said.token_ids)) < 400

    pipeline.runner.run(scene())


async def test_a_worker_that_was_forgotten_and_comes_back_confuses_no_numbers() -> None:
    pipeline = await Pipeline.start()
    workers = Workers(pipeline.pipe.registry, "copy")
    (card,) = pipeline.pipe.registry.workers
    room = Room(
        worker=card.id,
        incarnation=card.incarnation,
        free=4,
        free_high=4,
        received={"copy": [1, 2, 3]},
        active=0,
        free_tokens=1 << 20,
        total_tokens=1 << 20,
    )

    def hear() -> None:
        workers.hear(Message("", room.model_dump_json().encode(), {}))

    hear()
    ((_, seats),) = workers.living(MODEL, 1).members.values()
    assert [seats.send(1, 0.0) for _ in range(3)] == [1, 2, 3]
    known, pipeline.pipe.registry.workers = pipeline.pipe.registry.workers, ()
    workers.living(MODEL, 1)  # nobody is there
    pipeline.pipe.registry.workers = known
    hear()
    ((_, seats),) = workers.living(MODEL, 1).members.values()
    seats.send(4, 0.0)
    hear()
    assert seats.on_the_way == 4
    await pipeline.stop()


async def test_what_a_new_worker_says_holds_while_its_card_is_looked_for() -> None:
    pipeline = await Pipeline.start()
    registry = pipeline.pipe.registry
    workers = Workers(registry, "copy")
    (card,) = registry.workers
    registry.workers = ()
    memory = 1 << 20
    room = Room(
        worker=card.id,
        incarnation=card.incarnation,
        free=4,
        free_high=4,
        received={},
        active=0,
        free_tokens=memory,
        total_tokens=memory,
    )
    assert not workers.hear(Message("", room.model_dump_json().encode(), {}))
    assert not workers.living(MODEL, 1).members  # as for a request that waits: nobody else may be there
    other = card.model_copy(update={"id": "other", "incarnation": "other"})
    registry.workers = (other,)  # a reading that began before the worker announced itself
    assert not workers.living(MODEL, 1).members
    registry.workers = (card, other)
    ((_, seats),) = workers.living(MODEL, 1).members.values()
    assert seats.room.free == 4
    registry.workers = (other,)
    assert not workers.living(MODEL, 1).members
    registry.workers = (card,)
    assert not workers.living(MODEL, 1).members  # it was known and left: what it said is forgotten
    await pipeline.stop()


@pytest.mark.parametrize("schema", [codec.VALIDATED_JOB, f"{codec.VALIDATED_JOB}.7"])
async def test_a_job_goes_on_in_the_words_of_its_own_release_alone(schema: str) -> None:
    pipeline = await Pipeline.start()
    pipe = pipeline.pipe
    assert isinstance(pipe.broker, MemoryBroker)
    job = validated("same", pipe)
    came = codec.encode(job).replace(b"{", b'{"unknown":1,', 1)

    class Came:
        message = Message(
            pipe.subjects.stage("queue", "normal", "default"),
            came,
            {SCHEMA: schema, NEXT: lane_of(pipe.subjects, job)},
            1,
        )
        attempt = 1

    lane: list[Message] = []
    pipe.broker.watch(batch_stream(lanes_of(MODEL), "normal"), lane.append)
    await Queue(pipe).handle(Came())  # type: ignore[arg-type]
    (passed,) = lane
    assert passed.headers[SCHEMA] == codec.VALIDATED_JOB
    assert passed.data == (came if schema == codec.VALIDATED_JOB else codec.encode(job))
    await pipeline.stop()


async def test_a_request_for_another_model_does_not_end_the_batch_stage() -> None:
    pipeline = await Pipeline.start()
    names = [f"r-{place}" for place in range(20)]
    pipe = pipeline.pipe
    for name in names:
        job = validated(name, pipe).model_copy(update={"model": MODEL if name == "r-0" else f"model-{name}"})
        subject, headers = pipe.subjects.batch(lanes_of(MODEL), "normal", "default"), {SCHEMA: codec.VALIDATED_JOB}
        await pipe.broker.publish(subject, codec.encode(job), message_id=name, headers=headers)
    await publish(pipeline, job_named("last"))
    assert check(await ended_alone(pipeline, "last"))
    await pipeline.stop()


async def ended_alone(pipeline: Pipeline, request: str) -> list[Event]:
    """Its events, once the final one is there, whatever else still waits."""
    async with asyncio.timeout(PATIENCE):
        while not any(isinstance(event, FINAL) for event in await stored(pipeline, request)):  # noqa: ASYNC110
            await asyncio.sleep(0)
    return await stored(pipeline, request)
