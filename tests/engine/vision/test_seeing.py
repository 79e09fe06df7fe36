"""Models that see images, of each family that the engine claims, against transformers' own generation.

The oracle is eager attention in float32, one prompt at a time. Nothing may depend on what runs beside a request, on how
its prompt was cut, on what the cache still held, or on how often it was preempted.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from pydantic import ByteSize
from vision_models import FAMILIES, make_vision_model, picture
from vision_runs import requests_of, run
from vision_truth import expected, first_logits, reference

from penstock.engine import EngineConfig, EngineRequest, GenerationParams, ImageText, InferenceEngine
from penstock.engine.paged.backend import PagedBackend
from penstock.engine.planning.model_files import LEAST_STATES, STATES, ModelFiles
from penstock.engine.preparing.prompts import Prompt
from penstock.engine.vision.images import PromptImage
from penstock.schemas.errors import InvalidRequest, ModelLoadError

COUNT = 20  # tokens generated
GREEDY = GenerationParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
TEXT = "A sentence without any picture, which runs beside the others."

Tokens = tuple[int, ...]
Start = Callable[..., InferenceEngine]
ConfigOf = Callable[..., EngineConfig]
Truth = Callable[..., tuple[list[EngineRequest], list[Tokens]]]
UNCOMPILED = {
    "ernie4_5_vl_moe": "Ernie4_5_VLMoeForConditionalGeneration",
    "mllama": "MllamaForConditionalGeneration",
    "gemma3n": "Gemma3nForConditionalGeneration",
    "hyperclovax_vision_v2": "HyperCLOVAXVisionV2ForConditionalGeneration",
    "lfm3_vl": "Lfm3VlForConditionalGeneration",
    "hunyuan_vl": "HunYuanVLForConditionalGeneration",
    "kimi_k25": "Kimi_K25ForConditionalGeneration",
    "aria": "AriaForConditionalGeneration",
    "llama4": "Llama4ForConditionalGeneration",
    "glm4v_moe": "Glm4vMoeForConditionalGeneration",
    "aya_vision": "AyaVisionForConditionalGeneration",
    "cohere2_vision": "Cohere2VisionForConditionalGeneration",
    "deepseek_ocr2": "DeepseekOcr2ForConditionalGeneration",
}
all_families = pytest.mark.parametrize("family", FAMILIES)
# One with plain positions, one with tokens between those of an image, one with three dimensions and deepstack.
# And those whose image tokens see each other, one whose layers share keys and have inputs of their own, and two that
# keep running states.
some_families = pytest.mark.parametrize(
    "family",
    [
        *("llava", "smolvlm", "qwen3_vl", "gemma3", "gemma4", "gemma4_e", "qwen3_5", "lfm2_vl", "lfm3_vl", "glm4v"),
        *("llava_onevision", "minicpmv4_7", "ovis2", "gemma3n", "paligemma", "llama4", "hunyuan_vl", "granite4_vision"),
    ],
)


@pytest.fixture(scope="module")
def directory_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("seeing")
    return cache(lambda family: make_vision_model(root / family, family))


@pytest.fixture(scope="module")
def config_of(directory_of: Callable[[str], Path]) -> ConfigOf:
    def make(family: str, **changes: Any) -> EngineConfig:
        settings = {"kv_cache_memory": ByteSize(16 << 20), "dtype": "float32", "device": "cpu"}
        return EngineConfig(**{"model": str(directory_of(family)), **settings, **changes})

    return make


@pytest.fixture
def start(config_of: ConfigOf) -> Iterator[Start]:
    """A new engine, its cache cold."""
    with ExitStack() as stack:
        yield lambda family, **changes: stack.enter_context(InferenceEngine(config_of(family, **changes)))


@pytest.fixture(scope="module")
def truth(config_of: ConfigOf, reference_of: Callable[[str], Any]) -> Truth:
    """Requests, and what transformers answers, by family; the last one has no picture. An engine that runs makes the
    requests, and has `said` what it answers; without one a new engine does both."""
    made: dict[str, tuple[list[EngineRequest], list[Tokens]]] = {}

    def make(
        family: str, running: InferenceEngine | None = None, said: Sequence[Tokens] = ()
    ) -> tuple[list[EngineRequest], list[Tokens]]:
        if family not in made:
            with ExitStack() as stack:
                engine = running or stack.enter_context(InferenceEngine(config_of(family)))
                requests, processor = requests_of(engine, [*prompts(engine), TEXT], GREEDY), engine.sight.processor
                assert processor is not None
                mixed: list[Prompt] = [*prompts(engine), TEXT]
                said = said or [output.token_ids for output in engine.generate(mixed, GREEDY)]
                asked, model = zip(requests, said, strict=True), reference_of(family)
                made[family] = requests, [expected(model, one, processor, family, COUNT, it) for one, it in asked]
        return made[family]

    return make


@pytest.fixture(scope="module")
def reference_of(directory_of: Callable[[str], Path]) -> Callable[[str], Any]:
    return cache(lambda family: reference(directory_of(family)))


def prompts(engine: InferenceEngine) -> list[ImageText]:
    """Prompts with one and with two images, of different shapes."""
    mark = engine.image_mark
    return [
        ImageText(f"Here is {mark} and nothing else. What do you see?", (picture(),)),
        ImageText(f"{mark} is one, {mark} another. Say which is larger.", (picture(80, 30, 1), picture(40, 90, 2))),
    ]


@all_families
def test_a_picture_is_seen_as_transformers_sees_it(family: str, start: Start, truth: Truth) -> None:
    engine = start(family)
    mixed: list[Prompt] = [*prompts(engine), TEXT]
    together = [output.token_ids for output in engine.generate(mixed, GREEDY)]
    requests, wanted = truth(family, engine, together)
    assert len(set(wanted)) == 3, "the answers do not depend on the pictures"
    assert together == wanted
    again = [engine.generate(prompt, GREEDY) for prompt in prompts(engine)]
    assert [output.token_ids for output in again] == wanted[:2]
    for output, request in zip(again, requests[:2], strict=True):
        assert output.stats.cached_tokens == (len(request.prompt) - 1) // 16 * 16
    if name := UNCOMPILED.get(family):  # as for text
        assert engine.model_info().slow_paths == (f"decoding is not compiled: {name} is not a plain decoder",)
    else:
        assert engine.model_info().slow_paths == (), "decoding is compiled, as for text"


@pytest.mark.parametrize("family", ["granite_docling", "granite4_vision", "hyperclovax_vision_v2"])
def test_scaled_logits_are_those_of_transformers(family: str, start: Start, reference_of: Callable[[str], Any]) -> None:
    engine = start(family)
    prompt, params = prompts(engine)[0], GREEDY.model_copy(update={"max_tokens": 3, "logprobs": 1})
    (request,), processor = requests_of(engine, [prompt], params), engine.sight.processor
    assert processor is not None
    wanted = first_logits(reference_of(family), request, processor, family).log_softmax(-1)
    output = engine.generate(prompt, params)
    assert output.logprobs is not None
    assert output.logprobs[0].logprob == pytest.approx(float(wanted[output.token_ids[0]]), abs=1e-4)


@all_families
def test_pieces_and_takeovers_change_nothing(family: str, config_of: ConfigOf, truth: Truth) -> None:
    requests, wanted = truth(family)
    backend = PagedBackend(config_of(family, prefill_chunk_size=16, max_batch_size=4))
    assert run(backend, requests) == wanted
    taken_over = [
        replace(request, generated=(answer[:9],), cache_salt="somebody else", epoch=2)
        for request, answer in zip(requests, wanted, strict=True)
    ]
    assert run(backend, taken_over) == wanted
    backend.close()


def test_tokens_around_an_image_pass_its_experts_in_any_piece(
    start: Start, config_of: ConfigOf, reference_of: Callable[[str], Any]
) -> None:
    """ERNIE's do, also where a step ends between them and the image."""
    family, engine = "ernie4_5_vl_moe", start("ernie4_5_vl_moe")
    text = f"One <|IMAGE_START|>{engine.image_mark}<|IMAGE_END|> is here."
    (request,), processor = requests_of(engine, [ImageText(text, (picture(),))], GREEDY), engine.sight.processor
    assert processor is not None
    wanted = [expected(reference_of(family), request, processor, family, COUNT)]
    for size in (request.images[0].offset, request.images[0].end - 1):
        backend = PagedBackend(config_of(family, prefill_chunk_size=size, max_batch_size=2))
        assert run(backend, [request]) == wanted
        backend.close()


@some_families
def test_preemption_changes_nothing(family: str, config_of: ConfigOf, truth: Truth) -> None:
    requests, wanted = truth(family)
    files = ModelFiles.of(config_of(family))
    lengths = [len(request.prompt) for request in requests]
    longest = max(lengths) + COUNT
    block, blocks = files.cache(16, 1), longest // 16 + 2
    if family in ("gemma4", "gemma4_e", "lfm2_vl", "minicpmv4_7"):  # for all prompts, but not for their answers
        blocks = sum(-(-one // 16) for one in lengths) + (5 if family == "minicpmv4_7" else 1)  # some for states
    if family in ("gemma4", "gemma4_e"):
        block = 16 * (4 if family == "gemma4" else 3) * 2 * 2 * 16 * 4
    states = 3 * files.states()
    if family not in ("lfm2_vl", "lfm3_vl"):  # whose states are small: all that are wanted get room
        states = states * LEAST_STATES // STATES
    memory = ByteSize(blocks * block + states)
    backend = PagedBackend(config_of(family, kv_cache_memory=memory, max_batch_size=3, max_sequence_length=longest))
    assert backend.runner.vision is not None
    before = backend.runner.vision.num_encoded
    assert run(backend, [replace(request, cache_salt=request.id) for request in requests]) == wanted
    stats = backend.cache_stats()
    assert stats is not None and stats.num_preemptions > 0
    assert backend.runner.vision.num_encoded == before + 3, "each picture passes the tower once"
    backend.close()


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("smolvlm", {}),
        ("qwen3_vl", {}),
        ("qwen3_vl_moe", {"quantization": "int4"}),
        ("qwen3_5", {}),
        ("qwen3_5", {"quantization": "int8"}),
        ("qwen3_5_moe", {}),
        ("gemma3", {"quantization": "int4"}),
        ("gemma4", {}),
        ("gemma4_unified", {"quantization": "int4"}),
        ("gemma4_e", {"quantization": "int8"}),
        ("lfm2_vl", {}),
        ("lfm2_vl", {"quantization": "int4"}),
        ("glm4v", {}),
        ("glm4v", {"quantization": "int4"}),
        ("glm4v_moe", {"quantization": "int8"}),
        ("lfm3_vl", {}),
        ("lfm3_vl", {"quantization": "int8"}),
        ("llava", {"quantization": "int8"}),
        ("mistral3", {"compile_kernels": False}),
        ("llava_next", {"quantization": "int8"}),
        ("llava_onevision", {}),
        ("aya_vision", {}),
        ("minicpmv4_6", {}),
        ("minicpmv4_7", {"quantization": "int8"}),
        ("granite_docling", {"quantization": "int8"}),
        ("got_ocr2", {}),
        ("qianfan_ocr", {}),
        ("deepseek_vl", {}),
        ("cohere2_vision", {}),
        ("deepseek_ocr2", {}),
        ("video_llama_3", {}),
        ("ovis2", {}),
        ("janus", {}),
        ("idefics2", {}),
        ("gemma3n", {"quantization": "int8"}),
        ("paligemma", {"quantization": "int4"}),
        ("paligemma2", {}),
        ("deepseek_vl_hybrid", {}),
        ("hyperclovax_vision_v2", {"quantization": "int8"}),
        ("llama4", {"quantization": "int8"}),
        ("hunyuan_vl", {}),
        ("kimi_k25", {}),
        ("aria", {"quantization": "int8"}),
        ("perception_lm", {}),
        ("fast_vlm", {}),
        ("granite4_vision", {}),
        ("granite4_vision", {"quantization": "int4"}),
        ("mllama", {}),
        ("ernie4_5_vl_moe", {}),
        ("ernie4_5_vl_moe", {"quantization": "int8"}),
        ("mllama", {"quantization": "int8"}),
    ],
)
def test_other_numbers_see_as_well(family: str, changes: dict[str, Any], start: Start) -> None:
    """In bfloat16, the default, and quantised: no exact truth, but the pictures matter, and nothing else does."""
    engine = start(family, **{"dtype": "bfloat16"} | changes)
    one, two = prompts(engine)
    other = ImageText(one.text, (picture(salt=5),))
    mixed: list[Prompt] = [one, two, other, TEXT]
    answers = [output.token_ids for output in engine.generate(mixed, GREEDY)]
    assert len(set(answers)) == 4
    assert engine.generate(one, GREEDY).stats.cached_tokens > 0


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "qwen3_5", "lfm2_vl"])
def test_the_same_words_about_another_picture_share_no_block(family: str, start: Start) -> None:
    engine, cold = start(family), start(family)
    text = f"{engine.image_mark} What do you see, in as many words as you can find for all of it?"
    first, second = (ImageText(text, (picture(salt=salt),)) for salt in (1, 2))
    one, other = requests_of(engine, [first, second], GREEDY)
    assert one.prompt == other.prompt, "only the pictures differ"
    engine.generate(first, GREEDY)
    output = engine.generate(second, GREEDY)
    assert output.stats.cached_tokens == 0
    assert output.token_ids == cold.generate(second, GREEDY).token_ids
    assert engine.generate(first, GREEDY).stats.cached_tokens > 0, "and its own are still there"


def test_features_that_no_longer_fit_are_made_again(config_of: ConfigOf, truth: Truth) -> None:
    """Of two prompts that are computed in turn, each piece pushes the other's features out."""
    (request, *_), (wanted, *_) = truth("qwen3_vl")
    backend = PagedBackend(config_of("qwen3_vl", prefill_chunk_size=4, max_batch_size=4))
    assert backend.runner.vision is not None
    backend.runner.vision._cache_bytes = 1
    assert run(backend, [request, replace(request, cache_salt="somebody else")]) == [wanted, wanted]
    assert backend.runner.vision.num_encoded > 2, "some pass the tower again"
    backend.close()


def test_guessed_tokens_change_nothing_behind_a_picture(start: Start) -> None:
    engine = start("qwen2_vl", speculation="auto")
    plain = start("qwen2_vl", speculation="off")
    prompt = prompts(engine)[0]
    params = GREEDY.model_copy(update={"max_tokens": 200})
    assert engine.generate(prompt, params).token_ids == plain.generate(prompt, params).token_ids
    cache_stats = engine.stats().cache
    assert cache_stats is not None and cache_stats.speculation.num_accepted_tokens > 0


def test_images_for_a_model_of_text_are_refused(tiny_model: Path) -> None:
    config = EngineConfig(model=str(tiny_model), dtype="float32", device="cpu", kv_cache_memory=ByteSize(8 << 20))
    with InferenceEngine(config) as engine:
        with pytest.raises(InvalidRequest, match="takes text alone"):
            engine.generate(ImageText("What is this?", (picture(),)), GREEDY)
        image = PromptImage("0" * 64, 0, 1, (1,))
        request = EngineRequest("r", (5, 6, 7), GREEDY, seed=0, images=(image,))
        with pytest.raises(InvalidRequest, match="takes text alone"):
            asyncio.run(_open(engine, request))


async def _open(engine: InferenceEngine, request: EngineRequest) -> None:
    engine.open(request).cancel()


def test_a_model_that_sees_in_another_way_is_refused(
    directory_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one would whose pictures change the tokens before them."""
    from transformers.models.llava.modeling_llava import LlavaModel

    forward = LlavaModel.forward

    def otherwise(self: Any, *arguments: Any, **options: Any) -> Any:
        made = forward(self, *arguments, **options)
        made.last_hidden_state = made.last_hidden_state * 1.5
        return made

    monkeypatch.setattr(LlavaModel, "forward", otherwise)
    config = EngineConfig(model=str(directory_of("llava")), dtype="float32", device="cpu")
    with pytest.raises(ModelLoadError, match="sees images in a way that is not supported"):
        InferenceEngine(config)


@pytest.mark.parametrize("family", ["gemma4", "gemma4_unified"])
def test_gemma_4_shows_more_or_fewer_tokens(family: str, start: Start, reference_of: Callable[[str], Any]) -> None:
    """Within the numbers that its processor knows; each in turn as by transformers."""
    for changes, most in (({"min_pixels": 71 * 64}, 140), ({"max_pixels": 200 * 64, "min_pixels": 10_000}, 140)):
        engine = start(family, **changes)
        prompt = ImageText(f"{engine.image_mark} Well?", (picture(160, 90),))
        (request,), processor = requests_of(engine, [prompt], GREEDY), engine.sight.processor
        assert processor is not None and 70 < request.images[0].length <= most
        said = engine.generate(prompt, GREEDY).token_ids
        assert said == expected(reference_of(family), request, processor, family, COUNT, said)


def test_docling_shows_a_page_in_four_times_as_many_tokens_where_its_files_say_so(
    directory_of: Callable[[str], Path], start: Start, tmp_path: Path
) -> None:
    directory = shutil.copytree(directory_of("granite_docling"), tmp_path / "fine")
    file = directory / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"fine_route": True}))
    coarse, fine = start("granite_docling"), start("granite_docling", model=str(directory))
    prompt, processor = prompts(fine)[0], fine.sight.processor
    (few,), (many,) = (requests_of(engine, [prompt], GREEDY) for engine in (coarse, fine))
    assert processor is not None
    counts = [one.prompt.count(processor.image_token) for one in (few, many)]
    assert counts[1] == 4 * counts[0]
    said = fine.generate(prompt, GREEDY).token_ids
    assert said == expected(reference(directory), many, processor, "granite_docling", COUNT, said)


@pytest.mark.parametrize("family", ["minicpmv4_6", "minicpmv4_7"])
def test_the_images_of_a_prompt_are_numbered_where_the_model_wants_it(family: str, start: Start) -> None:
    engine = start(family)
    one, two = requests_of(engine, prompts(engine), GREEDY)
    texts = [engine.tokenizer.decode([*request.prompt]) for request in (one, two)]
    assert [text.count("<image_id>") for text in texts] == [1, 2]
    assert all(f"<image_id>{number}</image_id><image><|image_pad|>" in texts[1] for number in (0, 1))
    begins = [engine.tokenizer.decode([two.prompt[image.offset]]) for image in two.images]
    assert begins == ["<image>" if family == "minicpmv4_7" else "<|image_pad|>"] * 2, "from the first unlike text on"


@pytest.mark.parametrize(
    "family",
    [
        *("llava", "llava_next", "qwen2_5_vl", "internvl", "lfm2_vl", "lfm3_vl", "glm4v", "granite_docling"),
        *("cohere2_vision", "video_llama_3", "ovis2", "llama4", "kimi_k25", "hunyuan_vl", "perception_lm"),
    ],
)
def test_pixels_are_bounded(family: str, start: Start) -> None:
    few, many = start(family, max_pixels=56 * 56), start(family)
    prompt = ImageText(f"{few.image_mark} Well?", (picture(160, 90),))
    (small,), (large,) = (requests_of(engine, [prompt], GREEDY) for engine in (few, many))
    assert len(small.prompt) <= len(large.prompt)
    assert few.generate(prompt, GREEDY).token_ids != many.generate(prompt, GREEDY).token_ids
    if family in ("qwen2_5_vl", "lfm3_vl", "glm4v", "video_llama_3"):
        assert len(small.prompt) < len(large.prompt)
        assert small.images[0].grid[1] * small.images[0].grid[2] * 14 * 14 <= 56 * 56
        least = start(family, min_pixels=84 * 112)
        (larger,) = requests_of(least, [ImageText(prompt.text, (picture(30, 30),))], GREEDY)
        assert larger.images[0].grid[1] * larger.images[0].grid[2] * 14 * 14 >= 84 * 112
