"""Pictures on their way to a step: a thread decodes, resizes and cuts them up, and the tower encodes them in parts.

The scheduler asks for the pictures of its rows in their order, and computes no token of an image that is not encoded.
No step waits for a picture as a whole: between two of them, one part of one picture passes the tower. The parts are
always the same ones, so that features do not depend on what else runs.

What is prepared or encoded waits in memory, within a limit: further pictures are begun only as steps use earlier ones.
Knows no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

from ..background import Background
from .images import Key, PromptImage

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from .layout import ImageLayout

Arrays = dict[str, "NDArray[Any]"]
"""What a model's tower takes, by the names of its parameters."""

PENDING_BYTES = 256 << 20  # that wait for a step; a prepared picture of 12 megapixels takes up to 300 MB in some models
_BEGUN = 2  # pictures that the thread has in hand: one, and the next, so that it need not wait for a step
_POLL = 0.001  # seconds between two looks for a picture while nothing else runs


class Turn(NamedTuple):
    """When it is a prompt's turn: its place in line, and its priority; both are smaller for a more urgent one."""

    order: int
    priority: int

    def yields_to(self, first: Turn) -> bool:
        """Whether pictures of this prompt wait while a step computes prompts of which `first` is the first."""
        return self.priority > first.priority and self.order > first.order


Encode = Callable[[Arrays], "Iterator[Tensor | None]"]
"""Passes a picture through the tower part by part: yields None after each one but the last, and then the features."""


class _Picture:
    """A picture that some prompts need; `Pictures` sets all attributes."""

    __slots__ = ("encoding", "features", "made", "users")

    def __init__(self) -> None:
        self.users: dict[ImageLayout, Turn] = {}
        self.made: Future[Arrays] | None  # what is prepared; None once all of it is encoded
        self.encoding: Iterator[Tensor | None] | None = None  # while it passes the tower
        self.features: Tensor | None = None

    @property
    def has_failed(self) -> bool:
        return self.made is not None and self.made.done() and self.made.exception() is not None

    @property
    def is_ready(self) -> bool:
        """Whether a step can use it, or fails by it."""
        return self.made is None or self.has_failed

    @property
    def is_prepared(self) -> bool:
        """Whether its next part can pass the tower."""
        return self.made is not None and self.made.done() and not self.has_failed

    @property
    def num_bytes(self) -> int:
        made = self.made.result() if self.made is not None and self.is_prepared else {}
        return sum(array.nbytes for array in made.values()) + (0 if self.features is None else self.features.nbytes)

    def order(self, first: Turn | None) -> float:
        """Its place in line beside prompts of which `first` is the first; infinite if it yields to them."""
        turns = self.users.values()
        return min((turn.order for turn in turns if first is None or not turn.yields_to(first)), default=inf)


class Pictures:
    """The engine's thread calls all methods."""

    def __init__(
        self,
        prepare: Callable[[PromptImage], Arrays],
        encode: Encode,
        is_encoded: Callable[[Key], bool],
        limit: int = PENDING_BYTES,
    ) -> None:
        """`prepare` makes the tower's inputs; `is_encoded` says whether features are kept already. `limit`: bytes."""
        self.prepare, self.encode, self.limit, self._is_encoded = prepare, encode, limit, is_encoded
        self.most_held: int | None = None  # pictures that running prompts may need in all of their steps; None: any
        self._pictures: dict[Key, _Picture] = {}
        self._begun: list[Future[Arrays]] = []
        self._thread: Background | None = None  # set by `_begin`

    def visible(self, layout: ImageLayout, start: int, end: int, turn: Turn, *, runs: bool, is_first: bool) -> int:
        """Up to which of its tokens from `start` to `end` a prompt can be computed now.

        Begins to prepare what is missing, as far as the limit allows; the first picture that the first prompt in line
        lacks (`is_first`) is prepared in any case, so that the line moves. A prompt that does not run yet waits for all
        of its pictures, unless the limit keeps some away.
        """
        self._begun = [made for made in self._begun if not made.done()]
        visible, has_some = end, False
        for key, image in layout.keyed:
            if image.end <= start:
                continue
            if not self._is_encoded(key) and not self._is_ready(key, image, layout, turn, is_first and visible == end):
                visible = min(visible, max(image.offset, start))
            elif visible == end and key in self._pictures:
                has_some = True
        if visible == end or runs or (has_some and self.num_bytes >= self.limit):
            return visible
        return start

    def advance(self, first: Turn | None) -> bool:
        """Pass a part of the picture that is next in line through the tower; returns whether there was one.

        `first` is the first of the prompts that the step computes, if any.
        """
        _, found = min(
            ((picture.order(first), picture) for picture in self._pictures.values() if picture.is_prepared),
            key=lambda one: one[0],  # of several that one prompt needs, the first one
            default=(inf, None),
        )
        if found is None or found.made is None or found.order(first) == inf:
            return False
        try:
            found.encoding = found.encoding or self.encode(found.made.result())
            found.features = next(found.encoding)
        except Exception as error:  # of those alone that need this picture: `take` raises it
            found.made, found.encoding = Future(), None
            found.made.set_exception(error)
            return True
        if found.features is not None:
            found.made = found.encoding = None
        for layout in found.users:
            layout.num_encoded += 1
        return True

    def take(self, key: Key) -> Tensor | None:
        """The features of a picture, None if it is not encoded; they are not kept.

        Raises `InvalidRequest` for a picture that cannot be used.
        """
        picture = self._pictures.get(key)
        if picture is None or not picture.is_ready:
            return None
        if picture.made is not None:
            picture.made.result()
        del self._pictures[key]
        return picture.features

    def forget(self, layout: ImageLayout) -> None:
        """Drop what was prepared or encoded for a prompt that has ended, and for no other."""
        for key, _ in layout.keyed:
            if (picture := self._pictures.get(key)) is not None:
                picture.users.pop(layout, None)
                if not picture.users:
                    del self._pictures[key]

    def delay(self) -> float:
        """Seconds until a look for prepared pictures may find one; 0 if none is being prepared."""
        return 0.0 if not self._begun or any(made.done() for made in self._begun) else _POLL

    def close(self) -> None:
        """End the thread; what it has not begun is dropped."""
        for picture in self._pictures.values():
            picture.users.clear()
        self._pictures.clear()
        if self._thread is not None:
            self._thread.close(0)

    @property
    def num_bytes(self) -> int:
        """Of pictures that wait for the tower or for a step."""
        return sum(picture.num_bytes for picture in self._pictures.values())

    def _is_ready(self, key: Key, image: PromptImage, layout: ImageLayout, turn: Turn, is_urgent: bool) -> bool:
        picture = self._pictures.get(key)
        if picture is None:
            fits = self.num_bytes < self.limit or (is_urgent and not self._begun)
            if not fits or len(self._begun) == _BEGUN:
                return False
            picture = self._pictures[key] = self._begin(image, layout, turn)
        picture.users[layout] = turn
        return picture.is_ready

    def _begin(self, image: PromptImage, layout: ImageLayout, turn: Turn) -> _Picture:
        picture = _Picture()
        picture.users[layout] = turn

        def work() -> Arrays:
            return self.prepare(image) if picture.users else {}  # cancelled meanwhile

        self._thread = self._thread or Background("penstock-pictures")
        picture.made = self._thread.submit(work)
        self._begun.append(picture.made)
        return picture
