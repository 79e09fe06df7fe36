"""The gated short convolutions of LFM2, which keep their last inputs and nothing else.

Source: `Lfm2ShortConv` in transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .layer import StateLayer
from .step import StateStep, Wave


class ShortConvolution(StateLayer):
    def __init__(self, layer: Any) -> None:
        super().__init__(layer.conv)
        self.in_proj, self.out_proj = layer.in_proj, layer.out_proj

    def forward(self, hidden_states: Tensor, **_: object) -> Tensor:
        """[1, T, E] → [1, T, E], with the slots of `step`."""
        result: Tensor = self.out_proj(self.read([self.in_proj(hidden_states[0])], self.step)[None])
        return result

    def mix(self, made: Sequence[Tensor], step: StateStep) -> Tensor:
        before, after, x = made[0].chunk(3, dim=-1)
        return after * self.convolve(before * x, step).to(x.dtype)

    def advance(self, made: Sequence[Tensor], waves: Sequence[Wave]) -> Tensor:
        before, after, x = made[0].chunk(3, dim=-1)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        self.convolve_pieces(x, waves, out, (before, after))
        return out
