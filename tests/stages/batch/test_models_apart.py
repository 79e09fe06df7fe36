"""No request waits behind another model's, and no model's queue is another one's."""

from __future__ import annotations

import asyncio

import pytest
from absent_model import ABSENT, PATIENCE, asked, with_absent
from memory_pipeline import MODEL, Pipeline, events_of

from penstock.api.bridge.reading import Reading
from penstock.schemas.errors import Overloaded
from penstock.schemas.events import Cancelled, Done, Event, Failed
from penstock.schemas.registry import ModelRefusal
from penstock.stages.batch.stage import Batch
from penstock.streams.lanes import open_lanes, remove_lanes
from penstock.streams.topology import batch_stream, lanes_of


async def end_of(reading: Reading) -> Event:
    return (await events_of(reading, PATIENCE))[-1]


async def waiting(pipeline: Pipeline, count: int) -> None:
    async with asyncio.timeout(PATIENCE):
        while (await pipeline.pipe.broker.held(batch_stream(lanes_of(ABSENT), "normal"))).messages != count:  # noqa: ASYNC110
            await asyncio.sleep(0)


async def test_requests_for_a_model_without_a_worker_hold_up_no_other_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Batch, "concurrency", 2)  # so that a few fill the stage's hands
    pipeline = await with_absent()
    behind = [await asked(pipeline, ABSENT) for _ in range(6)]
    await waiting(pipeline, 6)
    assert isinstance(await end_of(await asked(pipeline, MODEL)), Done)
    for reading in behind:
        await reading.ask_to_stop()
        assert isinstance(await end_of(reading), Cancelled)
    await waiting(pipeline, 0)
    await pipeline.stop()


async def test_a_full_queue_is_one_models_alone() -> None:
    pipeline = await with_absent(queue_limit=3, high_watermark=1.0)
    held = [await asked(pipeline, ABSENT) for _ in range(3)]
    await waiting(pipeline, 3)

    async def refused() -> bool:
        try:
            reading = await asked(pipeline, ABSENT)
        except Overloaded as early:
            assert early.code == "queue_full"
            return True
        end = await end_of(reading)
        assert isinstance(end, Failed) and end.error.code == "queue_full"
        return False

    async with asyncio.timeout(PATIENCE):
        while not await refused():  # by the queue at first, and soon by the bridge, before it costs anything
            pass
    assert isinstance(await end_of(await asked(pipeline, MODEL)), Done)
    for reading in held:
        await reading.ask_to_stop()
        await end_of(reading)
    await pipeline.stop()


async def test_lanes_may_be_removed_and_come_back_while_all_runs() -> None:
    pipeline = await with_absent()
    pipe = pipeline.pipe
    (lanes,) = [lanes for lanes in pipe.registry.lanes.values() if lanes.model == ABSENT]
    for _ in range(2):
        await remove_lanes(pipe.broker, lanes)
        await pipe.registry.refresh()
        assert isinstance(await end_of(await asked(pipeline, MODEL)), Done)
        await open_lanes(pipe.broker, pipe.settings, ABSENT)
        await pipe.registry.refresh()
        reading = await asked(pipeline, ABSENT)
        await waiting(pipeline, 1)
        await reading.ask_to_stop()
        assert isinstance(await end_of(reading), Cancelled)
    await pipeline.stop()


async def refusal_of(reading: Reading) -> tuple[str | None, str]:
    end = await end_of(reading)
    assert isinstance(end, Failed) and end.error.status == 503
    return end.error.code, end.error.message


async def test_few_wait_for_a_model_that_is_not_loaded() -> None:
    pipeline = await with_absent({"queue_limit": 2})
    held = [await asked(pipeline, ABSENT) for _ in range(2)]
    await waiting(pipeline, 2)
    code, message = await refusal_of(await asked(pipeline, ABSENT))
    assert code == "server_busy" and "2 requests wait for the model 'absent' to be loaded" in message
    for reading in held:
        await reading.ask_to_stop()
        await end_of(reading)
    await pipeline.stop()


async def test_only_streams_wait_long_for_a_model() -> None:
    pipeline = await with_absent({"wait_limit": 0.1})
    stream, whole = await asked(pipeline, ABSENT, stream=True), await asked(pipeline, ABSENT)
    code, message = await refusal_of(whole)
    assert code == "server_busy" and "was not loaded within 0.1 s" in message
    assert not stream.ended
    await stream.ask_to_stop()
    assert isinstance(await end_of(stream), Cancelled)
    await pipeline.stop()


async def test_a_model_that_cannot_be_loaded_is_refused_with_the_reason_until_it_can() -> None:
    pipeline = await with_absent()
    registry = pipeline.pipe.registry
    before = await asked(pipeline, ABSENT)
    await waiting(pipeline, 1)
    now = pipeline.pipe.now()
    await registry.refuse_model(ABSENT, 1, ModelRefusal(reason="it is too large", at=now + 1.0, retry_after=60.0))
    await registry.refresh()
    assert await refusal_of(before) == ("model_unavailable", "it is too large")
    assert await refusal_of(await asked(pipeline, ABSENT)) == ("model_unavailable", "it is too large")
    await registry.refuse_model(ABSENT, 1, None)
    await registry.refresh()
    after = await asked(pipeline, ABSENT)
    await waiting(pipeline, 1)
    await after.ask_to_stop()
    assert isinstance(await end_of(after), Cancelled)
    await pipeline.stop()
