"""The states of one step as tensors: which slots its segments read and write."""

from __future__ import annotations

from collections.abc import Sequence
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


class StateStep(NamedTuple):
    """The first tokens of the row continue a sequence each, from the slots `sources` [N] to `targets` [N].

    The others belong to `pieces`; one may read what an earlier one wrote.
    """

    sources: Tensor
    targets: Tensor
    pieces: Sequence[Piece]

    @property
    def others(self) -> StateStep:
        """The pieces alone, as those of a row without the first tokens."""
        count = len(self.sources)
        pieces = [piece._replace(start=piece.start - count, end=piece.end - count) for piece in self.pieces]
        return StateStep(self.sources[:0], self.targets[:0], pieces)


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
    start = 0
    for use, count in zip(uses, counts, strict=True):
        assert use is not None, "a segment without a slot"
        source = zero if use.source == NO_STATE else use.source
        if count == 1:
            sources.append(source)
            targets.append(use.target)
        else:
            begin = start
            for num_tokens, slot in (*use.captures, (count, use.target)):
                pieces.append(Piece(begin, start + num_tokens, source, slot))
                begin, source = start + num_tokens, slot
        start += count
    read, written = (upload(torch.tensor(slots, dtype=torch.long), device) for slots in (sources, targets))
    return StateStep(read, written, pieces)
