"""Lets a step compute the tokens of an image only once its picture is encoded. Never sees a tensor."""

from __future__ import annotations

from collections.abc import Sequence

from ...choice import Choice
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

    def begin(self) -> None:
        """A step is being scheduled."""
        self._num_blind = 0

    def lacking(self, row: Row, matched: int = 0) -> int:
        """How many tokens behind the first `matched` of a waiting row, or behind those that a running one has, may be
        computed; begins to prepare the pictures that are missing."""
        lacking = row.num_lacking - matched
        if self._pictures is None or row.choice.layout is None:
            return lacking
        if self._num_blind == _MAX_BLIND and not row.running:
            return 0
        start, is_first = row.num_computed + matched, self._num_blind == 0
        end = start + lacking
        turn, layout = _turn(row), row.choice.layout
        visible = self._pictures.visible(layout, start, end, turn, runs=row.running, is_first=is_first)
        self._num_blind += visible < end and not row.running
        return visible - start

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
