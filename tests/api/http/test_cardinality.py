"""However many requests, tenants, paths and methods clients think up: the number of series stays what it was."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from starlette.responses import PlainTextResponse
from starlette.routing import Route, Router

from penstock.api.http.middleware.access import AccessLog
from penstock.config import metrics
from penstock.schemas.errors import Overloaded
from penstock.schemas.events import Delta, Done, ErrorBody, Event, Failed, Usage
from penstock.schemas.jobs import ValidatedJob
from penstock.schemas.params import GenerationParams
from penstock.stages.infer.request_metrics import RequestMetrics, WorkerMetrics
from penstock.stages.outcomes import count_outcome

REQUESTS = 10_000
JOB = ValidatedJob(
    id="r",
    endpoint="/v1/completions",
    bridge="b",
    tenant="t",
    priority="normal",
    model="served",
    prompts=(tuple(b"hello"),),
    params=GenerationParams(),
    created=1.0,
    deadline=601.0,
    body={},
)
BUSY = ErrorBody.of(Overloaded("Too many requests are waiting."))


def series() -> int:
    return sum(len(metric.samples) for metric in metrics.REGISTRY.collect())


def requested(number: int) -> dict[str, Any]:
    """What a client asks for: every eighth time something that is served, and else something of its own."""
    path = "/served" if number % 8 == 0 else f"/v1/models/model-{number}"
    return {
        "type": "http",
        "method": "GET" if number % 3 else f"M{number}",
        "path": path,
        "headers": [(b"authorization", b"Bearer sk-%d" % number), (b"x-request-id", b"%d" % number)],
        "query_string": b"tenant=%d" % number,
    }


async def test_ten_thousand_requests_make_no_series() -> None:
    app = AccessLog(Router([Route("/served", lambda _: PlainTextResponse("yes"))]), lines=False)
    worker = WorkerMetrics("served", "w-of-this-test")

    async def receive() -> MutableMapping[str, Any]:
        return {"type": "http.request"}

    async def send(message: MutableMapping[str, Any]) -> None: ...

    async def serve(numbers: range) -> None:
        for number in numbers:
            await app(requested(number), receive, send)
            name = f"request-{number}"
            job = JOB.model_copy(update={"id": name, "tenant": f"tenant-{number}"})
            measured = RequestMetrics(job, worker, lambda: 2.0)
            measured.began()
            measured.published([Delta(name, 1, 0, 0, (1, 2), "ab", finish_reason="length")], {0: (1.0, 2.0)})
            measured.ended()
            event: Event = Done(name, ("length",), Usage(5, 2, 7)) if number % 2 else Failed(name, BUSY)
            count_outcome(event)

    await serve(range(24))
    before = series()
    await serve(range(24, 24 + REQUESTS))
    assert series() == before
    labels = "model_name", "engine"
    found = metrics.REGISTRY.get_sample_value(
        "vllm:e2e_request_latency_seconds_count", dict(zip(labels, ("served", "w-of-this-test"), strict=True))
    )
    assert found == 24 + REQUESTS
