"""A full stream or store makes those who write to it wait; nobody dies of it, and nothing ends in the dead letters."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest
from memory_pipeline import MODEL, Pipeline
from structlog.testing import capture_logs

from penstock.composition.parts import heartbeats
from penstock.schemas.errors import PayloadTooLarge
from penstock.schemas.events import Done, Failed
from penstock.schemas.jobs import Endpoint, Job
from penstock.streams.topology import DEAD, INFER, MODELS, TOOLS, WORKERS, lane_stream, topology

BODY = {"model": MODEL, "prompt": "hello"}


@pytest.fixture
async def pipeline() -> AsyncIterator[Pipeline]:
    pipeline = await Pipeline.start(heartbeat_interval=0.02, max_attempts=2)
    yield pipeline
    await pipeline.stop()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def limit(pipeline: Pipeline, name: str, **limits: Any) -> None:
    """Give a stream or bucket other limits than those of the topology."""
    streams, buckets = topology(pipeline.pipe.subjects.root, ("queue",))
    await pipeline.pipe.broker.reconfigure(
        [replace(spec, **limits) for spec in streams if spec.name == name],
        [replace(spec, **limits) for spec in buckets if spec.name == name],
    )


async def test_a_full_infer_makes_the_batch_stage_wait(pipeline: Pipeline) -> None:
    await limit(pipeline, INFER, max_bytes=1)
    with capture_logs() as logs:
        asking = asyncio.create_task(pipeline.events(BODY))
        await until(lambda: any(entry["event"] == "too many requests run" for entry in logs))
    assert not asking.done()
    await limit(pipeline, INFER)
    assert isinstance((await asking)[-1], Done)
    assert await pipeline.pipe.broker.replay(DEAD, pipeline.pipe.subjects.dead_all()) == []


@pytest.mark.parametrize("bucket", [MODELS, WORKERS])
async def test_a_worker_outlives_a_store_without_room_for_itsheartbeats(pipeline: Pipeline, bucket: str) -> None:
    kept = await pipeline.pipe.broker.bucket(bucket)
    await limit(pipeline, bucket, max_bytes=1)
    with capture_logs() as logs:
        for entry in await kept.entries():
            await kept.delete(entry.key)  # as their age does; to replace one takes no room
        await until(lambda: sum(entry["event"] == "heartbeat missed" for entry in logs) > 3)
    await limit(pipeline, bucket)
    await until(lambda: pipeline.pipe.registry.workers and pipeline.pipe.registry.models)
    assert isinstance((await pipeline.events(BODY))[-1], Done)


async def test_stages_outlive_it_too(pipeline: Pipeline) -> None:
    await limit(pipeline, WORKERS, max_bytes=1)
    stage = pipeline._runners[0]._stage
    with capture_logs() as logs:
        beating = asyncio.create_task(heartbeats(pipeline.pipe, [stage]))
        await until(lambda: sum(entry.get("stage") == stage.name for entry in logs) > 3)
    await limit(pipeline, WORKERS)
    workers = await pipeline.pipe.broker.bucket(WORKERS)
    async with asyncio.timeout(30):
        while await workers.get(f"stage.{stage.name}.{stage.copy}") is None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    beating.cancel()
    await asyncio.gather(beating, return_exceptions=True)


async def test_the_responses_of_one_tenant_leave_room_for_those_of_others() -> None:
    pipeline = await Pipeline.start(tools_limit=20)
    (tools,) = (runner for runner in pipeline._runners if runner._stage.name == "tools")
    tools.stop()  # as if each of its tools were slow: what comes waits
    await asyncio.wait([pipeline._tasks[pipeline._runners.index(tools)]])

    async def begin(tenant: str) -> Failed | None:
        """Why a response is refused; None once it waits."""
        before = (await pipeline.pipe.broker.held(lane)).total
        body = {"model": MODEL, "input": "hello"}
        job = Job(id=f"resp_{uuid.uuid4().hex}", endpoint="/v1/responses", bridge="test", body=body)
        reading = await pipeline.bridge.open(job, priority="normal", tenant=tenant)
        taking = asyncio.create_task(reading.take(30))
        async with asyncio.timeout(30):
            while not taking.done() and (await pipeline.pipe.broker.held(lane)).total == before:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        if not taking.done():
            taking.cancel()
            return None
        (event,) = taking.result()
        assert isinstance(event, Failed)
        return event

    lane = lane_stream(TOOLS, "normal")
    refused = [failed for _ in range(20) if (failed := await begin("greedy"))]
    assert [(each.error.status, each.error.retry_after) for each in refused] == [(503, 1.0)] * 2
    assert await begin("modest") is None
    assert await begin("greedy") is not None
    assert await begin("another") is None
    assert set((await pipeline.pipe.broker.held(lane)).by_subject.values()) == {18, 1}
    await pipeline.stop()


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/responses"])
async def test_a_request_that_no_queue_could_hold_is_not_sent_to_wait(endpoint: Endpoint) -> None:
    """It was told to try again in a second, for ever."""
    pipeline = await Pipeline.start(store_limit=64 << 20)
    body = {"model": MODEL, "prompt" if endpoint == "/v1/completions" else "input": "x" * (400 << 10)}
    with pytest.raises(PayloadTooLarge, match=r"hold 3\d\d,\d{3} at most: send less, or .* raise store_limit"):
        await pipeline.events(body, endpoint=endpoint)
    await pipeline.stop()
