"""Jobs from NATS that nobody can serve, and a broker whose disk is full."""

from __future__ import annotations

import asyncio
import uuid

import pytest
from memory_pipeline import MODEL, Pipeline, validated

from penstock.schemas import codec
from penstock.schemas.errors import BrokerUnavailable, StreamFull
from penstock.schemas.events import FINAL, Done, Event, Expired, Failed, Token
from penstock.schemas.jobs import InferenceBatch, Job
from penstock.streams.memory import MemoryBroker
from penstock.streams.port import DEADLINE, Headers, Message, Published


def job() -> Job:
    return Job(id=f"j-{uuid.uuid4().hex}", endpoint="/v1/completions", body={"model": MODEL, "prompt": "hello"})


async def answer(pipeline: Pipeline, headers: dict[str, str]) -> Event:
    """What a job with these headers hears first."""
    given, subjects = job(), pipeline.pipe.subjects
    heard: asyncio.Future[Event] = asyncio.get_running_loop().create_future()
    listening = await pipeline.pipe.broker.listen(
        subjects.events("default", "default", str(given.id)), lambda m: heard.set_result(codec.decode_event(m.data))
    )
    await pipeline.pipe.broker.publish(
        subjects.jobs("normal", "default"), codec.encode(given), message_id=str(given.id), headers=headers
    )
    event = await heard
    await listening.close()
    return event


def test_a_deadline_that_has_passed(pipeline: Pipeline) -> None:
    expired = pipeline.runner.run(answer(pipeline, {DEADLINE: "1.0"}))
    assert isinstance(expired, Expired)
    assert (expired.error.status, expired.error.code) == (408, "deadline_exceeded")
    assert "passed before" in expired.error.message


def test_a_deadline_that_is_none(pipeline: Pipeline) -> None:
    failed = pipeline.runner.run(answer(pipeline, {DEADLINE: "soon"}))
    assert isinstance(failed, Failed)
    assert failed.error.message == "The header Penstock-Deadline must hold Unix seconds."


def test_an_unknown_priority(pipeline: Pipeline) -> None:
    """There is no lane for it: whoever publishes hears so at once."""
    odd = job()
    subject = f"{pipeline.pipe.subjects.root}.jobs.urgent.default"
    with pytest.raises(BrokerUnavailable, match="urgent"):
        pipeline.runner.run(pipeline.raw(subject, codec.encode(odd), str(odd.id)))


class FullDisk(MemoryBroker):
    """Takes no outputs and no events while `is_full`."""

    is_full = False
    refused = 0

    async def publish(
        self, subject: str, data: bytes, *, message_id: str, headers: Headers | None = None, expect: int | None = None
    ) -> Published:
        if self.is_full and (".stream." in subject or ".events." in subject):
            self.refused += 1
            raise StreamFull(f"{subject}: insufficient storage resources available")
        return await super().publish(subject, data, message_id=message_id, headers=headers, expect=expect)


async def test_a_full_disk_is_waited_out() -> None:
    pipeline = await Pipeline.start(memory=FullDisk, echo_rate=100.0)
    broker = pipeline.pipe.broker
    assert isinstance(broker, FullDisk)
    body = {"model": MODEL, "prompt": "nothing is lost", "max_tokens": 40, "ignore_eos": True}
    wanted = job().model_copy(update={"bridge": "test", "body": body})
    reading = await pipeline.bridge.open(wanted, priority="normal", tenant="default")
    events: list[Event] = []
    while not any(isinstance(event, Token) for event in events):
        events += await reading.take(60.0)
    broker.is_full = True
    while not broker.refused:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    broker.is_full = False
    while not reading.ended:
        events += await reading.take(60.0)
    said = [event for event in events if isinstance(event, Token)]
    assert "".join(event.text for event in said) == ("nothing is lost" * 3)[:40]
    assert isinstance(events[-1], Done)
    await pipeline.stop()


class Away(MemoryBroker):
    """Reads nothing back while `is_away`."""

    is_away = True
    refused = 0

    async def replay(self, stream: str, subject: str, after: int = 0) -> list[Message]:
        if self.is_away and stream == "STREAM":
            self.refused += 1
            raise BrokerUnavailable("no answer")
        return await super().replay(stream, subject, after)


async def test_a_takeover_waits_for_a_broker_that_is_away() -> None:
    pipeline = await Pipeline.start(memory=Away)
    broker = pipeline.pipe.broker
    assert isinstance(broker, Away)
    taken = validated(f"r-{uuid.uuid4().hex}", pipeline.pipe)
    heard: asyncio.Queue[Event] = asyncio.Queue()
    subjects = pipeline.pipe.subjects
    await broker.listen(subjects.events_of("test"), lambda m: heard.put_nowait(codec.decode_event(m.data)))
    batch = InferenceBatch(id="b", worker="w0", jobs=(taken,), epochs=(3,), incarnation="another")
    await broker.publish(subjects.infer("w0"), codec.encode(batch), message_id="b")
    while not broker.refused:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    broker.is_away = False
    text = ""
    while not isinstance(event := await heard.get(), FINAL):
        text += event.text if isinstance(event, Token) else ""
    assert (text, event.type) == ("hello", "done")
    await pipeline.stop()
