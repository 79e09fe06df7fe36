"""Quantised models that see: the language model's levels are computed with, and the tower stays as it is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ByteSize
from transformers import AutoModelForImageTextToText
from vision_models import make_vision_model, picture

from penstock.engine import EngineConfig, GenerationParams, ImageText, InferenceEngine
from penstock.engine.checkpoints.rounded import Rounded, save_quantized
from penstock.engine.models import count_parameters
from penstock.engine.paged.quantization.calibrate import calibrate
from penstock.engine.paged.quantization.quantize import quantizable, rounded
from penstock.engine.preparing.prompts import Prompt
from penstock.engine.sizing import footprint
from penstock.schemas.errors import ModelLoadError

COUNT = 12
GREEDY = GenerationParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
TEXTS = [[(7 * row + 3 * index * index + index) % 500 for index in range(24)] for row in range(8)]

Answers = list[tuple[int, ...]]


def config(model: Path, **more: Any) -> EngineConfig:
    own: dict[str, Any] = {"dtype": "float32", "device": "cpu", "kv_cache_memory": ByteSize(8 << 20)} | more
    return EngineConfig(model=str(model), **own)


def answers(engine: InferenceEngine) -> Answers:
    prompts: list[Prompt] = [ImageText(f"Here is {engine.image_mark}. Well?", (picture(),)), "Without a picture."]
    return [output.token_ids for output in engine.generate(prompts, GREEDY)]


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
    [("llava", "int4", on_texts), ("smolvlm", "int8", by_itself), ("qwen3_vl", "int4", by_itself)],
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
    assert sum(is_alike) == (len(found) if rounding is by_itself else 1), "the head alone is rounded by itself"
    assert len(found) == 3 * 7 + 1 and {one.bits for one in found.values()} == ({8} if method == "int8" else {4, 8})
    save_quantized(source, out, model, found)
    shutil.copytree(source, numbers, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    model.save_pretrained(numbers)
    assert count_parameters(out) == count_parameters(source)
    size = sum(file.stat().st_size for file in out.glob("*.safetensors"))
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


def test_weights_packed_by_another_program_are_refused_in_words(tmp_path: Path) -> None:
    source = make_vision_model(tmp_path / "packed", "llava")
    values = json.loads((source / "config.json").read_text())
    packing = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    (source / "config.json").write_text(json.dumps(values | {"quantization_config": packing}))
    with pytest.raises(ModelLoadError, match="name the model that it was made from, with --quantization int4"):
        InferenceEngine(config(source))
