"""Quantised checkpoints: the engine computes with what was written, and refuses broken ones."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ByteSize
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from penstock.engine import EngineConfig, GenerationParams, InferenceEngine
from penstock.engine.checkpoints import rounded as rounded_module
from penstock.engine.checkpoints.experts import whole_shapes
from penstock.engine.checkpoints.rounded import Rounded, absent, attach, is_absent, save_quantized
from penstock.engine.models import count_parameters, read_shapes
from penstock.engine.paged.backend import PagedBackend
from penstock.engine.paged.quantization.apart import set_apart
from penstock.engine.paged.quantization.quantize import quantizable, rounded
from penstock.engine.planning.sizing import footprint
from penstock.schemas.errors import ConfigurationError, ModelLoadError

PROMPT = [5, 17, 300, 41]
GREEDY = GenerationParams(temperature=0, max_tokens=12)


WITH_EXPERTS = ["mixtral", "qwen3_moe", "gpt_oss", "qwen3_5_moe_text", "nemotron_h", "deepseek_v3"]
"""In plain decoders, as tensors of inputs by outputs, beside delta nets, without gates, with latent attention."""


def write(source: Path, to: Path, quantization: str = "int4") -> Any:
    """Quantise a model by plain rounding; returns it with the numbers that its levels stand for."""
    model, right = (AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32) for _ in range(2))
    set_apart(model)
    found = {name: rounded(module.weight, method) for name, module, method in quantizable(model, quantization)}
    save_quantized(source, to, model, found)
    with torch.no_grad():
        for name, one in found.items():
            weight_of(right, name).copy_(one.numbers)
    return right


def weight_of(model: Any, name: str) -> torch.Tensor:
    """That of a module, or of one expert, outputs before inputs."""
    expert = re.fullmatch(r"(.+\.experts)\.(\d+)\.(\w+)", name)
    if not expert:
        weight: torch.Tensor = model.get_submodule(name).weight
        return weight
    experts = model.get_submodule(expert[1])
    own: torch.Tensor = getattr(experts, expert[3])[int(expert[2])]
    return own.T if experts.is_transposed else own


def config(model: Path, **more: Any) -> EngineConfig:
    own: dict[str, Any] = {"dtype": "float32", "device": "cpu", "kv_cache_memory": ByteSize(16 << 20)} | more
    return EngineConfig(model=str(model), **own)


def answer(model: Any) -> tuple[int, ...]:
    ids = torch.tensor([PROMPT])
    made = model.generate(ids, do_sample=False, max_new_tokens=12, eos_token_id=None, pad_token_id=0)
    return tuple(made[0, len(PROMPT) :].tolist())


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize(
    ("shape", "backend"),
    [
        *[("llama", "paged"), ("llama", "hf"), ("gemma2", "paged"), ("phi3", "paged")],
        *[(shape, "paged") for shape in WITH_EXPERTS],
        *[(shape, "hf") for shape in ("mixtral", "gpt_oss")],
    ],
)
def test_a_saved_model_answers_as_its_numbers_do(
    shape: str, backend: str, quantization: str, model_directory: Callable[[str], Path], tmp_path: Path
) -> None:
    model = write(model_directory(shape), tmp_path / "out", quantization)
    with InferenceEngine(config(tmp_path / "out", backend=backend)) as engine:
        found = engine.generate(PROMPT, GREEDY.model_copy(update={"ignore_eos": True})).token_ids
    assert tuple(found) == answer(model)


@pytest.mark.parametrize("shape", ["llama", "qwen3_moe", "gpt_oss"])
def test_levels_are_computed_with_as_they_are(
    shape: str, model_directory: Callable[[str], Path], tmp_path: Path
) -> None:
    source = model_directory(shape)
    write(source, tmp_path / "out")
    saved = PagedBackend(config(tmp_path / "out", dtype="bfloat16"))
    rounding = PagedBackend(config(source, dtype="bfloat16", quantization="int4"))
    assert saved.weight_bytes == rounding.weight_bytes
    saved.close()
    rounding.close()


@pytest.mark.parametrize("shape", ["llama", "qwen3_moe", "gpt_oss"])
def test_the_shapes_are_those_of_the_weights(
    shape: str, model_directory: Callable[[str], Path], tmp_path: Path
) -> None:
    source = model_directory(shape)
    write(source, tmp_path / "out")
    assert whole_shapes(read_shapes(tmp_path / "out")) == whole_shapes(read_shapes(source))
    assert count_parameters(tmp_path / "out") == count_parameters(source)
    size = (tmp_path / "out" / "model.safetensors").stat().st_size
    assert size < 0.8 * (source / "model.safetensors").stat().st_size
    whole, packed = (footprint(config(one, kv_cache_memory=1 << 20)).weights for one in (source, tmp_path / "out"))
    assert packed < 0.6 * whole
    assert packed == footprint(config(source, kv_cache_memory=1 << 20, quantization="int4")).weights


def test_a_tied_head_is_stored_once(model_directory: Callable[[str], Path], tmp_path: Path) -> None:
    source = tmp_path / "tied"
    tied: Any = AutoModelForCausalLM.from_pretrained(model_directory("llama"), dtype=torch.float32)
    tied.config.tie_word_embeddings = True
    tied.tie_weights()
    tied.save_pretrained(source)
    for file in model_directory("llama").glob("*token*"):
        shutil.copy(file, source)
    model = write(source, tmp_path / "out", "int8")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert "lm_head.levels" in stored and not any("embed_tokens" in name for name in stored)
    assert read_shapes(tmp_path / "out") == read_shapes(source)
    with InferenceEngine(config(tmp_path / "out")) as engine:
        found = engine.generate(PROMPT, GREEDY.model_copy(update={"ignore_eos": True})).token_ids
    assert tuple(found) == answer(model)


def test_large_models_are_written_in_shards(
    model_directory: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounded_module, "_SHARD", 100_000)
    source = model_directory("llama")
    model = write(source, tmp_path / "out")
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 1
    assert read_shapes(tmp_path / "out") == read_shapes(source)
    with InferenceEngine(config(tmp_path / "out")) as engine:
        found = engine.generate(PROMPT, GREEDY.model_copy(update={"ignore_eos": True})).token_ids
    assert tuple(found) == answer(model)


def test_levels_are_stored_in_few_bits() -> None:
    levels = torch.arange(64).view(2, 32) % 16
    one = Rounded.int4(levels.to(torch.int8), torch.ones((2, 1)).bfloat16(), torch.zeros((2, 1)).bfloat16())
    stored = one.stored("a")
    assert stored["a.levels"].shape == (2, 16) and stored["a.levels"].dtype == torch.uint8
    assert torch.equal(Rounded.stored_as("a", "int4", stored).levels, one.levels)


class Partly(nn.Module):
    """A table that is looked up, and a product: the weights of both are absent."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 32, _weight=absent((4, 32), torch.bfloat16))
        self.product = nn.Linear(32, 4, bias=False, device="meta")
        self.product.weight = nn.Parameter(absent((4, 32), torch.bfloat16), requires_grad=False)

    def get_input_embeddings(self) -> nn.Module | None:
        return None

    get_output_embeddings = get_input_embeddings


def test_only_products_compute_with_levels() -> None:
    levels = torch.arange(128).view(4, 32).to(torch.int8)
    one, model = Rounded(levels, torch.full((4, 1), 0.5)), Partly()
    attach(model, {"table": lambda: one, "product": lambda: one})
    assert torch.equal(model.table.weight, one.numbers.bfloat16())
    assert is_absent(model.product.weight) and vars(model.product)["rounded"]() is one
    with pytest.raises(ModelLoadError, match=r"product\.weight has levels in its file, and cannot use them"):
        attach(Partly(), {"table": lambda: one})


def test_what_cannot_be_loaded_is_refused(model_directory: Callable[[str], Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    write(model_directory("llama"), out)
    with pytest.raises(ConfigurationError, match="is quantised as int4; leave it out"):
        PagedBackend(config(out, quantization="int8"))
    settings = json.loads((out / "config.json").read_text())
    own = settings["quantization_config"]
    for change, message in (
        ({"version": 2}, "was quantised as version 2 with groups of 32; this Penstock reads version 1"),
        ({"group_size": 128}, "groups of 128"),
        ({"modules": {"lm_head": "int3"}}, "is broken; quantise the model again"),
        ({"modules": own["modules"] | {"absent": "int8"}}, "the weight files lack absent.levels"),
    ):
        (out / "config.json").write_text(json.dumps(settings | {"quantization_config": own | change}))
        with pytest.raises(ModelLoadError, match=message):
            PagedBackend(config(out))
    (out / "config.json").write_text(json.dumps(settings))
    tensors = load_file(out / "model.safetensors")
    del tensors["lm_head.scales"]
    save_file(tensors, out / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"cannot be loaded: 'lm_head.scales'"):
        PagedBackend(config(out))
