"""From requests to the tensors of one step on a CPU: which tokens, where their keys go, where older keys lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .attention import Bucket, GroupStep, Prefill

_Ints = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


class Segment(NamedTuple):
    """Tokens of one sequence to compute: `tokens` from position `start` on.

    `tables` has the sequence's blocks for each group; those behind a window may be anything. `samples` where the
    logits of the last token are wanted.
    """

    tokens: Sequence[int]
    start: int
    tables: Sequence[Sequence[int]]
    samples: bool

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


class Group(NamedTuple):
    """Layers with the same block tables; `num_heads` of keys in a pool of `num_blocks`."""

    window: int | None
    num_heads: int
    num_blocks: int


class Step(NamedTuple):
    """`ids` and `positions` are [T]; `keep` are the places in them whose logits are wanted, in the order of `sampled`,
    the indices of their segments."""

    ids: Tensor
    positions: Tensor
    keep: Tensor
    sampled: Sequence[int]
    groups: Sequence[GroupStep]


def pack(segments: Sequence[Segment], groups: Sequence[Group], block_size: int, dtype: torch.dtype) -> Step:
    """Decoding rows first, longest context first, so that rows of like length stand together."""
    order = sorted(range(len(segments)), key=lambda i: (len(segments[i].tokens) > 1, -segments[i].end))
    packed = [segments[index] for index in order]
    ends = np.cumsum([len(segment.tokens) for segment in packed])
    ids = [token for segment in packed for token in segment.tokens]
    positions = np.concatenate([np.arange(segment.start, segment.end) for segment in packed])
    sampling = [place for place, segment in enumerate(packed) if segment.samples]
    return Step(
        ids=torch.tensor(ids),
        positions=torch.from_numpy(positions),
        keep=torch.from_numpy(ends[sampling] - 1),
        sampled=[order[place] for place in sampling],
        groups=[_group(packed, index, group, block_size, dtype) for index, group in enumerate(groups)],
    )


def _group(packed: Sequence[Segment], index: int, group: Group, block_size: int, dtype: torch.dtype) -> GroupStep:
    tables = [np.asarray(segment.tables[index][: -(-segment.end // block_size)]) for segment in packed]
    slots = [_slots(segment, table, block_size) for segment, table in zip(packed, tables, strict=True)]
    num_decoding = sum(len(segment.tokens) == 1 for segment in packed)
    buckets = []
    start = 0
    while start < num_decoding:
        stop = start + 1
        while stop < num_decoding and 2 * len(tables[stop]) > len(tables[start]):
            stop += 1
        lengths = np.array([segment.end for segment in packed[start:stop]])
        buckets.append(_bucket(start, stop, lengths, tables[start:stop], group, block_size, dtype))
        start = stop
    prefills = []
    offset = num_decoding
    for segment, table in zip(packed[num_decoding:], tables[num_decoding:], strict=True):
        stop = offset + len(segment.tokens)
        skipped = 0 if group.window is None else max(0, segment.start + 1 - group.window) // block_size
        rows = _rows(table[None, skipped:], group)
        prefills.append(Prefill(offset, stop, segment.start - skipped * block_size, rows))
        offset = stop
    return GroupStep(group.window, torch.from_numpy(np.concatenate(slots)), tuple(buckets), tuple(prefills))


def _slots(segment: Segment, table: _Ints, block_size: int) -> _Ints:
    positions = np.arange(segment.start, segment.end)
    return table[positions // block_size] * block_size + positions % block_size


def _rows(blocks: _Ints, group: Group) -> Tensor:
    """Where blocks [B, N] lie in a pool sliced by head, [B · H · N]."""
    heads = np.arange(group.num_heads) * group.num_blocks
    return torch.from_numpy((blocks[:, None, :] + heads[:, None]).reshape(-1))


def _bucket(
    start: int,
    stop: int,
    lengths: _Ints,
    tables: Sequence[_Ints],
    group: Group,
    block_size: int,
    dtype: torch.dtype,
) -> Bucket:
    firsts = np.zeros_like(lengths) if group.window is None else np.maximum(lengths - group.window, 0)
    skipped = firsts // block_size
    width = max(len(table) - skip for table, skip in zip(tables, skipped, strict=True))
    blocks = np.zeros((stop - start, width), dtype=np.int64)
    for row, (table, skip) in enumerate(zip(tables, skipped, strict=True)):
        blocks[row, : len(table) - skip] = table[skip:]
    columns = np.arange(width * block_size) + skipped[:, None] * block_size
    hidden = (columns < firsts[:, None]) | (columns >= lengths[:, None])  # [B, L]
    mask = torch.zeros((stop - start, 1, width * block_size), dtype=dtype)
    mask.masked_fill_(torch.from_numpy(hidden[:, None]), -torch.inf)
    return Bucket(start, stop, _rows(blocks, group), mask)
