"""A bridge that asks itself: it says "ready" only while requests are answered, and troubles nobody."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import orjson
import pytest
import pytest_asyncio
from asgi import ask
from memory_pipeline import FragileEcho, Pipeline
from structlog.testing import capture_logs

from penstock.api.bridge.canary import Canary
from penstock.api.bridge.readiness import Readiness
from penstock.api.http.app import create_app
from penstock.config import metrics
from penstock.schemas.errors import BrokerUnavailable
from penstock.schemas.events import Delta, ErrorBody
from penstock.schemas.registry import StageCard
from penstock.streams.memory.broker import MemoryBroker
from penstock.streams.port import Message, Published

INTERVAL = 10.0


class Broken(FragileEcho):
    """Fails every request, while it `is_broken`."""

    is_broken = False

    def step(self) -> list[Delta]:
        deltas = super().step()
        if not self.is_broken:
            return deltas
        for choice in list(self._running):
            self.remove(choice)
        error = ErrorBody(500, "broken on purpose", "server_error", "generation_failed")
        return [replace(delta, token_ids=(), text="", finish_reason="error", error=error) for delta in deltas]


class Full(MemoryBroker):
    """Stores nothing, while it `is_full`, as nats-server on a full disk."""

    is_full = False

    async def publish(self, *given: Any, **more: Any) -> Published:
        if self.is_full:
            raise BrokerUnavailable("no answer within 5 s")
        return await super().publish(*given, **more)


class Watched:
    """A pipeline, its application, and a canary by a clock of the test's own."""

    def __init__(self, pipeline: Pipeline) -> None:
        assert isinstance(pipeline.backend, Broken)
        self.pipeline, self.backend, self.ahead = pipeline, pipeline.backend, 0.0
        pipe = pipeline.pipe
        self.canary = Canary(pipeline.bridge, pipe.registry, INTERVAL, self.clock)
        readiness = Readiness(pipeline.bridge, pipe.broker, pipe.registry, pipe.settings, self.canary)
        self.app = create_app(pipeline.bridge, pipe.broker, pipe.registry, pipe.settings, "0", readiness=readiness)
        self.asked: list[Message] = []

    def clock(self) -> float:
        return time.monotonic() + self.ahead

    async def look_after(self, seconds: float) -> None:
        self.ahead += seconds
        async with asyncio.timeout(60):
            await self.canary.look()

    async def ready(self) -> tuple[int, dict[str, Any]]:
        response = await ask(self.app, "GET", "/health/ready", None)
        return response.status, orjson.loads(response.body)


async def started(**values: Any) -> Watched:
    pipeline = await Pipeline.start(kind=Broken, **values)
    watched = Watched(pipeline)
    pipe = pipeline.pipe
    await pipe.broker.listen(pipe.subjects.jobs_all(), watched.asked.append)
    for name in pipe.settings.pipeline:
        await pipe.registry.announce_stage(StageCard(stage=name, id="s0", pid=os.getpid()))
    await pipe.registry.refresh()
    return watched


@pytest_asyncio.fixture
async def watched() -> AsyncIterator[Watched]:
    watched = await started()
    yield watched
    await watched.pipeline.stop()


async def test_it_asks_only_when_nobody_was_answered_lately(watched: Watched) -> None:
    await watched.look_after(INTERVAL / 2)
    assert watched.asked == []
    await watched.look_after(INTERVAL / 2)
    assert len(watched.asked) == 1
    watched.pipeline.bridge.last_answer = watched.clock() + 5
    await watched.look_after(INTERVAL + 1)
    assert len(watched.asked) == 1
    assert (await watched.ready())[0] == 200


async def test_what_fails_is_told_with_the_reason_until_it_works_again(watched: Watched) -> None:
    watched.backend.is_broken = True
    with capture_logs() as lines:
        await watched.look_after(INTERVAL)
        await watched.look_after(INTERVAL)
        status, answer = await watched.ready()
        assert (status, answer["status"], answer["fault"]["model"]) == (503, "failing", "echo")
        assert answer["fault"]["reason"]
        assert metrics.REGISTRY.get_sample_value("penstock_answering") == 0
        watched.backend.is_broken = False
        await watched.look_after(INTERVAL / 4)
        assert (await watched.ready())[0] == 200
    events = [line["event"] for line in lines]
    assert events.count("requests are not answered") == 1
    assert events.count("requests are answered again") == 1


async def test_a_client_s_answer_is_proof_enough(watched: Watched) -> None:
    watched.backend.is_broken = True
    await watched.look_after(INTERVAL)
    assert (await watched.ready())[0] == 503
    asked = len(watched.asked)
    watched.pipeline.bridge.last_answer = watched.clock() + 1
    await watched.canary.look()
    assert (await watched.ready())[0] == 200
    assert len(watched.asked) == asked


async def test_it_is_nobody_s_request(watched: Watched) -> None:
    def counted() -> list[float | None]:
        labels = {"model_name": "echo", "engine": "w0"}
        value = metrics.REGISTRY.get_sample_value
        return [
            value("penstock_requests_total", {"outcome": "completed"}),
            value("vllm:generation_tokens_total", labels),
            value("vllm:time_to_first_token_seconds_count", labels),
        ]

    before = counted()
    await watched.look_after(INTERVAL)
    assert watched.asked
    assert watched.canary.fault is None
    assert counted() == before
    assert not watched.pipeline.pipe.trails or all("_canary" in subject for subject in watched.pipeline.pipe.trails)


@pytest.mark.parametrize("fails", [False, True])
async def test_a_model_of_a_catalogue_runs_only_where_requests_fail(fails: bool) -> None:
    watched = await started(catalogued=True)
    watched.backend.is_broken = True
    if fails:
        watched.pipeline.bridge.last_failure = watched.clock()
    for _ in range(3):
        await watched.look_after(INTERVAL)
    assert len(watched.asked) == 3
    assert (await watched.ready())[0] == (503 if fails else 200)
    await watched.pipeline.stop()


async def test_a_broker_that_stores_nothing_is_noticed_though_no_model_may_be_asked() -> None:
    watched = await started(catalogued=True, memory=Full)
    broker = watched.pipeline.pipe.broker
    assert isinstance(broker, Full)
    await watched.look_after(INTERVAL)
    assert (await watched.ready())[0] == 200
    broker.is_full = True
    await watched.look_after(INTERVAL)
    status, answer = await watched.ready()
    assert (status, answer["status"], answer["fault"]["model"]) == (503, "failing", "echo")
    assert "no answer within 5 s" in answer["fault"]["reason"]
    broker.is_full = False
    await watched.look_after(INTERVAL)
    assert (await watched.ready())[0] == 200
    await watched.pipeline.stop()
