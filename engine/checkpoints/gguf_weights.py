"""Expands the weights of GGUF files, each when it is asked for.

Source of the blocks' layouts: ggml's `ggml-common.h` and `ggml-quants.c`. The arithmetic is that of the package `gguf`,
operation by operation, in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from .gguf import BLOCKS, Gguf
from .gguf_models import GgufWeight, weights_of
from .lazy import LazyWeight

_CHUNK = 1 << 18  # weights that are expanded at a time, so that what is between stays in the cache
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def lazy_weights(gguf: Gguf, dtype: torch.dtype) -> dict[str, LazyWeight]:
    """All weights by transformers' names; quantised ones become `dtype`, others keep the file's."""

    @cache
    def content(path: Path) -> Tensor:
        return torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)

    def lazy(weight: GgufWeight) -> LazyWeight:
        return LazyWeight(lambda: _read(weight, content(weight.tensor.path), dtype))

    return {name: lazy(weight) for name, weight in weights_of(gguf).items()}


def _read(weight: GgufWeight, content: Tensor, dtype: torch.dtype) -> Tensor:
    tensor = weight.tensor
    data = content[tensor.start : tensor.start + tensor.nbytes]
    if weight.expert is not None:
        data = data.view(tensor.shape[0], -1)[weight.expert]
    if weight.heads is not None:
        data = _by_halves(data.view(weight.shape[0], -1), weight.heads)
    expanded = dequantize(data, tensor.type, dtype).view(weight.shape)
    return expanded + weight.offset if weight.offset else expanded


def _by_halves(rows: Tensor, heads: int) -> Tensor:
    """Undo llama.cpp's order of the rows of queries and keys, where those that rotate together are neighbours."""
    return rows.view(heads, -1, 2, rows.shape[1]).transpose(1, 2).reshape(rows.shape)


def dequantize(data: Tensor, kind: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """The numbers [N] that bytes of the type `kind` stand for; those that are no blocks keep their own dtype."""
    if kind in _PLAIN:
        return data.clone().view(_PLAIN[kind])
    weights, size = BLOCKS[kind]
    blocks = data.view(-1, size)
    result = torch.empty(len(blocks), weights, dtype=dtype)
    step = _CHUNK // weights
    for start in range(0, len(blocks), step):
        result[start : start + step] = _EXPAND[kind](blocks[start : start + step])
    return result.flatten()


def _half(blocks: Tensor, at: int) -> Tensor:
    """The 16-bit float at byte `at` of each block, as float32 [N, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """[N, B] → [N, 2 B]: the low halves of all bytes, then the high ones."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)


def _bits(packed: Tensor) -> Tensor:
    """[N, 4] → [N, 32], lowest bit first."""
    return (packed[:, :, None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(1)


def _q4_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:]).float() - 8)


def _q4_1(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * _nibbles(blocks[:, 4:]) + _half(blocks, 2)


def _q5_0(blocks: Tensor) -> Tensor:
    levels = _nibbles(blocks[:, 6:]) | _bits(blocks[:, 2:6]) << 4
    return _half(blocks, 0) * (levels.float() - 16)


def _q5_1(blocks: Tensor) -> Tensor:
    levels = _nibbles(blocks[:, 8:]) | _bits(blocks[:, 4:8]) << 4
    return _half(blocks, 0) * levels + _half(blocks, 2)


def _q8_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * blocks[:, 2:].view(torch.int8)


def _scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The scales and minima [N, 8, 1] of the groups of 32 in a block of 256; six bits each, in twelve bytes."""
    first, second, third = blocks[:, 4:16].view(-1, 3, 4).unbind(1)
    scales = torch.cat((first & 63, third & 15 | first >> 2 & 48), dim=-1)
    minima = torch.cat((second & 63, third >> 4 | second >> 2 & 48), dim=-1)
    return (_half(blocks, 0) * scales)[..., None], (_half(blocks, 2) * minima)[..., None]


def _q4_k(blocks: Tensor) -> Tensor:
    scales, minima = _scales(blocks)
    levels = _nibbles(blocks[:, 16:].view(-1, 4, 32)).view(-1, 8, 32)
    return (scales * levels - minima).flatten(1)


def _q5_k(blocks: Tensor) -> Tensor:
    scales, minima = _scales(blocks)
    high = blocks[:, None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1  # [N, 8, 32]
    levels = _nibbles(blocks[:, 48:].view(-1, 4, 32)).view(-1, 8, 32) | high << 4
    return (scales * levels - minima).flatten(1)


def _q6_k(blocks: Tensor) -> Tensor:
    low = _nibbles(blocks[:, :128].view(-1, 2, 64)).view(-1, 2, 4, 32)
    high = blocks[:, 128:192].view(-1, 2, 1, 32) >> torch.arange(0, 8, 2, dtype=torch.uint8)[:, None] & 3
    levels = (low | high << 4).view(-1, 16, 16).float() - 32
    scales = _half(blocks, 208) * blocks[:, 192:208].view(torch.int8)  # [N, 16]
    return (scales[..., None] * levels).flatten(1)


_EXPAND: dict[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
