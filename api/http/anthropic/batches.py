"""Anthropic's `/v1/messages/batches`: OpenAI's batches underneath. The input file is made of the body, the results
of the output files."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import orjson
from fastapi import FastAPI, Request
from fastapi.responses import Response, StreamingResponse

from ....schemas.anthropic.batches import MessageBatchRequest, shown
from ....schemas.errors import InvalidRequest, Refusal, StreamNotFound
from ....schemas.ids import new_id
from ....schemas.openai.batches import FINAL, MESSAGES, WINDOW, Batch, Counts
from ....schemas.openai.completions import parse_body
from ....streams.stores.batches import change_batch, find_batch, list_batches
from ....streams.stores.files import find_file, put_file
from ....streams.stores.objects import Objects
from ....streams.topology import BATCH_STATES, FILES
from ...batches.input import read_line, read_lines
from ...render.anthropic import error_payload
from ..batches import publish
from ..middleware.ignored import known_fields
from ..openapi import body_of
from ..requests import Gateway, Routes, read_as, tenant_of
from .lists import page

PATH = "/v1/messages/batches"
_LINES: dict[int | str, Any] = {"200": {"content": {"application/x-jsonl": {"schema": {"type": "string"}}}}}


def add_message_batches(app: FastAPI, gateway: Gateway, responses: dict[int | str, Any]) -> None:
    """`responses` documents the refusals."""
    routes = MessageBatchRoutes(gateway)
    app.post(PATH, tags=["anthropic"], openapi_extra=body_of(MessageBatchRequest), responses=responses)(routes.create)
    app.get(PATH, tags=["anthropic"], responses=responses)(routes.batches)
    app.get(f"{PATH}/{{id}}", tags=["anthropic"], responses=responses)(routes.batch)
    lines = _LINES | responses
    app.get(f"{PATH}/{{id}}/results", tags=["anthropic"], response_class=Response, responses=lines)(routes.results)
    app.post(f"{PATH}/{{id}}/cancel", tags=["anthropic"], responses=responses)(routes.cancel)
    app.delete(f"{PATH}/{{id}}", tags=["anthropic"], responses=responses)(routes.delete)


class MessageBatchRoutes(Routes):
    async def create(self, request: Request) -> Any:
        """Create a batch of messages, answered within a day at low priority; each is validated when it runs."""
        lines = await read_as(partial(_lines, request, self._gateway), request, self._settings)
        tenant, now, lifetime = tenant_of(request), int(self._broker.now()), self._settings.files_ttl
        file = new_id("file-")
        batch = Batch(
            id=new_id("msgbatch_"),
            endpoint=MESSAGES,
            input_file_id=file,
            status="in_progress",
            in_progress_at=now,
            request_counts=Counts(total=len(lines)),
            created_at=now,
            expires_at=now + WINDOW,
            tenant=tenant,
            output_ttl=lifetime,
        )
        await self._gateway.quotas.check(tenant, sum(map(len, lines)))
        files = await Objects.of(self._broker, FILES)
        info = await put_file(files, f"{tenant}.{file}", _each(lines), f"{batch.id}_input.jsonl", "batch", lifetime)
        try:
            await publish(self._gateway, batch)
        except Refusal:  # no batch will read the file
            if info is not None:
                await files.delete(info)
            raise
        return _shown(request, batch)

    async def batches(self, request: Request) -> Any:
        """List the batches of messages, newest first; `limit`, `after_id` and `before_id` select."""
        found = reversed(await list_batches(self._broker, tenant_of(request)))
        return page(request, [_shown(request, batch) for batch in found if batch.endpoint == MESSAGES], "batch")

    async def batch(self, id: str, request: Request) -> Any:
        """Show a batch and its progress."""
        return _shown(request, await self._find(id, request))

    async def results(self, id: str, request: Request) -> Response:
        """Download the results of a batch that has ended, a line for each request, in the order in which they ended."""
        batch = await self._find(id, request)
        if batch.status not in FINAL:
            raise StreamNotFound(
                f"The batch {id} has not ended; its results come when it has.", code="results_not_ready"
            )
        ids = [file for file in (batch.output_file_id, batch.error_file_id) if file is not None]
        infos = [await find_file(self._broker, batch.tenant, file) for file in ids]
        files = await Objects.of(self._broker, FILES)

        async def lines() -> AsyncIterator[bytes]:
            for info in infos:
                async for _, line in read_lines(files.read(info)):
                    yield orjson.dumps(_result(orjson.loads(line)), option=orjson.OPT_APPEND_NEWLINE)

        return StreamingResponse(lines(), media_type="application/x-jsonl")

    async def cancel(self, id: str, request: Request) -> Any:
        """Cancel a batch; requests that were answered keep their answers."""
        await self._find(id, request)
        batch = await change_batch(
            self._broker,
            tenant_of(request),
            id,
            lambda batch: batch.after({"in_progress": "cancelling"}, self._broker.now()),
        )
        if batch.status in FINAL and batch.status != "cancelled":
            raise InvalidRequest("A batch that has ended cannot be cancelled.", code="batch_over")
        return _shown(request, batch)

    async def delete(self, id: str, request: Request) -> Any:
        """Delete a batch that has ended, with its results."""
        batch = await self._find(id, request)
        if batch.status not in FINAL:
            raise InvalidRequest("A batch that has not ended cannot be deleted; cancel it first.", code="batch_running")
        files = await Objects.of(self._broker, FILES)
        for file in (batch.input_file_id, batch.output_file_id, batch.error_file_id):
            if file is not None and (info := await files.info(f"{batch.tenant}.{file}")) is not None:
                await files.delete(info)
        await (await self._broker.bucket(BATCH_STATES)).delete(batch.key)
        return {"id": id, "type": "message_batch_deleted"}

    async def _find(self, id: str, request: Request) -> Batch:
        batch = await find_batch(self._broker, tenant_of(request), id)
        if batch.endpoint != MESSAGES:
            raise StreamNotFound(f"The batch {id} is not a batch of messages; see /v1/batches.", code="batch_not_found")
        return batch


def _lines(request: Request, gateway: Gateway, body: dict[str, Any]) -> list[bytes]:
    """The lines of the input file. Raises `InvalidRequest`."""
    known = known_fields(body, MessageBatchRequest, request, gateway.settings)
    asked = parse_body(MessageBatchRequest, known).requests
    if len({one.custom_id for one in asked}) < len(asked):
        raise InvalidRequest("requests: every custom_id must be unique.", code="duplicate_custom_id", param="requests")
    lines = [one.line for one in asked]
    for index, line in enumerate(lines):
        if len(line) > gateway.settings.max_body_size:  # the batch runner reads no longer line
            fault = f"requests[{index}] exceeds {gateway.settings.max_body_size} bytes as a line of a file; shorten it."
            raise InvalidRequest(fault, code="line_too_long", param=f"requests[{index}]")
        try:
            read_line(line, MESSAGES)
        except InvalidRequest as error:
            param = f"requests[{index}].{error.param}".replace(".body", ".params")
            raise InvalidRequest(f"{param}: {error}", code=error.code, param=param) from None
    return lines


async def _each(lines: list[bytes]) -> AsyncIterator[bytes]:
    for line in lines:
        yield line


def _shown(request: Request, batch: Batch) -> dict[str, Any]:
    return shown(batch, f"{request.base_url}{PATH[1:]}/{batch.id}/results")


def _result(entry: dict[str, Any]) -> dict[str, Any]:
    """A line of an output file in Anthropic's form."""
    match entry:
        case {"error": {"code": "batch_expired"}}:
            result: dict[str, Any] = {"type": "expired"}
        case {"error": {"code": "batch_cancelled"}}:
            result = {"type": "canceled"}
        case {"response": {"status_code": 200, "body": message}}:
            result = {"type": "succeeded", "message": message}
        case {"response": {"status_code": status, "request_id": id, "body": {"error": error}}}:
            result = {"type": "errored", "error": error_payload(status, error["message"], id, error["code"])}
        case _:
            raise ValueError(f"not a line of an output file: {entry}")
    return {"custom_id": entry["custom_id"], "result": result}
