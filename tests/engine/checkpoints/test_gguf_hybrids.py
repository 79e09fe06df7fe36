"""Qwen3-Next in GGUF: queries, keys, values and gates lie in two tensors, and in the model by key head in one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_cases import CASES, PROMPTS, Case
from gguf_files import write_gguf
from pydantic import ByteSize
from safetensors.torch import load_file
from torch import nn

from penstock.engine import EngineConfig, GenerationParams, InferenceEngine
from penstock.engine.checkpoints.gguf.file import read_gguf
from penstock.engine.checkpoints.gguf.models import config_of, weights_of
from penstock.engine.checkpoints.gguf.weights import dequantize, lazy_weights, level_readers
from penstock.engine.checkpoints.rounded import blocks_of
from penstock.engine.checkpoints.widths import gguf_widths
from penstock.engine.cpu.library import load_kernels
from penstock.engine.paged.quantization.quantize import ProductMaker
from penstock.schemas.errors import ModelLoadError

CASE = next(case for case in CASES if case.architecture == "qwen3next")
MODULE = "model.layers.0.linear_attn.in_proj_qkvz"


def tokens(model: Path) -> list[tuple[int, ...]]:
    config = EngineConfig(model=str(model), dtype="float32", device="cpu", kv_cache_memory=ByteSize(16 << 20))
    with InferenceEngine(config) as engine:
        params = GenerationParams(max_tokens=16, temperature=0, ignore_eos=True)
        return [tuple(output.token_ids) for output in engine.generate(PROMPTS, params)]


def test_the_same_tokens_as_from_safetensors(make_model: Callable[[Case], Path], tmp_path: Path) -> None:
    """And the same weights."""
    directory, path = make_model(CASE), tmp_path / "model.gguf"
    write_gguf(directory, path, CASE.architecture, metadata=CASE.metadata)
    assert tokens(path) == tokens(directory)
    weights = lazy_weights(read_gguf(path), torch.float32)
    for name, expected in load_file(directory / "model.safetensors").items():
        tolerance = 1e-6 if "norm" in name or "A_log" in name else 0
        assert torch.allclose(weights[name][...], expected, atol=tolerance, rtol=0), name


@pytest.mark.parametrize("kinds", [("Q8_0", "Q8_0"), ("Q4_0", "Q8_0"), ("NVFP4", "NVFP4")])
def test_levels_of_both_tensors_are_those_of_the_module(
    kinds: tuple[str, str], make_model: Callable[[Case], Path], tmp_path: Path
) -> None:
    """Also where the two differ in type; the memory that the product takes is known before."""
    directory, path = make_model(CASE), tmp_path / "model.gguf"

    def kind(name: str, values: Any) -> str | None:
        return kinds[0] if "in_proj_qkv" in name else kinds[1] if "in_proj_z" in name else None

    expected = torch.from_numpy(
        write_gguf(directory, path, CASE.architecture, kind, metadata=CASE.metadata)[MODULE + ".weight"]
    )
    gguf = read_gguf(path)
    assert torch.equal(lazy_weights(gguf, torch.float32)[f"{MODULE}.weight"][...], expected)
    read = level_readers(gguf)[MODULE]
    assert torch.equal(read().numbers, expected)
    if kinds == ("Q8_0", "Q8_0"):
        (found,) = blocks_of([read])
        assert torch.equal(dequantize(found.data.flatten(), found.kind).view(expected.shape), expected)
    else:
        assert not blocks_of([read])
    config = EngineConfig(model=str(path), dtype="bfloat16", device="cpu", kv_cache_memory=ByteSize(16 << 20))
    with InferenceEngine(config) as engine:
        answers = engine.generate(PROMPTS, GenerationParams(max_tokens=4, temperature=0, ignore_eos=True))
        assert [len(answer.token_ids) for answer in answers] == [4, 4]
    module = nn.Linear(64, len(expected), bias=False, dtype=torch.bfloat16)
    vars(module)["rounded"] = read
    product = ProductMaker(None, torch.device("cpu"), load_kernels())([module], "some.proj", False)
    width = gguf_widths(gguf)[f"{MODULE}.weight"]
    assert 0.8 * width * expected.numel() < product.nbytes <= width * expected.numel()


def test_a_tensor_of_both_is_read_as_it_is(make_model: Callable[[Case], Path], tmp_path: Path) -> None:
    """As files of the first converters have it."""
    directory, path = make_model(CASE), tmp_path / "model.gguf"
    write_gguf(directory, path, CASE.architecture, metadata=CASE.metadata)
    found = read_gguf(path)
    whole = found.tensors["blk.0.attn_qkv.weight"]._replace(name="blk.0.ssm_in.weight")
    others = {
        name: one for name, one in found.tensors.items() if not name.startswith(("blk.0.attn_qkv", "blk.0.attn_gate"))
    }
    weights = weights_of(replace(found, tensors=others | {whole.name: whole}))
    assert weights[f"{MODULE}.weight"].tensor == whole and weights[f"{MODULE}.weight"].groups is None


def test_all_of_a_head_may_rotate(make_model: Callable[[Case], Path], tmp_path: Path) -> None:
    """transformers would rotate a quarter where a configuration does not say how much."""
    path = tmp_path / "model.gguf"
    write_gguf(make_model(CASE), path, CASE.architecture, metadata=CASE.metadata | {"rope.dimension_count": 32})
    assert config_of(read_gguf(path))["rope_parameters"]["partial_rotary_factor"] == 1


def test_tensors_that_do_not_go_together_are_refused(make_model: Callable[[Case], Path], tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(make_model(CASE), path, CASE.architecture, metadata=CASE.metadata)
    found = read_gguf(path)
    first, gates = "blk.0.attn_qkv.weight", "blk.0.attn_gate.weight"
    for tensors, fault in (
        ({name: one for name, one in found.tensors.items() if name != gates}, f"has {first} without {gates}; convert"),
        ({name: one for name, one in found.tensors.items() if name != first}, f"has {gates} without {first}; convert"),
        (
            found.tensors | {gates: found.tensors[gates]._replace(shape=(96, 64))},
            f"{gates} has the shape .96, 64., and 192 rows go with 2 key heads and 6 value heads; convert",
        ),
    ):
        with pytest.raises(ModelLoadError, match=fault):
            weights_of(replace(found, tensors=tensors))
