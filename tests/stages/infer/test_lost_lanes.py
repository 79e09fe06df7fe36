"""A worker whose model's lanes have gone opens them again: requests for it would wait for ever."""

from __future__ import annotations

import asyncio

from memory_pipeline import MODEL, Pipeline
from structlog.testing import capture_logs

from penstock.schemas.events import Done
from penstock.streams.lanes import are_open, reopen_lanes
from penstock.streams.topology import STATE, lanes_of

BODY = {"model": MODEL, "prompt": "hello"}


async def purge(pipeline: Pipeline) -> None:
    """As an administrator does who empties every stream to be rid of what waits."""
    state = await pipeline.pipe.broker.bucket(STATE)
    for entry in await state.entries():
        await state.delete(entry.key)


async def test_requests_are_answered_after_the_lanes_had_gone() -> None:
    pipeline = await Pipeline.start(heartbeat_interval=0.02)
    try:
        assert isinstance((await pipeline.events(BODY))[-1], Done)
        await purge(pipeline)
        async with asyncio.timeout(20):
            while not await are_open(pipeline.pipe.broker, lanes_of(MODEL, 1)):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert isinstance((await pipeline.events(BODY))[-1], Done)
    finally:
        await pipeline.stop()


async def test_lanes_that_cannot_be_opened_are_told_of_and_the_worker_goes_on() -> None:
    pipeline = await Pipeline.start()
    try:
        with capture_logs() as logs:
            full = pipeline.pipe.settings.model_copy(update={"max_models": 1})
            await reopen_lanes(pipeline.pipe.broker, full, "another", 1)
        (entry,) = logs
        assert entry["log_level"] == "warning" and "max_models is 1" in entry["reason"]
    finally:
        await pipeline.stop()
