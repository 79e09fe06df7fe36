"""Packs the segments of one step into tensors: which tokens, at which positions, and which logits are wanted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..adapters.loaded import Adapter
from ..adapters.low_rank import Users, users
from ..transfer import upload
from ..vision.layout import Placed
from .state.slots import StateUse
from .state.step import StateStep, pack_states

Ints = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


class Segment(NamedTuple):
    """Tokens of one sequence to compute, from position `start` on.

    A token that only the device knows yet is ~k: the k-th token of the last step. `tables` has the sequence's blocks
    for each group; blocks that a window has passed may be anything. `samples` asks for the logits of the last token,
    `scores` for those of all tokens. `state` has its slots, if the model keeps running states. The model rotates a
    token by its index and `shift`, or by `positions` [D, n], and takes features of `images` instead of some tokens'
    embeddings. Each token sees the keys before its number in `ends` [n], or, without these, up to its own.
    """

    tokens: Sequence[int]
    start: int
    tables: Sequence[Sequence[int]]
    samples: bool
    scores: bool = False
    adapter: Adapter | None = None
    state: StateUse | None = None
    shift: int = 0
    images: Sequence[Placed] = ()
    positions: Ints | None = None
    ends: Ints | None = None

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


class LayerGroup(NamedTuple):
    """Layers that share block tables: `num_heads` key-value heads, `num_blocks` in a pool, the last always zero.

    `is_mutual`: tokens see the keys before their `ends`; without it, up to their own, whatever a segment says.
    `is_near`: the window bounds how far they see ahead, too.
    """

    window: int | None
    num_heads: int
    num_blocks: int
    is_mutual: bool = True
    is_near: bool = False

    def ends(self, segment: Segment) -> Ints | None:
        """The keys before which number each of a segment's tokens sees here; None if only those up to its own."""
        if segment.ends is None or not self.is_mutual:
            return None
        if self.window is None or not self.is_near:
            return segment.ends
        return np.minimum(segment.ends, np.arange(segment.start, segment.end) + self.window)


class PackedStep(NamedTuple):
    """The tensors of one step. `ids` are [T], and so are `positions`, or [D, T] where images have some; `keep` [K] are
    the indices of the tokens whose logits are wanted, and `sampled` [K] the indices of their segments, repeated where
    one is scored. `groups` has what `PackGroup` made for each group, `users` the adapters and their tokens, `states`
    the slots of running states, `images` what tokens show."""

    ids: Tensor
    positions: Tensor
    keep: Tensor
    sampled: Sequence[int]
    groups: Sequence[Any]
    users: Sequence[Users] = ()
    states: StateStep | None = None
    images: Sequence[Placed] = ()


class Computed(NamedTuple):
    """The result of a step: logits [K, V], valid until the next step, of the segments with the indices `sampled`.

    `best` [K] are their argmaxes, the first of equals, -1 where the maximum is not finite, perhaps still on the device;
    None if not computed.
    """

    logits: Tensor
    sampled: Sequence[int]
    best: Sequence[int] | Tensor | None = None


class PackedSegments(NamedTuple):
    """Segments in packed order; `rows` [T] is each token's segment among them, `positions` [T] its position."""

    segments: Sequence[Segment]
    rows: Ints
    positions: Ints


def rank(segment: Segment) -> tuple[bool, int]:
    """The sort key of packing: decoding rows first, then the longest context first."""
    return len(segment.tokens) > 1, -segment.end


PackGroup = Callable[[PackedSegments, Ints, Ints, LayerGroup], Any]
"""Takes the segments, their blocks [N, W] (padded with the block that is always zero), the tokens' slots [T] and the
group; returns what the group's attention needs."""


def pack(
    segments: Sequence[Segment],
    groups: Sequence[LayerGroup],
    block_size: int,
    device: torch.device,
    pack_group: PackGroup,
    chosen: Tensor | None = None,
    num_slots: int = 0,
) -> PackedStep:
    """Pack segments by `rank`, so that rows of similar length are adjacent.

    `chosen`, on the device, holds the tokens written ~k; -1 where none could be chosen. After the `num_slots` slots of
    running states comes one that is always zero.
    """
    order = sorted(range(len(segments)), key=lambda i: rank(segments[i]))
    ordered = [segments[index] for index in order]
    counts = np.array([len(segment.tokens) for segment in ordered])
    ends = counts.cumsum()
    rows = np.arange(len(ordered)).repeat(counts)
    firsts = np.array([segment.start for segment in ordered]) - ends + counts
    packed = PackedSegments(ordered, rows, firsts[rows] + np.arange(ends[-1]))
    column, inside = np.divmod(packed.positions, block_size)
    widths = [-(-segment.end // block_size) for segment in ordered]
    steps = []
    for index, group in enumerate(groups):
        tables = np.full((len(ordered), max(widths)), group.num_blocks - 1)
        for row, segment, width in zip(tables, ordered, widths, strict=True):
            row[:width] = segment.tables[index][:width]
        steps.append(pack_group(packed, tables, tables[rows, column] * block_size + inside, group))
    sampling = [index for index, segment in enumerate(ordered) if segment.samples or segment.scores]
    keep = ends[sampling] - 1
    if any(segment.scores for segment in ordered):
        spans = [len(ordered[index].tokens) if ordered[index].scores else 1 for index in sampling]
        keep = np.concatenate([np.arange(1 - span, 1) + last for span, last in zip(spans, keep, strict=True)])
        sampling = np.repeat(sampling, spans).tolist()
    ids = upload(torch.tensor([token for segment in ordered for token in segment.tokens]), device)
    if chosen is not None:
        ids = ids.where(ids >= 0, chosen.clamp(min=0)[(~ids).clamp(min=0)])
    return PackedStep(
        ids=ids,
        positions=upload(torch.from_numpy(_rotations(packed)), device),
        keep=upload(torch.from_numpy(keep), device),
        sampled=[order[index] for index in sampling],
        groups=steps,
        users=users([segment.adapter for segment in ordered], counts.tolist(), device),
        states=pack_states([segment.state for segment in ordered], counts.tolist(), num_slots, device),
        images=[
            one.behind(begin)
            for segment, begin in zip(ordered, (ends - counts).tolist(), strict=True)
            for one in segment.images
        ],
    )


def _rotations(packed: PackedSegments) -> Ints:
    """The positions by which the model rotates the tokens, [T], or [D, T] if they differ by dimension."""
    segments = packed.segments
    if not any(segment.shift or segment.positions is not None for segment in segments):
        return packed.positions
    plain: Ints = packed.positions + np.array([segment.shift for segment in segments])[packed.rows]
    given = [len(segment.positions) for segment in segments if segment.positions is not None]
    if not given:
        return plain
    found: Ints = np.tile(plain, (given[0], 1))
    for index, segment in enumerate(segments):
        if segment.positions is not None:
            found[:, packed.rows == index] = segment.positions
    return found
