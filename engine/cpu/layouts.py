"""How weights lie in memory for the compiled kernels, and back: blocks of 64 outputs, and in each pairs of inputs.

The source of truth is `kernels.c`. Nothing here is of oneDNN's making, which lays weights out as it likes on each CPU.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor
from torch.nn import functional

from .library import BLOCK, INT4, INT8, PLAIN, Product, span


def padded(tensor: Tensor, rows: int, columns: int) -> Tensor:
    """Zeros behind, up to multiples."""
    return functional.pad(tensor, (0, -tensor.shape[1] % columns, 0, -len(tensor) % rows))


def paired(weight: Tensor) -> Tensor:
    """[O, I] → [O / 64, I / 2, 64, 2]; float32 [O / 64, I / 2, 2, 64]. Zeros behind O and I."""
    blocks = _pairs(weight, weight.dtype)
    return (blocks if weight.dtype == torch.bfloat16 else blocks.transpose(2, 3)).contiguous()


def interleaved(levels: Tensor, dtype: torch.dtype) -> Tensor:
    """[O, I] → [O / 64, I / 2, 2, 64]: pairs of inputs, 32 outputs and 32 more, as `pairs` in `kernels.c` has them.

    Its unpacking takes 8 bytes in turn for the first 16 outputs and the second.
    """
    blocks = _pairs(levels, dtype)
    halves = blocks.reshape(*blocks.shape[:2], 2, 2, 4, 8).transpose(-3, -2)
    return halves.reshape(*blocks.shape[:2], 2, BLOCK).contiguous()


def numbers(product: Product, dtype: torch.dtype, start: int, stop: int) -> Tensor:
    """What the kernels multiply by, in float32: the outputs of the blocks `start` to `stop`, [64 (stop - start), I]."""
    weight, scales, _ = product.tensors
    assert weight is not None
    if product.kind == PLAIN:
        count = -(-product.inputs // _unit(dtype)) * _unit(dtype) // 2
        shape = (BLOCK, 2) if dtype == torch.bfloat16 else (2, BLOCK)
        lines = _memory(weight, dtype).view(-1, count, *shape)[start:stop].float()
        pairs = lines if dtype == torch.bfloat16 else lines.transpose(2, 3)
        return pairs.transpose(1, 2).flatten(2).flatten(0, 1)[:, : product.inputs]
    assert scales is not None
    packed = weight[start:stop]
    if product.kind == INT8:
        levels = _spread(packed)
        signed = (levels & 127).float() * (1 - 2 * (levels >> 7).float())
        return signed[:, : product.inputs] * scales.view(-1, BLOCK)[start:stop].reshape(-1, 1)
    assert product.kind == INT4
    levels = _spread(torch.stack((packed & 15, packed >> 4), dim=2)).float()
    groups = scales[start:stop].float().transpose(1, 3).flatten(0, 1)[..., None]  # [O, 2, G, 1]
    return ((levels.view(len(levels), groups.shape[2], -1) - 8) * groups[:, 0] + groups[:, 1]).flatten(1)


def _pairs(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """[O / 64, I / 2, 64, 2], a view where nothing has to be padded."""
    whole = padded(weight, BLOCK, _unit(dtype))
    return whole.view(len(whole) // BLOCK, BLOCK, -1, 2).transpose(1, 2)


def _spread(packed: Tensor) -> Tensor:
    """What `interleaved` was made of, [O, I]."""
    halves = packed.reshape(*packed.shape[:2], 2, 4, 2, 8).transpose(-3, -2)
    return halves.reshape(*packed.shape[:2], BLOCK, 2).transpose(1, 2).flatten(2).flatten(0, 1)


def _unit(dtype: torch.dtype) -> int:
    """Inputs are padded to multiples of it."""
    return 32 if dtype == torch.bfloat16 else 16


def _memory(weight: Tensor, dtype: torch.dtype) -> Tensor:
    if not weight.is_mkldnn:
        return weight
    address, size = span(weight)
    memory: Tensor = torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=dtype)
    return memory
