"""Convert weights to the layouts of the compiled kernels and back: blocks of 64 outputs.

`product.h` defines the layouts. oneDNN chooses its own for each CPU; nothing here depends on it.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor
from torch.nn import functional

from .library import BLOCK, GROUP, INT4, PLAIN, SIX, UNEVEN, Product, span

_TRIED = torch.arange(127, 112, -2)  # the levels that the largest input of a group may get, as in levels.h


def padded(tensor: Tensor, rows: int, columns: int) -> Tensor:
    """The tensor with zeros appended up to multiples of `rows` and `columns`."""
    return functional.pad(tensor, (0, -tensor.shape[1] % columns, 0, -len(tensor) % rows))


def paired(weight: Tensor) -> Tensor:
    """[O, I] → [O / 64, I / 2, 64, 2]; float32 → [O / 64, I / 2, 2, 64]. O and I are padded with zeros."""
    blocks = _pairs(weight, weight.dtype)
    return (blocks if weight.dtype == torch.bfloat16 else blocks.transpose(2, 3)).contiguous()


def fours(levels: Tensor) -> Tensor:
    """Levels [O, I] of one byte → [O / 64, I / 4, 64, 4], zeros behind O and I: INT8 and FINE."""
    whole = padded(levels, BLOCK, GROUP).contiguous()
    words = whole.view(torch.int32).view(len(whole) // BLOCK, BLOCK, -1)  # torch moves words faster than four bytes
    return words.transpose(1, 2).contiguous().view(levels.dtype).view(len(words), -1, BLOCK, 4)


def nibbles(levels: Tensor) -> Tensor:
    """Levels 0 to 15, [O, I] → [O / 64, I / 4, 2, 64], two to a byte: INT4 and UNEVEN."""
    low, high = fours(levels.to(torch.uint8)).view(-1, -(-levels.shape[1] // GROUP) * GROUP // 4, 2, 2, 64).unbind(3)
    return low | high << 4


def grouped(factors: Tensor) -> Tensor:
    """Scales, or scales and zeros, [O, G, 1 or 2] → [O / 64, G, 1 or 2, 64]."""
    whole = padded(factors.flatten(1), BLOCK, 1).view(-1, BLOCK, *factors.shape[1:])
    return whole.permute(0, 2, 3, 1).contiguous()


def numbers(product: Product, dtype: torch.dtype, start: int, stop: int) -> Tensor:
    """The weight that the kernels multiply by, in float32: outputs of blocks `start` to `stop`, [64 · blocks, I]."""
    if product.rest is not None:
        own = (product.outputs - product.rest.outputs) // BLOCK
        both = [_numbers(product, dtype, start, min(stop, own))] if start < own else []
        both += [numbers(product.rest, dtype, max(start - own, 0), stop - own)] if stop > own else []
        return torch.cat(both)
    return _numbers(product, dtype, start, stop)


def _numbers(product: Product, dtype: torch.dtype, start: int, stop: int) -> Tensor:
    """Of blocks of its own."""
    weight, scales, _ = product.tensors
    assert weight is not None
    if product.kind == PLAIN:
        count = -(-product.inputs // _unit(dtype)) * _unit(dtype) // 2
        shape = (BLOCK, 2) if dtype == torch.bfloat16 else (2, BLOCK)
        lines = _memory(weight, dtype).view(-1, count, *shape)[start:stop].float()
        pairs = lines if dtype == torch.bfloat16 else lines.transpose(2, 3)
        return pairs.transpose(1, 2).flatten(2).flatten(0, 1)[:, : product.inputs]
    assert scales is not None
    factors = scales[start:stop]
    factors = _multiplied(factors) if factors.dtype == torch.uint8 else factors.float()
    levels, groups = weight[start:stop], factors.permute(2, 0, 3, 1).flatten(1, 2)  # [1 or 2, O, G]
    if product.kind == SIX:
        upper = torch.stack([levels[:, :, 2] >> 2 * vector & 3 for vector in range(4)], dim=2)
        levels = (_unpacked(levels[:, :, :2]) | upper.flatten(2) << 4).to(torch.int8) - 32
    if product.kind in (INT4, UNEVEN):
        levels = _unpacked(levels).to(torch.int8)
        table = torch.tensor(list(product.table), dtype=torch.int8)
        levels = table[levels.int()] if product.kind == UNEVEN else levels - product.middle
    rows = levels.view(len(levels), -1, BLOCK, 4).transpose(1, 2).reshape(*groups.shape[1:], -1).float()
    exact = rows.mul_(groups[0, :, :, None])
    return (exact.add_(groups[1, :, :, None]) if product.has_zeros else exact).flatten(1)[:, : product.inputs]


def rounded_inputs(product: Product, x: Tensor, dtype: torch.dtype, is_fitted: bool = True) -> Tensor:
    """The inputs [T, I] that the kernels multiply by the weight, in float32: `fit_row` (levels.h) rounds them, and
    `quantize_row` those of a layer's later products, not `is_fitted`, which are of the dtype before."""
    if product.kind == PLAIN or dtype != torch.bfloat16:
        return x.float()
    exact, tried = (x, _TRIED) if is_fitted else (x.to(dtype), _TRIED[:1])
    groups = functional.pad(exact.float(), (0, -x.shape[1] % GROUP)).view(len(x), -1, 1, GROUP)
    steps = groups.abs().amax(-1, keepdim=True).clamp(min=1e-30) / tried[:, None]
    tried = (groups / steps).round_().mul_(steps)  # [T, G, tries, GROUP]
    best = (tried - groups).square_().sum(-1).argmin(-1)
    rounded = tried.gather(2, best[..., None, None].expand(-1, -1, 1, GROUP))
    return rounded.flatten(1)[:, : x.shape[1]]


def _pairs(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """[O, I] → [O / 64, I / 2, 64, 2], a view unless it needs padding."""
    whole = padded(weight, BLOCK, _unit(dtype))
    return whole.view(len(whole) // BLOCK, BLOCK, -1, 2).transpose(1, 2)


def _unpacked(halves: Tensor) -> Tensor:
    """[..., 2, 64] → [..., 256]"""
    return torch.stack((halves & 15, halves >> 4), dim=-2).flatten(-3)


def _multiplied(scales: Tensor) -> Tensor:
    """BYTES → [O / 64, G, 1 or 2, 64], float32."""
    whole, numbers = scales[..., : 2 * BLOCK].contiguous().view(torch.float16), scales[..., 2 * BLOCK :]
    each = numbers.contiguous().view(torch.int8).view(*numbers.shape[:3], -1, BLOCK)
    return (each * whole.float()[..., None, :]).transpose(2, 3).flatten(1, 2)


def _unit(dtype: torch.dtype) -> int:
    """The number of inputs is padded to a multiple of this."""
    return 32 if dtype == torch.bfloat16 else 16


def _memory(weight: Tensor, dtype: torch.dtype) -> Tensor:
    if not weight.is_mkldnn:
        return weight
    address, size = span(weight)
    memory: Tensor = torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=dtype)
    return memory
