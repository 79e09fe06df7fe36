"""From requests to the tensors of one step: which tokens, at which places, and which logits are wanted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .transfer import upload

Ints = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


class Segment(NamedTuple):
    """Tokens of one sequence to compute: `tokens` from position `start` on.

    A token that only the device knows is written ~k: the k-th that was chosen last. `tables` has the sequence's blocks
    for each group; those behind a window may be anything. `samples` where the logits of the last token are wanted.
    """

    tokens: Sequence[int]
    start: int
    tables: Sequence[Sequence[int]]
    samples: bool

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


class Group(NamedTuple):
    """Layers with the same block tables; `num_heads` of keys in a pool of `num_blocks`, the last always zero."""

    window: int | None
    num_heads: int
    num_blocks: int


class Step(NamedTuple):
    """`ids` and `positions` are [T]; `keep` are the places in them whose logits are wanted, in the order of `sampled`,
    the indices of their segments. `groups` is what attention made of each group."""

    ids: Tensor
    positions: Tensor
    keep: Tensor
    sampled: Sequence[int]
    groups: Sequence[Any]


PackGroup = Callable[[Sequence[Segment], Sequence[Ints], Ints, Group], Any]
"""The segments in packed order, their blocks, the slots of their tokens [T]; what the group's attention needs of it."""


def pack(
    segments: Sequence[Segment],
    groups: Sequence[Group],
    block_size: int,
    device: torch.device,
    pack_group: PackGroup,
    chosen: Tensor | None = None,
) -> Step:
    """Decoding rows first, longest context first, so that rows of like length stand together.

    `chosen` on the device has the tokens ~k, -1 where there is none.
    """
    order = sorted(range(len(segments)), key=lambda i: (len(segments[i].tokens) > 1, -segments[i].end))
    packed = [segments[index] for index in order]
    ends = np.cumsum([len(segment.tokens) for segment in packed])
    positions = np.concatenate([np.arange(segment.start, segment.end) for segment in packed])
    sampling = [place for place, segment in enumerate(packed) if segment.samples]
    steps = []
    for index, group in enumerate(groups):
        tables = [np.asarray(segment.tables[index][: -(-segment.end // block_size)]) for segment in packed]
        slots = [_slots(segment, table, block_size) for segment, table in zip(packed, tables, strict=True)]
        steps.append(pack_group(packed, tables, np.concatenate(slots), group))
    ids = upload(torch.tensor([token for segment in packed for token in segment.tokens]), device)
    if chosen is not None:
        ids = ids.where(ids >= 0, chosen.clamp(min=0)[(~ids).clamp(min=0)])
    return Step(
        ids=ids,
        positions=upload(torch.from_numpy(positions), device),
        keep=upload(torch.from_numpy(ends[sampling] - 1), device),
        sampled=[order[place] for place in sampling],
        groups=steps,
    )


def _slots(segment: Segment, table: Ints, block_size: int) -> Ints:
    positions = np.arange(segment.start, segment.end)
    return table[positions // block_size] * block_size + positions % block_size
