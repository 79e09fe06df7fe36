"""Responses that are not stored, for the WebSockets on which they were made: what follows them begins with their items.

All connections of a bridge share the room, so that many idle ones take no more of it than a few.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import orjson

MAX_KEPT = 16  # of one connection
_ENTRY = 500  # bytes that one takes besides its items


class Kept(NamedTuple):
    """`before` is the stored response that comes before the items, if there is one; `items` are JSON."""

    before: str | None
    items: bytes


class KeptResponses:
    """Forgets the one that was used least recently when there are too many bytes."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._size = 0
        self._kept: OrderedDict[tuple[int, str], Kept] = OrderedDict()  # by connection and the id of the response
        self._ids: dict[int, list[str]] = {}  # by connection, the newest last

    def put(self, connection: int, id: str, before: str | None, items: list[Any]) -> None:
        kept = Kept(before, orjson.dumps(items))
        self._kept[connection, id] = kept
        self._size += len(kept.items) + _ENTRY
        ids = self._ids.setdefault(connection, [])
        ids.append(id)
        if len(ids) > MAX_KEPT:
            self._drop(connection, ids[0])
        while self._size > self._most:
            self._drop(*next(iter(self._kept)))

    def find(self, connection: int, id: str) -> Kept | None:
        if (kept := self._kept.get((connection, id))) is not None:
            self._kept.move_to_end((connection, id))
        return kept

    def forget(self, connection: int) -> None:
        """The connection has ended."""
        for id in [*self._ids.get(connection, ())]:
            self._drop(connection, id)

    def _drop(self, connection: int, id: str) -> None:
        self._size -= len(self._kept.pop((connection, id)).items) + _ENTRY
        ids = self._ids[connection]
        ids.remove(id)
        if not ids:
            del self._ids[connection]
