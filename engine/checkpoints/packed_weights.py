"""Reads packed weights of safetensors, each when it is asked for: the formats are those of `packed`.

They are expanded, or levels and scales as any other weight's (`rounded`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from .experts import module_names
from .lazy import LazyWeight
from .mxfp4 import DOUBLED, half_powers_of_2, numbers_of, pairs
from .packed import PackedWeight, Packing
from .quantized import GROUP_SIZE
from .rounded import Blocks, ReadRounded, Rounded, looked_up

_AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # where in a word AWQ puts the weight of each of eight columns

Get = Callable[[str], Tensor]


def lazy_packed_weights(
    files: Mapping[str, Path], weights: Mapping[str, PackedWeight | str], packing: Packing, dtype: torch.dtype
) -> dict[str, LazyWeight]:
    """All weights by name; `files` says in which file each tensor lies. Packed ones become `dtype`."""

    get = partial(_get, files)

    def read(weight: PackedWeight | str) -> Tensor:
        if isinstance(weight, str):
            return get(weight)
        if weight.of_experts:
            return expand_experts(get(weight.parts["blocks"]), get(weight.parts["scales"]), dtype)
        return expand(weight, packing, get).to(dtype)

    return {name: LazyWeight(partial(read, weight)) for name, weight in weights.items()}


def packed_level_readers(
    files: Mapping[str, Path], weights: Mapping[str, PackedWeight | str], packing: Packing
) -> dict[str, ReadRounded]:
    """The weights whose levels can be kept, by the names of their modules, or of experts (`experts.module_names`)."""
    found: dict[str, ReadRounded] = {}
    for name, weight in weights.items():
        if isinstance(weight, str) or not weight.keeps_levels(packing):
            continue
        if weight.of_experts:
            modules = enumerate(module_names(name, weight.shape[0]))
            found |= {module: _Microscaled(weight, files, expert) for expert, module in modules}
        elif weight.float_group(packing) == GROUP_SIZE:
            found[name.removesuffix(".weight")] = _Microscaled(weight, files)
        else:
            found[name.removesuffix(".weight")] = partial(levels_of, weight, packing, partial(_get, files))
    return found


def byte_readers(
    files: Mapping[str, Path], weights: Mapping[str, PackedWeight | str], packing: Packing
) -> dict[str, ReadRounded]:
    """The weights in bytes, for products that take floating ones as levels."""
    packed = {name: weight for name, weight in weights.items() if isinstance(weight, PackedWeight)}
    return {
        name.removesuffix(".weight"): partial(_bytes_of, weight, packing, partial(_get, files))
        for name, weight in packed.items()
        if weight.keeps_bytes(packing)
    }


def _bytes_of(weight: PackedWeight, packing: Packing, get: Get) -> Rounded:
    parts = {part: get(name) for part, name in weight.parts.items()}
    levels, scales = parts["weight"], parts.get("weight_scale", parts.get("weight_scale_inv"))
    assert scales is not None, "a weight without a scale is none that is packed"
    spread = _spread(scales, levels.shape, packing.block, None).expand(levels.shape)
    return Rounded(levels, spread[:, ::GROUP_SIZE].contiguous())


def levels_of(weight: PackedWeight, packing: Packing, get: Get) -> Rounded:
    """A packed weight in groups of 32, of 4 bits or 8, or NVFP4's in groups of 16; `get` reads a tensor by name.

    Zeros become what they stand for, in float32; there are none where all are the middle. Raises `ValueError` for
    columns in another order than the configuration says.
    """
    parts = {part: get(name) for part, name in weight.parts.items()}
    if size := weight.float_group(packing):
        packed, factors = _float4(parts)
        return Rounded(looked_up(pairs(packed), DOUBLED), factors / 2, size=size)
    middle = 1 << packing.bits - 1
    if packing.method == "gptq":
        levels = _unpack(parts["qweight"].T, packing.bits)
        zeros = _unpack(parts["qzeros"], packing.bits).T + packing.zero_offset
        scales = parts["scales"].T
        order = parts.get("g_idx")
        if order is not None and not torch.equal(order, torch.arange(len(order)) // (len(order) // scales.shape[1])):
            raise ValueError(
                f"the columns of {weight.parts['g_idx']} are in an order of activations, which config.json "
                "does not say; set desc_act to true in its quantization_config"
            )
    elif packing.method == "awq":
        levels, zeros = (_in_order(_unpack(parts[name], 4)).T for name in ("qweight", "qzeros"))
        scales = parts["scales"].T
    else:
        levels, scales = _unpack(parts["weight_packed"], packing.bits), parts["weight_scale"]
        scales = scales.view(-1, 1) if scales.ndim < 2 else scales
        found = parts.get("weight_zero_point")
        if found is not None and found.dtype == torch.int32:  # packed along the rows
            zeros = _unpack(found.T, packing.bits).T[: len(levels)]
        else:
            zeros = torch.full_like(scales, middle) if found is None else found.view(scales.shape) + middle
    rows, inputs = levels.shape
    offsets = (middle - zeros.float()) * scales.float()  # what the middle stands for
    has_zeros = bool(offsets.any())
    times = inputs // GROUP_SIZE // scales.shape[1]
    factors, offsets = (
        each.expand(rows, -1).repeat_interleave(times, dim=1).contiguous()
        for each in (scales.float() if has_zeros else scales, offsets)
    )
    if packing.bits == 8:
        return Rounded((levels - middle).to(torch.int8), factors, offsets if has_zeros else None)
    return Rounded(levels.to(torch.int8), factors, offsets if has_zeros else None, 4, middle)


@dataclass(frozen=True, slots=True)
class _Microscaled:
    """Reads the levels of a weight in MXFP4, or of one expert."""

    weight: PackedWeight
    files: Mapping[str, Path]
    expert: int | None = None

    def __call__(self) -> Rounded:
        blocks, scales = self._parts()
        return Rounded(pairs(blocks).to(torch.int8), half_powers_of_2(scales), bits=4, table=DOUBLED)

    def blocks(self) -> list[Blocks]:
        """Like GGUF's, with each scale before its levels, but neighbours share a byte."""
        blocks, scales = self._parts()
        data = torch.cat((scales[..., None], blocks.view(*scales.shape, -1)), dim=-1).flatten(1)
        return [Blocks("MXFP4_PAIRS", data, scales.shape[1] * GROUP_SIZE)]

    def _parts(self) -> tuple[Tensor, Tensor]:
        names = ("blocks", "scales") if self.weight.of_experts else ("weight_packed", "weight_scale")
        blocks, scales = (_get(self.files, self.weight.parts[part], self.expert) for part in names)
        return blocks, scales


def expand_experts(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Blocks [E, O, G, 16] → [E, 32 G, O]; -0 is such, as in transformers."""
    experts, outputs, groups = scales.shape
    result = torch.empty(experts, groups * GROUP_SIZE, outputs, dtype=dtype)
    for expert in range(experts):
        doubled = 2 * numbers_of(pairs(blocks[expert])).view(outputs, groups, GROUP_SIZE)
        result[expert] = (doubled * half_powers_of_2(scales[expert])[..., None]).flatten(1).T
    return result


def _get(files: Mapping[str, Path], name: str, expert: int | None = None) -> Tensor:
    """A tensor, or what it has of an expert."""
    with safe_open(files[name], framework="pt") as file:
        tensor: Tensor = file.get_tensor(name) if expert is None else file.get_slice(name)[expert]
    return tensor


def expand(weight: PackedWeight, packing: Packing, get: Get) -> Tensor:
    """The numbers [O, I] that a packed weight stands for, in float32; `get` reads a tensor by name."""
    parts = {part: get(name) for part, name in weight.parts.items()}
    if packing.method == "gptq":
        return _gptq(parts, packing)
    if packing.method == "awq":
        return _awq(parts)
    if size := weight.float_group(packing):
        packed, factors = _float4(parts)
        return numbers_of(pairs(packed)) * factors.repeat_interleave(size, dim=1)
    return _compressed(parts, packing)


def _float4(parts: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The bytes of two numbers each [O, I / 2], and what those of each group are multiplied by, float32 [O, G]."""
    packed, scales = parts.get("weight_packed", parts.get("weight")), parts["weight_scale"]
    assert packed is not None, "a weight without levels is refused before"
    if "weight_global_scale" in parts:
        return packed, scales.float() / parts["weight_global_scale"].float()
    if "weight_scale_2" in parts:
        return packed, scales.float() * parts["weight_scale_2"].float()
    return packed, 2 * half_powers_of_2(scales).float()


def _gptq(parts: Mapping[str, Tensor], packing: Packing) -> Tensor:
    levels = _unpack(parts["qweight"].T, packing.bits)  # [O, I]
    zeros = _unpack(parts["qzeros"], packing.bits).T + packing.zero_offset  # [O, G]
    scales = parts["scales"].float().T
    columns = levels.shape[1]
    groups = parts.get("g_idx")  # the group of each column: those of one need not be neighbours
    if groups is None:
        groups = torch.arange(columns) // (packing.group_size or columns)
    return (levels - zeros[:, groups]) * scales[:, groups]


def _awq(parts: Mapping[str, Tensor]) -> Tensor:
    levels, zeros = (_in_order(_unpack(parts[name], 4)).T for name in ("qweight", "qzeros"))  # [O, I], [O, G]
    size = levels.shape[1] // zeros.shape[1]
    scales = parts["scales"].float().T
    return (levels - zeros.repeat_interleave(size, 1)) * scales.repeat_interleave(size, 1)


def _in_order(columns: Tensor) -> Tensor:
    return columns.view(len(columns), -1, 8)[..., _AWQ_PLACES].flatten(1)


def _compressed(parts: Mapping[str, Tensor], packing: Packing) -> Tensor:
    scales, zeros = parts.get("weight_scale", parts.get("weight_scale_inv")), parts.get("weight_zero_point")
    assert scales is not None, "a weight without a scale is none that is packed"
    if "weight_packed" in parts:
        middle = 1 << packing.bits - 1
        levels = _unpack(parts["weight_packed"], packing.bits) - middle
        if "weight_shape" in parts:
            rows, columns = parts["weight_shape"].tolist()
            levels = levels[:rows, :columns]
        if zeros is not None and zeros.dtype == torch.int32:  # packed along the rows
            zeros = _unpack(zeros.T, packing.bits).T[: len(levels)] - middle
    else:
        levels = parts["weight"].float()
    spread = partial(_spread, shape=levels.shape, block=packing.block, groups=parts.get("weight_g_idx"))
    return (levels if zeros is None else levels - spread(zeros)) * spread(scales)


def _spread(values: Tensor, shape: torch.Size, block: tuple[int, int] | None, groups: Tensor | None) -> Tensor:
    """One value for each weight, or one that broadcasts to that: given by tensor, row, group of a row, or block."""
    values = values.float()
    if values.numel() == 1:
        return values.view(1, 1)
    values = values.view(len(values), -1)
    if groups is not None:
        return values[:, groups]
    if len(values) != shape[0]:
        assert block is not None, f"{tuple(values.shape)} scales for weights {tuple(shape)}"
        values = values.repeat_interleave(block[0], 0)[: shape[0]]
    if values.shape[1] == 1:
        return values
    size = block[1] if block else -(-shape[1] // values.shape[1])
    return values.repeat_interleave(size, 1)[:, : shape[1]]


def _unpack(words: Tensor, bits: int) -> Tensor:
    """[R, C] words of 32 bits → [R, C · 32 / bits] numbers without sign, the lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return (words[..., None] >> shifts & (1 << bits) - 1).flatten(1)
