"""Writes checkpoints of GPTQ, AWQ, compressed-tensors and FP8, packed number by number as they describe it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

GROUP = 32
BLOCK = 48  # rows and columns of FP8 in blocks; the last blocks of a weight are smaller
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # the columns of a word's eight weights, lowest bits first

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


GPTQ = {"quant_method": "gptq", "group_size": GROUP, "sym": False}
COMPRESSED = {"quant_method": "compressed-tensors"}
FORMATS = {
    "gptq-4": Format(GPTQ | {"bits": 4, "desc_act": False}, gptq(4, 1, ordered=False)),
    "gptq-8": Format(GPTQ | {"bits": 8, "desc_act": False}, gptq(8, 1, ordered=False)),
    "gptq-in-order-of-activations": Format(GPTQ | {"bits": 4, "desc_act": True}, gptq(4, 1, ordered=True)),
    "gptq-v2": Format(GPTQ | {"bits": 4, "checkpoint_format": "gptq_v2"}, gptq(4, 0, ordered=False)),
    "awq": Format({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}, awq),
    "compressed-4": Format(
        COMPRESSED | {"format": "pack-quantized"} | groups_of(4, group_size=GROUP), compressed(4, symmetric=True)
    ),
    "compressed-4-with-zeros": Format(
        COMPRESSED | {"format": "pack-quantized"} | groups_of(4, group_size=GROUP), compressed(4, symmetric=False)
    ),
    "compressed-8": Format(
        COMPRESSED | {"format": "pack-quantized"} | groups_of(8, group_size=GROUP), compressed(8, symmetric=True)
    ),
    "compressed-int8": Format(COMPRESSED | {"format": "int-quantized"} | groups_of(8), by_row),
    "compressed-fp8": Format(
        COMPRESSED | {"format": "float-quantized"} | groups_of(8, type="float"),
        float8(lambda weight: weight.abs().amax(1, keepdim=True) / 448),
    ),
    "compressed-fp8-blocks": Format(
        COMPRESSED | {"format": "float-quantized"} | groups_of(8, block_structure=[BLOCK, BLOCK]), float8(per_block)
    ),
    "fp8-blocks": Format(
        {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}, float8(per_block, "weight_scale_inv")
    ),
    "fp8": Format({"quant_method": "fp8"}, float8(lambda weight: (weight.abs().amax() / 448).view(1))),
}


def in_layers(name: str) -> bool:
    return name.endswith("_proj.weight")


def write(source: Path, target: Path, form: Format, packs: Callable[[str], bool] = in_layers) -> dict[str, Tensor]:
    """Write a copy of a model with packed weights where `packs` their names; returns the numbers that all weights stand
    for."""
    shutil.copytree(source, target)
    config = json.loads((source / "config.json").read_text()) | {"quantization_config": form.settings}
    (target / "config.json").write_text(json.dumps(config))
    tensors, expanded = {}, {}
    for name, weight in load_file(source / "model.safetensors").items():
        if packs(name):
            parts, expanded[name] = form.pack(weight)
            module = name.removesuffix("weight")
            tensors.update({module + part: tensor for part, tensor in parts.items()})
        else:
            tensors[name] = expanded[name] = weight
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return expanded
