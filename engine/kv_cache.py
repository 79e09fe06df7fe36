"""The memory of keys and values: for every attention layer a pool of blocks, sliced by head.

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
    """Keys and values of one layer, [H, S, D] each; S = blocks · block_size slots."""

    def __init__(self, spec: LayerSpec, num_blocks: int, block_size: int, dtype: torch.dtype) -> None:
        self.keys = _zeros((spec.num_heads, num_blocks * block_size, spec.key_dim), dtype)
        self.values = _zeros((spec.num_heads, num_blocks * block_size, spec.value_dim), dtype)
        self._rows = spec.num_heads * num_blocks

    def write(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store [H, T, D] at slots [T]."""
        self.keys.index_copy_(1, slots, keys)
        self.values.index_copy_(1, slots, values)

    def gather(self, rows: Tensor, heads: int) -> tuple[Tensor, Tensor]:
        """Copies of the blocks at `rows` (head · num_blocks + block), as [heads, tokens, D]."""
        keys = self.keys.view(self._rows, -1).index_select(0, rows)
        values = self.values.view(self._rows, -1).index_select(0, rows)
        return keys.view(heads, -1, self.keys.shape[-1]), values.view(heads, -1, self.values.shape[-1])

    def blocks(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Copies of whole blocks, [H, len(indices), block_size · D] each."""
        heads = self.keys.shape[0]
        where = torch.tensor(indices, dtype=torch.long)
        keys, values = (pool.view(heads, self._rows // heads, -1) for pool in (self.keys, self.values))
        return keys.index_select(1, where), values.index_select(1, where)

    def restore(self, indices: Sequence[int], keys: Tensor, values: Tensor) -> None:
        """Write back what `blocks` gave."""
        heads = self.keys.shape[0]
        where = torch.tensor(indices, dtype=torch.long)
        self.keys.view(heads, self._rows // heads, -1).index_copy_(1, where, keys)
        self.values.view(heads, self._rows // heads, -1).index_copy_(1, where, values)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros whose pages the system provides at their first use; masked slots must be numbers, if nobody's."""
    size = int(np.prod(shape)) * dtype.itemsize
    return torch.from_numpy(np.zeros(size, dtype=np.uint8)).view(dtype).view(shape)
