"""The positions of a prompt's tokens in MiniCPM-V 4.7: its images lie on canvases, with their slices and marks.

An image as a whole covers the same rows and columns as its slices together; the marks around it and them lie at the
corners, and text goes on behind the longer side. Source: `get_rope_index` in transformers' `modeling_minicpmv4_7.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .families.canvas import Canvas

Ints = NDArray[np.int64]


class _Run(NamedTuple):
    """Image tokens that follow one another."""

    start: int
    end: int


@dataclass
class _Shown:
    """An image as a whole, and its slices; `end` is behind the marks that follow."""

    whole: _Run
    slices: list[_Run]
    end: int = 0

    @property
    def columns(self) -> int:
        """How many slices a row has: behind its last one there is more than the end of one mark and another's begin."""
        last = len(self.slices)
        count = next((k + 1 for k in range(last - 1) if self.slices[k + 1].start - self.slices[k].end > 2), last)
        return count if last % count == 0 else last


def canvas_positions(ids: Ints, image_token: int, sizes: Sequence[tuple[int, int]], canvas: Canvas) -> Ints:
    """The positions of a prompt's tokens in time, row and column, [3, n]. `sizes` are those of all images and their
    slices, each in patches of height and width."""
    found = np.tile(np.arange(len(ids)), (3, 1))
    left = iter([(height // canvas.merge, width // canvas.merge) for height, width in sizes])
    position = done = 0
    for shown in _images(ids, image_token, canvas.marks):
        begin = shown.whole.start - 1
        if (text := begin - done) > 0:
            found[:, done:begin] = np.arange(text) + position
            position += text
        position = _lay(found, shown, left.__next__, begin, position)
        done = shown.end
    found[:, done:] = np.arange(len(ids) - done) + position
    return found


def _images(ids: Ints, image_token: int, marks: Sequence[int]) -> list[_Shown]:
    edges = np.flatnonzero(np.diff(ids == image_token, prepend=False, append=False))
    images: list[_Shown] = []
    for run in map(_Run._make, edges.reshape(-1, 2).tolist()):
        if images and ids[run.start - 1] == marks[0]:
            images[-1].slices.append(run)
        else:
            images.append(_Shown(run, []))
    for shown in images:
        shown.end = (shown.slices or [shown.whole])[-1].end
        while shown.end < len(ids) and ids[shown.end] in marks:
            shown.end += 1
    return images


def _lay(found: Ints, shown: _Shown, size: Callable[[], tuple[int, int]], begin: int, origin: int) -> int:
    """Lay an image, the mark at `begin` included, with its top left corner at `origin`; returns the next position."""
    own = size()
    sizes = [size() for _ in shown.slices]
    rows, columns = 0, 0
    height, width = own
    if sizes:
        columns = shown.columns
        rows = len(sizes) // columns
        height, width = rows * sizes[0][0], columns * sizes[0][1]
    found[:, begin : shown.end] = origin
    found[1:, begin] = max(origin - 1, 0)
    if shown.whole.end < shown.end:
        found[1:, shown.whole.end] = origin + height, origin + width
    _spread(found, shown.whole, own, (height, width), (origin, origin))
    for k, (run, one) in enumerate(zip(shown.slices, sizes, strict=True)):
        top, side = origin + k // columns * sizes[0][0], origin + k % columns * sizes[0][1]
        found[1:, run.start - 1] = top, side
        if run.end < shown.end:
            found[1:, run.end] = top + one[0] - 1, side + one[1] - 1
        _spread(found, run, one, one, (top, side))
        if k + 1 < len(sizes) and shown.slices[k + 1].start - run.end > 2:  # the end of a line
            between = slice(run.end + 1, shown.slices[k + 1].start - 1)
            found[1, between] = origin + (k // columns + 1) * sizes[0][0] - 1
            found[2, between] = origin + columns * sizes[0][1]
    return origin + max(height, width) + 1


def _spread(found: Ints, run: _Run, size: tuple[int, int], over: tuple[int, int], corner: tuple[int, int]) -> None:
    """Spread tokens of `size` in rows and columns evenly over as many as `over` says."""
    import torch  # whose numbers decide where halves are rounded to

    sides = [
        torch.linspace(0, most - 1, count).round().long().numpy() + first
        for count, most, first in zip(size, over, corner, strict=True)
    ]
    found[1:, run.start : run.end] = np.stack(np.meshgrid(*sides, indexing="ij")).reshape(2, -1)
