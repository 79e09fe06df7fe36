"""What blocks of a GGUF file hold: levels with scales."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..rounded import looked_up


class Levels(NamedTuple):
    """Blocks of weights, level by level: (level - middle) * scale + zero, or that of the number in a table.

    Levels are [N, G, S], of 4 bits or up to 8; scales and zeros [N, G], as the file has them or in float32.
    """

    levels: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    bits: int = 8
    middle: int = 0
    table: tuple[int, ...] = ()

    @property
    def numbers(self) -> Tensor:
        """What the levels stand for, float32 [N, G * S], by the arithmetic of the package `gguf`."""
        whole = looked_up(self.levels, self.table) if self.table else self.levels
        numbers = (whole.float() - self.middle) * self.scales.float()[..., None]
        return (numbers if self.zeros is None else numbers + self.zeros.float()[..., None]).flatten(1)

    def times(self, factor: float | None) -> Levels:
        """The same with all numbers multiplied by the factor, if there is one."""
        if factor is None:
            return self
        zeros = None if self.zeros is None else self.zeros.float() * factor
        return self._replace(scales=self.scales.float() * factor, zeros=zeros)


def half_at(blocks: Tensor, at: int) -> Tensor:
    """The 16-bit float at byte `at` of each block, [N, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16)
