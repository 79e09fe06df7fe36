"""Numbers of four bits with a point (E2M1), by groups: 32 with a power of two in MXFP4, 16 with a number of eight bits
(E4M3) in NVFP4, where a whole weight has a factor besides.

Twice the numbers are whole; so are levels, and scales half of what the groups have. Source: the OCP's specification of
microscaling formats, 1.0.
"""

from __future__ import annotations

import torch
from torch import Tensor

DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the numbers that the sixteen levels stand for; the ninth is -0."""


def numbers_of(levels: Tensor) -> Tensor:
    """What levels stand for, float32; the ninth is -0."""
    numbers = torch.tensor(DOUBLED, dtype=torch.float32).copysign(7.5 - torch.arange(16)) / 2
    return numbers[levels.int()]


def pairs(packed: Tensor) -> Tensor:
    """[O, …] bytes → [O, 2 B], of each byte the low half first."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)


def half_powers_of_2(exponents: Tensor) -> Tensor:
    """2 to the power of exponent - 128, of bytes; bfloat16, which has all of these."""
    whole = exponents.int()
    return torch.where(whole < 2, 0x200000 << whole, whole - 1 << 23).view(torch.float32).bfloat16()
