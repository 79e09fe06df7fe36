"""Quantised models that see: the language model's levels are computed with, and the tower stays as it is."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from packed_files import FORMATS, write
from pydantic import ByteSize
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText
from vision_models import make_vision_model, picture
from vision_runs import requests_of
from vision_truth import expected, reference

from penstock.engine import EngineConfig, GenerationParams, ImageText, InferenceEngine
from penstock.engine.checkpoints import packed_weights
from penstock.engine.checkpoints.rounded import Rounded, save_quantized
from penstock.engine.cpu.layouts import numbers
from penstock.engine.cpu.library import BLOCK as ROWS
from penstock.engine.cpu.library import INT4, INT8
from penstock.engine.cpu.machine import KERNEL_FLAGS, computes_bfloat16, cpu_flags
from penstock.engine.models import count_parameters
from penstock.engine.paged import load
from penstock.engine.paged.decoding.linear import packs_bfloat16
from penstock.engine.paged.quantization.apart import set_apart
from penstock.engine.paged.quantization.calibrate import calibrate
from penstock.engine.paged.quantization.quantize import quantizable, rounded
from penstock.engine.planning import model_files
from penstock.engine.planning.sizing import footprint, weights_of_model
from penstock.engine.preparing.prompts import Prompt
from penstock.engine.vision.families.names import is_of_tower, is_unused

COUNT = 12
GREEDY = GenerationParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
TEXTS = [[(7 * row + 3 * index * index + index) % 500 for index in range(24)] for row in range(8)]

# Of Gemma 4's four layers two attend in all with one product for keys and values, or have their own inputs, and two of
# these attend to the keys of others.
NUM_PRODUCTS = {
    "gemma4": 4 * 7 - 2 + 1,
    "gemma4_e": 4 * (7 + 2) - 2 * 2 + 1 + 1,
    "minicpmv4_7": 2 * 8 + 7 + 1,
    "qwen3_5": 2 * 8 + 7 + 1,
    "glm4v": 3 * 6 + 1,
    "mllama": 5 * 7 + 1,
}

Answers = list[tuple[int, ...]]


def config(model: Path, **more: Any) -> EngineConfig:
    own: dict[str, Any] = {"dtype": "float32", "device": "cpu", "kv_cache_memory": ByteSize(8 << 20)} | more
    return EngineConfig(model=str(model), **own)


def prompts_of(engine: InferenceEngine, salt: int = 0) -> list[Prompt]:
    return [ImageText(f"Here is {engine.image_mark}. Well?", (picture(salt=salt),)), "Without a picture."]


def answers(engine: InferenceEngine, salt: int = 0) -> Answers:
    return [output.token_ids for output in engine.generate(prompts_of(engine, salt), GREEDY)]


def by_itself(model: Any, methods: dict[str, str]) -> dict[str, Rounded]:
    """Round each weight, and leave the model with the numbers."""
    found = {name: rounded(model.get_submodule(name).weight, method) for name, method in methods.items()}
    for name, one in found.items():
        model.get_submodule(name).weight.copy_(one.numbers)
    return found


def on_texts(model: Any, methods: dict[str, str]) -> dict[str, Rounded]:
    return calibrate(model, methods, TEXTS)


@pytest.mark.parametrize(
    ("family", "method", "rounding"),
    [
        ("llava", "int4", on_texts),
        ("smolvlm", "int8", by_itself),
        ("qwen3_vl", "int4", by_itself),
        ("qwen3_5", "int4", on_texts),
        ("glm4v", "int4", by_itself),
        ("llava_onevision", "int4", by_itself),
        ("minicpmv4_7", "int8", by_itself),
        ("gemma4", "int4", on_texts),
        ("gemma4_e", "int8", by_itself),
        ("mllama", "int4", on_texts),
    ],
)
def test_answers_are_those_of_the_numbers(
    family: str, method: str, rounding: Callable[[Any, dict[str, str]], dict[str, Rounded]], tmp_path: Path
) -> None:
    """A checkpoint, and where the rounding is the same, weights rounded at load."""
    source, out, numbers = (tmp_path / name for name in ("source", "out", "numbers"))
    make_vision_model(source, family)
    model: Any = AutoModelForImageTextToText.from_pretrained(source, dtype=torch.float32)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    methods = {name: own for name, _, own in quantizable(model, method)}
    with torch.no_grad():
        found = rounding(model, methods)
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == {f"{name}.weight" for name in found}, "the tower is left as it was"
    plain = [rounded(before[f"{name}.weight"], own).levels for name, own in methods.items()]
    is_alike = [torch.equal(found[name].levels, one) for name, one in zip(methods, plain, strict=True)]
    apart = 1 + 14 * (family == "mllama")  # the head, and layers that attend to images
    assert sum(is_alike) == (len(found) if rounding is by_itself else apart), "no others are rounded by themselves"
    assert len(found) == NUM_PRODUCTS.get(family, 3 * 7 + 1) and {one.bits for one in found.values()} == (
        {8} if method == "int8" else {4, 8}
    )
    save_quantized(source, out, model, found)
    shutil.copytree(source, numbers, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    model.save_pretrained(numbers)
    assert count_parameters(out) == count_parameters(source)
    size = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    size -= sum(4 * tensor.numel() for name, tensor in before.items() if is_unused(name))
    expected = footprint(config(out)).weights
    assert expected == footprint(config(source, quantization=method)).weights
    assert abs(expected - size) < 0.1 * size, "a worker's memory is estimated with the tower as it is"
    with InferenceEngine(config(numbers)) as engine:
        wanted = answers(engine)
    with InferenceEngine(config(out)) as engine:
        assert answers(engine) == wanted
    if rounding is by_itself:
        with InferenceEngine(config(source, quantization=method)) as engine:
            assert answers(engine) == wanted


@pytest.mark.parametrize(("family", "method"), [("qwen3_vl_moe", "int4"), ("qwen3_5_moe", "int8")])
def test_experts_of_a_model_that_sees_are_quantised(family: str, method: str, tmp_path: Path) -> None:
    source = make_vision_model(tmp_path / "source", family)
    model: Any = AutoModelForImageTextToText.from_pretrained(source, dtype=torch.float32)
    right = reference(source)
    set_apart(model)
    found = {name: rounded(module.weight, own) for name, module, own in quantizable(model, method)}
    save_quantized(source, tmp_path / "out", model, found)
    assert sum(".experts." in name for name in found) == 3 * 4 * 2
    with torch.no_grad():
        for name, one in found.items():
            path, _, last = name.rpartition(".")
            experts, _, number = path.rpartition(".")
            if experts.endswith(".experts"):
                getattr(right.get_submodule(experts), last)[int(number)] = one.numbers
            else:
                right.get_submodule(name).weight.copy_(one.numbers)
    assert footprint(config(tmp_path / "out")).weights == footprint(config(source, quantization=method)).weights
    with InferenceEngine(config(tmp_path / "out")) as engine:
        requests, processor = requests_of(engine, prompts_of(engine), GREEDY), engine.sight.processor
        assert processor is not None
        said = answers(engine)
        asked = zip(requests, said, strict=True)
        assert said == [expected(right, request, processor, family, COUNT, it) for request, it in asked]


def in_language_model(name: str) -> bool:
    return name.endswith("_proj.weight") and not is_of_tower(name)


def everywhere(name: str) -> bool:
    """In the tower, too."""
    return name.endswith(("_proj.weight", ".qkv.weight", "attn.proj.weight", "fc1.weight")) and "patch" not in name


@pytest.mark.parametrize(
    ("family", "name", "packs"),
    [
        ("llava_next", "awq", in_language_model),
        ("aya_vision", "compressed-int8", everywhere),
        ("minicpmv4_6", "compressed-4", in_language_model),
        ("mllama", "compressed-4", in_language_model),
        ("qwen2_5_vl", "awq", in_language_model),
        ("qwen2_5_vl", "compressed-fp8", everywhere),
        ("qwen3_vl", "compressed-4", in_language_model),
        ("qwen3_vl", "compressed-int8", everywhere),
        ("qwen3_5", "fp8", in_language_model),
        ("qwen3_5", "gptq-4", in_language_model),
        ("qwen3_5", "compressed-4", in_language_model),
        ("qwen3_5_moe", "fp8-blocks", in_language_model),
        ("qwen3_5_moe", "gptq-4", in_language_model),
        ("gemma3", "compressed-4-with-zeros", in_language_model),
        ("gemma4", "compressed-int8", in_language_model),
        ("gemma4_e", "awq", in_language_model),
        ("llava", "gptq-in-order-of-activations", in_language_model),
        ("mistral3", "compressed-fp8", in_language_model),
        ("internvl", "fp8", in_language_model),
    ],
)
def test_what_other_programs_packed_says_what_its_numbers_say(
    family: str, name: str, packs: Callable[[str], bool], tmp_path: Path
) -> None:
    """By the names that published checkpoints have."""
    source = make_vision_model(tmp_path / "source", family)
    if family == "gemma3":
        file = source / "model.safetensors"
        found = {
            name.replace("vision_tower.", "vision_tower.vision_model."): one for name, one in load_file(file).items()
        }
        save_file(found, file, {"format": "pt"})
    numbers = write(source, tmp_path / "packed", FORMATS[name], packs)
    plain = shutil.copytree(source, tmp_path / "plain")
    save_file({name: one.contiguous() for name, one in numbers.items()}, plain / "model.safetensors", {"format": "pt"})
    assert any(is_of_tower(name) for name in numbers if packs(name)) == (packs is everywhere)
    with InferenceEngine(config(tmp_path / "packed")) as engine:
        prompts = prompts_of(engine)
        requests, processor = requests_of(engine, prompts, GREEDY), engine.sight.processor
        assert processor is not None
        model = reference(plain)
        said = answers(engine)
        asked = zip(requests, said, strict=True)
        assert said == [expected(model, request, processor, family, COUNT, it) for request, it in asked]
    assert count_parameters(tmp_path / "packed") == count_parameters(plain)


@pytest.mark.skipif(not {*cpu_flags().split()} >= KERNEL_FLAGS, reason="the kernels need AVX2")
@pytest.mark.parametrize(
    ("family", "name", "kind"),
    [
        ("qwen2_5_vl", "awq", INT4),
        ("llava", "gptq-8", INT8),
        ("gemma3", "awq", INT4),
        ("mllama", "gptq-8", INT8),
        ("qwen3_5", "awq", INT4),
        ("qwen3_5_moe", "gptq-4", INT4),
    ],
)
def test_levels_of_other_programs_are_kept(
    family: str, name: str, kind: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16: the language model's weights are in no memory as numbers, and the tower is as it was."""
    source = make_vision_model(tmp_path / "source", family)
    expected = write(source, tmp_path / "packed", FORMATS[name], in_language_model)
    monkeypatch.setattr(packed_weights, "expand", lambda *_: pytest.fail("a weight was expanded"))
    with InferenceEngine(config(tmp_path / "packed", dtype="bfloat16")) as engine:
        backend: Any = engine._driver.backend
        model = backend.runner._model
        tower = [one for part, one in backend.runner.vision._body.named_parameters() if is_of_tower(part)]
        own = torch.bfloat16 if computes_bfloat16() else torch.float32
        assert tower and all(one.dtype == own and one.stride() for one in tower if one.ndim > 1)
        if backend.runner._decoder is None:
            product = model.model.layers[0].self_attn.o_proj._linear.product
        else:
            product = backend.runner._decoder.layers[0].output.product
        found = numbers(product, torch.bfloat16, 0, -(-product.outputs // ROWS))[: product.outputs]
        (weight,) = [
            one
            for part, one in expected.items()
            if part.endswith(("layers.0.self_attn.o_proj.weight", "layers.0.linear_attn.out_proj.weight"))
            and in_language_model(part)
        ]
        assert product.kind == kind and torch.allclose(found, weight, atol=1e-6, rtol=1e-5)
        assert answers(engine)[0] != answers(engine, salt=5)[0]
    sizes = [weights_of_model(config(path, dtype="bfloat16"), "cpu") for path in (tmp_path / "packed", source)]
    assert sizes[0].kept < sizes[1].kept and sizes[0].loading < sizes[1].loading


@pytest.mark.parametrize(("family", "name"), [("qwen3_5", "awq"), ("qwen3_5_moe", "gptq-4")])
def test_layers_that_guess_tokens_are_not_the_model_s(family: str, name: str, tmp_path: Path) -> None:
    """Checkpoints of Qwen 3.5 have one beside the language model, whose names end like those of a layer of it."""
    source = make_vision_model(tmp_path / "source", family)
    write(source, tmp_path / "without", FORMATS[name], in_language_model)
    weights = load_file(source / "model.safetensors")
    layer = "model.language_model.layers.1."
    more = {own.replace(layer, "mtp.layers.0."): -one for own, one in weights.items() if own.startswith(layer)}
    save_file(weights | more, source / "model.safetensors", {"format": "pt"})
    write(source, tmp_path / "with", FORMATS[name], in_language_model)
    for dtype in ("bfloat16", "float32"):
        found = []
        for folder in ("without", "with"):
            with InferenceEngine(config(tmp_path / folder, dtype=dtype)) as engine:
                found.append(answers(engine))
        assert found[0] == found[1]


@pytest.mark.skipif(not {*cpu_flags().split()} >= KERNEL_FLAGS, reason="the kernels need AVX2")
def test_a_tower_that_is_packed_takes_the_memory_of_its_numbers(tmp_path: Path) -> None:
    source, kept = make_vision_model(tmp_path / "source", "qwen3_vl"), []
    for index, packs in enumerate((in_language_model, everywhere)):
        write(source, tmp_path / str(index), FORMATS["compressed-4"], packs)
        kept.append(weights_of_model(config(tmp_path / str(index), dtype="bfloat16"), "cpu").kept)
    assert kept[0] == kept[1]
    with InferenceEngine(config(tmp_path / "1", dtype="bfloat16")) as engine:
        assert answers(engine)[0] != answers(engine, salt=5)[0]


def test_memory_is_that_of_what_stays(tmp_path: Path) -> None:
    """Without what would hear, and with the table that makes inputs for layers in the dtype, whatever is rounded."""
    source = make_vision_model(tmp_path / "source", "gemma4_e")
    weights, table = load_file(source / "model.safetensors"), "model.language_model.embed_tokens_per_layer.weight"
    kept: dict[str, list[int]] = {}
    for name, left in (
        ("whole", weights),
        ("deaf", {name: one for name, one in weights.items() if not is_unused(name)}),
        ("bare", {name: one for name, one in weights.items() if name != table}),
    ):
        (tmp_path / name).mkdir()
        shutil.copy(source / "config.json", tmp_path / name)
        save_file(left, tmp_path / name / "model.safetensors", {"format": "pt"})
        settings = (config(tmp_path / name), config(tmp_path / name, quantization="int8"))
        kept[name] = [weights_of_model(each, "cpu").kept for each in settings]
    assert kept["deaf"] == kept["whole"]
    assert [all - some for all, some in zip(kept["whole"], kept["bare"], strict=True)] == [
        4 * weights[table].numel()
    ] * 2
    with InferenceEngine(config(source)) as engine:
        body = engine._driver.backend.runner.vision._body  # type: ignore[attr-defined]
        assert any(map(is_unused, weights)) and not any(map(is_unused, body.state_dict()))


@pytest.mark.parametrize("family", ["gemma3", "gemma4", "gemma4_e", "qwen2_5_vl", "llava_next", "minicpmv4_6"])
@pytest.mark.parametrize("computes", [True, False])
def test_a_tower_is_as_fast_as_its_processor_allows(
    family: str, computes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where bfloat16 is slow, it computes in float32, with the same weights; the memory for that is counted."""
    source = make_vision_model(tmp_path / "source", family)
    for module in (load, model_files):
        monkeypatch.setattr(module, "computes_bfloat16", lambda: computes)
    settings = config(source, dtype="bfloat16")
    with InferenceEngine(settings) as engine:
        vision: Any = engine._driver.backend.runner.vision  # type: ignore[attr-defined]
        tower = [one for part, one in vision._body.named_parameters() if is_of_tower(part)]
        text = [one for one in vision._text.parameters() if one.ndim > 1]
        assert {one.dtype for one in tower} == {torch.bfloat16 if computes else torch.float32}
        assert {one.dtype for one in text} == {torch.bfloat16}
        assert all(len(output.token_ids) == COUNT for output in engine.generate(prompts_of(engine), GREEDY))
        size = sum(one.numel() for part, one in vision._body.state_dict().items() if is_of_tower(part))
    kept = weights_of_model(settings, "cpu").kept
    monkeypatch.setattr(model_files, "computes_bfloat16", lambda: True)
    assert kept - weights_of_model(settings, "cpu").kept == (0 if computes else 2 * size)


def test_a_processor_is_judged_as_by_onednn() -> None:
    """Without importing torch; only newer ones with bfloat16 beside AVX2 alone are taken for slow."""
    assert computes_bfloat16() == packs_bfloat16() or "avx_ne_convert" in cpu_flags()
