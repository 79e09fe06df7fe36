"""The images and documents in the results of tools. Chat templates take images from users alone, and documents are read
there, so that these follow in a message of the user, and the results say which.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any


class ResultImages:
    """Those of one chat, numbered through it."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._waiting: list[dict[str, Any]] = []  # parts of a chat message

    def text(self, pieces: Iterable[str | dict[str, Any]], joint: str) -> str:
        """The text of a result, with a mark for each image and document; `pieces` are its texts, and these as parts of
        a chat message."""
        return joint.join(piece if isinstance(piece, str) else self._marked(piece) for piece in pieces)

    def take(self) -> list[dict[str, Any]]:
        """The parts of the user's message behind the results, each behind its mark."""
        waiting, self._waiting = self._waiting, []
        return waiting

    def _marked(self, part: dict[str, Any]) -> str:
        kind = "document" if part["type"] == "file" else "image"
        self._counts[kind] += 1
        mark = f"[{kind} {self._counts[kind]}]"
        self._waiting += [{"type": "text", "text": mark}, part]
        return mark
