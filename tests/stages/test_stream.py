"""A new copy of the stream stage: what it must know of a request that others began."""

from __future__ import annotations

import uuid

from memory_pipeline import Pipeline, validated

from penstock.schemas.events import Delta, Output, Started, Token
from penstock.schemas.jobs import ValidatedJob
from penstock.schemas.wire import codec
from penstock.stages import Pipe
from penstock.stages.stream import EventPublisher
from penstock.streams.port import Message


async def say(pipe: Pipe, job: ValidatedJob, epoch: int, index: int, text: str) -> Message:
    """As a worker does that begins an epoch; returns what is stored of it."""
    started = Started(job.id, epoch, f"holder-{epoch}", job.tenant, job.bridge, job.choices, job.prompt_tokens)
    outputs: list[Output] = [started, Delta(job.id, epoch, 0, index, tuple(text.encode()), text)]
    await pipe.store(
        pipe.outputs_of(job.tenant, job.id), codec.encode_outputs(outputs), f"{job.id}.{epoch}", codec.OUTPUTS
    )
    *_, stored = await pipe.broker.replay("STREAM", pipe.outputs_of(job.tenant, job.id))
    return stored


async def told(pipe: Pipe, job: ValidatedJob) -> str:
    """The client's tokens, each at its place."""
    stored = await pipe.broker.replay("EVENTS", pipe.subjects.events(job.tenant, job.bridge, job.id))
    text = ""
    for message in stored:
        event = codec.decode_event(message.data)
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
