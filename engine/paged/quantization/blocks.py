"""Packs weights for the compiled kernels straight from the blocks of a GGUF file, or of MXFP4."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import reduce
from itertools import groupby
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from ...checkpoints.gguf.blocks import IQ4
from ...checkpoints.mxfp4 import DOUBLED
from ...checkpoints.rounded import Blocks
from ...cpu.library import BLOCK, GROUP, INT4, INT8, SIX, UNEVEN, WIDE_GROUPS, Kernels, Product
from ...cpu.process import expect_large_pages
from ...cpu.rows import TYPES, Rows
from ..decoding.linear import CompiledLinear

_ARENA = 64 << 20  # bytes of memory that small weights share, so that it lies in large pages
_SMALL = 8 << 20


class _Form(NamedTuple):
    """What a product of one type is: its kind, the middle of its levels, and its scales."""

    kind: int
    middle: int
    has_zeros: bool
    scale_type: torch.dtype
    table: tuple[int, ...] = ()


_FORMS = {
    "Q4_0": _Form(INT4, 8, False, torch.float16),
    "Q4_1": _Form(INT4, 0, True, torch.float16),
    "Q5_0": _Form(INT8, 0, False, torch.float16),
    "Q5_1": _Form(INT8, 0, True, torch.float16),
    "Q8_0": _Form(INT8, 0, False, torch.float16),
    "Q4_K": _Form(INT4, 0, True, torch.uint8),
    "Q5_K": _Form(INT8, 0, True, torch.uint8),
    "Q6_K": _Form(SIX, 0, False, torch.uint8),
    "IQ4_NL": _Form(UNEVEN, 0, False, torch.float16, IQ4),
    "MXFP4": _Form(UNEVEN, 0, False, torch.bfloat16, DOUBLED),
    "MXFP4_PAIRS": _Form(UNEVEN, 0, False, torch.bfloat16, DOUBLED),
}


class Packer:
    """Makes products of blocks; small ones share memory."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._arena, self._taken = torch.empty(0, dtype=torch.uint8), 0

    def pack(self, parts: Sequence[Blocks], bias: Tensor | None, dtype: torch.dtype) -> CompiledLinear | None:
        """One product of weights whose outputs are side by side, each in its own form, for activations of `dtype`; None
        for other types, and where a part other than the last ends within 64 outputs."""
        is_known = all(part.kind in _FORMS for part in parts) and self._kernels.take(dtype, parts[0].inputs)
        if not is_known or any(len(part.data) % BLOCK for part in parts[:-1]):
            return None
        runs = [list(run) for _, run in groupby(parts, key=lambda part: _FORMS[part.kind])]
        made = [self._run(run, None if number else bias, dtype) for number, run in enumerate(runs)]
        product = reduce(lambda behind, one: one.followed_by(behind), reversed(made))
        weights = [tensor for one in product.parts for tensor in one.tensors[:2] if tensor is not None]
        return CompiledLinear(product, weights[0], sum(tensor.nbytes for tensor in weights), self._kernels)

    def _run(self, parts: Sequence[Blocks], bias: Tensor | None, dtype: torch.dtype) -> Product:
        """That of weights of one form."""
        kind, middle, has_zeros, scale_type, table = _FORMS[parts[0].kind]
        scale_type = torch.float32 if dtype == torch.float32 and scale_type != torch.uint8 else scale_type
        outputs, inputs = sum(len(part.data) for part in parts), parts[0].inputs
        blocks, groups = -(-outputs // BLOCK), inputs // GROUP
        lines = {INT4: 2, UNEVEN: 2, SIX: 3}.get(kind, 4)  # of 64 bytes, for four inputs of a block
        weight = self._memory(blocks * groups * GROUP // 4 * lines * BLOCK)
        num_scales = 2 if kind == SIX else 1  # of a group
        shape = blocks, groups * num_scales, 1 + has_zeros, BLOCK
        if scale_type == torch.uint8:
            shape = blocks, groups // WIDE_GROUPS, 1 + has_zeros, (2 + WIDE_GROUPS * num_scales) * BLOCK
        scales = self._memory(prod(shape) * scale_type.itemsize)
        levels = weight.view(blocks, -1, lines, BLOCK)
        if lines == 4:
            levels = weight.view(torch.int8).view(blocks, -1, BLOCK, 4)
        product = Product.of((outputs, inputs), kind, levels, scales.view(scale_type).view(shape), bias, middle, table)
        first = 0
        for part in parts:
            data = part.data.contiguous()
            given = TYPES[part.kind], data.data_ptr(), data.shape[1], len(data), first
            own = (ctypes.c_int8 * 16)(*_FORMS[part.kind].table)
            self._kernels.library.pack_blocks(*given, ctypes.byref(product), own, torch.get_num_threads())
            first += len(data)
        return product

    def _memory(self, size: int) -> Tensor:
        if size > _SMALL:
            return _large(size)
        if self._taken + size > len(self._arena):
            self._arena, self._taken = _large(_ARENA), 0
        start, self._taken = self._taken, self._taken + -(-size // BLOCK) * BLOCK
        return self._arena[start : start + size]


def _large(size: int) -> Tensor:
    memory = torch.empty(size, dtype=torch.uint8)
    expect_large_pages(memory.data_ptr(), size)
    return memory


def rows_of(table: Blocks, kernels: Kernels) -> Rows:
    """What looks up the rows of a table in a copy of its blocks: a file that is mapped may be replaced."""
    return Rows(kernels, table.kind, table.data.clone(), table.inputs, _FORMS[table.kind].table)
