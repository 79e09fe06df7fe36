"""Reads the weights of GGUF files: expanded, each when it is asked for, or as levels and scales.

Source of the blocks' layouts: ggml's `ggml-common.h` and `ggml-quants.c`. The arithmetic is that of the package `gguf`,
in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..experts import module_names
from ..lazy import LazyWeight
from ..mxfp4 import DOUBLED, half_powers_of_2
from ..rounded import Blocks, ReadRounded, Rounded
from .file import BLOCKS, Gguf, GgufWeight, Tiles
from .grids import iq1_m, iq1_s, iq2_s, iq2_xs, iq2_xxs, iq3_s, iq3_xxs
from .levels import Levels, half_at
from .pairs import weights_of

_CHUNK = 1 << 18  # weights that are expanded at a time, so that what is between stays in the cache
_LEVELS_CHUNK = 1 << 21  # the same of levels alone
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""What the sixteen levels of IQ4_NL and IQ4_XS stand for."""


def lazy_weights(gguf: Gguf, dtype: torch.dtype) -> dict[str, LazyWeight]:
    """All weights by transformers' names; quantised ones become `dtype`, others keep the file's."""

    def lazy(weight: GgufWeight) -> LazyWeight:
        return LazyWeight(lambda: _read(weight, dtype))

    return {name: lazy(weight) for name, weight in weights_of(gguf).items()}


def level_readers(gguf: Gguf) -> dict[str, ReadRounded]:
    """The weights of the language model whose levels can be kept, by the names of their modules."""
    found: dict[str, ReadRounded] = {}
    for name, weight in weights_of(gguf).items():
        if weight.keeps_levels and weight.types <= {*_LEVELS}:
            if weight.is_transposed:
                modules = enumerate(module_names(name, weight.shape[0]))
                found |= {module: _Turns(weight, expert) for expert, module in modules}
            else:
                found[name.removesuffix(".weight")] = _Levels(weight)
    return found


@dataclass(frozen=True, slots=True)
class _Levels:
    """Reads the levels of a weight."""

    weight: GgufWeight

    def __call__(self) -> Rounded:
        weight, tiles = self.weight, self.weight.tiles
        found = rounded_of(_data(weight), weight.tensor.type, weight.shape[0])
        if tiles is None or not tiles.by_columns:
            return found
        groups = tiles._replace(size=tiles.size // found.size)
        zeros = None if found.zeros is None else _untiled(found.zeros, groups, 1)
        scales = _untiled(found.scales, groups, 1)
        return found._replace(levels=_untiled(found.levels, tiles, 1), scales=scales, zeros=zeros)

    def blocks(self) -> list[Blocks]:
        """As the file has it, rows in transformers' order; none where the columns have another one."""
        weight = self.weight
        if weight.tiles is not None and weight.tiles.by_columns:
            return []
        return [Blocks(weight.tensor.type, _data(weight).view(weight.shape[0], -1), weight.shape[1])]


@dataclass(frozen=True, slots=True)
class _Turns:
    """Reads the levels of one expert: an output of each of its tensors, and again."""

    weight: GgufWeight
    expert: int

    def __call__(self) -> Rounded:
        return Rounded.in_turns([read() for read in self._parts])

    def blocks(self) -> list[Blocks]:
        """As `_Levels` has them; none unless all are of one type."""
        if len(self.weight.types) > 1:
            return []
        parts = [block for read in self._parts for block in read.blocks()]
        return [parts[0]._replace(data=torch.stack([part.data for part in parts], dim=1).flatten(0, 1))]

    @property
    def _parts(self) -> list[_Levels]:
        tensors = self.weight.tensor, *self.weight.more
        return [_Levels(GgufWeight(one, one.shape[1:], expert=self.expert)) for one in tensors]


def rounded_of(data: Tensor, kind: str, rows: int) -> Rounded:
    """The levels and scales of a weight that lies in `data` in so many rows; `kind` is a quantised type."""
    weights, size = BLOCKS[kind]
    lines = data.view(rows, -1, size)
    step = max(1, _LEVELS_CHUNK // (lines.shape[1] * weights))
    levels = torch.empty((rows, lines.shape[1] * weights), dtype=torch.int8, device=data.device)
    scales, zeros = list[Tensor](), list[Tensor]()
    for start in range(0, rows, step):
        found = _LEVELS[kind](lines[start : start + step].reshape(-1, size))
        levels[start : start + step] = found.levels.reshape(-1, levels.shape[1])
        scales.append(found.scales.reshape(-1, lines.shape[1] * weights // found.levels.shape[-1]))
        if found.zeros is not None:
            zeros.append(found.zeros.reshape(scales[-1].shape))
    offsets = torch.cat(zeros) if zeros else None
    return Rounded(levels, torch.cat(scales), offsets, found.bits, found.middle, found.levels.shape[-1], found.table)


def _data(weight: GgufWeight) -> Tensor:
    """The bytes of a weight, rows in transformers' order."""
    tensor, path = weight.tensor, weight.tensor.path
    content = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)
    data = content[tensor.start : tensor.start + tensor.nbytes]
    if weight.expert is not None:
        data = data.view(tensor.shape[0], -1)[weight.expert]
    rows = data.view(weight.shape[0], -1)
    if weight.heads is not None:
        return _by_halves(rows, weight.heads)
    return data if weight.tiles is None or weight.tiles.by_columns else _untiled(rows, weight.tiles, 0)


def _read(weight: GgufWeight, dtype: torch.dtype) -> Tensor:
    if weight.is_transposed or weight.in_turns:
        return _read_experts(weight, dtype)
    if weight.more:
        parts = [_read(GgufWeight(part, part.shape), dtype) for part in (weight.tensor, *weight.more)]
        return torch.stack(parts, dim=2) if weight.is_split_in_time else torch.cat(parts)
    expanded = dequantize(_data(weight), weight.tensor.type, dtype).view(weight.shape)
    if weight.tiles is not None and weight.tiles.by_columns:
        expanded = _untiled(expanded, weight.tiles, 1)
    if weight.is_decay:
        return (-expanded).log()
    return expanded + weight.offset if weight.offset else expanded


def _read_experts(weight: GgufWeight, dtype: torch.dtype) -> Tensor:
    """All experts of a layer, in memory of one more."""
    found = torch.empty(weight.shape, dtype=dtype)
    for expert in range(len(found)):
        parts = [GgufWeight(one, one.shape[1:], expert=expert) for one in (weight.tensor, *weight.more)]
        outputs = torch.stack([_read(part, dtype) for part in parts], dim=1).flatten(
            0, 1
        )  # one of each tensor in turns
        found[expert] = outputs.T if weight.is_transposed else outputs
    return found


def _by_halves(rows: Tensor, heads: int) -> Tensor:
    """Undo llama.cpp's order of the rows of queries and keys, where those that rotate together are neighbours."""
    return rows.view(heads, -1, 2, rows.shape[1]).transpose(1, 2).reshape(rows.shape)


def _untiled(tensor: Tensor, tiles: Tiles, dim: int) -> Tensor:
    """Bring rows or columns from the file's order into the model's."""
    first, rest = tensor.narrow(dim, 0, tiles.start), tensor.narrow(dim, tiles.start, tensor.shape[dim] - tiles.start)
    heads = rest.reshape(*rest.shape[:dim], tiles.repeats, tiles.groups, tiles.size, *rest.shape[dim + 1 :])
    return torch.cat((first, heads.transpose(dim, dim + 1).reshape(rest.shape)), dim)


def dequantize(data: Tensor, kind: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """The numbers [N] that bytes of the type `kind` stand for; those that are no blocks keep their own dtype."""
    if kind in _PLAIN:
        return data.clone().view(_PLAIN[kind])
    weights, size = BLOCKS[kind]
    blocks = data.view(-1, size)
    result = torch.empty(len(blocks), weights, dtype=dtype)
    step = _CHUNK // weights
    for start in range(0, len(blocks), step):
        result[start : start + step] = _LEVELS[kind](blocks[start : start + step]).numbers
    return result.flatten()


def _nibbles(packed: Tensor) -> Tensor:
    """[N, B] → [N, 1, 2 B]: the low halves of all bytes, then the high ones."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)[:, None]


def _bits(packed: Tensor) -> Tensor:
    """[N, 4] → [N, 1, 32], lowest bit first."""
    return (packed[:, :, None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(1)[:, None]


def _q4_0(blocks: Tensor) -> Levels:
    return Levels(_nibbles(blocks[:, 2:]), half_at(blocks, 0), bits=4, middle=8)


def _q4_1(blocks: Tensor) -> Levels:
    return Levels(_nibbles(blocks[:, 4:]), half_at(blocks, 0), half_at(blocks, 2), bits=4)


def _q5_0(blocks: Tensor) -> Levels:
    return Levels(_nibbles(blocks[:, 6:]) | _bits(blocks[:, 2:6]) << 4, half_at(blocks, 0), middle=16)


def _q5_1(blocks: Tensor) -> Levels:
    return Levels(_nibbles(blocks[:, 8:]) | _bits(blocks[:, 4:8]) << 4, half_at(blocks, 0), half_at(blocks, 2))


def _q8_0(blocks: Tensor) -> Levels:
    return Levels(blocks[:, None, 2:].view(torch.int8), half_at(blocks, 0))


def _q2_k(blocks: Tensor) -> Levels:
    both, scale, least = blocks[:, :16], half_at(blocks, 80).float(), half_at(blocks, 82).float()
    return Levels(_pairs_of_bits(blocks[:, 16:80]), scale * (both & 15), -(least * (both >> 4)))


def _q3_k(blocks: Tensor) -> Levels:
    high = blocks[:, None, :32] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1  # [N, 8, 32]
    low, more = blocks[:, 96:104], blocks[:, 104:108]
    upper = (more[:, None] >> torch.arange(0, 8, 2, dtype=torch.uint8)[:, None] & 3).flatten(1)
    scales = (_nibbles(low)[:, 0] | upper << 4).to(torch.int8) - 32  # [N, 16]
    levels = _pairs_of_bits(blocks[:, 32:96]) | (high << 2).view(-1, 16, 16)
    return Levels(levels, half_at(blocks, 108).float() * scales, middle=4)


def _pairs_of_bits(packed: Tensor) -> Tensor:
    """[N, 64] → [N, 16, 16]: of each 32 bytes the lowest two bits, then the next ones."""
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    return (packed.view(-1, 2, 1, 32) >> shifts & 3).view(-1, 16, 16)


def _iq4_nl(blocks: Tensor) -> Levels:
    return Levels(_nibbles(blocks[:, 2:]), half_at(blocks, 0), bits=4, table=IQ4)


def _iq4_xs(blocks: Tensor) -> Levels:
    upper = blocks[:, 2:4, None] >> torch.arange(0, 8, 2, dtype=torch.uint8) & 3  # [N, 2, 4]
    lower = torch.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), dim=-1)  # [N, 4, 2]
    scales = (lower.flatten(1) | upper.flatten(1) << 4).to(torch.int8) - 32
    levels = _nibbles(blocks[:, 8:].reshape(-1, 16)).view(-1, 8, 32)
    return Levels(levels, half_at(blocks, 0).float() * scales, bits=4, table=IQ4)


def _mxfp4(blocks: Tensor) -> Levels:
    return Levels(_nibbles(blocks[:, 1:]), half_powers_of_2(blocks[:, :1]), bits=4, table=DOUBLED)


def _tq1_0(blocks: Tensor) -> Levels:
    first, second, rest = blocks[:, :32], blocks[:, 32:48], blocks[:, 48:52]
    return _ternary(torch.cat((_threes(first, 5), _threes(second, 5), _threes(rest, 4)), dim=-1), half_at(blocks, 52))


def _threes(packed: Tensor, count: int) -> Tensor:
    """[N, B] → [N, count * B]: of all bytes the first of `count` digits to the base 3, then the next ones.

    A byte is their fraction of 256, rounded up.
    """
    shifted = packed[:, None] * torch.tensor([3**place for place in range(count)], dtype=torch.uint8)[:, None]
    return (shifted.short() * 3 >> 8).to(torch.uint8).flatten(1)


def _tq2_0(blocks: Tensor) -> Levels:
    return _ternary(_pairs_of_bits(blocks[:, :64]), half_at(blocks, 64))


def _ternary(levels: Tensor, scale: Tensor) -> Levels:
    """-1, 0 and 1, given as 0, 1 and 2, with one scale for a block of 256: each group of 32 gets it.

    Levels are 7 to 9, since the kernels take 8 from them or nothing.
    """
    return Levels(levels.view(-1, 8, 32) + 7, scale.expand(-1, 8), bits=4, middle=8)


def _scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The scales and zeros [N, 8] of the groups of 32 in a block of 256; six bits each, in twelve bytes."""
    first, second, third = blocks[:, 4:16].view(-1, 3, 4).unbind(1)
    scales = torch.cat((first & 63, third & 15 | first >> 2 & 48), dim=-1)
    minima = torch.cat((second & 63, third >> 4 | second >> 2 & 48), dim=-1)
    return half_at(blocks, 0).float() * scales, -(half_at(blocks, 2).float() * minima)


def _q4_k(blocks: Tensor) -> Levels:
    levels = _nibbles(blocks[:, 16:].reshape(-1, 32)).view(-1, 8, 32)
    return Levels(levels, *_scales(blocks), bits=4)


def _q5_k(blocks: Tensor) -> Levels:
    high = blocks[:, None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1  # [N, 8, 32]
    levels = _nibbles(blocks[:, 48:].reshape(-1, 32)).view(-1, 8, 32) | high << 4
    return Levels(levels, *_scales(blocks))


def _q6_k(blocks: Tensor) -> Levels:
    low = _nibbles(blocks[:, :128].reshape(-1, 64)).view(-1, 2, 4, 32)
    high = blocks[:, 128:192].view(-1, 2, 1, 32) >> torch.arange(0, 8, 2, dtype=torch.uint8)[:, None] & 3
    scales = half_at(blocks, 208).float() * blocks[:, 192:208].view(torch.int8)  # [N, 16]
    return Levels((low | high << 4).view(-1, 16, 16), scales, middle=32)


_LEVELS: dict[str, Callable[[Tensor], Levels]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
    "IQ1_S": iq1_s,
    "IQ1_M": iq1_m,
    "IQ2_XXS": iq2_xxs,
    "IQ2_XS": iq2_xs,
    "IQ2_S": iq2_s,
    "IQ3_XXS": iq3_xxs,
    "IQ3_S": iq3_s,
    "TQ1_0": _tq1_0,
    "TQ2_0": _tq2_0,
}
