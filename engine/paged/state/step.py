"""The states of one step as tensors: which slots its segments read and write."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ...transfer import upload
from .slots import NO_STATE, StateUse


class Piece(NamedTuple):
    """Tokens `start` to `end` of the packed row: they continue the state in slot `source` and leave it in `target`."""

    start: int
    end: int
    source: int
    target: int


class Wave(NamedTuple):
    """Pieces that do not depend on each other, as tensors [N] of what `Piece` has; and all their `tokens` [T] in the
    row, with the number of the piece that has each, `owners` [T]."""

    starts: Tensor
    ends: Tensor
    sources: Tensor
    targets: Tensor
    tokens: Tensor
    owners: Tensor


class StateStep(NamedTuple):
    """The first tokens of the row continue a sequence each, from the slots `sources` [N] to `targets` [N].

    The others belong to `pieces`; one may read what an earlier one wrote. `waves` are all of them in an order in which
    each reads what is there.
    """

    sources: Tensor
    targets: Tensor
    pieces: Sequence[Piece]
    waves: Sequence[Wave] = ()


def pack_states(
    uses: Sequence[StateUse | None], counts: Sequence[int], zero: int, device: torch.device
) -> StateStep | None:
    """The slots of segments in packed order, those of one token first, with `counts` tokens each.

    `zero` is the slot that is always zero. Returns None if no segment uses a state.
    """
    if not any(uses):
        return None
    sources: list[int] = []
    targets: list[int] = []
    pieces: list[Piece] = []
    waves: list[list[Piece]] = []
    start = 0
    for use, count in zip(uses, counts, strict=True):
        assert use is not None, "a segment without a slot"
        source = zero if use.source == NO_STATE else use.source
        if count == 1:
            sources.append(source)
            targets.append(use.target)
        begin = start
        for depth, (num_tokens, slot) in enumerate((*use.captures, (count, use.target))):
            piece = Piece(begin, start + num_tokens, source, slot)
            pieces += [piece] if count > 1 else []
            waves += [[]] if depth == len(waves) else []
            waves[depth].append(piece)
            begin, source = piece.end, slot
        start += count
    read, written = (upload(torch.tensor(slots, dtype=torch.long), device) for slots in (sources, targets))
    return StateStep(read, written, pieces, _on_device(waves, device))


def _on_device(waves: Sequence[Sequence[Piece]], device: torch.device) -> list[Wave]:
    """The same on a device."""
    parts: list[list[int]] = []
    for wave in waves:
        parts += map(list, zip(*wave, strict=True))
        parts.append([token for piece in wave for token in range(piece.start, piece.end)])
        parts.append([owner for owner, piece in enumerate(wave) for _ in range(piece.start, piece.end)])
    whole = upload(torch.tensor(list(chain.from_iterable(parts)), dtype=torch.long), device)  # one copy of all
    borders = [0, *accumulate(map(len, parts))]
    tensors = [whole[start:end] for start, end in pairwise(borders)]
    size = len(Wave._fields)
    return [Wave(*tensors[at : at + size]) for at in range(0, len(tensors), size)]
