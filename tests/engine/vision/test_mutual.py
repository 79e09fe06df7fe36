"""Models whose image tokens see each other in both directions (Gemma 3 and 4), against transformers' own code.

`test_seeing` has what holds for every family; its model's images have more tokens than its windows and its steps.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from pydantic import ByteSize
from transformers import AutoTokenizer
from transformers.masking_utils import blockwise_overlay, create_causal_mask
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.modeling_gemma3 import get_block_sequence_ids_for_mask
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from vision_models import make_vision_model, picture
from vision_runs import requests_of, run
from vision_truth import expected, first_logits, reference

from penstock.engine import EngineConfig, EngineRequest, GenerationParams, ImageText, InferenceEngine
from penstock.engine.paged.backend import PagedBackend
from penstock.engine.vision.images import PromptImage
from penstock.engine.vision.layout import ImageLayout
from penstock.schemas.errors import InvalidRequest

COUNT = 12
GREEDY = GenerationParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
CROPS = {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 16}  # of smaller pictures than those of real models


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_model(tmp_path_factory.mktemp("mutual") / "gemma3", "gemma3")


@pytest.fixture(scope="module")
def cropping(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose processor cuts wide and tall pictures up, besides."""
    directory = make_vision_model(tmp_path_factory.mktemp("mutual") / "crops", "gemma3")
    file = directory / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | CROPS))
    return directory


def config(model: Path, **more: Any) -> EngineConfig:
    own: dict[str, Any] = {"dtype": "float32", "device": "cpu", "kv_cache_memory": ByteSize(8 << 20)} | more
    return EngineConfig(model=str(model), **own)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5)), min_size=1, max_size=5), st.integers(0, 4), st.data())
def test_those_see_each_other_that_do_in_transformers(
    parts: list[tuple[int, int]], behind: int, data: st.DataObject
) -> None:
    """Text and then a run of an image's tokens, several times; a step never ends inside of one."""
    ids = [token for text, run in parts for token in [5] * (text + 1) + [9] * run] + [5] * behind
    first = ids.index(9)
    image = PromptImage("0" * 64, first, len(ids) - behind - first, (1,))
    request = EngineRequest("r", tuple(ids), GenerationParams(), seed=0, images=(image,))
    layout = ImageLayout.of(request, 9, 0, is_mutual=True)
    groups = get_block_sequence_ids_for_mask(torch.tensor([ids]) == 9)[0]
    place = torch.arange(len(ids))
    seen = (place[None] <= place[:, None]) | ((groups[None] == groups[:, None]) & (groups[None] >= 0))
    whole = layout.place(0, len(ids) + 2).ends
    assert whole is not None and whole.tolist() == [*seen.sum(1).tolist(), len(ids) + 1, len(ids) + 2]
    start = data.draw(st.integers(0, len(ids) + 1))
    end = data.draw(st.integers(start, len(ids) + 2))
    inside = [at for at in range(1, len(ids)) if ids[at - 1] == ids[at] == 9]
    assert layout.pause(start, end) == next(at for at in range(end, start - 1, -1) if at == start or at not in inside)
    assert layout.least(start) == next(at for at in range(start + 1, len(ids) + 3) if at not in inside)
    part = layout.place(start, end).ends
    assert part is None or part.tolist() == whole[start:end].tolist()


@pytest.mark.parametrize("family", ["gemma3", "gemma4"])
@pytest.mark.parametrize("chunk", [8, 64])
def test_a_cached_prefix_may_end_inside_an_image(chunk: int, family: str, tmp_path: Path) -> None:
    model = make_vision_model(tmp_path / family, family)
    truth = reference(model)
    with InferenceEngine(config(model)) as engine:
        processor = engine.sight.processor
        assert processor is not None
        mark = engine.image_mark
        texts = [f"{'word ' * count}{mark}{end}" for count in range(8) for end in ("First?", "And then?")]
        found = requests_of(engine, [ImageText(text, (picture(),)) for text in texts], GREEDY)
    pairs = [
        (one, other)
        for one, other in zip(found[::2], found[1::2], strict=True)
        if one.images[0].offset + 3 < one.images[0].end // 16 * 16 <= one.images[0].end - 3
    ]
    assert pairs, "no prompt has the end of a block inside its image"
    backend = PagedBackend(config(model, prefill_chunk_size=chunk, max_batch_size=4))
    for one, other in pairs[:2]:
        hits = backend.cache_stats().num_hit_tokens
        said = [*run(backend, [one]), *run(backend, [other])]
        asked = zip((one, other), said, strict=True)
        assert said == [expected(truth, request, processor, family, COUNT, it) for request, it in asked]
        end = backend.cache_stats().num_hit_tokens - hits
        assert one.images[0].offset < end < one.images[0].end, "the second one begins inside the image"
    backend.close()


def test_a_prompt_that_sees_itself_shares_no_block_with_another(tmp_path: Path) -> None:
    """Not even where both begin with the same picture and words: each key depends on all of the prompt."""
    model = make_vision_model(tmp_path / "paligemma", "paligemma")
    truth, words = reference(model), "What do you see, in as many words as you can find? "
    with InferenceEngine(config(model)) as engine:
        processor = engine.sight.processor
        assert processor is not None
        texts = [f"{engine.image_mark}{words}{end}" for end in ("One", "Two", "One")]
        prompts = [ImageText(text, (picture(),)) for text in texts]
        found = requests_of(engine, prompts, GREEDY)
        assert found[0].prompt[:32] == found[1].prompt[:32]
        outputs = [engine.generate(prompt, GREEDY) for prompt in prompts]
        asked = zip(found, outputs, strict=True)
        wanted = [expected(truth, one, processor, "paligemma", COUNT, it.token_ids) for one, it in asked]
        assert [output.token_ids for output in outputs] == wanted
        assert [output.stats.cached_tokens for output in outputs[:2]] == [0, 0]
        assert outputs[2].stats.cached_tokens == (len(found[2].prompt) - 1) // 16 * 16
        longer = engine.generate(prompts[0], GREEDY.model_copy(update={"max_tokens": 40}))
        assert longer.token_ids[:COUNT] == wanted[0]
    backend = PagedBackend(config(model, prefill_chunk_size=8, max_batch_size=4))
    assert run(backend, found) == wanted, "beside each other, and in one step each"
    backend.close()


def test_windows_bound_what_a_prompt_sees_of_itself_on_both_sides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in Google's code; transformers has no bounds there."""
    from transformers.models.paligemma import modeling_paligemma

    model = make_vision_model(tmp_path / "paligemma2", "paligemma2")
    file = model / "config.json"
    settings = json.loads(file.read_text())
    settings["text_config"]["sliding_window"] = window = 32
    file.write_text(json.dumps(settings))

    def near(block_sequence_ids: torch.Tensor, **more: Any) -> Any:
        more |= {"and_mask_function": lambda _, __, query, key: abs(query - key) < window}
        return create_causal_mask(**more, or_mask_function=blockwise_overlay(block_sequence_ids))

    monkeypatch.setattr(modeling_paligemma, "create_sliding_window_causal_mask", near)
    truth = reference(model)
    with InferenceEngine(config(model)) as engine:
        processor = engine.sight.processor
        assert processor is not None
        prompt = ImageText(f"{engine.image_mark}{'word ' * 20}{engine.image_mark}Well?", (picture(), picture(salt=3)))
        params = GREEDY.model_copy(update={"max_tokens": 1, "logprobs": 5})
        (request,) = requests_of(engine, [prompt], params)
        assert len(request.prompt) > 2 * window
        logits = first_logits(truth, request, processor, "paligemma2").log_softmax(-1)
        output = engine.generate(prompt, params)
        assert output.logprobs is not None
        assert output.token_ids == (int(logits.argmax()),)
        assert output.logprobs[0].logprob == pytest.approx(float(logits.max()), abs=1e-4)


@pytest.mark.parametrize("size", [(160, 60), (60, 200), (64, 60)])
def test_crops_are_those_of_transformers(size: tuple[int, int], cropping: Path) -> None:
    """Where the checkpoint turns them on; each crop is an image of its own."""
    data, text = picture(*size), "Here is <start_of_image>. What do you see?"
    with InferenceEngine(config(cropping)) as engine:
        (request,) = requests_of(engine, [ImageText(text, (data,))], GREEDY)
        processor = engine.sight.processor
        assert processor is not None
        made = _theirs(cropping)(images=[[Image.open(io.BytesIO(data))]], text=[text], return_tensors="pt", **CROPS)
        assert request.prompt == tuple(made["input_ids"][0].tolist())
        assert torch.equal(torch.from_numpy(processor.inputs(request.images[0])["pixel_values"]), made["pixel_values"])
        output = reference(cropping).generate(**made, max_new_tokens=COUNT, do_sample=False)
        wanted = tuple(output[0, len(request.prompt) :].tolist())
        assert engine.generate(ImageText(text, (data,)), GREEDY).token_ids == wanted
    backend = PagedBackend(config(cropping, prefill_chunk_size=8, max_batch_size=4))
    assert run(backend, [request]) == [wanted]
    backend.close()
    assert request.images[0].grid[0] == (0 if size == (64, 60) else 3)


def _theirs(directory: Path) -> Any:
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    for name, text in (("image", "<image_soft_token>"), ("boi", "<start_of_image>"), ("eoi", "<end_of_image>")):
        setattr(tokenizer, f"{name}_token", text)
        setattr(tokenizer, f"{name}_token_id", tokenizer.convert_tokens_to_ids(text))
    library: Any = Gemma3ImageProcessorPil
    return Gemma3Processor(library(size={"height": 80, "width": 80}), tokenizer, image_seq_length=25)


def test_marks_of_images_have_no_place_in_text(model: Path) -> None:
    with InferenceEngine(config(model)) as engine:
        for text in ("<start_of_image> and <start_of_image>", "<start_of_image> and <image_soft_token>", "None."):
            with pytest.raises(InvalidRequest, match="send that text only where an image stands") as caught:
                engine.generate(ImageText(text, (picture(),)), GREEDY)
            assert caught.value.code == "image_mark"
