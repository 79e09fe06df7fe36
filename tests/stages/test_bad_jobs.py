"""Jobs from NATS that nobody can serve, and a broker whose disk is full."""

from __future__ import annotations

import asyncio
import json
import re
import uuid

import pytest
from memory_pipeline import MODEL, Pipeline, validated

from penstock.schemas.bounds import LONG
from penstock.schemas.errors import BrokerUnavailable, InvalidRequest, StreamFull
from penstock.schemas.events import FINAL, Accepted, Done, Event, Expired, Failed, Token
from penstock.schemas.jobs import InferenceBatch, Job
from penstock.schemas.wire import codec
from penstock.stages.validate.stage import MAX_MISADDRESSED, Validate
from penstock.streams.memory.broker import MemoryBroker
from penstock.streams.port import DEADLINE, MESSAGE_ID, SCHEMA, Headers, Message, Published


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


@pytest.mark.parametrize("deadline", ["soon", "nan", ""])
def test_a_deadline_that_is_none(pipeline: Pipeline, deadline: str) -> None:
    failed = pipeline.runner.run(answer(pipeline, {DEADLINE: deadline}))
    assert isinstance(failed, Failed)
    assert failed.error.message == "The header Penstock-Deadline must be a time in Unix seconds."


async def written(pipeline: Pipeline, given: Job, data: bytes) -> Event:
    """What the client of a job hears first, who has published it without a message id."""
    heard: asyncio.Future[Event] = asyncio.get_running_loop().create_future()
    broker, subjects = pipeline.pipe.broker, pipeline.pipe.subjects
    where = subjects.events("default", given.bridge, str(given.id))
    listening = await broker.listen(
        where, lambda m: None if heard.done() else heard.set_result(codec.decode_event(m.data))
    )
    await broker.publish(subjects.jobs("normal", "default"), data, message_id="", headers={})
    event = await heard
    await listening.close()
    return event


def test_a_job_may_begin_with_a_byte_order_mark(pipeline: Pipeline) -> None:
    """.NET's streams and PowerShell write one in front of what they send."""
    given = job().model_copy(update={"bridge": "windows"})
    assert isinstance(pipeline.runner.run(written(pipeline, given, b"\xef\xbb\xbf" + codec.encode(given))), Accepted)


@pytest.mark.parametrize(
    ("encoding", "fault"),
    [*((f"utf-16{order}", "UTF-8, but in UTF-16") for order in ("", "-le", "-be")), ("latin-1", "UTF-8")],
)
def test_the_client_of_a_job_in_another_encoding_hears_what_is_wrong(
    pipeline: Pipeline, encoding: str, fault: str
) -> None:
    given = job().model_copy(update={"bridge": "windows", "body": {"model": MODEL, "prompt": "é"}})
    failed = pipeline.runner.run(written(pipeline, given, codec.encode(given).decode().encode(encoding)))
    assert isinstance(failed, Failed)
    assert (failed.error.status, failed.error.code) == (400, "malformed_job")
    assert failed.error.message == f"The job is malformed: it is not in {fault}; send it in UTF-8."


async def first_end(pipeline: Pipeline, where: str, data: bytes, headers: Headers) -> Event:
    """What is heard at `where` of a job of the tenant "default"."""
    heard: asyncio.Queue[Event] = asyncio.Queue()
    broker, subjects = pipeline.pipe.broker, pipeline.pipe.subjects
    listening = await broker.listen(where, lambda message: heard.put_nowait(codec.decode_event(message.data)))
    await broker.publish(subjects.jobs("normal", "default"), data, message_id="", headers=headers)
    async with asyncio.timeout(30):  # what goes to somebody else is never heard here
        event = await heard.get()
    await listening.close()
    return event


@pytest.mark.parametrize("own", [{}, {"jobs": [{"id": "theirs", "bridge": "b", "tenant": "other"}]}])
def test_a_malformed_job_ends_no_request_of_another_tenant(pipeline: Pipeline, own: dict[str, object]) -> None:
    broker, subjects = pipeline.pipe.broker, pipeline.pipe.subjects
    data = json.dumps({"id": "theirs", "bridge": "b", "tenant": "other", **own}).encode()
    failed = pipeline.runner.run(first_end(pipeline, subjects.events("default", "b", "theirs"), data, {}))
    assert isinstance(failed, Failed)
    assert failed.error.code == "malformed_job"
    assert pipeline.runner.run(broker.last("EVENTS", subjects.events("other", "b", "theirs"))) is None


def test_a_job_that_says_it_is_something_else_hears_so(pipeline: Pipeline) -> None:
    given = job()
    where = pipeline.pipe.subjects.events("default", "default", str(given.id))
    failed = pipeline.runner.run(first_end(pipeline, where, codec.encode(given), {SCHEMA: codec.OUTPUTS}))
    assert isinstance(failed, Failed)
    assert failed.error.message == f"The job is malformed: expected schema {codec.JOB}, got {codec.OUTPUTS}."


def test_a_malformed_repetition_does_not_end_the_request(pipeline: Pipeline) -> None:
    pipe, name = pipeline.pipe, uuid.uuid4().hex
    subject, data = pipe.subjects.jobs("normal", "default"), json.dumps({"id": name, "bridge": "b"}).encode()

    class Repetition:
        message = Message(subject, data, {}, 1)
        attempt = 1

    async def scene() -> None:
        validate = Validate(pipe)
        with pytest.raises(InvalidRequest, match="body: Field required"):
            await validate.handle(Repetition())  # type: ignore[arg-type]
        await pipe.open(Accepted(name, MODEL, 0, 1), tenant="default", bridge="b")
        await validate.handle(Repetition())  # type: ignore[arg-type]

    pipeline.runner.run(scene())


@pytest.mark.parametrize("lane", ["normal.default.high.other", "normal.default.other"])
def test_a_subject_with_more_than_a_lane(pipeline: Pipeline, lane: str) -> None:
    """The broker stores it, and its end alone names a priority and a tenant: that of somebody else's queue."""
    bad, broker, subjects = job(), pipeline.pipe.broker, pipeline.pipe.subjects

    async def scene() -> Event:
        heard: asyncio.Queue[Event] = asyncio.Queue()
        where = subjects.events("other", "default", str(bad.id))
        listening = await broker.listen(where, lambda m: heard.put_nowait(codec.decode_event(m.data)))
        await broker.publish(f"{subjects.root}.jobs.{lane}", codec.encode(bad), message_id=str(bad.id))
        event = await heard.get()
        await listening.close()
        return event

    failed = pipeline.runner.run(scene())
    assert isinstance(failed, Failed)
    assert failed.error.message.startswith(f"Publish a job on the subject {subjects.root}.jobs.<priority>.<tenant>, ")


@pytest.mark.parametrize("lane", ["urgent.default", "High.default", "normal", "a.b.c"])
def test_a_subject_that_no_lane_takes(pipeline: Pipeline, lane: str) -> None:
    """Whoever publishes hears so at once, and whoever waits for the request's events does, too."""
    bad, broker, subjects = job(), pipeline.pipe.broker, pipeline.pipe.subjects
    tenant = lane.rpartition(".")[2]

    async def scene() -> None:
        heard: asyncio.Queue[Event] = asyncio.Queue()
        events = subjects.events(tenant, "default", str(bad.id))
        listening = await broker.listen(events, lambda message: heard.put_nowait(codec.decode_event(message.data)))
        for _ in range(2):
            advice = f"{subjects.root}.jobs.<priority>.<tenant>, with one of the priorities high, normal, low"
            with pytest.raises(BrokerUnavailable, match=re.escape(advice)):
                await broker.publish(f"{subjects.root}.jobs.{lane}", codec.encode(bad), message_id=str(bad.id))
        event = await heard.get()
        assert isinstance(event, Failed)
        assert (event.error.status, event.error.param) == (400, "priority")
        good = job()
        await broker.publish(subjects.jobs("normal", "default"), codec.encode(good), message_id=str(good.id))
        while not await broker.last("EVENTS", subjects.events("default", "default", str(good.id))):  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert len(await broker.replay("EVENTS", events)) == 1
        await listening.close()

    pipeline.runner.run(scene())


def test_many_large_jobs_that_no_lane_takes_are_not_kept(pipeline: Pipeline) -> None:
    async def scene() -> None:
        validate = Validate(pipeline.pipe)
        for place in range(MAX_MISADDRESSED + 1):
            subject = f"{pipeline.pipe.subjects.root}.jobs.urgent.default"
            assert validate._why_misaddressed(Message(subject, b"x" * (LONG + 1), {MESSAGE_ID: f"m{place}"}))
        assert validate._misaddressed.qsize() == MAX_MISADDRESSED
        assert not validate._misaddressed.get_nowait().data

    pipeline.runner.run(scene())


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
