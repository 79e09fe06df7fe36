"""Pictures on their way to the tower: a thread decodes, resizes and cuts them up, so that no step waits for it.

The scheduler asks for the pictures of its rows in their order, and computes no token of an image that is not prepared.
What is prepared waits in memory, within a limit: further pictures are begun only as earlier ones pass the tower.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from ..background import Background
from .images import Key, PromptImage

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .layout import ImageLayout

    Arrays = dict[str, NDArray[Any]]

PREPARED_BYTES = 256 << 20  # that wait for the tower; a picture of 12 megapixels takes up to 300 MB in some models
_BEGUN = 2  # pictures that the thread has in hand: one, and the next, so that it need not wait for a step
_POLL = 0.001  # seconds between two looks for a picture while nothing else runs


class _Picture:
    """A picture that some prompts need; `Pictures` sets all attributes."""

    __slots__ = ("made", "users")

    def __init__(self) -> None:
        self.users: set[ImageLayout] = set()
        self.made: Future[Arrays]

    @property
    def num_bytes(self) -> int:
        """Of what is prepared."""
        if not self.made.done() or self.made.exception() is not None:
            return 0
        return sum(array.nbytes for array in self.made.result().values())


class Pictures:
    """The engine's thread calls all methods."""

    def __init__(
        self,
        prepare: Callable[[PromptImage], Arrays],
        is_encoded: Callable[[Key], bool],
        limit: int = PREPARED_BYTES,
    ) -> None:
        """`prepare` makes the tower's inputs; `is_encoded` says whether there are features already. `limit`: bytes."""
        self.prepare, self.limit, self._is_encoded = prepare, limit, is_encoded
        self._pictures: dict[Key, _Picture] = {}
        self._begun: list[Future[Arrays]] = []
        self._thread: Background | None = None  # set by `_begin`

    def visible(self, layout: ImageLayout, start: int, end: int, *, runs: bool, is_first: bool) -> int:
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
            if not self._is_encoded(key) and not self._is_prepared(key, image, layout, is_first and visible == end):
                visible = min(visible, max(image.offset, start))
            elif visible == end and key in self._pictures:
                has_some = True
        if visible == end or runs or (has_some and self.num_bytes >= self.limit):
            return visible
        return start

    def take(self, key: Key) -> Arrays | None:
        """The inputs for a picture that passes the tower now, None if it is not prepared; they are not kept.

        Raises `InvalidRequest` for a picture that cannot be used.
        """
        picture = self._pictures.get(key)
        if picture is None or not picture.made.done():
            return None
        made = picture.made.result()
        del self._pictures[key]
        return made

    def forget(self, layout: ImageLayout) -> None:
        """Drop what was prepared for a prompt that has ended, and for no other."""
        for key, _ in layout.keyed:
            if (picture := self._pictures.get(key)) is not None:
                picture.users.discard(layout)
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
        """Of prepared pictures that wait for the tower."""
        return sum(picture.num_bytes for picture in self._pictures.values())

    def _is_prepared(self, key: Key, image: PromptImage, layout: ImageLayout, is_urgent: bool) -> bool:
        picture = self._pictures.get(key)
        if picture is None:
            fits = self.num_bytes < self.limit or (is_urgent and not self._begun)
            if not fits or len(self._begun) == _BEGUN:
                return False
            picture = self._pictures[key] = self._begin(image, layout)
        picture.users.add(layout)
        return picture.made.done()

    def _begin(self, image: PromptImage, layout: ImageLayout) -> _Picture:
        picture = _Picture()
        picture.users.add(layout)

        def work() -> Arrays:
            return self.prepare(image) if picture.users else {}  # cancelled meanwhile

        self._thread = self._thread or Background("penstock-pictures")
        picture.made = self._thread.submit(work)
        self._begun.append(picture.made)
        return picture
