"""Where the images of a prompt lie among its tokens, and at which positions its tokens are. Knows no torch.

Models with positions in three dimensions (time, row, column) count text like any other model, in all three at once; an
image lies at the next position in time, its rows and columns count on from there, and text goes on behind the farther
of both. Source: `get_rope_index` in transformers' `modeling_qwen2_5_vl.py`. In HunyuanVL a token of text has its index
in all dimensions, and one of an image in all but the last three, which are the column, the row and the number of the
image. Source: the same function in transformers' `modeling_hunyuan_vl.py`.

Where the tokens of an image see each other in both directions, all of them are computed in one step; a later step may
begin inside the image, since the keys and values before it were computed so, too. Source:
`get_block_sequence_ids_for_mask` in transformers' `modeling_gemma3.py`. Where all of a prompt sees itself so, it is
computed like such an image, and its keys and values are those of no other prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from ..request import EngineRequest
from .canvas_positions import canvas_positions
from .families.canvas import Canvas
from .images import Key, PromptImage

Ints = NDArray[np.int64]
_EVER = 1 << 62  # tokens


class Placed(NamedTuple):
    """The part of an image that some tokens show: `rows` are their indices, the first of which shows the image's token
    number `first`. Of an image that layers attend to they show nothing, but read so many of its `tiles`, and 0 before
    the first image of their prompt. `around` are the indices of tokens that begin and end it and pass the same experts,
    in models where text passes others."""

    image: PromptImage
    key: Key
    first: int
    rows: Ints
    tiles: int = 0
    around: Ints = np.empty(0, np.int64)

    def behind(self, count: int) -> Self:
        """The same, behind `count` other tokens."""
        return self._replace(rows=self.rows + count, around=self.around + count)


class Placement(NamedTuple):
    """What a range of a sequence's tokens sees beside their ids: the images, and how far from its index each token's
    position is. `positions` [D, n] has them where they differ by dimension, and is None where they do not. Each token
    sees those before the index in `ends` [n]; None where that is its own and those before it."""

    shift: int
    images: tuple[Placed, ...] = ()
    positions: Ints | None = None
    ends: Ints | None = None


class ImageLayout:
    """The layout of one prompt with images; `keyed` are these, with their keys."""

    def __init__(
        self,
        owner: str,
        images: tuple[PromptImage, ...],
        tokens: list[Ints],
        positions: Ints | None,
        ends: Ints | None = None,
        identity: bytes = b"",
        around: Sequence[Ints] = (),
    ) -> None:
        self.identity = identity  # of the prompt, where each of its keys and values depends on all of it
        self.keyed = [((owner, image.identity), image) for image in images]
        self.num_encoded = 0  # parts of its images that passed the tower since it waits for them; set by `Pictures`
        self._tokens, self._positions, self._ends = tokens, positions, ends
        self._around = around or [np.empty(0, np.int64)] * len(tokens)
        self._shift = 0 if positions is None else int(positions.max()) + 1 - positions.shape[1]

    @classmethod
    def of(
        cls,
        request: EngineRequest,
        image_token: int,
        merge: int,
        is_mutual: bool = False,
        canvas: Canvas | None = None,
        marks: Sequence[int] = (),
        is_prefix: bool = False,
        axes: int = 0,
        apart: Sequence[int] = (),
    ) -> Self:
        """The layout of a request's prompt; `merge`, `canvas` and `axes` are those of the model's `Family`. Where it
        `is_mutual`, the tokens of an image that follow one another see each other; with `is_prefix` all of the
        prompt's do. `marks` are further tokens that show something, `apart` those of which some begin and end an image
        and pass its experts."""
        ids = np.array(request.prompt, np.int64)
        shows = np.isin(ids, (image_token, *marks))
        tokens = [image.offset + np.flatnonzero(shows[image.offset : image.end]) for image in request.images]
        positions = _positions(len(ids), request.images, merge) if merge else None
        if axes:
            positions = _numbered(len(ids), request.images, axes)
        if canvas is not None:
            numbers = [number for image in request.images for number in image.grid[2:]]
            sizes = list(zip(numbers[::2], numbers[1::2], strict=True))
            positions = canvas_positions(ids, image_token, sizes, canvas)
        ends = _ends(len(ids), [np.arange(len(ids))] if is_prefix else tokens) if is_mutual else None
        identity = blake2b(ids.tobytes(), digest_size=16).digest() if is_prefix else b""
        nears = [[image.offset - 1, image.end] for image in request.images] if apart else []
        around = [np.array([at for at in near if 0 <= at < len(ids) and ids[at] in apart], np.int64) for near in nears]
        return cls(request.cache_salt, request.images, tokens, positions, ends, identity, around)

    def place(self, start: int, end: int) -> Placement:
        """What the tokens from `start` to `end` see."""
        known = self._positions
        if known is None:
            images = self._placed(start, end)
            sees_later = images or (self.identity and self._ends is not None and start < len(self._ends))
            return Placement(0, images, ends=self._seen(start, end) if sees_later else None)
        if start >= known.shape[1]:
            return Placement(self._shift)
        later = np.arange(max(start, known.shape[1]), end) + self._shift
        positions = np.concatenate([known[:, start:end], np.tile(later, (len(known), 1))], axis=1)
        shift = int(positions[0, 0]) - start
        is_plain = bool((positions == np.arange(start, end) + shift).all())
        return Placement(shift, self._placed(start, end), None if is_plain else positions)

    def pause(self, start: int, end: int) -> int:
        """The last place from `start` to `end` where computing may pause: between tokens that do not see each other."""
        if self._ends is None or not start < end <= len(self._ends) or self._ends[end - 1] == end:
            return end
        return max(start, int(np.searchsorted(self._ends, self._ends[end - 1])))

    def least(self, start: int) -> int:
        """Up to where a step that begins at `start` must compute at least."""
        return start + 1 if self._ends is None or start >= len(self._ends) else int(self._ends[start])

    def _seen(self, start: int, end: int) -> Ints | None:
        if self._ends is None:
            return None
        later = np.arange(max(start, len(self._ends)), end) + 1
        return np.concatenate([self._ends[start:end], later])

    def _placed(self, start: int, end: int) -> tuple[Placed, ...]:
        found = []
        for (key, image), tokens, around in zip(self.keyed, self._tokens, self._around, strict=True):
            first, last = np.searchsorted(tokens, (start, end))
            near = around[(around >= start) & (around < end)]
            if first < last or len(near):
                found.append(Placed(image, key, int(first), tokens[first:last] - start, 0, near - start))
        return tuple(found)


class CrossLayout(ImageLayout):
    """The layout of a prompt with images that some layers attend to, from all of its tokens on.

    A token stands for an image; it and those behind it read the image, up to the next one. Images in a row are read
    together from the last of them on. Those before the first image read all of them: so the keys and values of each
    token are those of all of the prompt's images, and of no others.
    """

    def __init__(self, request: EngineRequest) -> None:
        images = sorted(request.images, key=lambda image: image.offset)
        whole = tuple(replace(image, offset=0, length=_EVER) for image in images)
        identity = blake2b(b"".join(image.identity for image in images), digest_size=16).digest()
        super().__init__(request.cache_salt, whole, [], None, identity=identity)
        self._spans: list[tuple[int, range]] = [(0, range(len(images)))]  # where each begins, and the images it reads
        for index, image in enumerate(images):
            follows = index > 0 and images[index - 1].offset == image.offset - 1
            first = self._spans[-1][1].start if follows else index
            self._spans.append((image.offset, range(first, index + 1)))

    def place(self, start: int, end: int) -> Placement:
        ends = [begin for begin, _ in self._spans[1:]] + [end]
        placed = []
        for number, ((begin, images), stop) in enumerate(zip(self._spans, ends, strict=True)):
            first, last = max(begin, start), min(stop, end)
            if first < last:
                rows = np.arange(first, last) - start
                for key, image in (self.keyed[index] for index in images):
                    placed.append(Placed(image, key, 0, rows, image.grid[0] if number else 0))
        return Placement(0, tuple(placed))


def _ends(count: int, tokens: Sequence[Ints]) -> Ints:
    """Before which index the tokens lie that each of a prompt's tokens sees, ascending [count]. `tokens` are the
    indices of those of each image."""
    ends: Ints = np.arange(1, count + 1)
    for one in tokens:
        for run in np.split(one, np.flatnonzero(np.diff(one) > 1) + 1):
            ends[run] = run[-1] + 1
    return ends


def _positions(count: int, images: tuple[PromptImage, ...], merge: int) -> Ints:
    """The positions of a prompt's tokens in time, row and column, [3, count]."""
    parts: list[Ints] = []
    done = position = 0
    for image in images:
        text = image.offset - done
        parts.append(np.tile(np.arange(position, position + text), (3, 1)))
        position += text
        time, rows, columns = image.grid[0], image.grid[1] // merge, image.grid[2] // merge
        grid = np.meshgrid(np.arange(time), np.arange(rows), np.arange(columns), indexing="ij")
        parts.append(np.stack(grid).reshape(3, -1) + position)
        position += max(rows, columns)
        done = image.end
    parts.append(np.tile(np.arange(position, position + count - done), (3, 1)))
    return np.concatenate(parts, axis=1)


def _numbered(count: int, images: tuple[PromptImage, ...], axes: int) -> Ints:
    """The positions of a prompt's tokens in `axes` dimensions, the last of which are column, row and the number of the
    image, [axes, count]. An image's first and last tokens begin and end it; each of its rows has one more that ends
    it."""
    found: Ints = np.tile(np.arange(count), (axes, 1))
    for number, image in enumerate(images):
        begin, (rows, columns) = image.offset + 1, image.grid
        line, column = np.divmod(np.arange(rows * (columns + 1)), columns + 1)
        found[axes - 3 :, begin : begin + len(line)] = column, line, np.full(len(line), number)
    return found
