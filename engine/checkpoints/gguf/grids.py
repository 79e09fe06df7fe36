"""Blocks of the types IQ1 to IQ3 of GGUF files: each of their bytes, with a few more bits, names weights of a grid.

The grids and the arithmetic are those of the package `gguf`. A weight is a size of the grid with a sign; so are levels:
those of a table where 32 weights share a scale, and whole numbers where 16 do.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from .levels import Levels, half_at

_BITS = torch.arange(8, dtype=torch.uint8)
_SEVENS = torch.arange(0, 28, 7, dtype=torch.int32)  # where a word has the signs of each eight weights


def iq3_xxs(blocks: Tensor) -> Levels:
    words = blocks[:, 66:98].contiguous().view(torch.int32)  # [N, 8]
    scales = half_at(blocks, 0).float() * (0.5 + (words >> 28 & 15).float()) * 0.5
    return _signed("IQ3_XXS", blocks[:, 2:66].int(), _signs(words), scales)


def iq3_s(blocks: Tensor) -> Levels:
    high = (blocks[:, 66:74, None] >> _BITS & 1).flatten(1)  # [N, 64]
    entries = blocks[:, 2:66].int() | high.int() << 8
    scales = half_at(blocks, 0).float() * (1 + 2 * _pairs(blocks[:, 106:110]))
    return _signed("IQ3_S", entries, blocks[:, 74:106], scales)


def iq2_xxs(blocks: Tensor) -> Levels:
    both = blocks[:, 2:66].view(-1, 8, 8)  # of 32 weights four entries, then their signs and scale
    words = both[:, :, 4:].contiguous().view(torch.int32).flatten(1)
    scales = half_at(blocks, 0).float() * (0.5 + (words >> 28 & 15).float()) * 0.25
    return _signed("IQ2_XXS", both[:, :, :4].flatten(1).int(), _signs(words), scales)


def iq2_xs(blocks: Tensor) -> Levels:
    words = blocks[:, 2:66].contiguous().view(torch.int16).int()  # [N, 32]
    signs = _sign_table()[words >> 9 & 127]
    scales = half_at(blocks, 0).float() * (0.5 + _pairs(blocks[:, 66:74])) * 0.25
    return _signed("IQ2_XS", words & 511, signs, scales)


def iq2_s(blocks: Tensor) -> Levels:
    entries = blocks[:, 2:34].int() | (_twos(blocks[:, 66:74]) << 8)
    scales = half_at(blocks, 0).float() * (0.5 + _pairs(blocks[:, 74:82])) * 0.25
    return _signed("IQ2_S", entries, blocks[:, 34:66], scales)


def iq1_s(blocks: Tensor) -> Levels:
    words = blocks[:, 34:50].contiguous().view(torch.int16).int()  # [N, 8]
    high = (words[:, :, None] >> torch.arange(0, 12, 3, dtype=torch.int32) & 7).flatten(1)
    moved = _grid("IQ1_S")[blocks[:, 2:34].int() | high << 8].view(-1, 8, 32) + 1
    levels = moved + 3 * (words >> 15 & 1)[:, :, None].to(torch.int8)
    scales = half_at(blocks, 0).float() * (2 * (words >> 12 & 7) + 1)
    return Levels(levels.to(torch.uint8), scales / 8, bits=4, table=_EIGHTHS)


def iq1_m(blocks: Tensor) -> Levels:
    words = blocks[:, 48:56].contiguous().view(torch.int16).int()  # [N, 4]: twelve bits of scales, four of `whole`
    bits = (words >> 12 & 15) << torch.arange(0, 16, 4, dtype=torch.int32)
    whole = bits.sum(1, keepdim=True).to(torch.int16).view(torch.float16).float()
    threes = words[:, :, None] >> torch.arange(0, 12, 3, dtype=torch.int32) & 7
    high = (blocks[:, 32:48, None] >> torch.tensor([0, 4], dtype=torch.uint8) & 15).flatten(1).int()  # [N, 32]
    steps = _grid("IQ1_M")[blocks[:, :32].int() | (high & 7) << 8]  # [N, 32, 8]
    levels = 8 * steps + (1 - 2 * (high >> 3))[:, :, None].to(torch.int8)
    return Levels(levels.view(-1, 16, 16), whole * (2 * threes.flatten(1) + 1) / 8)


_EIGHTHS = (-7, 1, 9, -9, -1, 7, *[0] * 10)
"""Eight times the weights of IQ1_S: -1, 0 and 1, and an eighth more, or less."""


def _signed(kind: str, entries: Tensor, signs: Tensor, scales: Tensor) -> Levels:
    """Weights of the grid's `entries` [N, E]; each bit of `signs` uint8 [N, 32], if it is set, makes one negative."""
    negative = (signs[:, :, None] >> _BITS & 1).view(len(entries), -1, 256 // scales.shape[1])
    sizes, indices = _sizes(kind), _indices(kind)[entries].view(negative.shape)
    if negative.shape[-1] == 32:
        table = [*sizes, *[0] * (8 - len(sizes))]
        return Levels(indices + 8 * negative, scales, bits=4, table=(*table, *(-size for size in table)))
    whole = torch.tensor(sizes, dtype=torch.int8)[indices.int()]
    return Levels(torch.where(negative == 1, -whole, whole), scales)


def _signs(words: Tensor) -> Tensor:
    """The signs of 32 weights in each of `words` [N, 8]: uint8 [N, 32]."""
    return _sign_table()[words[:, :, None] >> _SEVENS & 127].flatten(1)


@cache
def _sign_table() -> Tensor:
    """The eighth sign of each seven makes the negative ones an even number."""
    sevens = torch.arange(128, dtype=torch.uint8)
    return sevens | (sevens[:, None] >> _BITS & 1).sum(1).to(torch.uint8) % 2 << 7


def _pairs(packed: Tensor) -> Tensor:
    """[N, B] → [N, 2 B]: the low half of each byte, then its high one."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)


def _twos(packed: Tensor) -> Tensor:
    """[N, B] → int32 [N, 4 B]: two bits each, the lowest first."""
    return (packed[:, :, None] >> torch.arange(0, 8, 2, dtype=torch.uint8) & 3).flatten(1).int()


def _sizes(kind: str) -> Sequence[int]:
    """What the weights of a grid may be, ascending."""
    import gguf.quants

    sizes: Sequence[int] = getattr(gguf.quants, kind).grid_map
    return sizes


@cache
def _grid(kind: str) -> Tensor:
    """The grid, int8 [entries, weights of each]."""
    import gguf.quants

    quant = getattr(gguf.quants, kind)
    quant.init_grid()
    return torch.from_numpy(quant.grid[0, 0]).to(torch.int8)


@cache
def _indices(kind: str) -> Tensor:
    """The same with indices into `_sizes`, uint8."""
    return torch.searchsorted(torch.tensor(_sizes(kind)), _grid(kind).long()).to(torch.uint8)
