"""Tiny random models, written once a session, and engines that run them in float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ByteSize
from threads import torch_threads
from tiny_model import make_tiny_model

from penstock.engine import EngineConfig, InferenceEngine
from penstock.engine.paged import verdicts

MakeModel = Callable[[str], Path]
MakeEngine = Callable[[str], InferenceEngine]
MakeReference = Callable[[str], Any]

_numbers = count()


@pytest.fixture(scope="module", autouse=True)
def one_thread(request: pytest.FixtureRequest) -> Iterator[None]:
    """But for kernels and compiled steps, which are also for several: tiny models are fastest on one thread."""
    threads = torch.get_num_threads() if request.path.parent.name in ("cpu", "compiled") else 1
    with torch_threads(threads):
        yield


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    """The directory of a tiny model of the given shape."""
    root = tmp_path_factory.mktemp("models")

    def make(shape: str) -> Path:
        path: Path = root / shape
        return path if path.exists() else make_tiny_model(path, shape)

    return make


@pytest.fixture(scope="session", params=["paged", "hf"])
def engine_of(model_directory: MakeModel, request: pytest.FixtureRequest) -> Iterator[MakeEngine]:
    """A running engine with a tiny model of the given shape, for each backend that runs models."""
    engines: dict[str, InferenceEngine] = {}
    with ExitStack() as stack:

        def make(shape: str) -> InferenceEngine:
            if shape not in engines:
                config = EngineConfig(
                    model=str(model_directory(shape)),
                    backend=request.param,
                    dtype="float32",
                    device="cpu",
                    kv_cache_memory=ByteSize(64 << 20),
                )
                engines[shape] = stack.enter_context(InferenceEngine(config))
            return engines[shape]

        yield make


@pytest.fixture(scope="session")
def reference_of(model_directory: MakeModel) -> MakeReference:
    """The same model in transformers' own hands."""
    from transformers import AutoModelForCausalLM

    loaded: dict[str, Any] = {}

    def make(shape: str) -> Any:
        if shape not in loaded:
            loaded[shape] = AutoModelForCausalLM.from_pretrained(model_directory(shape), dtype="float32")
        return loaded[shape]

    return make


@pytest.fixture
def llama(engine_of: MakeEngine) -> InferenceEngine:
    return engine_of("llama")


@pytest.fixture
def echo() -> Iterator[InferenceEngine]:
    with InferenceEngine(EngineConfig(model="echo", backend="echo")) as engine:
        yield engine


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Sixteen prompts of different lengths, 1 to 61 tokens."""
    return [[3 + (7 * row + index * index) % 500 for index in range(1 + 4 * row)] for row in range(16)]


@pytest.fixture(autouse=True)
def verdict_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Each test begins without a model that is known to have been checked. The directory is made when one is kept."""
    cache = tmp_path_factory.getbasetemp() / "verdicts" / str(next(_numbers))
    monkeypatch.setattr(verdicts, "user_cache", lambda: cache)
    return cache
