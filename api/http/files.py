"""`/v1/files`, as OpenAI and Anthropic have it. A file is an object named `<tenant>.<file>`; its metadata is what
clients see."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Container, Sequence
from typing import Any
from urllib.parse import unquote

from fastapi import FastAPI, Request
from fastapi.responses import Response, StreamingResponse
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.types import Message

from ...schemas.errors import DeadlineExceeded, InvalidRequest, PayloadTooLarge
from ...schemas.ids import index_behind, new_id
from ...streams.stores.files import files_in_use, find_file, list_files, put_file
from ...streams.stores.objects import ObjectInfo, Objects
from ...streams.topology import FILES
from .anthropic import files as anthropic_files
from .anthropic.files import is_of_anthropic
from .openapi import refusals
from .requests import Gateway, Routes, tenant_of

PURPOSES = ("batch", "user_data", "assistants", "vision")
MIN_UPLOAD_RATE = 16 << 10  # bytes a second; a slower upload is refused
FORM_OVERHEAD = 64 << 10  # bytes of an upload beside the file

_FORM = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"type": "string", "enum": list(PURPOSES)},
        "expires_in_seconds": {"type": "integer", "minimum": 3600, "description": "In Anthropic's form"},
        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
        "expires_after[seconds]": {"type": "integer", "minimum": 3600, "maximum": 30 * 86400},
    },
}
_BYTES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The bytes",
        "content": {"application/octet-stream": {"schema": {"format": "binary", "type": "string"}}},
    }
}
_UPLOAD = {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _FORM}}}}


def add_files(app: FastAPI, gateway: Gateway) -> None:
    routes = FileRoutes(gateway)
    refused = refusals(400, 408, 413, 429, 503, 507)
    app.post("/v1/files", tags=["openai"], openapi_extra=_UPLOAD, responses=refused)(routes.upload)
    app.get("/v1/files", tags=["openai"], responses=refusals(400, 503))(routes.files)
    app.get("/v1/files/{id}", tags=["openai"], responses=refusals(404, 503))(routes.file)
    sent = _BYTES | refusals(404, 503)
    app.get("/v1/files/{id}/content", tags=["openai"], response_class=Response, responses=sent)(routes.content)
    app.delete("/v1/files/{id}", tags=["openai"], responses=refusals(400, 404, 503))(routes.delete)


class FileRoutes(Routes):
    async def upload(self, request: Request) -> Any:
        """Upload a file; `purpose` is `batch`, or one of the others for what requests name. Anthropic's clients give
        none; to them, this and the other paths of files answer in Anthropic's form."""
        form = await _form(request, self._settings.file_limit, self._settings.body_timeout)
        try:
            file, purpose, most = form.get("file"), form.get("purpose"), self._settings.files_ttl
            if (of_anthropic := is_of_anthropic(request)) and purpose is None:
                purpose = anthropic_files.PURPOSE
            if not isinstance(file, UploadFile):
                fault = "file is missing." if file is None else "file has no name; send one, as in ('a.pdf', data)."
                raise InvalidRequest(fault, code="missing_required_parameter", param="file")
            if (file.size or 0) > self._settings.file_limit:
                raise _too_large(self._settings.file_limit)
            if purpose not in PURPOSES:
                raise InvalidRequest(f"purpose must be one of {', '.join(PURPOSES)}.", param="purpose")
            lifetime = anthropic_files.lifetime(form, most) if of_anthropic else _lifetime(form, most)
            name = f"{tenant_of(request)}.{new_id('file-')}"
            objects = await Objects.of(self._broker, FILES)
            await self._gateway.quotas.check(tenant_of(request), file.size or 0)
            info = await put_file(objects, name, _chunks(file), _name(file), str(purpose), lifetime)
            assert info is not None, "the name is new"
        finally:
            await form.close()
        return _shown(info, request)

    async def files(self, request: Request) -> Any:
        """List the files, newest first; `purpose`, `order`, `limit` and `after` select."""
        purpose = request.query_params.get("purpose")
        infos = await list_files(self._broker, tenant_of(request))
        if is_of_anthropic(request):
            return anthropic_files.listed(request, infos)
        found = [_shown(info, request) for info in infos if purpose in (None, info.about["purpose"])]
        return page(request, found, default=10_000, most=10_000)

    async def file(self, id: str, request: Request) -> Any:
        """Show a file's metadata."""
        return _shown(await find_file(self._broker, tenant_of(request), id), request)

    async def content(self, id: str, request: Request) -> Response:
        """Download a file."""
        info = await find_file(self._broker, tenant_of(request), id)
        data = (await Objects.of(self._broker, FILES)).read(info)
        headers = {"content-length": str(info.size), "content-disposition": "attachment"}
        return StreamingResponse(data, media_type="application/octet-stream", headers=headers)

    async def delete(self, id: str, request: Request) -> Any:
        """Delete a file, unless a running batch needs it."""
        info = await find_file(self._broker, tenant_of(request), id)
        if info.name in await files_in_use(self._broker):
            raise InvalidRequest(
                "A running batch needs this file; cancel the batch first.", code="file_in_use", param="file_id"
            )
        await (await Objects.of(self._broker, FILES)).delete(info)
        self._gateway.quotas.freed(tenant_of(request))
        return anthropic_files.deleted(id) if is_of_anthropic(request) else _deleted(id)


def page(
    request: Request, items: Sequence[dict[str, Any]], *, default: int, most: int, gone: Container[str] = ()
) -> dict[str, Any]:
    """The page of `items`, oldest first, that the query asks for, as OpenAI's list. Those whose ids are `gone` are not
    shown, but a page can begin behind them. Raises `InvalidRequest`."""
    query = request.query_params
    limit, order, after = query.get("limit", str(default)), query.get("order", "desc"), query.get("after")
    if not re.fullmatch("[0-9]{1,9}", limit) or not 1 <= int(limit) <= most:
        raise InvalidRequest(f"limit must be a number from 1 to {most}.", param="limit")
    if order not in ("asc", "desc"):
        raise InvalidRequest("order must be asc or desc.", param="order")
    ordered = items if order == "asc" else items[::-1]
    if after is not None:
        start = index_behind([item["id"] for item in ordered], after, newest_first=order == "desc")
        if start is None:
            raise InvalidRequest("after must be the id of an entry of this list.", param="after")
        ordered = ordered[start:]
    ordered = [item for item in ordered if item["id"] not in gone]
    data = ordered[: int(limit)]
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return {"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": len(data) < len(ordered)}


async def _form(request: Request, limit: int, patience: float) -> FormData:
    """The form; a large file is on disk. Raises `PayloadTooLarge`, `DeadlineExceeded`, `InvalidRequest`."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > limit + FORM_OVERHEAD:
        raise _too_large(limit)
    if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        raise InvalidRequest("Send the file as multipart/form-data.", code="invalid_form")
    size, clock = 0, asyncio.get_running_loop().time
    begun = clock()

    async def limited() -> Message:
        nonlocal size
        async with asyncio.timeout_at(min(clock(), begun + size / MIN_UPLOAD_RATE) + patience):
            message = await request.receive()
        size += len(message.get("body", b""))
        if size > limit + FORM_OVERHEAD:
            raise _too_large(limit)
        return message

    try:
        return await Request(request.scope, limited).form(max_files=1, max_fields=8)
    except TimeoutError:
        raise DeadlineExceeded(
            f"The upload paused for {patience:g} seconds, or was slower than {MIN_UPLOAD_RATE} bytes a second.",
            code="body_timeout",
        ) from None
    except HTTPException as error:
        raise InvalidRequest(f"The form is malformed: {error.detail}", code="invalid_form") from None


def _too_large(limit: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"The file exceeds {limit} bytes, the limit of the setting file_limit.")


def _name(file: UploadFile) -> str:
    """The file's name; .NET's HttpClient gives it in ASCII as a MIME word, and again in the form of RFC 5987."""
    given = re.search(r"; *filename\*=utf-8''([^\s;]+)", file.headers.get("content-disposition", ""), re.IGNORECASE)
    return (unquote(given[1]) if given else file.filename) or "file"


def _lifetime(form: FormData, most: float) -> float:
    """Seconds until the file expires. Raises `InvalidRequest`."""
    anchor, seconds = form.get("expires_after[anchor]"), str(form.get("expires_after[seconds]", ""))
    if anchor is None and not seconds:
        return most
    if anchor != "created_at" or not re.fullmatch("[0-9]{1,9}", seconds) or not 3600 <= int(seconds) <= most:
        message = f"expires_after must have the anchor created_at and from 3600 to {int(most)} seconds."
        raise InvalidRequest(message, param="expires_after")
    return int(seconds)


async def _chunks(file: UploadFile) -> AsyncIterator[bytes]:
    while chunk := await file.read(1 << 20):
        yield chunk


def _deleted(id: str) -> dict[str, Any]:
    return {"id": id, "object": "file", "deleted": True}


def _shown(info: ObjectInfo, request: Request) -> dict[str, Any]:
    if is_of_anthropic(request):
        return anthropic_files.file_info(info)
    return {"id": info.name.partition(".")[2], "bytes": info.size, "status": "processed", **info.about}
