"""Checkpoints of GPTQ, AWQ, compressed-tensors and FP8, packed here number by number, as the formats are described."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from pydantic import ByteSize
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.engine import EngineConfig, GenerationParams, InferenceEngine
from penstock.engine.checkpoints import packed_weights
from penstock.engine.cpu.layouts import numbers
from penstock.engine.cpu.library import BLOCK as ROWS
from penstock.engine.cpu.library import INT4, INT8, PLAIN
from penstock.engine.cpu.machine import KERNEL_FLAGS, cpu_flags
from penstock.engine.models import count_parameters, read_model_info
from penstock.engine.sizing import weights_of_model
from penstock.schemas.errors import ModelLoadError

GROUP = 32
BLOCK = 48  # rows and columns of FP8 in blocks; the last blocks of a weight are smaller
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # the columns of a word's eight weights, lowest bits first
PROMPTS = [[7, 90, 301, 45, 12], [5 + 3 * index % 400 for index in range(40)]]

Packed = tuple[dict[str, Tensor], Tensor]  # tensors by the last part of their names; the weight [O, I] they stand for


class Format(NamedTuple):
    """`settings` is the `quantization_config`, and `pack` packs a weight."""

    settings: dict[str, Any]
    pack: Callable[[Tensor], Packed]


def words(numbers: Iterable[int], bits: int) -> list[int]:
    """Words of 32 bits with sign, the first number in the lowest bits."""
    found, all_of_them = [], list(numbers)
    for start in range(0, len(all_of_them), 32 // bits):
        word = sum(number << bits * at for at, number in enumerate(all_of_them[start : start + 32 // bits]))
        found.append(word - (1 << 32) if word >= 1 << 31 else word)
    return found


def pack_rows(levels: Tensor, bits: int) -> Tensor:
    """[R, C] → [R, C · bits / 32]."""
    return torch.tensor([words(row, bits) for row in levels.tolist()], dtype=torch.int32)


def levels_of(weight: Tensor, bits: int, groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Levels [O, I] without sign, scales and zeros [O, G], where `groups` is the group of each column."""
    scales, zeros = [], []
    for group in range(int(groups.max()) + 1):
        low, high = weight[:, groups == group].aminmax(dim=1)
        scale = ((high - low) / ((1 << bits) - 1)).half()
        scales.append(scale)
        zeros.append((-low / scale.float()).round().clamp(1, (1 << bits) - 1))
    scale, zero = torch.stack(scales, 1), torch.stack(zeros, 1)
    levels = (weight / scale.float()[:, groups] + zero[:, groups]).round().clamp(0, (1 << bits) - 1)
    return levels.int(), scale, zero.int()


def value(levels: Tensor, scales: Tensor, zeros: Tensor, groups: Tensor) -> Tensor:
    return (levels - zeros[:, groups]) * scales.float()[:, groups]


def gptq(bits: int, offset: int, ordered: bool) -> Callable[[Tensor], Packed]:
    def pack(weight: Tensor) -> Packed:
        groups = torch.arange(weight.shape[1]) // GROUP
        if ordered:
            groups = groups[torch.randperm(len(groups), generator=torch.Generator().manual_seed(3))]
        levels, scales, zeros = levels_of(weight, bits, groups)
        tensors = {
            "qweight": pack_rows(levels, bits).T.contiguous(),
            "qzeros": pack_rows(zeros.T - offset, bits),
            "scales": scales.T.contiguous(),
        }
        if ordered:
            tensors["g_idx"] = groups.int()
        return tensors, value(levels, scales, zeros, groups)

    return pack


def awq(weight: Tensor) -> Packed:
    groups = torch.arange(weight.shape[1]) // GROUP
    levels, scales, zeros = levels_of(weight, 4, groups)

    def pack(numbers: Tensor) -> Tensor:
        return pack_rows(numbers.T.reshape(numbers.shape[1], -1, 8)[..., AWQ_ORDER].flatten(1), 4)

    tensors = {"qweight": pack(levels), "qzeros": pack(zeros), "scales": scales.T.contiguous()}
    return tensors, value(levels, scales, zeros, groups)


def compressed(bits: int, symmetric: bool) -> Callable[[Tensor], Packed]:
    def pack(weight: Tensor) -> Packed:
        groups = torch.arange(weight.shape[1]) // GROUP
        levels, scales, zeros = levels_of(weight, bits, groups)
        tensors = {
            "weight_packed": pack_rows(levels, bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor(weight.shape),
        }
        if symmetric:
            zeros = torch.full_like(zeros, 1 << bits - 1)
        else:
            tensors["weight_zero_point"] = pack_rows(zeros.T, bits).T.contiguous()
        return tensors, value(levels, scales, zeros, groups)

    return pack


def by_row(weight: Tensor) -> Packed:
    scales = weight.abs().amax(1, keepdim=True) / 127
    levels = (weight / scales).round().to(torch.int8)
    return {"weight": levels, "weight_scale": scales}, levels.float() * scales


def float8(scale: Callable[[Tensor], Tensor], name: str = "weight_scale") -> Callable[[Tensor], Packed]:
    """`scale` gives the scales of a weight in their own shape."""

    def pack(weight: Tensor) -> Packed:
        scales = scale(weight)
        spread = scales.view(1, 1) if scales.numel() == 1 else scales
        if spread.shape[0] not in (1, len(weight)):
            spread = spread.repeat_interleave(BLOCK, 0)[: len(weight)].repeat_interleave(BLOCK, 1)[:, : weight.shape[1]]
        levels = (weight / spread).to(torch.float8_e4m3fn)
        return {"weight": levels, name: scales, "input_scale": torch.ones(1)}, levels.float() * spread

    return pack


def per_block(weight: Tensor) -> Tensor:
    starts = [range(0, size, BLOCK) for size in weight.shape]
    blocks = [[weight[row : row + BLOCK, at : at + BLOCK].abs().amax() for at in starts[1]] for row in starts[0]]
    return torch.tensor(blocks) / 448


def groups_of(bits: int, **more: Any) -> dict[str, Any]:
    return {"config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": bits, **more}}}}


_GPTQ = {"quant_method": "gptq", "group_size": GROUP, "sym": False}
_COMPRESSED = {"quant_method": "compressed-tensors"}
FORMATS = {
    "gptq-4": Format(_GPTQ | {"bits": 4, "desc_act": False}, gptq(4, 1, ordered=False)),
    "gptq-8": Format(_GPTQ | {"bits": 8, "desc_act": False}, gptq(8, 1, ordered=False)),
    "gptq-in-order-of-activations": Format(_GPTQ | {"bits": 4, "desc_act": True}, gptq(4, 1, ordered=True)),
    "gptq-v2": Format(_GPTQ | {"bits": 4, "checkpoint_format": "gptq_v2"}, gptq(4, 0, ordered=False)),
    "awq": Format({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}, awq),
    "compressed-4": Format(
        _COMPRESSED | {"format": "pack-quantized"} | groups_of(4, group_size=GROUP), compressed(4, symmetric=True)
    ),
    "compressed-4-with-zeros": Format(
        _COMPRESSED | {"format": "pack-quantized"} | groups_of(4, group_size=GROUP), compressed(4, symmetric=False)
    ),
    "compressed-8": Format(
        _COMPRESSED | {"format": "pack-quantized"} | groups_of(8, group_size=GROUP), compressed(8, symmetric=True)
    ),
    "compressed-int8": Format(_COMPRESSED | {"format": "int-quantized"} | groups_of(8), by_row),
    "compressed-fp8": Format(
        _COMPRESSED | {"format": "float-quantized"} | groups_of(8, type="float"),
        float8(lambda weight: weight.abs().amax(1, keepdim=True) / 448),
    ),
    "compressed-fp8-blocks": Format(
        _COMPRESSED | {"format": "float-quantized"} | groups_of(8, block_structure=[BLOCK, BLOCK]), float8(per_block)
    ),
    "fp8-blocks": Format(
        {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}, float8(per_block, "weight_scale_inv")
    ),
    "fp8": Format({"quant_method": "fp8"}, float8(lambda weight: (weight.abs().amax() / 448).view(1))),
}


def write(source: Path, target: Path, form: Format) -> dict[str, Tensor]:
    """Write a copy of a model with packed weights in its layers; returns the numbers that all weights stand for."""
    shutil.copytree(source, target)
    config = json.loads((source / "config.json").read_text()) | {"quantization_config": form.settings}
    (target / "config.json").write_text(json.dumps(config))
    tensors, expanded = {}, {}
    for name, weight in load_file(source / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            parts, expanded[name] = form.pack(weight)
            module = name.removesuffix("weight")
            tensors.update({module + part: tensor for part, tensor in parts.items()})
        else:
            tensors[name] = expanded[name] = weight
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return expanded


def generate(model: Path) -> list[list[int]]:
    config = EngineConfig(model=str(model), dtype="float32", device="cpu", kv_cache_memory=ByteSize(16 << 20))
    with InferenceEngine(config) as engine:
        params = GenerationParams(max_tokens=24, temperature=0, ignore_eos=True)
        outputs = engine.generate(PROMPTS, params)
        return [list(output.choices[0].token_ids) for output in outputs]


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_a_packed_checkpoint_says_what_its_numbers_say(
    form: Format, model_directory: Callable[[str], Path], tmp_path: Path
) -> None:
    expanded = write(model_directory("qwen2"), tmp_path / "packed", form)
    shutil.copytree(model_directory("qwen2"), tmp_path / "plain")
    save_file(
        {name: weight.contiguous() for name, weight in expanded.items()},
        tmp_path / "plain" / "model.safetensors",
        {"format": "pt"},
    )
    assert generate(tmp_path / "packed") == generate(tmp_path / "plain")
    assert count_parameters(tmp_path / "packed") == count_parameters(tmp_path / "plain")


IN_TWO_BITS = {"gptq-2": Format(_GPTQ | {"bits": 2, "desc_act": False}, gptq(2, 1, ordered=False))}
WITH_LEVELS = {
    **dict.fromkeys(("gptq-2", "gptq-4", "gptq-v2", "awq", "compressed-4", "compressed-4-with-zeros"), INT4),
    **dict.fromkeys(("gptq-8", "compressed-8"), INT8),
}


@pytest.mark.skipif(not {*cpu_flags().split()} >= KERNEL_FLAGS, reason="the kernels need AVX2")
@pytest.mark.parametrize("name", [*FORMATS, *IN_TWO_BITS])
@torch.inference_mode()
def test_levels_are_kept_in_bfloat16(
    name: str, model_directory: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products multiply by the checkpoint's numbers; weights with levels are never expanded."""
    expected = write(model_directory("qwen2"), tmp_path / "packed", (FORMATS | IN_TWO_BITS)[name])
    if name in WITH_LEVELS:
        monkeypatch.setattr(packed_weights, "expand", lambda *_: pytest.fail("a weight was expanded"))
    config = EngineConfig(model=str(tmp_path / "packed"), dtype="bfloat16", device="cpu")
    with InferenceEngine(config) as engine:
        backend: Any = engine._driver.backend
        _, *products = [linear.product for linear in backend.runner._decoder.linears()[:5]]
        for part, product in zip(("self_attn.o", "mlp.gate", "mlp.up", "mlp.down"), products, strict=True):
            if name in WITH_LEVELS:
                found = numbers(product, torch.bfloat16, 0, -(-product.outputs // ROWS))[: product.outputs]
                assert product.kind == WITH_LEVELS[name]
                assert torch.allclose(found, expected[f"model.layers.0.{part}_proj.weight"], atol=1e-6, rtol=1e-5)
            else:
                assert product is None or product.kind == PLAIN
        answers = engine.generate(PROMPTS, GenerationParams(max_tokens=8, temperature=0, ignore_eos=True))
        assert [len(answer.token_ids) for answer in answers] == [8, 8]


def test_the_memory_of_levels_is_known_before_they_are_read(
    model_directory: Callable[[str], Path], tmp_path: Path
) -> None:
    sizes = {}
    for name in ("awq", "gptq-8", "gptq-in-order-of-activations"):
        write(model_directory("qwen2"), tmp_path / name, FORMATS[name])
        config = EngineConfig(model=str(tmp_path / name), dtype="bfloat16", device="cpu")
        sizes[name] = weights_of_model(config, "cpu").kept
    assert sizes["awq"] < sizes["gptq-8"] < sizes["gptq-in-order-of-activations"]


def test_columns_in_an_order_that_the_configuration_denies_are_refused(
    model_directory: Callable[[str], Path], tmp_path: Path
) -> None:
    form = Format(_GPTQ | {"bits": 4, "desc_act": False}, gptq(4, 1, ordered=True))
    write(model_directory("qwen2"), tmp_path / "packed", form)
    with pytest.raises(ModelLoadError, match=r"g_idx are in an order of activations, .* set desc_act to true"):
        InferenceEngine(EngineConfig(model=str(tmp_path / "packed"), dtype="bfloat16", device="cpu"))


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"quant_method": "bitsandbytes"}, "is quantised by 'bitsandbytes', which is not supported; supported: one of"),
        ({"bits": 4}, "is quantised by None"),
        (_GPTQ | {"bits": 3}, "is quantised by gptq to 3 bits"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "has AWQ's layout 'gemv'"),
        (_COMPRESSED | {"format": "nvfp4-pack-quantized"} | groups_of(4), "layout 'nvfp4-pack-quantized'"),
        (_COMPRESSED | {"sparsity_config": {"format": "sparse-24-bitmask"}} | groups_of(8), "'sparse-24-bitmask'"),
        (_COMPRESSED | groups_of(6), "has weights of 6 bits"),
    ],
)
def test_another_method_is_refused_by_its_name(
    settings: dict[str, Any], fault: str, model_directory: Callable[[str], Path], tmp_path: Path
) -> None:
    """When the configuration is read, by the command line already."""
    write(model_directory("qwen2"), tmp_path / "packed", Format(settings, by_row))
    with pytest.raises(ModelLoadError, match=fault):
        read_model_info(tmp_path / "packed", "m")


def test_a_missing_part_is_named(model_directory: Callable[[str], Path], tmp_path: Path) -> None:
    write(model_directory("qwen2"), tmp_path / "packed", FORMATS["gptq-4"])
    weights = tmp_path / "packed" / "model.safetensors"
    tensors = load_file(weights)
    del tensors["model.layers.0.self_attn.q_proj.scales"]
    save_file(tensors, weights, {"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"lack model\.layers\.0\.self_attn\.q_proj\.scales; download them again"):
        count_parameters(tmp_path / "packed")


def test_packed_weights_without_a_word_in_the_configuration(
    model_directory: Callable[[str], Path], tmp_path: Path
) -> None:
    write(model_directory("qwen2"), tmp_path / "packed", FORMATS["gptq-4"])
    shutil.copy(model_directory("qwen2") / "config.json", tmp_path / "packed")
    with pytest.raises(ModelLoadError, match=r"_proj\.qweight is packed, and .*config\.json has no quantization_conf"):
        count_parameters(tmp_path / "packed")
