"""Adapters as model names in the pipeline: bound where a prompt is tokenised, loaded by whatever worker has the job."""

from __future__ import annotations

import asyncio
import shutil
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lora import make_adapter
from memory_pipeline import MODEL, FragileEcho, Pipeline, validated

from penstock.engine.adapters.files import AdapterFiles, adapter_source
from penstock.engine.adapters.loaded import Adapter, AdapterInfo, Target, Targets
from penstock.engine.choice import Choice
from penstock.schemas.events import FINAL, Accepted, Delta, Done, Event, Failed, Started, Token
from penstock.schemas.jobs import AdapterSource, InferenceBatch, ValidatedJob
from penstock.schemas.registry import AddedAdapter
from penstock.schemas.wire import codec
from penstock.streams.port import SCHEMA

SIZES = {"layer": (8, 8)}
TEXT = "hello, how are you?"


class Adapting(FragileEcho):
    """Echoes: in capitals with an adapter of rank 1, letter by letter replaced by the next with one of rank 2."""

    loads = 0

    def adapter_targets(self) -> Targets:
        return Targets({name: Target(*size) for name, size in SIZES.items()}, frozenset())

    def load_adapter(self, files: AdapterFiles) -> Adapter:
        self.loads += 1
        return Adapter(AdapterInfo(files.name, files.source, files.digest, files.rank, 1, 64), files.pairs)

    def _next_token(self, row: Any) -> int:
        choice: Choice = row.choice
        return spoken(super()._next_token(row), choice.adapter.info.rank if choice.adapter else 0)


def spoken(letter: int, rank: int) -> int:
    is_letter = ord("a") <= letter <= ord("z")
    return letter + (0, -32, 1)[rank] if is_letter else letter


def said(rank: int, text: str = TEXT) -> str:
    return bytes(spoken(letter, rank) for letter in text.encode()).decode()


@pytest.fixture
def pipeline() -> Iterator[Pipeline]:
    with asyncio.Runner() as runner:
        pipeline = runner.run(Pipeline.start(kind=Adapting, heartbeat_interval=0.02))
        pipeline.runner = runner
        yield pipeline
        runner.run(pipeline.stop())


@pytest.fixture
def adapters(tmp_path: Path) -> dict[str, Path]:
    return {name: make_adapter(tmp_path / name, SIZES, rank=rank) for name, rank in (("upper", 1), ("next", 2))}


def backend_of(pipeline: Pipeline) -> Adapting:
    assert isinstance(pipeline.backend, Adapting)
    return pipeline.backend


async def add(pipeline: Pipeline, name: str, path: Path, model: str = MODEL) -> AddedAdapter:
    source = adapter_source(name, path)
    added = AddedAdapter(name=name, path=source.path, digest=source.digest, model=model, created=0)
    assert await pipeline.pipe.registry.add_adapter(added)
    await pipeline.pipe.registry.refresh()
    return added


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)


def body(model: str) -> dict[str, Any]:
    return {"model": model, "prompt": TEXT, "max_tokens": len(TEXT)}


def text_of(events: list[Event]) -> str:
    assert isinstance(events[-1], Done), events[-1]
    return "".join(event.text for event in events if isinstance(event, Token))


def test_each_name_answers_as_itself_alone_and_mixed(pipeline: Pipeline, adapters: dict[str, Path]) -> None:
    async def run() -> None:
        for name, path in adapters.items():
            await add(pipeline, name, path)
        ranks = {MODEL: 0, "upper": 1, "next": 2}
        asked = [*ranks] * 4
        for name, events in zip(
            asked, await asyncio.gather(*(pipeline.events(body(name)) for name in asked)), strict=True
        ):
            assert text_of(events) == said(ranks[name])
            assert [event.model for event in events if isinstance(event, Accepted)] == [name]
            assert isinstance(events[-1], Done) and events[-1].usage.completion_tokens == len(TEXT)
        assert backend_of(pipeline).loads == 2
        assert len(pipeline.pipe.registry.lanes) == 1, "they wait in the lanes of their base"

    pipeline.runner.run(run())


def test_unknown_names_are_refused_with_the_nearest(pipeline: Pipeline, adapters: dict[str, Path]) -> None:
    pipeline.runner.run(add(pipeline, "upper", adapters["upper"]))
    failed = pipeline.ask(body("uper"))[-1]
    assert isinstance(failed, Failed) and "Did you mean upper?" in failed.error.message


@pytest.mark.parametrize("worker", ["w0", "gone"])
def test_a_successor_goes_on_with_the_same_adapter(pipeline: Pipeline, adapters: dict[str, Path], worker: str) -> None:
    """Of a worker that has died, though the adapter was removed meanwhile, and another has its name now."""

    async def run() -> None:
        job = job_with(pipeline, adapter_source("mine", adapters["upper"]))
        await add(pipeline, "mine", adapters["next"])
        await say(pipeline, job, said(1)[:7])
        await dispatch(pipeline, worker, job)
        events = await events_of(pipeline, job)
        assert text_of(events) == said(1)
        await until(lambda: [info.source for info in pipeline.engine.adapters()] == [str(adapters["next"])])

    pipeline.runner.run(run())


def test_removed_adapters_serve_what_runs_and_are_freed(pipeline: Pipeline, adapters: dict[str, Path]) -> None:
    async def run() -> None:
        added = await add(pipeline, "upper", adapters["upper"])
        await until(lambda: len(pipeline.engine.adapters()) == 1)
        backend_of(pipeline).goes.clear()
        running = asyncio.create_task(pipeline.events(body("upper")))
        await until(lambda: pipeline.engine.stats().num_waiting + pipeline.engine.stats().num_running)
        await pipeline.pipe.registry.remove_adapter(added)
        await pipeline.pipe.registry.refresh()
        refused = (await pipeline.events(body("upper")))[-1]
        assert isinstance(refused, Failed) and refused.error.status == 404
        backend_of(pipeline).goes.set()
        assert text_of(await running) == said(1)
        await until(lambda: not pipeline.engine.adapters())

    pipeline.runner.run(run())


class TestFaults:
    """Each ends the requests that name the adapter, with the reason, and disturbs no others."""

    def check(self, pipeline: Pipeline, name: str, reason: str) -> None:
        async def run() -> None:
            failed, other = await asyncio.gather(pipeline.events(body(name)), pipeline.events(body(MODEL)))
            assert text_of(other) == said(0)
            assert isinstance(failed[-1], Failed)
            error = failed[-1].error
            assert (error.status, error.code) == (503, "model_unavailable")
            assert f"The adapter {name!r} cannot be used: " in error.message and reason in error.message

        pipeline.runner.run(run())

    def test_another_base(self, pipeline: Pipeline, tmp_path: Path) -> None:
        pipeline.runner.run(add(pipeline, "other", make_adapter(tmp_path / "other", {"layer": (8, 12)})))
        self.check(pipeline, "other", "is for another model: its layer has 8 inputs and 12 outputs")

    def test_a_path_that_has_vanished(self, pipeline: Pipeline, adapters: dict[str, Path]) -> None:
        source = adapter_source("upper", adapters["upper"])
        shutil.rmtree(adapters["upper"])
        pipeline.runner.run(add(pipeline, "upper", adapters["upper"]))
        self.check(pipeline, "upper", f"no such directory: {source.path}")

    def test_files_that_have_changed(self, pipeline: Pipeline, adapters: dict[str, Path], tmp_path: Path) -> None:
        async def run() -> None:
            source = adapter_source("upper", adapters["upper"])
            make_adapter(adapters["upper"], SIZES, rank=1, seed=7)
            added = AddedAdapter(**source.model_dump(), model=MODEL, created=0)
            assert await pipeline.pipe.registry.add_adapter(added)
            await pipeline.pipe.registry.refresh()

        pipeline.runner.run(run())
        self.check(pipeline, "upper", "have changed since it was offered")

    def test_a_name_that_is_taken(self, pipeline: Pipeline, adapters: dict[str, Path]) -> None:
        """By the model, whatever came first."""

        async def run() -> None:
            await add(pipeline, MODEL, adapters["upper"])
            assert text_of(await pipeline.events(body(MODEL))) == said(0)
            assert pipeline.pipe.registry.models[MODEL].adapters == ()

        pipeline.runner.run(run())


def test_a_slow_load_holds_up_nobody_else(
    pipeline: Pipeline, adapters: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    may_load = threading.Event()
    load = pipeline.engine.load_adapter

    def wait_and_load(name: str, path: Any) -> AdapterInfo:
        may_load.wait()
        return load(name, path)

    monkeypatch.setattr(pipeline.engine, "load_adapter", wait_and_load)

    async def run() -> None:
        await add(pipeline, "upper", adapters["upper"])
        slow = [asyncio.create_task(pipeline.events(body("upper"))) for _ in range(3)]
        assert text_of(await pipeline.events(body(MODEL))) == said(0)
        may_load.set()
        for events in await asyncio.gather(*slow):
            assert text_of(events) == said(1)
        assert backend_of(pipeline).loads == 1

    pipeline.runner.run(run())


def job_with(pipeline: Pipeline, adapter: AdapterSource) -> ValidatedJob:
    job = validated(f"r-{uuid.uuid4().hex}", pipeline.pipe)
    params = job.params.model_copy(update={"max_tokens": len(TEXT)})
    return job.model_copy(update={"prompts": (tuple(TEXT.encode()),), "params": params, "adapter": adapter})


async def say(pipeline: Pipeline, job: ValidatedJob, text: str) -> None:
    """As a worker that is gone had said it."""
    started = Started(job.id, 1, uuid.uuid4().hex, job.tenant, job.bridge, job.choices, job.prompt_tokens)
    for output in (started, Delta(job.id, 1, 0, 0, tuple(text.encode()), text)):
        data = codec.encode_outputs([output])
        await pipeline.pipe.store(pipeline.pipe.outputs_of(job.tenant, job.id), data, uuid.uuid4().hex, codec.OUTPUTS)


async def dispatch(pipeline: Pipeline, worker: str, job: ValidatedJob) -> None:
    batch = InferenceBatch(id=uuid.uuid4().hex, worker=worker, jobs=(job,), incarnation="x")
    subject = pipeline.pipe.subjects.infer(worker)
    await pipeline.pipe.broker.publish(subject, codec.encode(batch), message_id=batch.id, headers={SCHEMA: codec.BATCH})


async def events_of(pipeline: Pipeline, job: ValidatedJob) -> list[Event]:
    subject = pipeline.pipe.subjects.events(job.tenant, job.bridge, job.id)
    heard: list[Event] = []
    async with asyncio.timeout(10):
        while not any(isinstance(event, FINAL) for event in heard):
            await asyncio.sleep(0)
            heard = [codec.decode_event(m.data) for m in await pipeline.pipe.broker.replay("EVENTS", subject)]
    return heard
