"""A new copy of the stream stage: what it must know of a request that others began."""

from __future__ import annotations

import asyncio
import dataclasses
import uuid
from collections import OrderedDict

import pytest
from memory_pipeline import Pipeline, validated
from raw_events import PATIENCE

from penstock.schemas.events import Accepted, Delta, Done, Event, Output, Started, Token, Usage
from penstock.schemas.jobs import ValidatedJob
from penstock.schemas.loops import Step
from penstock.schemas.wire import codec
from penstock.stages import Pipe
from penstock.stages.stream import EventPublisher
from penstock.streams.port import Message


async def say(pipe: Pipe, job: ValidatedJob, epoch: int, index: int, text: str, created: int = 0) -> Message:
    """As a worker does that begins an epoch; returns what is stored of it."""
    address = job.tenant, job.bridge
    started = Started(job.id, epoch, f"holder-{epoch}", *address, job.choices, job.prompt_tokens, created=created)
    started = dataclasses.replace(started, model=job.model, prompts=job.shown_prompts)
    outputs: list[Output] = [started, Delta(job.id, epoch, 0, index, tuple(text.encode()), text)]
    await pipe.store(
        pipe.outputs_of(job.tenant, job.id), codec.encode_outputs(outputs), f"{job.id}.{epoch}", codec.OUTPUTS
    )
    *_, stored = await pipe.broker.replay("STREAM", pipe.outputs_of(job.tenant, job.id))
    return stored


async def events(pipe: Pipe, job: ValidatedJob) -> list[Event]:
    stored = await pipe.broker.replay("EVENTS", pipe.subjects.events(job.tenant, job.bridge, job.id))
    return [codec.decode_event(message.data) for message in stored]


async def told(pipe: Pipe, job: ValidatedJob) -> str:
    """The client's tokens, each at its place."""
    text = ""
    for event in await events(pipe, job):
        assert isinstance(event, Token)
        assert event.index == len(text)
        text += event.text
    return text


def test_a_copy_that_begins_with_a_successor_knows_what_came_before(pipeline: Pipeline) -> None:
    """A worker and the stream stage die together: the new worker's announcement is the first that is not settled."""

    async def scene() -> None:
        pipe = pipeline.pipe
        job = validated(f"r-{uuid.uuid4().hex}", pipe)
        first = await say(pipe, job, 1, 0, "hello,")
        await EventPublisher(pipe, 0).publish(codec.decode_outputs(first.data), first)
        second = await say(pipe, job, 2, 6, " you")
        await EventPublisher(pipe, 0).publish(codec.decode_outputs(second.data), second)
        assert await told(pipe, job) == "hello, you"

    pipeline.runner.run(scene())


def test_what_comes_late_is_no_loss(pipeline: Pipeline) -> None:
    """A connection broke: what it had carried comes again when its lease ends, and after what was said since."""

    async def scene() -> None:
        pipe = pipeline.pipe
        job = validated(f"r-{uuid.uuid4().hex}", pipe)
        messages = [await say(pipe, job, *said) for said in ((1, 0, "hello,"), (2, 6, " you"), (3, 10, " there"))]
        publisher = EventPublisher(pipe, 0)
        for place in (0, 2, 1):
            await publisher.publish(codec.decode_outputs(messages[place].data), messages[place])
        assert await told(pipe, job) == "hello, you there"

    pipeline.runner.run(scene())


def test_an_answer_goes_on_in_a_stream_that_was_made_anew(pipeline: Pipeline) -> None:
    """Somebody has deleted the stream: its sequences begin again, and no client waits until its deadline for that."""

    async def scene() -> None:
        pipe = pipeline.pipe
        job = validated(f"r-{uuid.uuid4().hex}", pipe)
        publisher = EventPublisher(pipe, 0)
        first = await say(pipe, job, 1, 0, "hello,")
        later = await say(pipe, job, 2, 6, " you")
        for message in (first, dataclasses.replace(later, sequence=1, time=first.time + 1.0), first):
            await publisher.publish(codec.decode_outputs(message.data), message)
        assert await told(pipe, job) == "hello, you"

    pipeline.runner.run(scene())


@pytest.mark.parametrize("is_together", [True, False], ids=["in one process", "in two"])
@pytest.mark.parametrize("shows", [True, False])
def test_an_answer_that_is_faster_than_its_acceptance_comes_behind_it(
    pipeline: Pipeline, is_together: bool, shows: bool
) -> None:
    """The stage queue passes a job on before it says so, and may be stopped in between."""

    async def scene() -> None:
        pipe = pipeline.pipe
        job = validated(f"r-{uuid.uuid4().hex}", pipe)
        job = job.model_copy(update={"body": job.body | {"return_token_ids": shows}})
        accepted = Accepted(job.id, job.model, 17, job.prompt_tokens, job.shown_prompts)
        assert bool(accepted.prompts) == shows
        message = await say(pipe, job, 1, 0, "hello", created=17)
        await EventPublisher(pipe, 0).publish(codec.decode_outputs(message.data), message)
        own = pipe if is_together else dataclasses.replace(pipe, trails=OrderedDict())
        await own.emit(accepted, tenant=job.tenant, bridge=job.bridge, key="accepted")
        first, second = await events(pipe, job)
        assert first == accepted and isinstance(second, Token)

    pipeline.runner.run(scene())


@pytest.mark.parametrize("is_together", [True, False], ids=["in one message", "in two"])
def test_the_end_of_a_turn_is_told_though_the_copy_that_stored_it_died(pipeline: Pipeline, is_together: bool) -> None:
    """The stage tools goes on when it hears so: else a response in the background would never end."""

    async def scene() -> None:
        pipe, turn = pipeline.pipe, f"resp_{uuid.uuid4().hex}-2"
        job = validated(turn, pipe)
        told: asyncio.Queue[Message] = asyncio.Queue()
        await pipe.broker.listen(pipe.subjects.tools(job.priority, job.tenant), told.put_nowait)
        started = Started(turn, 1, "holder", job.tenant, job.bridge, job.choices, job.prompt_tokens)
        said = Delta(turn, 1, 0, 0, tuple(b"hello"), "hello")
        end = Delta(turn, 1, 0, 5, (256,), "", finish_reason="stop")
        parts: list[list[Output]] = [[started, said, end]] if is_together else [[started, said], [end]]
        events_at = pipe.subjects.events(job.tenant, job.bridge, turn)
        for event in (Token(turn, 0, 0, tuple(b"hello"), "hello"), Done(turn, ("stop",), Usage(5, 6, 11))):
            await pipe.store(events_at, codec.encode(event), f"{turn}.{event.type}", codec.EVENT)
        subject = pipe.outputs_of(job.tenant, turn)
        for number, part in enumerate(parts):
            await pipe.store(subject, codec.encode_outputs(part), f"{turn}.{number}", codec.OUTPUTS)
        messages = await pipe.broker.replay("STREAM", subject)
        publisher = EventPublisher(dataclasses.replace(pipe, trails=OrderedDict()), 0)
        for message in messages:
            await publisher.publish(codec.decode_outputs(message.data), message)
        assert publisher.settled and len(await events(pipe, job)) == 2
        async with asyncio.timeout(PATIENCE):
            assert codec.decode_model(Step, (await told.get()).data, codec.STEP).turn == turn

    pipeline.runner.run(scene())
