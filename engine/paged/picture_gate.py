"""Lets a step compute the tokens of an image only once its picture is prepared. Never sees a tensor."""

from __future__ import annotations

from ..choice import Choice
from ..vision.pictures import Pictures
from .rows import Row

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
        visible = self._pictures.visible(row.choice.layout, start, end, runs=row.running, is_first=is_first)
        self._num_blind += visible < end and not row.running
        return visible - start

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
