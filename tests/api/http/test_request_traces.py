"""`GET /v1/streams/{id}/trace`: what a request's messages tell of its way."""

from __future__ import annotations

import asyncio
import io
import time
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from applications import Applications
from asgi import Response, ask
from memory_pipeline import validated
from rich.console import Console

from penstock.api.terminal.over_http.trace import lines
from penstock.engine.request import Preemption
from penstock.schemas.events import Accepted, Delta, Output, Started, Token
from penstock.schemas.jobs import InferenceBatch, Job
from penstock.schemas.request_trace import RequestTrace
from penstock.schemas.wire import codec
from penstock.schemas.wire.hops import append_hop
from penstock.streams.port import HOPS, SCHEMA

BODY: dict[str, Any] = {"model": "echo", "prompt": "hello, how are you?", "max_tokens": 12, "ignore_eos": True}
PATIENCE = 30.0  # seconds


def post(applications: Applications, body: dict[str, Any], **more: Any) -> Response:
    return applications.run(ask(applications.apps[0], "POST", "/v1/completions", body, **more))


def trace_of(applications: Applications, request: str) -> RequestTrace:
    response = applications.run(ask(applications.apps[1], "GET", f"/v1/streams/{request}/trace"))
    assert response.status == 200, response.body
    assert b"hello" not in response.body  # no text of the request
    return RequestTrace.model_validate_json(response.body)


def stages(trace: RequestTrace) -> list[str]:
    return [visit.stage for visit in trace.stages]


def kinds(trace: RequestTrace) -> list[str]:
    return [mark.kind for mark in trace.marks]


def test_an_answered_request_was_in_every_stage(applications: Applications) -> None:
    trace = trace_of(applications, post(applications, BODY).headers["x-request-id"])
    assert (trace.status, trace.model, trace.endpoint) == ("completed", "echo", "/v1/completions")
    assert stages(trace) == ["validate", "queue", "batch", "infer", "stream"]
    times = [time for visit in trace.stages for time in (visit.entered, visit.began, visit.left)]
    assert None not in times
    infer = trace.stages[3]
    assert (infer.worker, infer.batch_size, infer.epoch, infer.tokens, infer.ending) == ("w0", 1, 1, 12, "finished")
    assert kinds(trace) == ["accepted", "first_token", "end"]
    assert trace.usage is not None
    assert trace.usage["completion_tokens"] == 12
    assert trace.accepted and trace.first_token and trace.ended
    assert trace.began <= trace.accepted <= trace.first_token <= trace.ended


def test_a_refused_request_ended_where_it_was_refused(applications: Applications) -> None:
    refused = post(applications, BODY | {"max_tokens": 100_000})
    assert refused.status == 400
    trace = trace_of(applications, refused.headers["x-request-id"])
    assert (trace.status, stages(trace), trace.accepted) == ("refused", ["validate"], None)
    assert trace.error is not None
    assert trace.error["status"] == 400


@pytest.mark.parametrize("name", ["cmpl-nobody", "*", "a.b", "x" * 65])
def test_an_unknown_request_has_no_trace(applications: Applications, name: str) -> None:
    response = applications.run(ask(applications.apps[0], "GET", f"/v1/streams/{name}/trace"))
    assert response.status == 404
    assert "expired" in response.error["message"]


def test_another_tenants_request_is_unknown(applications: Applications) -> None:
    request = post(applications, BODY).headers["x-request-id"]
    response = applications.run(ask(applications.apps[0], "GET", f"/v1/streams/{request}/trace?tenant=other"))
    assert response.status == 404


@pytest.fixture
def slow(applications: Applications) -> Iterator[Applications]:
    rate, applications.pipeline.backend._rate = applications.pipeline.backend._rate, 10.0
    yield applications
    applications.pipeline.backend._rate = rate


def test_a_running_request_is_at_its_worker(slow: Applications) -> None:
    body, headers = BODY | {"max_tokens": 300, "stream": True}, {"Penstock-Resumable": "true"}
    request = post(slow, body, headers=headers, leave_after=2).headers["x-request-id"]
    trace = trace_of(slow, request)
    assert (trace.status, trace.ended) == ("running", None)
    assert stages(trace) == ["validate", "queue", "batch", "infer"]
    infer = trace.stages[-1]
    assert (infer.worker, infer.left, infer.ending) == ("w0", None, None)
    slow.run(ask(slow.apps[0], "DELETE", f"/v1/streams/{request}"))
    trace = trace_of(slow, request)
    assert (trace.status, kinds(trace)[-1]) == ("cancelled", "end")
    assert trace.stages[3].left is not None


def test_a_request_that_still_waits(slow: Applications) -> None:
    """Its worker stands still."""
    slow.pipeline.backend.goes.clear()

    async def waiting() -> RequestTrace:
        job = Job(id=f"r-{uuid.uuid4().hex}", endpoint="/v1/completions", bridge="test", body=BODY)
        reading = await slow.bridges[0].open(job, priority="normal", tenant="default")
        assert isinstance((await reading.take(PATIENCE))[0], Accepted)
        response = await ask(slow.apps[0], "GET", f"/v1/streams/{job.id}/trace")
        slow.pipeline.backend.goes.set()
        reading.leave()
        return RequestTrace.model_validate_json(response.body)

    trace = slow.run(waiting())
    assert (trace.status, trace.ended) == ("waiting", None)
    assert stages(trace) == ["validate", "queue", "batch"]
    assert (trace.stages[-1].left, kinds(trace)) == (None, ["accepted"])


@pytest.mark.parametrize(
    ("former", "told"),
    [
        ("w9", "w9 died here, w0 continued at token 3"),
        ("w0", "w0 died here, w0 (restarted) continued at token 3"),
    ],
)
def test_a_takeover_names_both_workers_and_the_token(applications: Applications, former: str, told: str) -> None:
    """The former process said so much, and died; its batch lies with nobody, or with the new process of its name."""
    pipe = applications.pipeline.pipe

    async def scene() -> str:
        job = validated(f"r-{uuid.uuid4().hex}", pipe)
        now = pipe.now()
        hops = append_hop("", "batch", at=now - 3, began=now - 3, left=now - 2, worker=former, size=4)
        announced = append_hop(hops, "infer", at=now - 2, began=now - 1, worker=former, epoch=1)
        outputs: list[tuple[Output, dict[str, str]]] = [
            (Started(job.id, 1, "x", job.tenant, job.bridge, 1, job.prompt_tokens), {HOPS: announced}),
            (Delta(job.id, 1, 0, 0, tuple(b"hel"), "hel"), {}),
        ]
        for output, headers in outputs:
            data, name = codec.encode_outputs([output]), uuid.uuid4().hex
            await pipe.store(pipe.outputs_of(job.tenant, job.id), data, name, codec.OUTPUTS, headers)
        batch = InferenceBatch(id="b", worker=former, jobs=(job,), incarnation="x")
        headers = {SCHEMA: codec.BATCH, HOPS: hops}
        await pipe.broker.publish(pipe.subjects.infer(former), codec.encode(batch), message_id=job.id, headers=headers)
        reading = await applications.bridges[0]._reading(job.id, job.tenant, None, kept=True, shared=True)
        async with asyncio.timeout(PATIENCE):
            while not reading.ended:
                await reading.take(1.0)
        reading.close()
        return job.id

    trace = trace_of(applications, applications.run(scene()))
    assert trace.status == "completed"
    lost, successor = (visit for visit in trace.stages if visit.stage == "infer")
    assert (lost.worker, lost.batch_size, lost.tokens, lost.ending) == (former, 4, 3, "lost")
    assert (successor.worker, successor.epoch, successor.from_token, successor.ending) == ("w0", 2, 3, "finished")
    (takeover,) = (mark for mark in trace.marks if mark.kind == "takeover")
    assert takeover.text == told


def test_a_preemption_is_told_with_the_next_token(slow: Applications) -> None:
    """The engine says that it had no memory for the request, for a second."""
    backend = slow.pipeline.backend

    async def scene() -> str:
        body = BODY | {"max_tokens": 4}
        job = Job(id=f"r-{uuid.uuid4().hex}", endpoint="/v1/completions", bridge="test", body=body)
        reading = await slow.bridges[0].open(job, priority="normal", tenant="default")
        async with asyncio.timeout(PATIENCE):
            while not any(isinstance(event, Token) for event in await reading.take(PATIENCE)):
                pass
            (choice,) = backend._running
            choice.preemptions.append(Preemption(0, at=time.time() - 1, resumed=time.time()))
            choice.preemptions.append(Preemption(0, at=time.time()))  # which lasts
            while not reading.ended:
                await reading.take(PATIENCE)
        reading.close()
        return str(job.id)

    trace = trace_of(slow, slow.run(scene()))
    assert kinds(trace).count("preempted") == kinds(trace).count("resumed") == 1
    (infer,) = (visit for visit in trace.stages if visit.stage == "infer")
    assert (infer.preemptions, infer.tokens) == (1, 4)
    shown = rendered(trace)
    assert "preempted 1 times" in shown
    assert "no memory" in shown


def test_the_waterfall_in_a_terminal(applications: Applications) -> None:
    trace = trace_of(applications, post(applications, BODY).headers["x-request-id"])
    shown = rendered(trace).splitlines()
    assert trace.id in shown[0]
    assert "completed" in shown[0]
    names = [next(word for word in line.split() if not word.startswith("+")) for line in shown[2:-1]]
    assert [name for name in names if name != "·"] == ["validate", "queue", "batch", "infer", "stream"]
    assert any("to w0, 1 together" in line for line in shown)
    refused = post(applications, BODY | {"max_tokens": 100_000}).headers["x-request-id"]
    assert "context_length_exceeded" in rendered(trace_of(applications, refused))


def rendered(trace: RequestTrace) -> str:
    console = Console(width=160, file=io.StringIO(), soft_wrap=True)
    for each in lines(trace):
        console.print(each)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()
