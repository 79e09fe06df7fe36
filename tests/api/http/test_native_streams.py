"""`/v1/streams/{id}`: following, going on and cancelling, at a bridge that did not open the request."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from applications import Applications, Script
from asgi import Sent, ask, messages

from penstock.api.bridge.bridge import Bridge
from penstock.schemas.events import Accepted, Cancelled, Done, Event, FinishReason, Token, Usage
from penstock.schemas.jobs import Job
from penstock.streams.memory.broker import MemoryBroker

COMPLETIONS = "/v1/completions"
LONG = {"model": "echo", "prompt": "x", "max_tokens": 300, "ignore_eos": True, "stream": True}
RESUMABLE = {"Penstock-Resumable": "1"}


def follow(applications: Applications, request: str) -> list[Sent]:
    response = applications.run(ask(applications.apps[1], "GET", f"/v1/streams/{request}"))
    assert response.status == 200
    return messages(response.body)


def open_and_leave(applications: Applications, headers: dict[str, str]) -> str:
    response = applications.run(ask(applications.apps[0], "POST", COMPLETIONS, LONG, headers, leave_after=1))
    return response.headers["x-request-id"]


def test_a_running_request_is_followed_to_its_end(applications: Applications) -> None:
    request = open_and_leave(applications, RESUMABLE)
    events = follow(applications, request)
    assert events[-1].data["type"] == "done"
    assert [event.data["type"] for event in events].count("accepted") == 1
    ids = [id for event in events if event.data["type"] == "token" for id in event.data["token_ids"]]
    assert len(ids) == 300
    assert events == follow(applications, request)


async def test_places_and_counts_skip_what_was_read() -> None:
    script = await Script.start()
    events: list[Event] = [Accepted("", "m", 1, 1)]
    for index in range(0, 8, 2):
        reason: FinishReason | None = "stop" if index == 6 else None
        events += [Token("", choice, index, (index, index + 1), "ab", None, reason) for choice in (0, 1)]
    await script.tell([*events, Done("", ("stop", "stop"), Usage(1, 16, 17))], Job(id="r", bridge="gone", body={}))

    async def read(query: str = "", **headers: str) -> list[Sent]:
        response = await ask(script.app, "GET", f"/v1/streams/r{query}", headers=headers)
        assert response.status == 200
        return messages(response.body)

    whole = await read()
    assert len(whole) == 1 + 8 + 1
    for place, sent in enumerate(whole[:-1]):
        assert await read(**{"Last-Event-ID": str(sent.id)}) == whole[place + 1 :]
    assert await read("?after=4") == [whole[0], *whole[5:]]
    assert await read("?after=5") == [whole[0], *whole[5:]]  # an event is not cut: its index says where it begins
    assert await read("?after=8") == await read("?after=999") == [whole[0], whole[-1]]


@pytest.fixture
def slow(applications: Applications) -> Iterator[Applications]:
    """It takes half a minute to answer, so that whoever stops it is in time."""
    rate, applications.pipeline.backend._rate = applications.pipeline.backend._rate, 10.0
    yield applications
    applications.pipeline.backend._rate = rate


def test_delete_cancels_once(slow: Applications) -> None:
    request = open_and_leave(slow, RESUMABLE)
    for expected in (True, False):
        response = slow.run(ask(slow.apps[1], "DELETE", f"/v1/streams/{request}"))
        assert response.status == 200
        assert response.body == f'{{"id":"{request}","object":"stream","cancelled":{str(expected).lower()}}}'.encode()
    assert follow(slow, request)[-1].data["type"] == "cancelled"


def test_leaving_cancels(slow: Applications) -> None:
    assert follow(slow, open_and_leave(slow, {}))[-1].data["type"] == "cancelled"


class DeafBroker(MemoryBroker):
    """Loses the first message that is only for who listens now, as when a stage restarts."""

    told = 0

    async def notify(self, subject: str, data: bytes) -> None:
        self.told += 1
        if self.told > 1:
            await super().notify(subject, data)


async def test_a_cancel_is_repeated_until_it_is_heard() -> None:
    script = await Script.start(DeafBroker())
    leaving = asyncio.create_task(ask(script.app, "POST", COMPLETIONS, LONG, leave_after=1))
    job = await script.job()
    heard = asyncio.Event()
    await script.broker.listen(script.subjects.cancel("default", str(job.id)), lambda _: heard.set())
    await script.tell([Accepted("", "echo", 1, 1), Token("", 0, 0, (1,), "x")], job)
    await leaving
    await heard.wait()
    await script.tell([Cancelled("", Usage(1, 1, 2))], job)
    await script.bridge.drain(60.0)  # returns when nothing is open


async def test_requests_of_others_and_those_gone_are_unknown() -> None:
    script = await Script.start()
    other = Job(id="cmpl-foreign", bridge="scripted", body={})
    events: list[Event] = [
        Accepted("", "m", 1, 1),
        Token("", 0, 0, (1,), "a"),
        Token("", 0, 1, (2,), "b", finish_reason="stop"),
    ]
    events += [Done("", ("stop",), Usage(1, 2, 3))]
    await script.tell(events, other, tenant="other")
    gone = Job(id="cmpl-gone", bridge="scripted", body={})
    await script.tell(events, gone)
    stored = await script.broker.replay("EVENTS", script.subjects.events_at("default", "cmpl-gone"))
    for message in stored[:2]:  # as age does: the oldest first
        await script.broker.delete("EVENTS", message.sequence)
    for request in ("cmpl-foreign", "cmpl-gone", "cmpl-never", "a.b", "%3E", "*", "x" * 65):
        for method in ("GET", "DELETE"):
            response = await ask(script.app, method, f"/v1/streams/{request}")
            assert (response.status, response.error["code"]) == (404, "stream_not_found")
        body = LONG | {"prompt": "x"}
        if request.startswith("cmpl-"):
            response = await ask(script.app, "POST", COMPLETIONS, body, {"Last-Event-ID": f"{request}/1:1"})
            assert (response.status, response.error["code"]) == (404, "stream_not_found")
    assert not script.jobs
    followed = await Bridge(script.broker, script.subjects).follow("cmpl-foreign", "other")
    assert followed.final is not None
    followed.close()
