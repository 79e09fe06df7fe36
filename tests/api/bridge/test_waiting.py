"""What a client hears while its request waits, is refused, runs out of time or meets a server that stops."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import orjson
import pytest
from applications import Script
from asgi import Response, ask, messages

from penstock.api.bridge.early_refusal import STALE, EarlyRefusal
from penstock.schemas.errors import Overloaded, StreamFull
from penstock.schemas.events import Accepted, Done, Event, Failed, Queued, Token, Usage
from penstock.schemas.jobs import Job
from penstock.schemas.registry import Admission, ModelCard, StageCard, WorkerCard
from penstock.streams.memory.broker import MemoryBroker
from penstock.streams.port import DEADLINE, Headers, Published

COMPLETIONS = "/v1/completions"
PATIENCE = 10.0  # seconds until a wait counts as endless
BODY: dict[str, Any] = {"model": "echo", "prompt": "x", "stream": True}
ACCEPTED, DONE = Accepted("", "echo", 1, 1), Done("", ("stop",), Usage(1, 1, 2))
TOKEN = Token("", 0, 0, (1,), "ok", finish_reason="stop")
WAITING: list[Event] = [Queued("", 3), ACCEPTED, TOKEN, DONE]
FULL = Admission(
    model="echo",
    accepting={"high": True, "normal": False, "low": False},
    retry_after={"high": 1.0, "normal": 2.5, "low": 9.0},
    depth={"high": 0, "normal": 5, "low": 5},
)


async def test_queue_news_are_events_for_those_who_asked_and_nothing_to_others() -> None:
    script = await Script.start()

    async def told(**headers: str) -> bytes:
        asking = asyncio.create_task(ask(script.app, "POST", COMPLETIONS, BODY, headers))
        job = await script.job()
        heard = asyncio.Event()
        await script.broker.listen(script.subjects.events_at("default", str(job.id)), lambda _: heard.set())
        await script.tell(WAITING[:1], job)
        await heard.wait()
        await script.tell(WAITING[1:], job)
        return (await asking).body

    assert (await told()).startswith(b"data: ")
    assert (await told(**{"Penstock-Resumable": "true"})).startswith(b"id: ")
    status = await told(**{"Penstock-Events": "true"})
    assert status.startswith(b'event: status\ndata: {"type":"queued","position":3}\n\ndata: ')
    assert messages(status)[-1].data == "[DONE]"


@pytest.mark.parametrize(
    ("event", "said"),
    [
        (Queued("", 4, wait=1.5), b'{"type":"queued","position":4,"estimated_seconds":1.5}'),
        (Queued("", 1, "waiting"), b'{"type":"waiting_for_model","position":1}'),
        (Queued("", 2, "loading", 0), b'{"type":"loading","position":2,"progress":0}'),
        (
            Queued("", 2, "loading", 40, 4.5),
            b'{"type":"loading","position":2,"progress":40,"estimated_seconds":4.5}',
        ),
    ],
)
async def test_news_of_the_model(event: Queued, said: bytes) -> None:
    script = await Script.start()
    response = await script.answer([event, *WAITING[1:]], "POST", COMPLETIONS, BODY, {"Penstock-Events": "true"})
    assert response.body.startswith(b"event: status\ndata: " + said + b"\n\n")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, BODY),
        ("/v1/chat/completions", {"model": "echo", "messages": [{"role": "user", "content": "x"}], "stream": True}),
    ],
)
async def test_news_that_nobody_asked_for_do_not_put_off_the_sign_of_life(path: str, body: dict[str, Any]) -> None:
    """A place in the queue comes again and again, and says nothing to this client: for a proxy that is silence."""
    script = await Script.start(keepalive_interval=0.05)
    asking = asyncio.create_task(ask(script.app, "POST", path, body, leave_after=2))
    job = await script.job()
    await script.tell([ACCEPTED], job)
    place = 0
    async with asyncio.timeout(PATIENCE):
        while not asking.done():
            place += 1
            await script.tell([Queued("", place)], job)
            await asyncio.sleep(0)
    assert (await asking).body.startswith(b": ping\n\n")


async def test_queue_news_are_nothing_to_whole_answers() -> None:
    script = await Script.start()
    response = await script.answer(WAITING, "POST", COMPLETIONS, BODY | {"stream": False}, {"Penstock-Events": "true"})
    assert response.status == 200
    assert b"queued" not in response.body


def refused(response: Response, status: int, code: str, wait: str) -> None:
    assert (response.status, response.error["code"]) == (status, code)
    assert (response.headers["retry-after"], response.headers["retry-after-ms"]) == tuple(wait.split())


@pytest.mark.parametrize("known", ["told", "kept"])
async def test_a_full_queue_refuses_before_anything_is_published(known: str) -> None:
    broker = MemoryBroker()
    script = Script(broker)
    if known == "kept":
        await script.topology()
        await (await broker.bucket("state")).put("admission.echo", FULL.model_dump_json().encode())
    script = await Script.start(broker)
    if known == "told":
        heard = asyncio.Event()
        await broker.listen(script.subjects.admission(), lambda _: heard.set())
        await broker.notify(script.subjects.admission(), FULL.model_dump_json().encode())
        await heard.wait()
    refused(await ask(script.app, "POST", COMPLETIONS, BODY), 503, "queue_full", "2 2500")
    refused(await ask(script.app, "POST", COMPLETIONS, BODY | {"priority": "low"}), 503, "queue_full", "9 9000")
    keyed = await ask(script.app, "POST", COMPLETIONS, BODY, {"Idempotency-Key": "k"})
    refused(keyed, 503, "queue_full", "2 2500")
    assert not script.jobs
    assert not await (await broker.bucket("idempotency")).entries()
    high = await script.answer([ACCEPTED, TOKEN, DONE], "POST", COMPLETIONS, BODY | {"priority": "high"})
    assert high.status == 200


def test_what_the_queue_said_long_ago_counts_no_more() -> None:
    now = 100.0
    early_refusal = EarlyRefusal(lambda: now)
    early_refusal.check("echo", "low", "t")
    early_refusal.hear(FULL.model_dump_json().encode())
    early_refusal.hear(b"nonsense")
    now += STALE
    with pytest.raises(Overloaded):
        early_refusal.check("echo", "low", "t")
    early_refusal.check("another", "low", "t")
    now += 0.01
    early_refusal.check("echo", "low", "t")


class FullBroker(MemoryBroker):
    """Takes no jobs: because of one tenant, or of all."""

    per_subject = False

    async def publish(
        self, subject: str, data: bytes, *, message_id: str, headers: Headers | None = None, expect: int | None = None
    ) -> Published:
        raise StreamFull("full", per_subject=self.per_subject)


async def test_jobs_that_are_not_taken_are_503_and_429_for_a_tenant_of_too_many() -> None:
    broker = FullBroker()
    script = await Script.start(broker)
    refused(await ask(script.app, "POST", COMPLETIONS, BODY), 503, "server_busy", "1 1000")
    broker.per_subject = True
    refused(await ask(script.app, "POST", COMPLETIONS, BODY), 429, "quota_exceeded", "1 1000")


@pytest.mark.parametrize(
    ("body", "headers", "seconds"),
    [
        ({}, {}, 600.0),
        ({"timeout": 30}, {}, 30.0),
        ({"timeout": None}, {"Penstock-Timeout": "2.5"}, 2.5),
        ({"timeout": 30.5}, {"Penstock-Timeout": "2.5"}, 30.5),
    ],
)
async def test_every_job_has_an_absolute_deadline(
    body: dict[str, Any], headers: dict[str, str], seconds: float
) -> None:
    script = await Script.start()
    before = time.time()
    await script.answer([ACCEPTED, TOKEN, DONE], "POST", COMPLETIONS, BODY | body, headers)
    assert before - 0.001 <= float(script.jobs[0].headers[DEADLINE]) - seconds <= time.time() + 0.001


async def test_a_deadline_that_no_stage_keeps_is_kept_by_the_bridge() -> None:
    script = await Script.start()
    cancelled = asyncio.Event()
    await script.broker.listen(script.subjects.cancel("default", "cmpl-late"), lambda _: cancelled.set())
    job = Job(id="cmpl-late", bridge="scripted", body=BODY)
    reading = await script.bridge.open(job, priority="normal", tenant="default", deadline=time.time() - 10)
    (event,) = await reading.take(60.0)
    assert isinstance(event, Failed) and (event.error.status, event.error.code) == (408, "deadline_exceeded")
    assert reading.ended
    reading.leave()
    await cancelled.wait()


async def test_a_server_that_stops_says_so_and_waits_for_what_is_open() -> None:
    script = await Script.start()
    asking = asyncio.create_task(ask(script.app, "POST", COMPLETIONS, BODY))
    job = await script.job()
    draining = asyncio.create_task(script.bridge.drain(60.0))
    await asyncio.sleep(0)  # it begins
    assert script.bridge.draining
    for method, target, body in (("POST", COMPLETIONS, BODY), ("GET", f"/v1/streams/{job.id}", None)):
        refused(await ask(script.app, method, target, body), 503, "shutting_down", "5 5000")
    keyed = await ask(script.app, "POST", COMPLETIONS, BODY, {"Idempotency-Key": "k"})
    refused(keyed, 503, "shutting_down", "5 5000")
    assert (await ask(script.app, "GET", "/health/ready")).body == b'{"status":"stopping"}'
    assert not draining.done()
    await script.tell([ACCEPTED, TOKEN, DONE], job)
    assert (await asking).body.endswith(b"data: [DONE]\n\n")
    await draining


async def test_a_server_that_is_to_stop_serves_on_until_load_balancers_know() -> None:
    """Each answer ends its connection meanwhile, so that the next request comes on one to another server."""
    script = await Script.start()
    assert "connection" not in (await ask(script.app, "GET", "/v1/models")).headers
    draining = asyncio.create_task(script.bridge.drain(60.0, delay=1e9))
    await asyncio.sleep(0)  # it begins
    health = await ask(script.app, "GET", "/health/ready")
    assert (health.status, health.body) == (503, b'{"status":"stopping"}')
    asking = asyncio.create_task(ask(script.app, "POST", COMPLETIONS, BODY))
    await script.tell([ACCEPTED, TOKEN, DONE], await script.job())
    answer = await asking
    assert answer.status == 200 and answer.body.endswith(b"data: [DONE]\n\n")
    assert answer.headers["connection"] == "close"
    draining.cancel()


@pytest.mark.parametrize(("headers", "cancels"), [({}, 1), ({"Penstock-Resumable": "true"}, 0)])
async def test_what_outlasts_the_drain_is_told_where_it_is(headers: dict[str, str], cancels: int) -> None:
    script = await Script.start()
    asking = asyncio.create_task(ask(script.app, "POST", COMPLETIONS, BODY, headers))
    await script.job()
    await script.bridge.drain(0.0)
    refused(await asking, 503, "shutting_down", "5 5000")
    assert len(script.cancelled) == cancels


async def test_readiness_counts_workers_and_names_stages_of_which_nothing_was_heard() -> None:
    script = await Script.start(pipeline="validate,cap,queue,batch,infer,stream")

    async def ready() -> tuple[int, Any]:
        await script.registry.refresh()
        response = await ask(script.app, "GET", "/health/ready")
        return response.status, orjson.loads(response.body)

    missing = ["validate", "queue", "batch", "infer", "stream"]
    assert await ready() == (503, {"status": "waiting", "missing": missing, "workers": 0, "unseen": ["cap"]})
    for stage in ("validate", "queue", "batch", "stream"):
        await script.registry.announce_stage(StageCard(stage=stage, id="a", pid=1))
    model = ModelCard(name="echo", source="echo", backend="echo", context_length=8, created=1)
    for worker in ("w0", "w1"):
        await script.registry.announce_worker(WorkerCard(id=worker, model=model, capacity=1, pid=1))
    assert await ready() == (200, {"status": "ready", "workers": 2, "unseen": ["cap"]})
    await script.registry.announce_stage(StageCard(stage="cap", id="a", pid=1))
    assert await ready() == (200, {"status": "ready", "workers": 2})
