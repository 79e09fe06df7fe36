"""RMSNorm in the plain decoder."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .structure import WIDE, epsilon_of, scale_of


class Norm:
    """RMSNorm: x / sqrt(mean(x²) + ε) · w. Concatenated with -x a row has mean zero, so layer_norm fits."""

    def __init__(self, module: Any) -> None:
        self.weight, self.epsilon = scale_of(module), epsilon_of(module)
        self._is_wide = type(module).__name__ in WIDE

    def __call__(self, x: Tensor) -> Tensor:
        size, weight = x.shape[-1], self.weight if self._is_wide else self.weight.to(x.dtype)
        if x.is_cuda:
            wide = x.to(weight.dtype)  # in which weights of `WIDE` are
            return functional.rms_norm(wide, (size,), weight, self.epsilon).to(x.dtype)
        both = torch.cat((x, -x), dim=-1)
        return (functional.layer_norm(both, (2 * size,), None, None, self.epsilon)[..., :size] * weight).to(x.dtype)


class NoNorm(Norm):
    """In the place of one, where a layer has none."""

    def __init__(self) -> None:
        self.weight, self.epsilon = torch.empty(0), 0.0

    def __call__(self, x: Tensor) -> Tensor:
        return x
