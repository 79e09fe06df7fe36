"""Attention over block-paged keys and values, written with matrix products: for CPUs, and devices without a kernel.

A step is one packed row of tokens: first the decoding rows, one token each, longest context first; then the prefills.
Query heads that share keys and values are rows of one matrix, so that a group reads them once. oneDNN's batched product
is faster here than torch's flash attention for CPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ..transfer import upload
from .choosing import Choice
from .kv.kv_cache import LayerSpec, SlicedPool
from .packing import Ints, LayerGroup, PackedSegments

_TILE = 128
"""Queries of a prefill computed at a time: enough for efficient products, and few enough to skip most masked keys."""


class Rules(NamedTuple):
    """How one layer attends, besides its window: `softcap` bounds the scores, `sinks` [Hq] join the softmax, and with a
    `choice`, which is another one in each pass, tokens attend to those that they choose."""

    scaling: float
    softcap: float | None = None
    sinks: Tensor | None = None
    choice: Choice | None = None


class DecodeBucket(NamedTuple):
    """Decoding rows `start`…`stop`, attended together, padded to the longest. `rows` locates their blocks for
    `SlicedPool.gather`; `mask` [B, 1, L] is added to the scores."""

    start: int
    stop: int
    rows: Tensor
    mask: Tensor


class Prefill(NamedTuple):
    """Tokens `start`…`stop` of the packed row; the first of them is key `num_cached` of the blocks at `rows`. Each sees
    the keys before its number in `ends`, if there are any, else up to its own."""

    start: int
    stop: int
    num_cached: int
    rows: Tensor
    ends: Ints | None = None


@dataclass(frozen=True, slots=True)
class MatmulStep:
    """One step for the layers of one group. `slots` [T] are where to store the new keys and values."""

    window: int | None
    slots: Tensor
    buckets: tuple[DecodeBucket, ...]
    prefills: tuple[Prefill, ...]


class MatmulAttention:
    """Attention by matrix products on one device, over pools of one dtype."""

    def __init__(self, block_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.block_size, self._dtype, self._device = block_size, dtype, device

    def pool(self, spec: LayerSpec, num_blocks: int) -> SlicedPool:
        return SlicedPool(spec, num_blocks, self.block_size, self._dtype, self._device)

    def attend(
        self, step: MatmulStep, pool: SlicedPool, query: Tensor, keys_values: Tensor | None, rules: Rules
    ) -> Tensor:
        """Store this step's keys and values, unless the pool has them, then attend. [Hq, T, D], [2 H, T, D] →
        [T, Hq · D]."""
        if keys_values is not None:
            pool.write(step.slots, keys_values)
        query = query.reshape(pool.num_heads, -1, *query.shape[1:])  # [H, G, T, D]
        parts = [_decode(bucket, pool, query, rules) for bucket in step.buckets]
        parts += [_prefill(prefill, step.window, pool, query, rules) for prefill in step.prefills]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def pack_group(self, packed: PackedSegments, tables: Ints, slots: Ints, group: LayerGroup) -> MatmulStep:
        lengths = np.array([segment.end for segment in packed.segments])
        widths = -(-lengths // self.block_size)
        num_decoding = sum(len(segment.tokens) == 1 for segment in packed.segments)
        buckets = []
        start = 0
        while start < num_decoding:
            stop = start + 1
            while stop < num_decoding and 2 * widths[stop] > widths[start]:
                stop += 1
            buckets.append(self._bucket(start, lengths[start:stop], tables[start:stop], group))
            start = stop
        prefills = []
        for row, segment in enumerate(packed.segments[num_decoding:], num_decoding):
            stop = start + len(segment.tokens)
            skipped = 0 if group.window is None else max(0, segment.start + 1 - group.window) // self.block_size
            rows = self._rows(tables[row : row + 1, skipped : widths[row]], group)
            first = skipped * self.block_size
            ends = group.ends(segment)
            seen = None if ends is None else ends - first
            prefills.append(Prefill(start, stop, segment.start - first, rows, seen))
            start = stop
        return MatmulStep(group.window, self._tensor(slots), tuple(buckets), tuple(prefills))

    def _bucket(self, start: int, lengths: Ints, tables: Ints, group: LayerGroup) -> DecodeBucket:
        size = self.block_size
        firsts = np.zeros_like(lengths) if group.window is None else np.maximum(lengths - group.window, 0)
        skipped = firsts // size
        width = int((-(-lengths // size) - skipped).max())
        columns = skipped[:, None] + np.arange(width)  # a shorter row is padded, at worst with its own blocks
        blocks = np.take_along_axis(tables, np.minimum(columns, tables.shape[1] - 1), 1)
        keys = np.arange(width * size) + skipped[:, None] * size
        hidden = (keys < firsts[:, None]) | (keys >= lengths[:, None])  # [B, L]
        mask = torch.zeros((len(lengths), 1, width * size), dtype=self._dtype, device=self._device)
        mask.masked_fill_(self._tensor(hidden[:, None]), -torch.inf)
        return DecodeBucket(start, start + len(lengths), self._rows(blocks, group), mask)

    def _rows(self, blocks: Ints, group: LayerGroup) -> Tensor:
        """The rows of blocks [B, N] in a pool sliced by head, [2 · B · H · N]."""
        heads = np.arange(2 * group.num_heads).reshape(2, 1, -1, 1) * group.num_blocks
        return self._tensor((blocks[:, None, :] + heads).reshape(-1))

    def _tensor(self, array: np.ndarray[Any, Any]) -> Tensor:
        return upload(torch.from_numpy(array), self._device)


def _decode(bucket: DecodeBucket, pool: SlicedPool, query: Tensor, rules: Rules) -> Tensor:
    heads, group, _, size = query.shape
    batch = bucket.stop - bucket.start
    rows = query[:, :, bucket.start : bucket.stop].permute(2, 0, 1, 3).reshape(batch * heads, group, size)
    keys, values = pool.gather(bucket.rows, batch * heads)  # [B · H, L, D]
    scores = _scores(rows, keys, rules)
    scores.view(batch, heads * group, -1).add_(bucket.mask)
    if rules.choice is not None:
        each, own = slice(bucket.start, bucket.stop), keys.view(batch, heads, -1, size)
        if (unchosen := rules.choice.unchosen(each, own, bucket.mask < 0)) is not None:
            scores.view(batch, heads * group, -1).masked_fill_(unchosen, -torch.inf)
    return torch.bmm(_softmax(scores, rules, heads), values).view(batch, -1)


def _prefill(prefill: Prefill, window: int | None, pool: SlicedPool, query: Tensor, rules: Rules) -> Tensor:
    heads, group, _, size = query.shape
    start, stop, cached, _, ends = prefill
    keys, values = pool.gather(prefill.rows, heads)  # [H, L, D]
    parts = []
    for first in range(start, stop, _TILE):
        last = min(first + _TILE, stop)
        count, position = last - first, cached + first - start  # the key of the tile's first query
        tile = None if ends is None else ends[first - start : last - start]
        end = position + count if tile is None else int(tile.max())
        begin = 0 if window is None else max(0, position - window + 1)
        rows = query[:, :, first:last].reshape(heads, group * count, size)
        scores = _scores(rows, keys[:, begin:end], rules)  # [H, G · count, end - begin]
        seen = scores.view(heads, group, count, end - begin)
        if tile is not None:
            seen.masked_fill_(_unseen(tile, position, begin, window, scores.device), -torch.inf)
        else:
            seen[..., -count:].add_(_later(count, scores))
            if window is not None and (outside := end - begin - window) > 0:
                seen[..., :outside].add_(_earlier(count, outside, scores))
        _choose(rules, slice(first, last), keys[:, begin:end], seen)
        mixed = torch.bmm(_softmax(scores, rules, heads), values[:, begin:end])
        parts.append(mixed.view(heads, group, count, -1).permute(2, 0, 1, 3).reshape(count, -1))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _choose(rules: Rules, tokens: slice, keys: Tensor, scores: Tensor) -> None:
    """Hide from the scores [H, G, Q, L] of one sequence's causal queries the keys that they do not choose."""
    if rules.choice is None:
        return
    count, length = scores.shape[-2:]
    hidden = torch.ones((count, length), dtype=torch.bool, device=keys.device).triu_(length - count + 1)
    if (unchosen := rules.choice.unchosen(tokens, keys, hidden)) is not None:
        scores.masked_fill_(unchosen, -torch.inf)


def _scores(rows: Tensor, keys: Tensor, rules: Rules) -> Tensor:
    """Scaled, soft-capped scores of rows [N, R, D] over keys [N, L, D]: [N, R, L]."""
    scores = torch.bmm(rows * rules.scaling, keys.transpose(1, 2))
    return scores if rules.softcap is None else scores.div_(rules.softcap).tanh_().mul_(rules.softcap)


def _softmax(scores: Tensor, rules: Rules, heads: int) -> Tensor:
    if rules.sinks is None:
        return scores.softmax(-1)
    batch, rows, _ = scores.shape
    sinks = rules.sinks.to(scores.dtype).view(1, heads, -1, 1)
    sinks = sinks.expand(batch // heads, -1, -1, rows * heads // len(rules.sinks)).reshape(batch, rows, 1)
    return torch.cat((scores, sinks), dim=-1).softmax(-1)[..., :-1]


def _later(count: int, like: Tensor) -> Tensor:
    """A mask [count, count]: minus infinity where key c comes after query i."""
    return _masks(count, count, like.dtype, like.device, 1)


def _earlier(count: int, outside: int, like: Tensor) -> Tensor:
    """A mask [count, outside]: minus infinity where key c has left query i's window; the last query sees none."""
    return _masks(count, outside, like.dtype, like.device, 0)


def _unseen(ends: Ints, position: int, begin: int, window: int | None, device: torch.device) -> Tensor:
    """Which of the keys from `begin` on the queries from `position` on do not see, [count, keys]: those from their
    `ends` on, and those that have left their windows."""
    keys = np.arange(begin, ends.max())
    unseen = keys >= ends[:, None]
    if window is not None:
        unseen |= keys <= np.arange(position, position + len(ends))[:, None] - window
    return upload(torch.from_numpy(unseen), device)


@lru_cache(maxsize=32)
def _masks(rows: int, columns: int, dtype: torch.dtype, device: torch.device, above: int) -> Tensor:
    mask = torch.full((rows, columns), -torch.inf, dtype=dtype, device=device)
    return mask.triu_(1) if above else mask.tril_(columns - rows)


def attend_alone(query: Tensor, key: Tensor, value: Tensor, rules: Rules) -> Tensor:
    """Causal attention over one whole sequence, without a pool or a window: [H, T, D] → [T, Hq · Dv]."""
    heads, count, size = key.shape
    rows = widened(query, size).reshape(heads, -1, size)
    scores = _scores(rows, key, rules)
    scores.view(heads, -1, count, count).add_(_later(count, scores))
    _choose(rules, slice(None), key, scores.view(heads, -1, count, count))
    mixed = torch.bmm(_softmax(scores, rules, heads), value)
    return mixed.view(heads, -1, count, value.shape[-1]).permute(2, 0, 1, 3).reshape(count, -1)


def with_rules(
    attention: Callable[..., Tensor],
    index: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    """Call `attention` as transformers' models do, for one that knows of no other rules."""
    return attention(index, query, key, value, Rules(scaling, None, sinks), window)


def widened(tensor: Tensor, size: int) -> Tensor:
    """[…, D] → […, size], padded with zeros, which change no score."""
    return tensor if tensor.shape[-1] == size else functional.pad(tensor, (0, size - tensor.shape[-1]))
