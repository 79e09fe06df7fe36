"""Which uploaded files the items of a response name, and where."""

from __future__ import annotations

from ...loops import Items
from .request import ResponsesRequest

EARLIER = ("conversation", "previous_response_id")  # parameters that bring items which came before


def files_named(history: Items, given: Items, request: ResponsesRequest) -> dict[str, str]:
    """The ids of the files, each with the parameter of the request that names it: the place in its input, `given`, or
    one of `EARLIER` for what only `history` names."""
    found: dict[str, str] = {}
    for index, item in enumerate(given):
        for place, id in _named(item):
            found.setdefault(id, f"input[{index}].{place}.file_id")
    before = EARLIER[request.conversation is None]
    for item in history:
        for _, id in _named(item):
            found.setdefault(id, before)
    return found


def _named(item: dict[str, object]) -> list[tuple[str, str]]:
    """The place of each part of an item that names a file, and the file's id."""
    found = []
    for field in ("content", "output"):
        if isinstance(parts := item.get(field), list):
            named = [(number, part.get("file_id")) for number, part in enumerate(parts)]
            found += [(f"{field}[{number}]", id) for number, id in named if isinstance(id, str)]
    return found
