"""Running states that have passed images: Qwen 3.5, LFM2 and LFM3 keep them in most layers, not keys and values.

The oracle is transformers' own generation, one prompt at a time. `test_seeing.py` has what holds for all families.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ByteSize
from vision_models import make_vision_model, picture
from vision_runs import requests_of, run
from vision_truth import expected, reference

from penstock.engine import EngineConfig, GenerationParams, ImageText, InferenceEngine
from penstock.engine.cpu.machine import KERNEL_FLAGS, cpu_flags
from penstock.engine.paged.backend import PagedBackend
from penstock.engine.paged.decoding.decoder import Decoder
from penstock.engine.preparing.prompts import Prompt

COUNT = 20  # tokens generated
GREEDY = GenerationParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
WIDE = picture(160, 90)  # of more than ten tokens
QUESTIONS = "What is it?", "Is it large, or small, or neither of both?", "And now something else."

Answers = list[tuple[int, ...]]
Truth = Callable[[InferenceEngine, Sequence[Prompt], Sequence[tuple[int, ...]]], Answers]
has_kernels = pytest.mark.skipif(not {*cpu_flags().split()} >= KERNEL_FLAGS, reason="the kernels need AVX2")


@pytest.fixture(scope="module", params=["qwen3_5", "qwen3_5_moe", "lfm2_vl", "lfm3_vl", "minicpmv4_7"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def directory(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_model(tmp_path_factory.mktemp("states") / family, family)


@pytest.fixture(scope="module")
def truth(family: str, directory: Path) -> Truth:
    """What transformers answers, of which an engine has said something."""
    model = reference(directory)

    def make(engine: InferenceEngine, prompts: Sequence[Prompt], said: Sequence[tuple[int, ...]]) -> Answers:
        processor = engine.sight.processor
        assert processor is not None
        asked = zip(requests_of(engine, prompts, GREEDY), said, strict=True)
        return [expected(model, request, processor, family, COUNT, it) for request, it in asked]

    return make


def config(directory: Path, **more: Any) -> EngineConfig:
    own: dict[str, Any] = {"dtype": "float32", "device": "cpu", "kv_cache_memory": ByteSize(16 << 20)} | more
    return EngineConfig(model=str(directory), **own)


@pytest.fixture
def engine(directory: Path) -> Iterator[InferenceEngine]:
    with InferenceEngine(config(directory)) as engine:
        yield engine


def test_a_prefix_ends_anywhere_before_inside_or_behind_an_image(engine: InferenceEngine, truth: Truth) -> None:
    """Questions about one picture after one to sixteen words: the last border of blocks that they share moves on."""
    inside = 0
    for count in range(1, 17, 3):
        before = "word " * count + engine.image_mark
        prompts = [ImageText(f"{before} {question}", (WIDE,)) for question in QUESTIONS]
        requests = requests_of(engine, prompts, GREEDY)
        outputs = [engine.generate(prompt, GREEDY) for prompt in prompts]
        said = [output.token_ids for output in outputs]
        assert said == truth(engine, prompts, said)
        image = requests[0].images[0]
        (end,) = {one.images[0].end for one in requests}
        cached = outputs[-1].stats.cached_tokens
        assert end // 16 * 16 <= cached < end + 16, "the second left a state where both begin to differ"
        inside += image.offset < cached < end
    assert inside, "some go on inside the image"


def test_a_chat_goes_on_behind_its_images(engine: InferenceEngine, truth: Truth) -> None:
    text, images, known = f"{engine.image_mark} A first question.", [WIDE], 0
    for turn in range(3):
        prompt = ImageText(text, tuple(images))
        output = engine.generate(prompt, GREEDY)
        assert [output.token_ids] == truth(engine, [prompt], [output.token_ids])
        assert output.stats.cached_tokens >= known // 16 * 16, "what the last turn has read is not read again"
        (request,) = requests_of(engine, [prompt], GREEDY)
        known = len(request.prompt)
        text += f" And another {engine.image_mark} question."
        images.append(picture(60, 40, turn + 1))


@pytest.mark.parametrize("size", [3, 7])
def test_an_image_is_computed_in_small_pieces(size: int, directory: Path, truth: Truth) -> None:
    """Down to single tokens, beside those of others."""
    with InferenceEngine(config(directory)) as engine:
        mark = engine.image_mark
        prompts: list[Prompt] = [
            ImageText(f"Look {mark}, {mark}!", (WIDE, picture())),
            "Without any picture.",
            ImageText(f"{mark} What?", (WIDE,)),
        ]
        requests = requests_of(engine, prompts, GREEDY)
        backend = PagedBackend(config(directory, prefill_chunk_size=size, max_batch_size=3))
        said = run(backend, requests)
        backend.close()
        assert said == truth(engine, prompts, said)


def test_transformers_modules_see_as_well(
    directory: Path, engine: InferenceEngine, truth: Truth, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They run where a model is built otherwise than the plain decoder."""
    prompts: list[Prompt] = [ImageText(f"Look {engine.image_mark}!", (WIDE,)), "Without any picture."]
    requests = requests_of(engine, prompts, GREEDY)
    monkeypatch.setattr(Decoder, "of", lambda *_: None)
    backend = PagedBackend(
        config(directory, prefill_chunk_size=7, max_batch_size=3, max_sequence_length=1024)
    )  # not yet known
    assert any("is not a plain decoder" in path for path in backend.info.slow_paths)
    said = run(backend, requests)
    assert said == truth(engine, prompts, said)
    backend.close()


def counting(backend: PagedBackend) -> list[int]:
    """A list that gets an entry for each step that the kernels compute."""
    compiled: Any = backend.runner._compiled
    calls, own = list[int](), compiled._kernels.library

    def step(*given: Any) -> int:
        calls.append(1)
        return int(own.step(*given))

    compiled._kernels = SimpleNamespace(library=SimpleNamespace(step=step))
    return calls


@has_kernels
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_all_steps_are_compiled(dtype: str, family: str, directory: Path) -> None:
    if family == "lfm3_vl":
        pytest.skip("its text is not compiled either")
    backend = PagedBackend(config(directory, dtype=dtype))
    with InferenceEngine(config(directory)) as engine:
        seeing, text = requests_of(engine, [ImageText(f"{engine.image_mark} Well?", (WIDE,)), "Well?"], GREEDY)
    assert backend.info.slow_paths == () and backend.info.sees
    calls = counting(backend)
    run(backend, [text])
    assert len(calls) == COUNT, "as without a tower"
    calls.clear()
    run(backend, [seeing])
    assert len(calls) == COUNT, "also the one that computes the prompt"
    backend.close()
