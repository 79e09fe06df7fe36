"""What weights are rounded to: levels by groups of 32 inputs, with scales that keep the error small.

int8 is level · scale, levels -127 to 127. int4 is (level - 8) · scale + zero, levels 0 to 15. Scales and zeros are
bfloat16 numbers whatever the weights' dtype, and are chosen before the levels, so that rounding them costs nothing. Of
several scales each group takes the one with the smallest sum of squared errors; int4's are fitted by least squares, as
in llama.cpp's `make_qkx2_quants` (ggml-quants.c).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from ...checkpoints.rounded import Rounded
from ...cpu.library import GROUP

_CHUNK = 1 << 18  # weights rounded at a time: what a pass over them reads and writes stays in the cache
_CUDA_CHUNK = 1 << 24  # on a GPU, whose operations are many and short
_TINY = 2.0**-100  # the smallest scale
_INT8_SCALES = 8  # that are tried: neighbouring bfloat16 numbers
_SPREADS = (13.5, 14.0, 14.5, 15.0, 15.5, 16.0, 17.0, 18.0)  # levels that a group's range is first divided into


def to_int8(weight: Tensor) -> Rounded:
    """Round a weight [O, I]."""
    return _by_chunks(weight, _int8)


def to_int4(weight: Tensor) -> Rounded:
    """Round a weight [O, I]."""
    return _by_chunks(weight, _int4)


def _by_chunks(weight: Tensor, fit: Callable[[Tensor], tuple[Tensor, ...]]) -> Rounded:
    """Apply `fit` to groups [R, G, 32] of a few rows at a time, zeros appended to the last group."""
    parts = []
    chunk = _CUDA_CHUNK if weight.is_cuda else _CHUNK
    for rows in weight.split(max(1, chunk // weight.shape[1])):  # type: ignore[no-untyped-call]
        whole = functional.pad(rows.float(), (0, -weight.shape[1] % GROUP))
        levels, *factors = fit(whole.view(len(rows), -1, GROUP))
        parts.append((levels.to(torch.int8).flatten(1)[:, : weight.shape[1]], *(one.bfloat16() for one in factors)))
    levels, scales, *zeros = (torch.cat(each) for each in zip(*parts, strict=True))
    return Rounded.int4(levels, scales, *zeros) if zeros else Rounded(levels, scales)


def _int8(groups: Tensor) -> tuple[Tensor, Tensor]:
    scales = fit_int8(groups)
    return int8_levels(groups, scales), scales[..., 0]


def _int4(groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    scales, zeros = fit_int4(groups)
    return int4_levels(groups, scales, zeros), scales[..., 0], zeros[..., 0]


def fit_int8(groups: Tensor) -> Tensor:
    """Scales [..., 1] of groups [..., 32], for the least sum of squared errors.

    The smallest scale that reaches the largest weight is not always the best.
    """
    least = _up((groups.abs().amax(-1, keepdim=True) / 127).clamp(min=_TINY))
    scales, smallest = least, torch.full_like(least, torch.inf)
    for step in range(_INT8_SCALES):
        tried = (least.view(torch.int32) + (step << 16)).view(torch.float32)
        error = (groups / tried).round_().mul_(tried).sub_(groups).square_().sum(-1, keepdim=True)
        scales, smallest = scales.where(error >= smallest, tried), smallest.minimum(error)
    return scales


def int8_levels(groups: Tensor, scales: Tensor) -> Tensor:
    """As `int4_levels`."""
    return (groups / scales).round_().clamp_(-127, 127)


def int4_levels(groups: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """The nearest levels of groups [..., 32] or of single weights [..., 1]; scales and zeros are [..., 1]."""
    return ((groups - zeros) / scales).round_().add_(8).clamp_(0, 15)


def fit_int4(groups: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Scales and zeros [..., 1] of groups [..., 32], for the least sum of squared errors times `weights` [32]."""
    weights = groups.new_ones(groups.shape[-1]) if weights is None else weights
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    middle, reach = (low + high) / 2, (high - low).clamp(min=_TINY)
    total, mean = weights.sum(), (groups @ weights)[..., None] / weights.sum()
    best = torch.full_like(low, torch.inf), low, low

    def consider(scales: Tensor, zeros: Tensor) -> None:
        nonlocal best
        scales, zeros = scales.clamp(min=_TINY).bfloat16().float(), zeros.bfloat16().float()
        found = int4_levels(groups, scales, zeros).sub_(8).mul_(scales).add_(zeros)
        error = (found.sub_(groups).square_() @ weights)[..., None]
        known = error >= best[0]
        best = best[0].minimum(error), best[1].where(known, scales), best[2].where(known, zeros)

    def regress(levels: Tensor) -> None:
        """Consider the line through the weights over their levels."""
        average = (levels @ weights)[..., None] / total
        levels = levels - average
        variance = (levels.square() @ weights)[..., None]
        scales = ((levels * groups) @ weights)[..., None] / variance.clamp(min=_TINY)
        scales = scales.where(variance > 0, reach / 15)
        consider(scales, mean - scales * (average - 8))

    consider(reach / 15, low + 8 * (reach / 15))
    for spread in _SPREADS:
        regress(((groups - middle) * (spread / reach) + 7.5).round_().clamp_(0, 15))
    regress(int4_levels(groups, best[1], best[2]))
    return best[1], best[2]


def _up(numbers: Tensor) -> Tensor:
    """The next bfloat16 numbers, in float32, that are no smaller than these positive ones."""
    return ((numbers.contiguous().view(torch.int32) + 0xFFFF) & ~0xFFFF).view(torch.float32)
