"""Blocks of quantised weights as levels: what their bytes hold, of each type.

Source of the layouts: ggml's `ggml-common.h` and `ggml-quants.c`. The arithmetic is that of the package `gguf`, in
float32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from ..mxfp4 import DOUBLED, half_powers_of_2
from ..rounded import looked_up
from .grids import iq1_m, iq1_s, iq2_s, iq2_xs, iq2_xxs, iq3_s, iq3_xxs
from .levels import Levels, half_at

IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""What the sixteen levels of IQ4_NL and IQ4_XS stand for."""


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


def _nvfp4(blocks: Tensor) -> Levels:
    levels = _nibbles(blocks[:, 4:].reshape(-1, 8)).view(-1, 4, 16)
    return Levels(looked_up(levels, DOUBLED), _halves_of_e4m3()[blocks[:, :4].int()])


@cache
def _halves_of_e4m3() -> Tensor:
    """Half of what each byte stands for in NVFP4: the number of its lower seven bits, and 0 for 127."""
    numbers = torch.arange(128, dtype=torch.uint8).view(torch.float8_e4m3fn).float().nan_to_num(480)
    both = numbers.repeat(2)
    both[127] = 0
    return both / 2


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


LEVELS: dict[str, Callable[[Tensor], Levels]] = {
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
    "NVFP4": _nvfp4,
}
"""By the name of a type, what reads blocks of it: uint8 [N, bytes of a block]."""
