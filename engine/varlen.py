"""Attention on CUDA: torch's own kernel for sequences of any lengths, which reads keys and values by block table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor

from .attention import Rules
from .kv_cache import LayerSpec, PagePool
from .packing import Group, Ints, Segment
from .transfer import upload

_PAGE = 256  # what the kernel's second generation accepts as a page; the third takes any, and loses little by it


@dataclass(frozen=True, slots=True)
class VarlenStep:
    """One step of N sequences. `bounds` [N + 1] are where each one's queries begin in the packed row, `lengths` [N] how
    many keys it has, `tables` [N, P] its blocks, all int32; `slots` [T] is where the new keys and values go."""

    slots: Tensor
    bounds: Tensor
    lengths: Tensor
    tables: Tensor
    longest_query: int
    longest_key: int
    window: int | None


class VarlenAttention:
    """`kernel` is called as `torch.nn.attention.varlen.varlen_attn`."""

    block_size = _PAGE

    def __init__(self, dtype: torch.dtype, device: torch.device, kernel: Callable[..., Tensor] | None = None) -> None:
        if kernel is None:
            from torch.nn.attention import varlen

            kernel = cast("Callable[..., Tensor]", varlen.varlen_attn)
        self._kernel, self._dtype, self._device = kernel, dtype, device

    @staticmethod
    def serves(dtype: torch.dtype, specs: Sequence[LayerSpec], rules: Sequence[Rules]) -> bool:
        """Whether the kernel can do what these layers ask for: no caps, no sinks, 16-bit numbers, heads of one size."""
        return (
            dtype in (torch.bfloat16, torch.float16)
            and all(spec.key_dim == spec.value_dim <= 256 and spec.key_dim % 8 == 0 for spec in specs)
            and all(rule.softcap is None and rule.sinks is None for rule in rules)
        )

    def pool(self, spec: LayerSpec, num_blocks: int) -> PagePool:
        return PagePool(spec, num_blocks, self.block_size, self._dtype, self._device)

    def attend(self, step: VarlenStep, pool: PagePool, query: Tensor, keys_values: Tensor, rules: Rules) -> Tensor:
        """Store this step's keys and values, then attend. [Hq, T, D], [2 H, T, D] → [T, Hq · D]."""
        pool.write(step.slots, keys_values)
        mixed = self._kernel(
            query.transpose(0, 1).contiguous(),
            pool.keys,
            pool.values,
            step.bounds,
            None,
            step.longest_query,
            step.longest_key,
            scale=rules.scaling,
            window_size=(-1 if step.window is None else step.window - 1, 0),
            enable_gqa=True,
            seqused_k=step.lengths,
            block_table=step.tables,
        )
        return mixed.flatten(1)

    def pack_group(self, packed: Sequence[Segment], tables: Sequence[Ints], slots: Ints, group: Group) -> VarlenStep:
        width = max(map(len, tables))
        padded = np.full((len(tables), width), group.num_blocks - 1, dtype=np.int32)
        for row, table in enumerate(tables):
            padded[row, : len(table)] = np.maximum(table, 0)  # behind a window nothing is read
        counts = [len(segment.tokens) for segment in packed]
        lengths = [segment.end for segment in packed]
        return VarlenStep(
            slots=upload(torch.from_numpy(slots), self._device),
            bounds=upload(torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32), self._device),
            lengths=upload(torch.tensor(lengths, dtype=torch.int32), self._device),
            tables=upload(torch.from_numpy(padded), self._device),
            longest_query=max(counts),
            longest_key=max(lengths),
            window=group.window,
        )
