"""From requests to the tensors of one step: which tokens, at which places, and which logits are wanted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..transfer import upload

Ints = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


class Segment(NamedTuple):
    """Tokens of one sequence to compute: `tokens` from position `start` on.

    A token that only the device knows is written ~k: the k-th that was chosen last. `tables` has the sequence's blocks
    for each group; those behind a window may be anything. `samples` where the logits of the last token are wanted,
    `scores` where those of all of them are.
    """

    tokens: Sequence[int]
    start: int
    tables: Sequence[Sequence[int]]
    samples: bool
    scores: bool = False

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
    the indices of their segments, which repeat where one is scored. `groups` is what attention made of each group."""

    ids: Tensor
    positions: Tensor
    keep: Tensor
    sampled: Sequence[int]
    groups: Sequence[Any]


class Computed(NamedTuple):
    """What became of a step: logits [K, V], until the next one, of the segments with the indices `sampled`.

    `best` [K] are their largest, the first of equals, or -1 where that is not finite; None where nobody has looked.
    """

    logits: Tensor
    sampled: Sequence[int]
    best: Sequence[int] | None = None


class Packed(NamedTuple):
    """Segments in packed order; each token's segment among them and its position [T]."""

    segments: Sequence[Segment]
    rows: Ints
    positions: Ints


def rank(segment: Segment) -> tuple[bool, int]:
    """By which segments are packed."""
    return len(segment.tokens) > 1, -segment.end


PackGroup = Callable[[Packed, Ints, Ints, Group], Any]
"""The segments' blocks [N, W], behind a shorter one's the block that is always zero; the slots of the tokens [T]. Makes
of it what the group's attention needs."""


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
    order = sorted(range(len(segments)), key=lambda i: rank(segments[i]))
    ordered = [segments[index] for index in order]
    counts = np.array([len(segment.tokens) for segment in ordered])
    ends = counts.cumsum()
    rows = np.arange(len(ordered)).repeat(counts)
    firsts = np.array([segment.start for segment in ordered]) - ends + counts
    packed = Packed(ordered, rows, firsts[rows] + np.arange(ends[-1]))
    column, inside = np.divmod(packed.positions, block_size)
    widths = [-(-segment.end // block_size) for segment in ordered]
    steps = []
    for index, group in enumerate(groups):
        tables = np.full((len(ordered), max(widths)), group.num_blocks - 1)
        for row, segment, width in zip(tables, ordered, widths, strict=True):
            row[:width] = segment.tables[index][:width]
        steps.append(pack_group(packed, tables, tables[rows, column] * block_size + inside, group))
    sampling = [place for place, segment in enumerate(ordered) if segment.samples or segment.scores]
    keep = ends[sampling] - 1
    if any(segment.scores for segment in ordered):
        spans = [len(ordered[place].tokens) if ordered[place].scores else 1 for place in sampling]
        keep = np.concatenate([np.arange(1 - span, 1) + last for span, last in zip(spans, keep, strict=True)])
        sampling = np.repeat(sampling, spans).tolist()
    ids = upload(torch.tensor([token for segment in ordered for token in segment.tokens]), device)
    if chosen is not None:
        ids = ids.where(ids >= 0, chosen.clamp(min=0)[(~ids).clamp(min=0)])
    return Step(
        ids=ids,
        positions=upload(torch.from_numpy(packed.positions), device),
        keep=upload(torch.from_numpy(keep), device),
        sampled=[order[place] for place in sampling],
        groups=steps,
    )
