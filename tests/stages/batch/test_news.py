"""What a request hears while it waits: its position, its model's loading, and when its turn may come."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import pytest
from absent_model import ABSENT, PATIENCE, asked, with_absent
from memory_pipeline import MODEL, Pipeline, validated
from raw_events import stored
from structlog.testing import capture_logs

from penstock.api.bridge.reading import Reading
from penstock.schemas.events import Accepted, Queued, Token
from penstock.schemas.registry import LoadProgress, ModelCard
from penstock.stages import Pipe
from penstock.stages.batch.lanes import Lanes, Waiting
from penstock.stages.batch.news import WaitingNews
from penstock.stages.batch.stage import Batch
from penstock.stages.loading import announced
from penstock.streams.lanes import remove_lanes


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.stages.batch.stage.TICK", 0.01)


async def news(reading: Reading) -> Queued:
    async with asyncio.timeout(PATIENCE):
        while True:
            for event in await reading.take(PATIENCE):
                if isinstance(event, Queued):
                    return event


async def loads(pipeline: Pipeline, percent: int, elapsed: float) -> None:
    load = LoadProgress(worker="w", model=ABSENT, percent=percent, elapsed=elapsed)
    await pipeline.pipe.broker.notify(pipeline.pipe.subjects.loading(), load.model_dump_json().encode())


async def test_a_client_hears_that_its_model_is_waited_for_then_loads_and_how_far_it_is() -> None:
    pipeline = await with_absent()
    reading = await asked(pipeline, ABSENT)
    id = reading.request
    assert await news(reading) == Queued(id, 1, "waiting")
    await pipeline.pipe.broker.notify(pipeline.pipe.subjects.loading(), b"of another release")
    await loads(pipeline, 0, 1.0)
    assert await news(reading) == Queued(id, 1, "loading", 0), "nothing says yet how long it takes"
    await loads(pipeline, 20, 3.0)
    assert await news(reading) == Queued(id, 1, "loading", 20, 12.0)
    await loads(pipeline, 25, 4.0)  # too little to be told
    await loads(pipeline, 80, 8.0)
    assert await news(reading) == Queued(id, 1, "loading", 80, 2.0)
    reading.close()
    await pipeline.stop()


async def test_a_load_that_nobody_reports_any_more_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = await with_absent()
    reading = await asked(pipeline, ABSENT)
    assert (await news(reading)).model == "waiting"
    await loads(pipeline, 50, 1.0)
    assert (await news(reading)).model == "loading"
    monkeypatch.setattr("penstock.stages.batch.news.SILENT", -1.0)
    assert (await news(reading)).model == "waiting"
    reading.close()
    await pipeline.stop()


async def test_nothing_is_kept_of_a_model_whose_lanes_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = await with_absent()
    pipe = pipeline.pipe
    (batch,) = [runner._stage for runner in pipeline._runners if isinstance(runner._stage, Batch)]
    readings = [await asked(pipeline, model) for model in (MODEL, ABSENT)]
    await news(readings[1])
    await loads(pipeline, 50, 1.0)
    await readings[1].ask_to_stop()

    async def until(condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    await until(lambda: (ABSENT, 1) in batch._news._loads and not any(batch._lanes.values()))
    assert {*batch._lanes} == {(MODEL, 1), (ABSENT, 1)}, "its lanes are there"
    (lanes,) = [lanes for lanes in pipe.registry.lanes.values() if lanes.model == ABSENT]
    await remove_lanes(pipe.broker, lanes)
    await until(lambda: [*batch._lanes] == [*batch._news._drains] == [(MODEL, 1)])
    monkeypatch.setattr("penstock.stages.batch.news.SILENT", -1.0)
    await until(lambda: not batch._news._loads)
    for reading in readings:
        reading.close()
    await pipeline.stop()


async def test_of_a_model_that_runs_only_the_position_is_told_and_when_its_turn_comes() -> None:
    pipeline = await Pipeline.start(max_batch_size=1, echo_rate=200)
    readings = [await asked(pipeline, MODEL, max_tokens=20, prompt="long " * 20) for _ in range(40)]
    heard: list[Queued] = []
    async with asyncio.timeout(PATIENCE):
        while not readings[-1].ended:
            heard += [event for event in await readings[-1].take(PATIENCE) if isinstance(event, Queued)]
    assert heard and all((each.model, each.progress) == (None, None) for each in heard)
    assert heard[0].position > 1 and any(each.wait for each in heard), heard
    for reading in readings:
        reading.close()
    await pipeline.stop()


async def test_a_worker_reports_what_it_has_loaded() -> None:
    pipeline = await Pipeline.start()
    card = ModelCard(name="new", source="new", backend="paged", context_length=100, created=0)

    @contextlib.asynccontextmanager
    async def connect() -> AsyncIterator[Pipe]:
        yield pipeline.pipe

    seen: asyncio.Queue[LoadProgress] = asyncio.Queue()
    await pipeline.pipe.broker.listen(
        pipeline.pipe.subjects.loading(),
        lambda message: seen.put_nowait(LoadProgress.model_validate_json(message.data)),
    )
    async with asyncio.timeout(PATIENCE), announced(connect, card, "w7") as report:
        first = await seen.get()
        await asyncio.to_thread(report, 3, 4)
        then = await seen.get()
    assert (first.worker, first.model, first.percent) == ("w7", "new", 0)
    assert (then.percent, then.remaining) == (75, then.elapsed / 3)
    await pipeline.stop()


async def test_news_stands_between_acceptance_and_answer() -> None:
    """Of one job the stage queue has yet to say that it is accepted; another is answered before its turn to hear."""
    pipeline = await Pipeline.start()
    pipe, lanes = pipeline.pipe, Lanes(None)
    unheard, answered = jobs = [validated(name, pipe) for name in ("unheard", "answered")]
    for number, job in enumerate(jobs):
        lanes.push(Waiting(job, number))
    await pipe.emit(Accepted.of(answered), tenant=answered.tenant, bridge=answered.bridge, key="accepted")
    token = Token(answered.id, 0, 0, (1,), "a")
    await pipe.emit(token, tenant=answered.tenant, bridge=answered.bridge, key="0.0")
    await WaitingNews(pipe).tell(ABSENT, 1, lanes)
    await pipe.emit(Accepted.of(unheard), tenant=unheard.tenant, bridge=unheard.bridge, key="accepted")
    heard = {job.id: [event.type for event in await stored(pipeline, job.id)] for job in jobs}
    assert heard == {"unheard": ["accepted", "queued"], "answered": ["accepted", "token"]}
    await pipeline.stop()


async def test_the_operator_hears_once_that_requests_wait_for_a_model_that_nobody_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pipeline = await Pipeline.start()
    pipe, lanes, none = pipeline.pipe, Lanes(None), Lanes(None)
    lanes.push(Waiting(validated("waits", pipe), 1))
    news = WaitingNews(pipe)

    async def warnings(model: str, lanes: Lanes) -> list[tuple[str, int]]:
        with capture_logs() as lines:
            await news.tell(model, 1, lanes)
        return [(line["model"], line["waiting"]) for line in lines if line["event"] == "no worker serves a model"]

    assert await warnings(ABSENT, lanes) == [], "its worker may be on its way"
    monkeypatch.setattr("penstock.stages.batch.news.UNSERVED", 0.0)
    assert await warnings(ABSENT, lanes) == [], "the time has not come"
    assert await warnings(ABSENT, none) == [], "nothing waits any more"
    assert await warnings(ABSENT, lanes) == [(ABSENT, 1)]
    assert await warnings(ABSENT, lanes) == [], "it was said already"
    assert await warnings(MODEL, lanes) == [], "it has a worker"
    await pipeline.stop()
