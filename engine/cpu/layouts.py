"""Convert weights to the layout of the compiled kernels and back: blocks of 64 outputs, and in each, pairs of inputs.

`kernels.c` defines the layout. oneDNN chooses its own for each CPU; nothing here depends on it.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor
from torch.nn import functional

from .library import BLOCK, GROUP, INT4, INT8, PLAIN, Product, span


def padded(tensor: Tensor, rows: int, columns: int) -> Tensor:
    """The tensor with zeros appended up to multiples of `rows` and `columns`."""
    return functional.pad(tensor, (0, -tensor.shape[1] % columns, 0, -len(tensor) % rows))


def paired(weight: Tensor) -> Tensor:
    """[O, I] → [O / 64, I / 2, 64, 2]; float32 → [O / 64, I / 2, 2, 64]. O and I are padded with zeros."""
    blocks = _pairs(weight, weight.dtype)
    return (blocks if weight.dtype == torch.bfloat16 else blocks.transpose(2, 3)).contiguous()


def interleaved(levels: Tensor, dtype: torch.dtype) -> Tensor:
    """[O, I] → [O / 64, I / 2, 2, 64]: pairs of inputs, 32 outputs and 32 more, as `dequantize_pair` (kernels.c) reads.

    Its `interleave_bytes` takes 8 bytes in turn for the first 16 outputs and the second.
    """
    blocks = _pairs(levels, dtype)
    halves = blocks.reshape(*blocks.shape[:2], 2, 2, 4, 8).transpose(-3, -2)
    return halves.reshape(*blocks.shape[:2], 2, BLOCK).contiguous()


def numbers(product: Product, dtype: torch.dtype, start: int, stop: int) -> Tensor:
    """The weight that the kernels multiply by, in float32: outputs of blocks `start` to `stop`, [64 · blocks, I]."""
    weight, scales, _ = product.tensors
    assert weight is not None
    if product.kind == PLAIN:
        count = -(-product.inputs // _unit(dtype)) * _unit(dtype) // 2
        shape = (BLOCK, 2) if dtype == torch.bfloat16 else (2, BLOCK)
        lines = _memory(weight, dtype).view(-1, count, *shape)[start:stop].float()
        pairs = lines if dtype == torch.bfloat16 else lines.transpose(2, 3)
        return pairs.transpose(1, 2).flatten(2).flatten(0, 1)[:, : product.inputs]
    assert scales is not None
    packed, groups = weight[start:stop], scales[start:stop].float().transpose(1, 3).flatten(0, 1)  # [O, 1 or 2, G]
    if product.kind == INT8:
        levels = _spread(packed)
        signed = (levels & 127).float() * (1 - 2 * (levels >> 7).float())
        factors = groups[:, 0].repeat_interleave(GROUP, dim=1)
        return signed[:, : product.inputs] * factors[:, : product.inputs]
    assert product.kind == INT4
    levels = _spread(torch.stack((packed & 15, packed >> 4), dim=2)).float()
    return ((levels.view(len(levels), -1, GROUP) - 8) * groups[:, 0, :, None] + groups[:, 1, :, None]).flatten(1)


def _pairs(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """[O, I] → [O / 64, I / 2, 64, 2], a view unless it needs padding."""
    whole = padded(weight, BLOCK, _unit(dtype))
    return whole.view(len(whole) // BLOCK, BLOCK, -1, 2).transpose(1, 2)


def _spread(packed: Tensor) -> Tensor:
    """Undo `interleaved`: [O, I]."""
    halves = packed.reshape(*packed.shape[:2], 2, 4, 2, 8).transpose(-3, -2)
    return halves.reshape(*packed.shape[:2], BLOCK, 2).transpose(1, 2).flatten(2).flatten(0, 1)


def _unit(dtype: torch.dtype) -> int:
    """The number of inputs is padded to a multiple of this."""
    return 32 if dtype == torch.bfloat16 else 16


def _memory(weight: Tensor, dtype: torch.dtype) -> Tensor:
    if not weight.is_mkldnn:
        return weight
    address, size = span(weight)
    memory: Tensor = torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=dtype)
    return memory
