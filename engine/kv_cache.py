"""The memory of keys and values: for every attention layer a pool of blocks.

Which block belongs to whom is `blocks.py`'s business. A group is the layers that share block tables: the same window
and the same number of key-value heads; head sizes may differ within one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class LayerSpec(NamedTuple):
    """What one attention layer keeps for a token: `num_heads` keys of `key_dim` and values of `value_dim` numbers.

    `window` tokens are seen by a query, itself included; None: all.
    """

    window: int | None
    num_heads: int
    key_dim: int
    value_dim: int

    @property
    def numbers(self) -> int:
        return self.num_heads * (self.key_dim + self.value_dim)


class Pool:
    """Keys and values of one layer: tensors with a dimension of blocks, the one numbered `axis`."""

    def __init__(self, keys: Tensor, values: Tensor, axis: int) -> None:
        self.keys, self.values = keys, values
        self._axis = axis

    def blocks(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Copies of whole blocks."""
        where = self._where(indices)
        return self.keys.index_select(self._axis, where), self.values.index_select(self._axis, where)

    def restore(self, indices: Sequence[int], keys: Tensor, values: Tensor) -> None:
        """Write back what `blocks` gave."""
        where = self._where(indices)
        self.keys.index_copy_(self._axis, where, keys.to(where.device))
        self.values.index_copy_(self._axis, where, values.to(where.device))

    def clear(self, indices: Sequence[int]) -> None:
        """Zero whole blocks."""
        where = self._where(indices)
        self.keys.index_fill_(self._axis, where, 0)
        self.values.index_fill_(self._axis, where, 0)

    def _where(self, indices: Sequence[int]) -> Tensor:
        return torch.tensor(indices, dtype=torch.long, device=self.keys.device)


class SlicedPool(Pool):
    """[H, N, block · D]: a head's blocks lie together, so that gathering them gives matrices."""

    def __init__(self, spec: LayerSpec, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device):
        self._sizes = spec.key_dim, spec.value_dim
        shape = spec.num_heads, num_blocks, block_size
        keys, values = (zeros((*shape[:2], block_size * size), dtype, device) for size in self._sizes)
        super().__init__(keys, values, axis=1)

    def write(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store [H, T, D] at slots [T]."""
        heads = len(keys)
        self.keys.view(heads, -1, self._sizes[0]).index_copy_(1, slots, keys)
        self.values.view(heads, -1, self._sizes[1]).index_copy_(1, slots, values)

    def gather(self, rows: Tensor, heads: int) -> tuple[Tensor, Tensor]:
        """Copies of the blocks at `rows` (head · N + block), as [heads, tokens, D]."""
        keys, values = self.keys.flatten(0, 1).index_select(0, rows), self.values.flatten(0, 1).index_select(0, rows)
        return keys.view(heads, -1, self._sizes[0]), values.view(heads, -1, self._sizes[1])


class PagePool(Pool):
    """[N, block, H, D]: the layout of the attention kernels that read block tables."""

    def __init__(self, spec: LayerSpec, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device):
        shape = num_blocks, block_size, spec.num_heads
        super().__init__(
            zeros((*shape, spec.key_dim), dtype, device), zeros((*shape, spec.value_dim), dtype, device), axis=0
        )

    def write(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store [T, H, D] at slots [T]."""
        self.keys.flatten(0, 1).index_copy_(0, slots, keys)
        self.values.flatten(0, 1).index_copy_(0, slots, values)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on a CPU the system provides their pages at the first use. Masked slots must be numbers, if nobody's."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = int(np.prod(shape)) * dtype.itemsize
    return torch.from_numpy(np.zeros(size, dtype=np.uint8)).view(dtype).view(shape)
