"""The memory of keys and values: a pool of blocks for every attention layer.

`blocks.py` decides which sequence holds which block. A group is the layers that share block tables: those with the same
window and number of key-value heads; head sizes may differ within one.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...cpu.process import populate

_ALL_LARGE = 4 << 20  # bytes of memory that is in pages of 2 MB, for the most part
_LINE = 64  # bytes
_SOON = 512 << 10  # bytes of each head's keys, and of its values, that the first requests take: some thousand tokens


class LayerSpec(NamedTuple):
    """What one attention layer stores for a token: `num_heads` keys of `key_dim` and values of `value_dim` numbers.

    A query attends to `window` tokens, itself included; None: all.
    """

    window: int | None
    num_heads: int
    key_dim: int
    value_dim: int

    @property
    def size(self) -> int:
        """The numbers reserved for a key or a value."""
        return max(self.key_dim, self.value_dim)

    @property
    def numbers(self) -> int:
        return 2 * self.num_heads * self.size


class Pool:
    """Keys and values of one layer in one tensor, whose dimension `axis` is the blocks.

    If keys and values differ in size, both take the room of the larger.
    """

    def __init__(self, memory: Tensor, axis: int) -> None:
        self.memory = memory
        self.axis = axis

    def blocks(self, indices: Sequence[int]) -> Tensor:
        """Copy whole blocks."""
        return self.memory.index_select(self.axis, self._upload(indices))

    def restore(self, indices: Sequence[int], saved: Tensor) -> None:
        """Write back what `blocks` returned."""
        self.memory.index_copy_(self.axis, self._upload(indices), saved.to(self.memory.device))

    @property
    def block_numbers(self) -> int:
        """The numbers of one block."""
        return self.memory.numel() // self.memory.shape[self.axis]

    def rows(self, indices: Sequence[int]) -> Tensor:
        """Copy whole blocks, each as one row: [N, numbers]."""
        return self.blocks(indices).movedim(self.axis, 0).flatten(1)

    def restore_rows(self, indices: Sequence[int], rows: Tensor) -> None:
        """Write back what `rows` returned."""
        shape = [size for axis, size in enumerate(self.memory.shape) if axis != self.axis]
        self.restore(indices, rows.reshape(len(indices), *shape).movedim(0, self.axis))

    def clear(self, indices: Sequence[int]) -> None:
        """Zero whole blocks."""
        self.memory.index_fill_(self.axis, self._upload(indices), 0)

    def _upload(self, indices: Sequence[int]) -> Tensor:
        return torch.tensor(indices, dtype=torch.long, device=self.memory.device)


class SlicedPool(Pool):
    """[2 H, N, block · D], keys before values: a head's blocks are contiguous: gathering them gives matrices."""

    def __init__(self, spec: LayerSpec, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device):
        super().__init__(zeros((2 * spec.num_heads, num_blocks, block_size * spec.size), dtype, device), axis=1)
        self._slots = self.memory.view(2 * spec.num_heads, -1, spec.size)
        self._rows = self.memory.view(-1, block_size * spec.size)
        self._size, self.num_heads = spec.size, spec.num_heads

    def write(self, slots: Tensor, keys_values: Tensor) -> None:
        """Store [2 H, T, D] at slots [T]."""
        self._slots.index_copy_(1, slots, keys_values)

    def gather(self, rows: Tensor, heads: int) -> tuple[Tensor, Tensor]:
        """Copy the blocks at `rows` (head · N + block, keys first): keys and values, [heads, tokens, D] each."""
        keys, values = self._rows.index_select(0, rows).view(2, heads, -1, self._size).unbind()
        return keys, values


class PagePool(Pool):
    """[2, N, block, H, D]: the layout for attention kernels that read block tables."""

    def __init__(self, spec: LayerSpec, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device):
        super().__init__(zeros((2, num_blocks, block_size, spec.num_heads, spec.size), dtype, device), axis=1)
        self.keys, self.values = self.memory.unbind()
        self._slots = self.memory.flatten(1, 2)

    def write(self, slots: Tensor, keys_values: Tensor) -> None:
        """Store [2 H, T, D] at slots [T]."""
        heads, size = self._slots.shape[2:]
        self._slots.index_copy_(1, slots, keys_values.view(2, heads, -1, size).transpose(1, 2))


def populated(pools: list[Pool]) -> list[Pool]:
    """These pools, for which Linux allocates the memory of the first blocks from now on, in a thread: a page for each
    head of each layer, for which the first request would wait up to half a second."""
    spans, kept = list[tuple[int, int]](), [*pools]  # which must not be freed meanwhile
    for pool in pools:
        parts = pool.memory.flatten(0, pool.axis - 1)
        part = parts.stride(0) * parts.itemsize
        if part >= _ALL_LARGE and parts.device.type == "cpu":
            spans += [(parts.data_ptr() + index * part, _SOON) for index in range(len(parts))]

    def allocate() -> None:
        populate(spans)
        kept.clear()

    if spans:
        # No daemon, as its parent is: torch aborts the process if the interpreter's end takes it away while it frees.
        threading.Thread(target=allocate, name="penstock-populate", daemon=False).start()
    return pools


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A zeroed tensor; on a CPU it starts with a line of the cache, and Linux allocates its pages at first use. Masked
    slots are read too: keep them finite."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = int(np.prod(shape)) * dtype.itemsize
    room = np.zeros(size + _LINE, dtype=np.uint8)
    start = -room.ctypes.data % _LINE
    return torch.from_numpy(room[start : start + size]).view(dtype).view(shape)
