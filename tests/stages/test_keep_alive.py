"""How long a model stays loaded after a request: the worker says what the last one asked for, before it is idle."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from memory_pipeline import MODEL, Pipeline

from penstock.schemas.events import Done, Failed
from penstock.schemas.models.catalogue import Catalogue, CatalogueEntry, RevisionKey


def announced(pipeline: Pipeline) -> float | None:
    pipeline.runner.run(pipeline.pipe.registry.refresh())
    (worker,) = pipeline.pipe.registry.workers
    return worker.keep_alive


@pytest.mark.parametrize(
    ("given", "seconds"), [("5m", 300.0), (20, 20.0), (0, 0.0), (-1, -1.0), ("-1s", -1.0), (None, None)]
)
def test_the_last_request_decides(given: Any, seconds: float | None) -> None:
    with asyncio.Runner() as runner:
        pipeline = runner.run(Pipeline.start(catalogued=True))
        pipeline.runner = runner
        body = {"model": MODEL, "prompt": "hello", "max_tokens": 3}
        for keep_alive, said in ((given, seconds), ("1h", 3600.0), (None, None), (given, seconds)):
            assert isinstance(pipeline.ask(body | {"keep_alive": keep_alive})[-1], Done)
            assert announced(pipeline) == said
        runner.run(pipeline.stop())


def test_it_means_nothing_for_a_model_of_no_catalogue(pipeline: Pipeline) -> None:
    assert isinstance(pipeline.ask({"model": MODEL, "prompt": "hello", "keep_alive": 0})[-1], Done)
    assert announced(pipeline) is None


def test_what_is_no_duration_is_refused(pipeline: Pipeline) -> None:
    failed = pipeline.ask({"model": MODEL, "prompt": "hello", "keep_alive": "soon"})[-1]
    assert isinstance(failed, Failed)
    assert failed.error.param == "keep_alive" and 'such as "5m"' in failed.error.message


def test_a_catalogue_as_requests_have_asked_for_it() -> None:
    entries = [CatalogueEntry(name=name, source="o/m", keep_alive=60.0) for name in "abc"]
    known = Catalogue().offer(entries)
    asked = known.as_asked({RevisionKey("a", 1): -1.0, RevisionKey("b", 1): 5.0, RevisionKey("c", 1): None})
    assert [entry.keep_alive for entry in asked.entries] == [None, 5.0, 60.0]
    assert known.as_asked({RevisionKey("a", 2): 1.0}) == known


def test_a_request_may_leave_the_only_model_out(pipeline: Pipeline) -> None:
    assert isinstance(pipeline.ask({"prompt": "hello", "max_tokens": 3})[-1], Done)
    other = pipeline.pipe.registry.models[MODEL].model_copy(update={"name": "other"})
    pipeline.runner.run(pipeline.pipe.registry.announce_model(other))
    pipeline.runner.run(pipeline.pipe.registry.refresh())
    failed = pipeline.ask({"prompt": "hello", "max_tokens": 3})[-1]
    assert isinstance(failed, Failed) and failed.error.param == "model"
