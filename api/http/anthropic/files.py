"""Anthropic's form of uploaded files, for clients that send its header, `anthropic-version`, to `/v1/files`."""

from __future__ import annotations

import mimetypes
import re
from collections.abc import Sequence
from typing import Any

from fastapi import Request
from starlette.datastructures import FormData

from ....schemas.errors import InvalidRequest
from ....schemas.ids import index_behind
from ....schemas.times import rfc3339
from ....streams.stores.objects import ObjectInfo
from .lists import VERSION, page

PURPOSE = "user_data"  # of files that Anthropic's clients upload
SHORTEST = 3600  # seconds that a file may be asked to live
MAX_IDS = 100

_CURSOR = "page_"  # and the id of the last file before the page


def is_of_anthropic(request: Request) -> bool:
    return VERSION in request.headers


def file_info(info: ObjectInfo) -> dict[str, Any]:
    name: str = info.about["filename"]
    return {
        "type": "file",
        "id": info.name.partition(".")[2],
        "filename": name,
        "mime_type": mimetypes.guess_type(name)[0] or "application/octet-stream",
        "size_bytes": info.size,
        "created_at": rfc3339(info.about["created_at"]),
        "expires_at": rfc3339(info.about["expires_at"]),
        "downloadable": True,
        "scope": None,
    }


def deleted(id: str) -> dict[str, Any]:
    return {"type": "file_deleted", "id": id}


def lifetime(form: FormData, most: float) -> float:
    """Seconds until an uploaded file expires. Raises `InvalidRequest`."""
    if (given := form.get("expires_in_seconds")) is None:
        return most
    if not re.fullmatch("[0-9]{1,9}", str(given)) or not SHORTEST <= int(str(given)) <= most:
        fault = f"expires_in_seconds must be from {SHORTEST} to {int(most)}."
        raise InvalidRequest(fault, param="expires_in_seconds")
    return int(str(given))


def listed(request: Request, infos: Sequence[ObjectInfo]) -> dict[str, Any]:
    """The page of files, of those that come oldest first, that the query asks for, newest first.

    `limit` and `page`, the `next_page` of another list, or `after_id` and `before_id` select, or `ids`; no file has the
    scope of a session. Raises `InvalidRequest`.
    """
    query = request.query_params
    items = [] if "scope_id" in query else [file_info(info) for info in reversed(infos)]
    if wanted := {*query.getlist("ids"), *query.getlist("ids[]")}:
        if len(wanted) > MAX_IDS or "page" in query or "limit" in query:
            raise InvalidRequest(f"ids may be {MAX_IDS}, without page and limit.", param="ids")
        items = [item for item in items if item["id"] in wanted]
        first, last = (items[0]["id"], items[-1]["id"]) if items else (None, None)
        return {"data": items, "has_more": False, "first_id": first, "last_id": last, "next_page": None}
    if (cursor := query.get("page")) is not None:
        ids = [item["id"] for item in items]
        start = index_behind(ids, cursor.removeprefix(_CURSOR), newest_first=True)
        if start is None:
            raise InvalidRequest("page must be the next_page of a list.", param="page")
        items = items[start:]
    shown = page(request, items, "file")
    more = shown["has_more"] and "before_id" not in query
    return shown | {"next_page": f"{_CURSOR}{shown['last_id']}" if more else None}
