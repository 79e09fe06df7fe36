"""Lets a step compute the tokens of an image only once its picture is encoded. Never sees a tensor."""

from __future__ import annotations

from collections.abc import Sequence

from ...choice import Choice
from ...vision.images import Key
from ...vision.pictures import Pictures, Turn
from .rows import Row, Scheduled

_MAX_BLIND = 8  # waiting rows without their pictures that one step considers; text passes them


class PictureGate:
    """`is_idle`: the last step had nothing to compute, and no row has come or gone since; the scheduler sets it."""

    def __init__(self, pictures: Pictures | None = None) -> None:
        """`pictures` is None for a model that sees none."""
        self.is_idle = False
        self._pictures = pictures
        self._num_blind = 0  # rows that lack pictures, of those considered in this step; set by `begin` and `lacking`
        self._holding: list[Row] = []  # those let in, where pictures are held; this and the next are set as above
        self._is_full = False  # a row waits for those that are held to be released, and others behind it

    def begin(self) -> None:
        """A step is being scheduled."""
        self._num_blind, self._is_full = 0, False
        self._holding = [row for row in self._holding if row.running]

    def lacking(self, row: Row, matched: int = 0) -> int:
        """How many tokens behind the first `matched` of a waiting row, or behind those that a running one has, may be
        computed; begins to prepare the pictures that are missing."""
        lacking = row.num_lacking - matched
        if self._pictures is None or row.choice.layout is None:
            return lacking
        if not row.running and (self._num_blind == _MAX_BLIND or not self._has_room(row)):
            return 0
        start, is_first = row.num_computed + matched, self._num_blind == 0
        end = start + lacking
        turn, layout = _turn(row), row.choice.layout
        visible = self._pictures.visible(layout, start, end, turn, runs=row.running, is_first=is_first)
        self._num_blind += visible < end and not row.running
        if visible > start and not row.running and self._pictures.most_held is not None:
            self._holding.append(row)
        return visible - start

    def _has_room(self, row: Row) -> bool:
        """Whether a waiting row's pictures may be held beside those of the rows that run."""
        if self._pictures is None or self._pictures.most_held is None or row.choice.layout is None:
            return True
        held = {key for one in self._holding if one.running for key in _pictures(one)}
        fits = not held or len(held.union(_pictures(row))) <= self._pictures.most_held
        self._is_full |= not fits
        return fits and not self._is_full

    def encode(self, scheduled: Sequence[Scheduled]) -> None:
        """Encode a part of the picture that is next in line, beside a step of these rows."""
        if self._pictures is None:
            return
        turns = [_turn(row) for row, _, _ in scheduled if row.num_tokens - row.num_computed > 1]
        if self._pictures.advance(min(turns, default=None)):
            self.is_idle = False

    def forget(self, choice: Choice) -> None:
        """A choice has ended."""
        self.is_idle = False
        if self._pictures is not None and choice.layout is not None:
            self._pictures.forget(choice.layout)

    def delay(self) -> float:
        """Seconds until the next step may have something to compute, where choices wait or run."""
        return self._pictures.delay() if self._pictures is not None and self.is_idle else 0.0

    def close(self) -> None:
        if self._pictures is not None:
            self._pictures.close()


def _turn(row: Row) -> Turn:
    return Turn(row.order, row.priority)


def _pictures(row: Row) -> list[Key]:
    return [] if row.choice.layout is None else [key for key, _ in row.choice.layout.keyed]
