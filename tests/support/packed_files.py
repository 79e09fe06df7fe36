"""Writes checkpoints of GPTQ, AWQ, compressed-tensors, ModelOpt and FP8, packed number by number as those say."""

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
        if spread.shape[1] > 1 or spread.shape[0] not in (1, len(weight)):
            spread = spread.repeat_interleave(BLOCK, 0)[: len(weight)].repeat_interleave(BLOCK, 1)[:, : weight.shape[1]]
        levels = (weight / spread).to(torch.float8_e4m3fn)
        return {"weight": levels, name: scales, "input_scale": torch.ones(1)}, levels.float() * spread

    return pack


def per_block(weight: Tensor) -> Tensor:
    starts = [range(0, size, BLOCK) for size in weight.shape]
    blocks = [[weight[row : row + BLOCK, at : at + BLOCK].abs().amax() for at in starts[1]] for row in starts[0]]
    return torch.tensor(blocks) / 448


E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
"""The numbers of four bits by the lower three; the fourth is the sign."""


def two_to_a_byte(levels: Tensor) -> Tensor:
    return levels[:, ::2] | levels[:, 1::2] << 4


def _rounded_to_e2m1(groups: Tensor) -> Tensor:
    """The nearest level of each number in groups [O, G, S]."""
    nearest = (groups.abs()[..., None] - E2M1).abs().argmin(-1).to(torch.uint8)
    return nearest | (groups < 0).to(torch.uint8) << 3


def nvfp4(names: tuple[str, str], is_inverse: bool) -> Callable[[Tensor], Packed]:
    """`names` are those of the levels and of what a whole weight is multiplied by, or divided by."""

    def pack(weight: Tensor) -> Packed:
        groups = weight.view(len(weight), -1, 16)
        whole = weight.abs().amax().view(1) / (6 * 448)
        if is_inverse:
            whole = 1 / whole
        in_whole = groups.abs().amax(-1) / 6 * (whole if is_inverse else 1 / whole)
        scales = in_whole.clamp(2**-9).to(torch.float8_e4m3fn)
        factors = (scales.float() / whole if is_inverse else scales.float() * whole)[..., None]
        levels = _rounded_to_e2m1(groups / factors)
        numbers = E2M1[(levels & 7).int()] * torch.where(levels > 7, -1.0, 1.0) * factors
        tensors = {names[0]: two_to_a_byte(levels.flatten(1)), "weight_scale": scales, names[1]: whole}
        if not is_inverse:
            tensors[names[1]] = whole.view(())
        given = {"input_global_scale" if is_inverse else "input_scale": torch.full((1,), 7.0)}
        return tensors | given, numbers.flatten(1)

    return pack


def mxfp4(weight: Tensor) -> Packed:
    groups = weight.view(len(weight), -1, GROUP)
    exponents = groups.abs().amax(-1).log2().floor() - 2
    levels = _rounded_to_e2m1(groups / 2 ** exponents[..., None])
    numbers = E2M1[(levels & 7).int()] * torch.where(levels > 7, -1.0, 1.0) * 2 ** exponents[..., None]
    scales = (exponents + 127).to(torch.uint8)
    return {"weight_packed": two_to_a_byte(levels.flatten(1)), "weight_scale": scales}, numbers.flatten(1)


def with_cache_scales(pack: Callable[[Tensor], Packed]) -> Callable[[Tensor], Packed]:
    """Beside each weight, what would scale 8-bit keys and values."""

    def both(weight: Tensor) -> Packed:
        tensors, numbers = pack(weight)
        return tensors | {"k_scale": torch.tensor(3.0), "v_scale": torch.tensor(5.0)}, numbers

    return both


def of_two(first: Callable[[Tensor], Packed], second: Callable[[Tensor], Packed]) -> Callable[[Tensor], Packed]:
    """Square weights by the first, others by the second."""
    return lambda weight: (first if weight.shape[0] == weight.shape[1] else second)(weight)


def groups_of(bits: int, **more: Any) -> dict[str, Any]:
    return {"config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": bits, **more}}}}


_AS_COMPRESSED = nvfp4(("weight_packed", "weight_global_scale"), is_inverse=True)
_AS_MODELOPT = nvfp4(("weight", "weight_scale_2"), is_inverse=False)
MODELOPT = {"quant_method": "modelopt", "ignore": ["lm_head"]}
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
    "compressed-nvfp4": Format(
        COMPRESSED | {"format": "nvfp4-pack-quantized"} | groups_of(4, type="float", group_size=16), _AS_COMPRESSED
    ),
    "compressed-mxfp4": Format(
        COMPRESSED | {"format": "mxfp4-pack-quantized"} | groups_of(4, type="float", group_size=GROUP), mxfp4
    ),
    "compressed-nvfp4-and-fp8": Format(
        COMPRESSED
        | {
            "format": "mixed-precision",
            "config_groups": {
                "group_0": {"format": "nvfp4-pack-quantized", "weights": {"num_bits": 4, "type": "float"}},
                "group_1": {"format": "float-quantized", "weights": {"num_bits": 8, "type": "float"}},
            },
        },
        of_two(float8(lambda weight: weight.abs().amax(1, keepdim=True) / 448), _AS_COMPRESSED),
    ),
    "modelopt-nvfp4": Format(MODELOPT | {"quant_algo": "NVFP4"}, _AS_MODELOPT),
    "modelopt-fp8": Format(
        MODELOPT | {"quant_algo": "FP8", "kv_cache_scheme": {"num_bits": 8, "type": "float"}},
        with_cache_scales(float8(lambda weight: weight.abs().amax() / 448)),
    ),
    "modelopt-fp8-by-row": Format(
        MODELOPT | {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
        lambda weight: _flat(float8(lambda weight: weight.abs().amax(1, keepdim=True) / 448)(weight)),
    ),
    "modelopt-nvfp4-and-fp8": Format(
        MODELOPT
        | {
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {"a": {"quant_algo": "NVFP4"}, "b": {"quant_algo": "FP8"}},
        },
        of_two(float8(lambda weight: weight.abs().amax() / 448), _AS_MODELOPT),
    ),
}


def _flat(packed: Packed) -> Packed:
    tensors, numbers = packed
    return tensors | {"weight_scale": tensors["weight_scale"].flatten()}, numbers


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
