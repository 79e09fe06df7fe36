"""Anthropic's form of lists and models, for clients that send its header, `anthropic-version`, to a common path."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from fastapi import Request

from ....schemas.errors import InvalidRequest
from ....schemas.ids import index_behind
from ....schemas.registry import ModelCard
from ....schemas.times import rfc3339

VERSION = "anthropic-version"
MAX_LISTED = 1000


def model_info(card: ModelCard, name: str) -> dict[str, Any]:
    """The model, or one of its adapters, in Anthropic's form. What depends on its chat template is not told."""
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": rfc3339(card.created),
        "lifecycle": "active",
        "line": None,
        "deprecated_at": None,
        "retires_at": None,
        "max_input_tokens": card.context_length,
        "max_tokens": card.context_length,
        "capabilities": None,
    }


def page(request: Request, items: Sequence[dict[str, Any]], kind: str, *, limit: int = 20) -> dict[str, Any]:
    """The page of `items` that the query asks for by `limit`, `after_id` and `before_id`, as Anthropic's list.

    `kind` names an item in the refusals. Raises `InvalidRequest`.
    """
    query = request.query_params
    text = query.get("limit", str(limit))
    if not re.fullmatch("[0-9]{1,9}", text) or not 1 <= int(text) <= MAX_LISTED:
        raise InvalidRequest(f"limit must be a number from 1 to {MAX_LISTED}.", param="limit")
    limit, ids = int(text), [item["id"] for item in items]
    starts: dict[str, int] = {}
    for name in query.keys() & {"after_id", "before_id"}:
        start = index_behind(ids, query[name], newest_first=True)
        if start is None:
            raise InvalidRequest(f"{name} must be the id of a {kind} of this list.", param=name)
        starts[name] = start
    if "before_id" in starts:
        end = starts["before_id"] - (query["before_id"] in ids)
        data, more = items[max(0, end - limit) : end], end > limit
    else:
        later = items[starts.get("after_id", 0) :]
        data, more = later[:limit], len(later) > limit
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return {"data": data, "has_more": more, "first_id": first, "last_id": last}
