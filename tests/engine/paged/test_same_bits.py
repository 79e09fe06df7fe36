"""On a CPU with the kernels an answer has the same bits whatever else runs, however its prompt is computed, and
whichever worker goes on with it: not only the same tokens, but the same scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import wait
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from pydantic import ByteSize
from vision_models import make_vision_model, picture
from vision_runs import requests_of

from penstock.engine import EngineConfig, EngineRequest, GenerationParams, ImageText, InferenceEngine
from penstock.engine.choice import Choice
from penstock.engine.cpu.machine import KERNEL_FLAGS, cpu_flags
from penstock.engine.paged.backend import PagedBackend
from penstock.schemas.events import TokenLogprob

pytestmark = pytest.mark.skipif(not set(cpu_flags().split()) >= KERNEL_FLAGS, reason="the kernels need AVX2")

COUNT = 12
PARAMS = GenerationParams(temperature=1, seed=5, max_tokens=COUNT, ignore_eos=True, logprobs=3)
LONG = "".join(f"Line {number} of a prompt that is longer than the rest. " for number in range(45))

Answer = list[TokenLogprob]
families = pytest.mark.parametrize(
    "family", ["llava", "smolvlm", "qwen2_vl", "qwen3_vl", "gemma4_e", "qwen3_5", "lfm2_vl", "glm4v"]
)
dtypes = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


@pytest.fixture(scope="module")
def directory_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("bits")
    return cache(lambda family: make_vision_model(root / family, family))


def config(directory: Path, dtype: str, **changes: Any) -> EngineConfig:
    given: Any = {"dtype": dtype, "device": "cpu", "kv_cache_memory": ByteSize(32 << 20), **changes}
    return EngineConfig(model=str(directory), **given)


def answers(backend: PagedBackend, requests: Sequence[EngineRequest]) -> list[Answer]:
    """The tokens of each request, their scores, and those of the three best."""
    choices = [Choice(request, 0, backend.tokenizer, backend.info) for request in requests]
    found: dict[str, Answer] = {request.id: [] for request in requests}
    for choice in choices:
        backend.add(choice)
    while any(choice.finish is None for choice in choices):
        if backend.runner.vision is not None:
            wait(backend.runner.vision.pictures._begun)
        for delta in backend.step():
            assert delta.error is None
            found[delta.request] += delta.logprobs or ()
    return [found[request.id] for request in requests]


def check(directory: Path, dtype: str, request: EngineRequest, others: Sequence[EngineRequest]) -> None:
    """Alone, beside others, in pieces of several lengths, scored, behind a prefix, and taken over by other workers."""
    backend = PagedBackend(config(directory, dtype))
    assert backend.info.slow_paths == ()
    [alone] = answers(backend, [request])
    assert len(alone) == COUNT
    salted = [replace(request, id=f"salted {salt}", cache_salt=salt) for salt in ("a", "b")]
    assert answers(backend, [*others, *salted])[len(others) :] == [alone, alone]
    assert answers(backend, [replace(request, id="again")]) == [alone], "behind a prefix hit"
    scored = request.params.model_copy(update={"prompt_logprobs": 1})
    assert answers(backend, [replace(request, id="scored", cache_salt="c", params=scored)]) == [alone]
    assert answers(backend, [replace(request, id="behind", cache_salt="c")]) == [alone], "behind what was scored"
    backend.close()
    tokens = tuple(one.token_id for one in alone)
    for chunk, done in ((16, 0), (48, 5), (100, 11)):
        backend = PagedBackend(config(directory, dtype, prefill_chunk_size=chunk, max_batch_size=8))
        going = replace(request, generated=(tokens[:done],) if done else (), epoch=2)
        assert answers(backend, [*others, going])[-1] == alone[done:], f"in pieces of {chunk}, {done} tokens on"
        backend.close()


@dtypes
@pytest.mark.parametrize(
    "shape", ["qwen2", "mistral", "gemma3_text", "gpt_oss", "qwen3_moe", "lfm2", "qwen3_5_text", "bamba"]
)
def test_a_long_prompt(shape: str, dtype: str, model_directory: Callable[[str], Path]) -> None:
    """Beyond 1,024 tokens, where torch would be faster."""
    directory = model_directory(shape)
    with InferenceEngine(config(directory, dtype)) as engine:
        long, *others = requests_of(engine, [LONG, "A short one.", "Another short one, which is longer."], PARAMS)
    assert len(long.prompt) > 1024
    check(directory, dtype, long, others)


@dtypes
@families
def test_a_prompt_with_images(family: str, dtype: str, directory_of: Callable[[str], Path]) -> None:
    directory = directory_of(family)
    with InferenceEngine(config(directory, dtype)) as engine:
        mark = engine.image_mark
        seeing = ImageText(f"{mark} is one, {mark} another. Which?", (picture(80, 30, 1), picture(40, 90, 2)))
        given, *others = requests_of(engine, [seeing, ImageText(f"{mark}?", (picture(),)), "No picture."], PARAMS)
    check(directory, dtype, given, others)
