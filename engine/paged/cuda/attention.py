"""Attention on CUDA: Triton kernels that read keys and values in the pools, by block table.

One kernel stores a step's keys and values; one attends for decoding rows, each split along its keys so that even few
rows fill the device (https://pytorch.org/blog/flash-decoding); one attends for prompts, a tile of queries at a time.
Scores and sums are float32. torch's own kernel takes neither blocks below 256 tokens nor soft caps, sinks or float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor
from triton import next_power_of_2

from ...transfer import upload
from ..attention import Rules
from ..kv.kv_cache import LayerSpec, PagePool
from ..packing import Ints, LayerGroup, PackedSegments
from . import kernels

_PROGRAMS = 512  # the approximate number of programs of a decoding step: several for each multiprocessor


@dataclass(frozen=True, slots=True)
class PagedStep:
    """One step of N sequences, the first `num_decoding` of one token each. `bounds` [N + 1] are the indices of each
    one's first query in the packed row, `lengths` [N] its number of keys, `tables` [N, P] its blocks, `tiles` [K, 2]
    the sequence and first query of each tile of a prompt, all int32; `slots` [T] are where to store the new keys and
    values. Each token of a prompt sees the keys before its number in `ends` [T], or, without these, up to its own."""

    slots: Tensor
    bounds: Tensor
    lengths: Tensor
    tables: Tensor
    tiles: Tensor
    num_decoding: int
    window: int | None
    ends: Tensor | None = None


class PagedAttention:
    """Attention by Triton kernels on one device, over pools of one dtype, with heads of at most `size` numbers."""

    def __init__(self, block_size: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.block_size, self._dtype, self._device = block_size, dtype, device
        # Tiles must fit into the shared memory of a small GPU, 99 KiB.
        wide = (dtype == torch.float32) + (size > 128)
        self._tile = 32 if dtype == torch.float32 else 64 if size > 128 else 128  # of queries
        self._columns = 64 >> wide  # keys
        self._warps = 4 if wide else 8

    def pool(self, spec: LayerSpec, num_blocks: int) -> PagePool:
        return PagePool(spec, num_blocks, self.block_size, self._dtype, self._device)

    def attend(
        self, step: PagedStep, pool: PagePool, query: Tensor, keys_values: Tensor | None, rules: Rules
    ) -> Tensor:
        """Store this step's keys and values, unless the pool has them, then attend. [Hq, T, D], [2 H, T, D] →
        [T, Hq · D]."""
        num_q_heads, num_tokens, size = query.shape
        num_kv_heads, padded = pool.keys.shape[2], next_power_of_2(size)
        mixed = query.new_empty((num_tokens, num_q_heads, size))
        pools, sinks, window = (pool.keys, pool.values), rules.sinks, step.window
        if keys_values is not None:
            strides, rows = keys_values.stride()[:2], next_power_of_2(2 * num_kv_heads)
            kernels.store[(num_tokens,)](keys_values, *strides, step.slots, *pools, num_kv_heads, size, rows, padded)
        tables = (step.lengths, step.tables, step.tables.stride(0))
        given = (query, *query.stride()[:2], *pools, *tables, mixed, sinks)
        rule = (rules.scaling * kernels.LOG2_E.value, rules.softcap, window)
        shape = (num_kv_heads, num_q_heads // num_kv_heads, size, padded, self.block_size)
        if count := step.num_decoding:
            splits = min(32, next_power_of_2(-(-_PROGRAMS // (count * num_kv_heads))))
            parts = query.new_empty((count, num_q_heads, splits, padded + 2), dtype=torch.float32)
            sizes = splits, max(16, next_power_of_2(num_q_heads // num_kv_heads)), self._columns
            kernels.decode[(count, num_kv_heads, splits)](*given, *rule, parts, *shape, *sizes)
            if splits > 1:
                combined = parts, step.lengths, mixed, sinks, window
                kernels.combine[(count, num_q_heads)](*combined, size, padded, splits, num_warps=1)
        if len(step.tiles):
            tiles, tile = (step.bounds, step.tiles, step.ends), (self._tile, self._columns)
            kernels.prefill[(len(step.tiles), num_q_heads)](*given, *rule, *tiles, *shape, *tile, num_warps=self._warps)
        return mixed.flatten(1)

    def pack_group(self, packed: PackedSegments, tables: Ints, slots: Ints, group: LayerGroup) -> PagedStep:
        counts = [len(segment.tokens) for segment in packed.segments]
        bounds = [0, *np.cumsum(counts).tolist()]
        num_decoding = counts.count(1)
        tiles = [
            (row, first)
            for row in range(num_decoding, len(counts))
            for first in range(bounds[row], bounds[row + 1], self._tile)
        ]
        return PagedStep(
            slots=upload(torch.from_numpy(slots), self._device),
            bounds=self._put(bounds),
            lengths=self._put([segment.end for segment in packed.segments]),
            tables=self._put(np.maximum(tables, 0)),  # blocks that a window has passed are never read
            tiles=self._put(np.reshape(tiles, (-1, 2))),
            num_decoding=num_decoding,
            window=group.window,
            ends=self._ends(packed, group),
        )

    def _ends(self, packed: PackedSegments, group: LayerGroup) -> Tensor | None:
        each = [group.ends(segment) for segment in packed.segments]
        if all(found is None for found in each):
            return None
        ends = packed.positions + 1
        for index, found in enumerate(each):
            if found is not None:
                ends[packed.rows == index] = found
        return self._put(ends)

    def _put(self, numbers: ArrayLike) -> Tensor:
        return upload(torch.from_numpy(np.asarray(numbers, dtype=np.int32)), self._device)
