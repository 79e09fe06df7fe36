"""A client that may not read the stream of events asks for what is stored."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from memory_pipeline import MODEL, Pipeline
from raw_events import PATIENCE, stored

from penstock.schemas.errors import BrokerUnavailable
from penstock.schemas.events import FINAL, Accepted, Event, Token
from penstock.schemas.jobs import Job
from penstock.schemas.wire import codec
from penstock.stages.validate import replays
from penstock.stages.validate.replays import Replays
from penstock.streams.memory.broker import MemoryBroker
from penstock.streams.port import Message

BODY = {"model": MODEL, "prompt": "nothing of it is lost", "max_tokens": 64}


@pytest_asyncio.fixture
async def pipeline() -> AsyncIterator[Pipeline]:
    pipeline = await Pipeline.start()
    yield pipeline
    await pipeline.stop()


async def publish(pipeline: Pipeline, request: str) -> None:
    data = codec.encode(Job(id=request, endpoint="/v1/completions", bridge="me", body=BODY))
    await pipeline.pipe.broker.publish(pipeline.pipe.subjects.jobs("normal", "anna"), data, message_id=request)


async def ask(pipeline: Pipeline, request: str, data: bytes = b"", tenant: str = "anna", **question: float) -> Any:
    broker = pipeline.pipe.broker
    assert isinstance(broker, MemoryBroker)
    subject = f"{pipeline.pipe.subjects.root}.control.replay.{tenant}.me.{request}"
    async with asyncio.timeout(PATIENCE):
        while True:
            try:
                return json.loads(await broker.ask(subject, data or json.dumps(question).encode()))
            except BrokerUnavailable:  # the stage does not listen yet
                await asyncio.sleep(0)


async def read(pipeline: Pipeline, request: str) -> list[Any]:
    """All its events, each asked for behind the one before."""
    events: list[Any] = []
    after = 0
    while not events or events[-1]["type"] not in ("done", "failed", "cancelled", "expired"):
        for one in (await ask(pipeline, request, after=after, wait=5))["events"]:
            events.append(one["event"])
            after = one["sequence"]
    return events


async def test_who_asks_for_what_follows_has_each_event_once(pipeline: Pipeline) -> None:
    for request in ("r1", "r2"):
        reading = asyncio.create_task(read(pipeline, request))  # it waits for what nobody has published yet
        await asyncio.sleep(0)
        await publish(pipeline, request)
        events = await reading
        kept = await stored(pipeline, request, "anna", "me")
        assert [codec.decode_event(json.dumps(event).encode()) for event in events] == kept
        assert "".join(event.get("text", "") for event in events) == BODY["prompt"]
        assert isinstance(kept[-1], FINAL)


async def test_pages_are_bounded(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    await publish(pipeline, "r1")
    whole = await read(pipeline, "r1")
    monkeypatch.setattr(replays, "PAGE", 400)
    page = (await ask(pipeline, "r1"))["events"]
    assert 0 < len(page) < len(whole)
    assert await read(pipeline, "r1") == whole
    monkeypatch.setattr(replays, "PAGE", 1)
    assert len((await ask(pipeline, "r1"))["events"]) == 1
    assert await read(pipeline, "r1") == whole


async def test_there_is_nothing_of_what_nobody_published_nor_behind_the_end(pipeline: Pipeline) -> None:
    assert await ask(pipeline, "r1") == {"events": []}
    await publish(pipeline, "r1")
    await read(pipeline, "r1")
    last = (await ask(pipeline, "r1"))["events"][-1]["sequence"]
    assert await ask(pipeline, "r1", after=last, wait=0.01) == {"events": []}
    assert await ask(pipeline, "r1", tenant="bob") == {"events": []}


async def test_a_sequence_that_no_event_has_is_told_as_such(pipeline: Pipeline) -> None:
    for request in ("r1", "r2"):
        await publish(pipeline, request)
        await read(pipeline, request)
    sequences = [one["sequence"] for one in (await ask(pipeline, "r2"))["events"]]
    for after in (sequences[-1] + 1, 2**40):
        error = (await ask(pipeline, "r2", after=after, wait=0.01))["error"]
        assert (error["status"], error["param"]) == (400, "after")
        assert f"its first is {sequences[0]}, its newest {sequences[-1]}" in error["message"]


async def test_a_gap_is_told(pipeline: Pipeline) -> None:
    events: list[Event] = [Accepted("r1", MODEL, 0, 1), *(Token("r1", 0, index, (index,), "x") for index in range(3))]
    for number, event in enumerate(events):
        await pipeline.pipe.emit(event, tenant="anna", bridge="me", key=str(number))
    accepted, *tokens = [one["sequence"] for one in (await ask(pipeline, "r1"))["events"]]
    for sequence in (accepted, tokens[0]):  # the oldest leave the stream first
        await pipeline.pipe.broker.delete("EVENTS", sequence)
    for after in (0, accepted, tokens[0]):
        error = (await ask(pipeline, "r1", after=after))["error"]
        assert error["status"] == 500 and "no longer stored; send the request again" in error["message"]
    assert [one["sequence"] for one in (await ask(pipeline, "r1", after=tokens[1]))["events"]] == tokens[2:]


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (b"what?", "malformed"),
        (b'{"after": -1}', "after"),
        (b'{"after": 9223372036854775808}', "after"),  # more than any sequence
        (b'{"wait": 61}', "wait"),
        (b'{"since": 3}', "since"),
    ],
)
async def test_a_question_that_cannot_be_answered_says_why(pipeline: Pipeline, data: bytes, fault: str) -> None:
    error = (await ask(pipeline, "r1", data))["error"]
    assert error["status"] == 400 and fault in error["message"]
    error = (await ask(pipeline, "r 1"))["error"]
    assert error["status"] == 400 and "letters" in error["message"]


async def test_a_question_may_begin_with_a_byte_order_mark(pipeline: Pipeline) -> None:
    assert await ask(pipeline, "r1", b'\xef\xbb\xbf{"after": 0}') == await ask(pipeline, "r1", b'{"after": 0}')
    error = (await ask(pipeline, "r1", '{"after": 0}'.encode("utf-16")))["error"]
    assert error["message"] == "The question is malformed: it is not in UTF-8, but in UTF-16; send it in UTF-8."


async def test_one_tenant_cannot_take_all_the_room(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replays, "MOST_OF_TENANT", 2)
    waiting = [asyncio.create_task(ask(pipeline, f"r{number}", wait=60)) for number in range(2)]
    await asyncio.sleep(0)
    error = (await ask(pipeline, "r3"))["error"]
    assert error["status"] == 503 and error["retry_after"]
    assert await ask(pipeline, "r3", tenant="bob") == {"events": []}
    monkeypatch.setattr(replays, "MOST", 2)
    assert (await ask(pipeline, "r3", tenant="bob"))["error"]["status"] == 503
    for number in range(2):
        await publish(pipeline, f"r{number}")
    for one in waiting:
        assert (await one)["events"]
    assert await ask(pipeline, "r3") == {"events": []}


async def test_whoever_waits_is_told_when_a_copy_ends(pipeline: Pipeline) -> None:
    """So that it asks another copy, without waiting in vain."""
    answers: asyncio.Queue[bytes] = asyncio.Queue()
    own = Replays(pipeline.pipe.broker, pipeline.pipe.subjects)
    subject = f"{pipeline.pipe.subjects.root}.control.replay.anna.me.r1"
    own.ask(Message(subject, b'{"wait": 60}', {}), answers.put)
    await asyncio.sleep(0)
    async with asyncio.timeout(PATIENCE):
        await own.close()
    assert json.loads(answers.get_nowait()) == {"events": []}
