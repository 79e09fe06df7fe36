"""MXFP4: numbers of four bits by groups of 32, with a power of two for each group.

Twice the numbers are whole; so are levels, and scales half of the powers of two. Source: the OCP's specification of
microscaling formats, 1.0.
"""

from __future__ import annotations

import torch
from torch import Tensor

DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the numbers that the sixteen levels stand for; the ninth is -0."""


def half_powers_of_2(exponents: Tensor) -> Tensor:
    """2 to the power of exponent - 128, of bytes; bfloat16, which has all of these."""
    whole = exponents.int()
    return torch.where(whole < 2, 0x200000 << whole, whole - 1 << 23).view(torch.float32).bfloat16()
