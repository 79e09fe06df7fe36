"""What operators watch: the state of the deployment and its changes, made only while somebody watches."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from applications import Script
from asgi import Sent, ask, messages

from penstock.api.http.console.requests import MOST_ENDED, RequestBoard
from penstock.schemas.canaries import CANARY
from penstock.schemas.errors import InvalidRequest
from penstock.schemas.events import (
    Accepted,
    Cancelled,
    Done,
    ErrorBody,
    Event,
    Failed,
    Queued,
    Started,
    Token,
    Usage,
)
from penstock.schemas.jobs import Job
from penstock.schemas.registry import ModelCard, Room, StageCard, WorkerCard
from penstock.schemas.wire import codec
from penstock.schemas.wire.merge_patch import patched
from penstock.streams.memory.broker import MemoryBroker
from penstock.streams.port import DEAD_ATTEMPTS, DEAD_REASON, HOPS, Message, Subscription
from penstock.streams.topology import Subjects, topology

MODEL = ModelCard(name="m", source="m", backend="echo", context_length=9, created=1)
WORKER = WorkerCard(id="w7", model=MODEL, capacity=4, pid=1, incarnation="i")
KEYS = "ada=sk-ada-0123456789,op=sk-op-0123456789 admin"


class Counting(MemoryBroker):
    """Knows how many listen, and to what."""

    def __init__(self) -> None:
        super().__init__()
        self.listening = 0
        self.lost = 0
        self.subjects = asyncio.Queue[str]()  # that were listened to, in turn
        self.has_closed = asyncio.Event()

    @property
    def outages(self) -> int:
        return self.lost

    async def listen(self, subject: str, callback: Callable[[Message], None]) -> Subscription:
        self.listening += 1
        subscription = await super().listen(subject, callback)
        self.subjects.put_nowait(subject)
        close = subscription.close

        async def closed() -> None:
            await close()
            self.listening -= 1
            self.has_closed.set()

        subscription.close = closed  # type: ignore[method-assign]
        return subscription


class Told:
    """Events of requests on a broker, published as stages do."""

    def __init__(self, broker: MemoryBroker) -> None:
        self.broker = broker
        self.subjects = Subjects("penstock")
        self._told = 0

    async def tell(self, event: Event, tenant: str = "acme") -> None:
        self._told += 1
        subject = self.subjects.events(tenant, "b1", event.request)
        await self.broker.publish(subject, codec.encode(event), message_id=f"e{self._told}")

    async def start(self, request: str, epoch: int = 1, tenant: str = "acme") -> None:
        self._told += 1
        started = Started(request, epoch, "h", tenant, "b1", 1, 5, None, "high", "/v1/completions", "m")
        subject, hops = (
            self.subjects.stream(0, tenant, request),
            f"validate;at=999;began=1, batch;at=1001;began=1;worker=w{epoch}",
        )
        data = codec.encode_outputs([started])
        await self.broker.publish(subject, data, message_id=f"s{self._told}", headers={HOPS: hops})


@pytest.fixture
async def told() -> Told:
    told = Told(MemoryBroker())
    await told.broker.ensure(*topology("penstock", ("queue",)))
    return told


async def test_requests_are_followed_from_their_stored_and_their_live_events(told: Told) -> None:
    clock = [1000.0]
    board = RequestBoard(told.broker, told.subjects, lambda: clock[0])
    await told.tell(Accepted("old", "m", 900, 7))
    await told.tell(Token("old", 0, 0, (1, 2, 3), "abc", None))
    await told.tell(Accepted("gone", "m", 900, 7))
    await told.tell(Done("gone", ("stop",), Usage(7, 9, 16)))
    async with board.following():
        assert board.counts() == {"running": 1, "completed": 1}
        old = board.shown()["acme/old"]
        assert (old["state"], old["tokens"], old["created"]) == ("running", 3, 900.0)

        await told.tell(Accepted("new", "m", 1000, 5))
        await told.tell(Queued("new", 4, wait=2.5))
        new = board.shown()["acme/new"]
        assert (new["state"], new["position"], new["wait"], new["model"]) == ("waiting", 4, 2.5, "m")
        clock[0] = 1002.0
        await told.start("new")
        await told.tell(Token("new", 0, 0, (1,), "a", None))
        await told.start("new", epoch=2)
        clock[0] = 1003.5
        await told.tell(Token("new", 0, 1, (2,), "b", None))
        new = board.shown()["acme/new"]
        assert (new["state"], new["first_token"], new["takeovers"], new["tokens"]) == ("running", 3.0, 1, 2)
        assert (new["worker"], new["priority"], new["created"]) == ("w2", "high", 999.0)
        assert "position" not in new
        await told.tell(Done("new", ("length",), Usage(5, 2, 7)))
        await told.start("new", epoch=3)  # late, from a worker that stood still
        new = board.shown()["acme/new"]
        assert (new["state"], new["took"], new["reason"]) == ("completed", 4.5, "length")
    assert board.shown() == {}


async def test_refusals_cancellations_and_canaries(told: Told) -> None:
    board = RequestBoard(told.broker, told.subjects)
    async with board.following():
        await told.tell(Failed("bad", ErrorBody.of(InvalidRequest("no", code="invalid_value"))), tenant="other")
        await told.tell(Accepted("left", "m", 1, 5))
        await told.tell(Cancelled("left", Usage(5, 0, 5)))
        await told.tell(Accepted("canary", "m", 1, 5), tenant=CANARY)
        await told.broker.notify("penstock.events.acme.b1.x", b"not an event")
        assert {key: row["state"] for key, row in board.shown().items()} == {
            "other/bad": "failed",
            "acme/left": "cancelled",
        }
        assert board.shown()["other/bad"]["reason"] == "invalid_value"
        for number in range(MOST_ENDED + 5):
            await told.tell(Failed(f"r{number}", ErrorBody.of(InvalidRequest("no"))))
        assert len(board.shown()) == MOST_ENDED
        assert "other/bad" not in board.shown()


async def watched(script: Script, until: Callable[[dict[str, Any]], bool], **headers: str) -> list[Sent]:
    """What a watcher gets until the document that it has put together is as it should be."""
    document: dict[str, Any] = {}
    pieces = 1
    while True:  # each time from the beginning, with one piece more
        response = await ask(script.app, "GET", "/server/events", headers=headers, leave_after=pieces)
        assert response.status == 200
        found = messages(response.body)
        assert [each.event for each in found] == ["snapshot", *["delta"] * (pieces - 1)]
        document = {}
        for each in found:
            document = patched(document, each.data)
        if until(document):
            return found
        pieces += 1


async def test_the_document_has_every_part_and_nothing_runs_without_a_watcher() -> None:
    broker = Counting()
    script = await Script.start(broker)
    await script.registry.announce_worker(WORKER)
    await script.registry.announce_stage(StageCard(stage="validate", id="v1", pid=1))
    await script.registry.refresh()
    headers = {DEAD_REASON: "ValueError", DEAD_ATTEMPTS: "5"}
    await broker.publish("penstock.dead.validate", b"{}", message_id="d", headers=headers)
    before = broker.listening
    room = Room(worker="w7", incarnation="i", free=1, free_high=1, received={}, active=3, free_tokens=9)

    async def report() -> None:
        while True:
            if await broker.subjects.get() == script.subjects.room_all():
                await broker.notify(script.subjects.room("w7"), room.model_dump_json().encode())

    reporting = asyncio.create_task(report())
    found = await watched(script, lambda document: document["workers"]["w7"].get("active") == 3)
    reporting.cancel()
    document = found[0].data
    assert document["pipeline"]["validate"] == {"index": 0, "copies": 1, "rate": 0.0, "waiting": 0}
    assert document["pipeline"]["infer"]["copies"] == 1
    assert document["models"]["m"]["state"] == "ready"
    assert document["letters"]["1"]["reason"] == "ValueError"
    assert document["server"]["connected"] and not document["server"]["show_prompts"]
    assert document["requests"] == {} == document["counts"]
    while broker.listening > before:
        broker.has_closed.clear()
        await broker.has_closed.wait()
    assert broker.listening == before


async def test_an_outage_begins_it_anew_as_events_were_missed() -> None:
    broker = Counting()
    script = await Script.start(broker)
    watching = asyncio.create_task(ask(script.app, "GET", "/server/events", leave_after=4))
    while await broker.subjects.get() != script.subjects.room_all():
        pass
    await script.tell([Accepted("lost", "m", 1, 1)], Job(id="lost", bridge="b1", body={}))
    await broker.remove("EVENTS")  # with its end, which nobody hears of
    await broker.ensure(*topology("penstock", ("queue",)))
    broker.lost += 1
    while await broker.subjects.get() != script.subjects.room_all():
        pass
    document: dict[str, Any] = {}
    for each in messages((await watching).body):
        document = patched(document, each.data)
    assert document["requests"] == {}


async def test_a_key_that_is_revoked_ends_its_watch(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("op=sk-op-0123456789 admin")
    broker = Counting()
    script = await Script.start(broker, api_keys_file=file)
    headers = {"x-api-key": "sk-op-0123456789"}
    watching = asyncio.create_task(ask(script.app, "GET", "/server/events", headers=headers))
    while await broker.subjects.get() != script.subjects.room_all():
        pass
    file.write_text("op=sk-another-0123456789 admin")
    assert (await watching).status == 200
    assert (await ask(script.app, "GET", "/server/events", headers=headers)).status == 401


async def test_only_an_admin_watches_and_reaches_other_tenants() -> None:
    script = await Script.start(api_keys=KEYS)
    ada, op = ({"x-api-key": f"sk-{name}-0123456789"} for name in ("ada", "op"))
    for path in ("/server/events", "/server/dead-letters", "/server/dead-letters/1"):
        assert (await ask(script.app, "GET", path)).status == 401
        refused = await ask(script.app, "GET", path, headers=ada)
        assert (refused.status, refused.error["code"]) == (403, "not_admin")
    assert (await ask(script.app, "GET", "/server/events", headers=op, leave_after=1)).status == 200
    asking = asyncio.create_task(ask(script.app, "POST", "/v1/completions", {"model": "m", "prompt": "x"}, ada))
    job = await script.job()
    await script.tell([Accepted("", "m", 1, 1)], job, tenant="ada")
    path = f"/v1/streams/{job.id}"
    assert (await ask(script.app, "DELETE", path, headers=op)).status == 404
    refused = await ask(script.app, "DELETE", f"{path}?tenant=op", headers=ada)
    assert (refused.status, refused.error["code"]) == (403, "not_admin")
    assert (await ask(script.app, "DELETE", f"{path}?tenant=a.b", headers=op)).status == 400
    is_asked = asyncio.Event()
    await script.broker.listen(script.subjects.cancel("ada", str(job.id)), lambda _: is_asked.set())
    cancelling = asyncio.create_task(ask(script.app, "DELETE", f"{path}?tenant=ada", headers=op))
    await is_asked.wait()
    await script.tell([Cancelled("", Usage(1, 0, 1))], job, tenant="ada")
    assert b'"cancelled":true' in (await cancelling).body
    assert (await asking).status == 499
