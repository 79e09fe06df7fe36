"""Requests that another worker had: they go on with the very next token, are fenced off, or are given up at last."""

from __future__ import annotations

import asyncio
import itertools
import os
import uuid
from collections.abc import Sequence

import pytest
from absent_model import ABSENT, with_absent
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from memory_pipeline import MODEL, Pipeline, validated

from penstock.config.process import host
from penstock.engine.text.byte_tokenizer import END_OF_TEXT
from penstock.schemas.errors import StartupError
from penstock.schemas.events import FINAL, Cancelled, Delta, Done, Event, Failed, Output, Started, Token, Usage
from penstock.schemas.jobs import InferenceBatch, ValidatedJob
from penstock.schemas.registry import RETURNED, ModelCard, WorkerCard
from penstock.schemas.wire import codec
from penstock.stages import Runner
from penstock.stages.infer.stage import Infer
from penstock.streams.port import DEAD_REASON, SCHEMA

EXAMPLES = settings(max_examples=100, deadline=None, phases=[Phase.generate])  # a failure waits; once is enough
TEXT = "hello, how are you?"
PATIENCE = 10.0  # seconds until a wait counts as endless; less than a card lives


def job_of(pipeline: Pipeline, text: str = TEXT, **change: object) -> ValidatedJob:
    job = validated(f"r-{uuid.uuid4().hex}", pipeline.pipe)
    return job.model_copy(update={"prompts": (tuple(text.encode()),), **change})


def started(job: ValidatedJob, epoch: int) -> Started:
    return Started(job.id, epoch, uuid.uuid4().hex, job.tenant, job.bridge, job.choices, job.prompt_tokens)


def delta(job: ValidatedJob, epoch: int, index: int, text: str) -> Delta:
    return Delta(job.id, epoch, 0, index, tuple(text.encode()), text)


async def say(pipeline: Pipeline, job: ValidatedJob, *outputs: Output) -> None:
    """As a worker that is gone had said it."""
    for output in outputs:
        data = codec.encode_outputs([output])
        await pipeline.pipe.store(pipeline.pipe.outputs_of(job.tenant, job.id), data, uuid.uuid4().hex, codec.OUTPUTS)


async def events_of(pipeline: Pipeline, job: ValidatedJob) -> list[Event]:
    """What the client has heard, once it has heard the end."""
    subject = pipeline.pipe.subjects.events(job.tenant, job.bridge, job.id)
    heard: list[Event] = []
    async with asyncio.timeout(PATIENCE):
        while not any(isinstance(event, FINAL) for event in heard):
            await asyncio.sleep(0)
            stored = await pipeline.pipe.broker.replay("EVENTS", subject)
            heard = [codec.decode_event(message.data) for message in stored]
    return heard


async def dispatch(pipeline: Pipeline, worker: str, jobs: Sequence[ValidatedJob], epochs: Sequence[int] = ()) -> None:
    batch = InferenceBatch(id=uuid.uuid4().hex, worker=worker, jobs=tuple(jobs), epochs=tuple(epochs), incarnation="x")
    subject = pipeline.pipe.subjects.infer(worker)
    await pipeline.pipe.broker.publish(subject, codec.encode(batch), message_id=batch.id, headers={SCHEMA: codec.BATCH})


def text_of(events: list[Event]) -> str:
    said = [event for event in events if isinstance(event, Token)]
    assert [event.index for event in said] == [
        sum(len(e.token_ids) for e in said[:place]) for place in range(len(said))
    ]
    return "".join(event.text for event in said)


def test_a_successor_goes_on_with_the_very_next_token(pipeline: Pipeline) -> None:
    @EXAMPLES
    @given(st.lists(st.integers(0, len(TEXT)), min_size=1, max_size=4), st.sampled_from(["w0", "w9"]))
    def check(ends: list[int], worker: str) -> None:
        """Workers said so much, one after the other, and died; the last one's batch lies with `worker`."""

        async def scene() -> None:
            job = job_of(pipeline)
            place = 0
            for epoch, end in enumerate(sorted(ends), 1):
                await say(pipeline, job, started(job, epoch))
                if end > place:
                    await say(pipeline, job, delta(job, epoch, place, TEXT[place:end]))
                place = max(place, end)
            if sum(1 for end in sorted(ends) if end == max(ends)) > 2 or (max(ends) == 0 and len(ends) > 1):
                return  # that many silent ends are the next test's
            await dispatch(pipeline, worker, [job], [len(ends) - 1])
            events = await events_of(pipeline, job)
            assert text_of(events) == TEXT
            done = events[-1]
            assert isinstance(done, Done)
            assert done.usage.completion_tokens == len(TEXT) + 1
            assert (await pipeline.pipe.transcript(job.tenant, job.id)).epoch == len(ends) + 1

        pipeline.runner.run(scene())

    check()


def test_the_end_of_a_choice_is_said_once(pipeline: Pipeline) -> None:
    """One choice had come to its end when the worker died, and the other had not."""

    async def scene() -> None:
        job = job_of(pipeline)
        job = job.model_copy(update={"params": job.params.model_copy(update={"n": 2})})
        whole = Delta(job.id, 1, 0, 0, (*TEXT.encode(), END_OF_TEXT), TEXT, finish_reason="stop")
        half = Delta(job.id, 1, 1, 0, tuple(TEXT[:4].encode()), TEXT[:4])
        await say(pipeline, job, started(job, 1), whole, half)
        await dispatch(pipeline, "w0", [job], [1])
        await events_of(pipeline, job)
        stored = await pipeline.pipe.broker.replay("STREAM", pipeline.pipe.outputs_of(job.tenant, job.id))
        deltas = [one for message in stored for one in codec.decode_outputs(message.data) if isinstance(one, Delta)]
        assert [(one.choice, one.finish_reason) for one in deltas if one.finish_reason] == [(0, "stop"), (1, "stop")]
        assert "".join(one.text for one in deltas if one.choice == 1) == TEXT

    pipeline.runner.run(scene())


def test_a_finished_request_is_not_run_again(pipeline: Pipeline) -> None:
    async def scene() -> None:
        job = job_of(pipeline)
        await dispatch(pipeline, "w0", [job])
        first = await events_of(pipeline, job)
        for worker in ("w0", "w9"):
            await dispatch(pipeline, worker, [job], [5])
        other = job_of(pipeline)
        await dispatch(pipeline, "w9", [other])
        await events_of(pipeline, other)
        assert await events_of(pipeline, job) == first
        assert pipeline.engine.stats().num_requests == 2

    pipeline.runner.run(scene())


def test_the_late_tokens_of_the_living_dead_are_fenced_off(pipeline: Pipeline) -> None:
    async def scene() -> None:
        job = job_of(pipeline)
        await say(pipeline, job, started(job, 1), delta(job, 1, 0, TEXT[:5]))
        await dispatch(pipeline, "w0", [job])
        while (await pipeline.pipe.transcript(job.tenant, job.id)).epoch < 2:  # noqa: ASYNC110
            await asyncio.sleep(0)
        await say(pipeline, job, delta(job, 1, 5, "WRONG"))
        assert text_of(await events_of(pipeline, job)) == TEXT

    pipeline.runner.run(scene())


def test_who_kills_two_workers_alone_goes_to_the_dead_letters(pipeline: Pipeline) -> None:
    async def scene() -> None:
        poison, mate = job_of(pipeline), job_of(pipeline)
        await say(pipeline, poison, started(poison, 2), started(poison, 3))
        await say(pipeline, mate, started(mate, 1), delta(mate, 1, 0, TEXT[:3]), started(mate, 2))
        await dispatch(pipeline, "w0", [poison, mate], [3, 2])
        failed = (await events_of(pipeline, poison))[-1]
        assert isinstance(failed, Failed)
        assert failed.error.status == 500
        assert "2 workers died" in failed.error.message
        assert text_of(await events_of(pipeline, mate)) == TEXT
        (letter,) = await pipeline.pipe.broker.replay("DEAD", pipeline.pipe.subjects.dead("infer"))
        assert codec.decode_model(ValidatedJob, letter.data, letter.headers[SCHEMA]) == poison
        assert letter.headers[DEAD_REASON] == "2 workers died while they began it"

    pipeline.runner.run(scene())


def test_what_may_have_killed_a_worker_is_begun_alone() -> None:
    """Each waits until the one before has said something, so that the next death has one suspect."""

    async def scene() -> None:
        pipeline = await Pipeline.start()
        jobs = [job_of(pipeline) for _ in range(5)]
        for job in jobs:
            await say(pipeline, job, started(job, 1))
        heard: list[Output] = []
        share = pipeline.pipe.subjects.root + ".stream.>"
        await pipeline.pipe.broker.listen(share, lambda message: heard.extend(codec.decode_outputs(message.data)))
        await dispatch(pipeline, "w0", jobs, [1] * 5)
        for job in jobs:
            assert text_of(await events_of(pipeline, job)) == TEXT
        beginnings = [place for place, output in enumerate(heard) if isinstance(output, Started)]
        assert len(beginnings) == 5
        for one, next_one in itertools.pairwise(beginnings):
            assert any(heard[place].request == heard[one].request for place in range(one + 1, next_one))
        await pipeline.stop()

    asyncio.run(scene())


async def test_what_is_cancelled_while_it_waits_for_a_successor_has_used_its_tokens() -> None:
    pipeline = await Pipeline.start()
    await pipeline.lose_worker()
    job = job_of(pipeline)
    await say(pipeline, job, started(job, 1), delta(job, 1, 0, TEXT[:5]))
    await dispatch(pipeline, "w9", [job])
    await pipeline.pipe.broker.notify(pipeline.pipe.subjects.cancel(job.tenant, job.id), b"")
    events = await events_of(pipeline, job)
    assert text_of(events) == TEXT[:5]
    assert events[-1] == Cancelled(job.id, Usage(len(TEXT), 5, len(TEXT) + 5))
    await pipeline.stop()


async def test_two_workers_of_one_name() -> None:
    pipeline = await Pipeline.start(heartbeat_interval=0.05)
    model = ModelCard(name=MODEL, source=MODEL, backend="echo", context_length=10, created=0)
    other = WorkerCard(id="w0", model=model, capacity=1, pid=1, incarnation="another", host="elsewhere")
    with pytest.raises(StartupError, match=r"a worker called w0 is already running.*choose another --id"):
        async with asyncio.timeout(PATIENCE):
            await pipeline.pipe.registry.claim(other)
    await pipeline.stop()


async def test_the_card_of_a_dead_process_is_no_obstacle(dead: int) -> None:
    pipeline = await Pipeline.start()
    model = ModelCard(name=MODEL, source=MODEL, backend="echo", context_length=10, created=0)
    card = WorkerCard(id="w1", model=model, capacity=1, pid=dead, incarnation="dead", host=host())
    await pipeline.pipe.registry.announce_worker(card)
    async with asyncio.timeout(PATIENCE):
        await pipeline.pipe.registry.claim(card.model_copy(update={"incarnation": "new", "pid": 1}))
    await pipeline.stop()


async def test_what_lies_with_a_worker_that_serves_another_model_now_waits_for_its_own() -> None:
    """As after a restart of `w0` under another name: a worker of the former model goes on where it was."""
    pipeline = await with_absent()
    pipe = pipeline.pipe
    job = job_of(pipeline, model=ABSENT)
    await say(pipeline, job, started(job, 1), delta(job, 1, 0, TEXT[:5]))
    await dispatch(pipeline, "w0", [job])
    (known,) = [card for card in pipe.registry.models.values() if card.name == ABSENT]
    card = WorkerCard(id="w1", model=known, capacity=4, pid=os.getpid(), incarnation=uuid.uuid4().hex)
    async with asyncio.timeout(PATIENCE):
        while RETURNED not in await returned_to(pipeline):  # noqa: ASYNC110
            await asyncio.sleep(0)
    late = Runner(Infer(pipe, pipeline.engine, card), pipe)
    running = asyncio.create_task(late.run())
    assert text_of(await events_of(pipeline, job)) == TEXT
    late.stop()
    await running
    await pipeline.stop()


async def returned_to(pipeline: Pipeline) -> set[str]:
    """The names under which batches lie."""
    return {subject.rpartition(".")[2] for subject in (await pipeline.pipe.broker.held("INFER")).by_subject}
