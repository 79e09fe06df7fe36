"""OpenAI's `/v1/responses`: the pipeline makes them, the broker stores them, and every bridge can show them."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from dataclasses import asdict
from functools import partial
from typing import Any, Literal

import orjson
from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from ...config.settings import Settings
from ...schemas.errors import DeadlineExceeded, InvalidRequest, Overloaded, StreamNotFound
from ...schemas.events import Accepted, Cancelled, ErrorBody, Event, Expired, Failed, Turn
from ...schemas.loops import Begun, Ended, LoopJob, is_response
from ...schemas.openai.body import model_of
from ...schemas.openai.completions import parse_request
from ...schemas.openai.responses.files import files_named
from ...schemas.openai.responses.items import input_items as items_of
from ...schemas.openai.responses.messages import chat_messages
from ...schemas.openai.responses.paths import refused_in_response
from ...schemas.openai.responses.request import ResponsesRequest, parse_responses
from ...schemas.openai.responses.tools import hosted
from ...schemas.wire import codec
from ...streams.port import MESSAGE_ID
from ...streams.stores.conversations import Conversations
from ...streams.stores.history import History
from ...streams.stores.registry import Registry
from ...streams.stores.responses import LOST, ResponseLog, Stored
from ...streams.topology import EVENTS, PRIORITIES, TOOLS, lane_stream
from ..bridge.response_reading import ResponseReading
from ..render.response_object import response_object
from ..render.responses import ResponseRenderer, repeats_no_more
from ..tools.sealing import seal
from .answers import FOR_EVER, EventStream, error_of, error_response
from .files import page
from .middleware.ignored import known_fields, name_ignored
from .openapi import STREAMED, body_of, documented, refusals
from .requests import Gateway, Routes, open_request, read_as, size_of, tenant_of

PREFIX = "resp_"
POLL_INTERVAL = 0.1  # seconds, while a response stops
MAX_POLLS = 100  # after which the client is answered, though the response may still be stopping

_REFUSALS = refusals(400, 404, 408, 413, 500, 503)

Mode = Literal["stream", "whole", "background"]


class ResponseAnswer(EventStream):
    """Sends a response in one of three modes: as SSE, whole as JSON when it has ended, or in the background, as JSON as
    soon as it is stored. If it has `begun`, a failure is part of the response and not an HTTP error."""

    def __init__(
        self, reading: ResponseReading, renderer: ResponseRenderer, mode: Mode, *, keepalive: float, begun: bool = False
    ) -> None:
        super().__init__(reading, keepalive=keepalive, progress=None)
        self._begun = begun
        self._renderer = renderer
        self._mode = mode

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._mode == "stream":
            await super()._answer(scope, receive, send)
            return
        ready = False
        while not ready:
            events = await self._reading.take(FOR_EVER)
            for event in events:
                # After a tool call or a turn, the client must not retry.
                self._begun = self._begun or repeats_no_more(event)
                if error := self._refusal(event):
                    await error_response(error, self._reading.request)(scope, receive, send)
                    return
                if not self._is_own(event):
                    self._renderer.render(event)
            ready = self._reading.ended or (self._mode == "background" and self._reached(events))
        response = self._renderer.response()
        if self._mode == "background" and not self._renderer.finished:
            response |= {"status": "queued", "output": [], "usage": None}
        body = orjson.dumps(response)
        await send(self._opening("application/json", {"content-length": str(len(body))}))
        await send({"type": "http.response.body", "body": body})

    def _reached(self, events: list[Event]) -> bool:
        """Wait for the first event of the first turn, so that a refusal of that turn decides the HTTP status."""
        own = self._reading.request
        events = [event for event in events if not isinstance(event, Turn | Failed | Expired | Cancelled)]
        if self._mode == "background":  # before the first turn, its log may not exist
            return any(event.request != own for event in events)
        return self._begun or any(not isinstance(event, Accepted) or event.request != own for event in events)

    def _refusal(self, event: Event) -> ErrorBody | None:
        return error_of(event) if event.request == self._reading.request and not self._begun else None

    def _chunks(self, event: Event) -> list[bytes]:
        if self._is_own(event):
            assert isinstance(event, Failed)
            return [self._renderer.broken(event.error)]
        return [self._renderer.render(event)]

    def _is_own(self, event: Event) -> bool:
        """Whether this bridge made the event because it stops reading; the response itself continues."""
        return self._reading.is_cut and self._reading.kept and isinstance(event, Failed)


def add_responses(app: FastAPI, gateway: Gateway) -> None:
    path = "/v1/responses/{id}"
    routes = ResponseRoutes(gateway)
    app.post("/v1/responses", tags=["openai"], openapi_extra=documented(ResponsesRequest))(routes.create)
    app.post("/v1/responses/compact", include_in_schema=False)(routes.compact)
    body = body_of(ResponsesRequest)
    count = app.post("/v1/responses/input_tokens", tags=["openai"], openapi_extra=body, responses=_REFUSALS)
    count(routes.input_tokens)
    app.get(path, tags=["openai"], responses=STREAMED | refusals(400, 404, 503))(routes.retrieve)
    app.delete(path, tags=["openai"], responses=refusals(404, 503))(routes.delete)
    app.post(f"{path}/cancel", tags=["openai"], responses=refusals(400, 404, 503))(routes.cancel)
    app.get(f"{path}/input_items", tags=["openai"], responses=refusals(400, 404, 503))(routes.input_items)


class ResponseRoutes(Routes):
    async def create(self, request: Request) -> Response:
        """OpenAI's `/v1/responses`; Penstock runs MCP tools. Its own parameters are in the schema too."""
        body = await read_as(partial(_sealed, request, self._settings), request, self._settings)
        for header in ("penstock-resumable", "last-event-id", "penstock-events"):
            if header in request.headers:
                advice = "retrieve the response with stream=true and starting_after"
                raise InvalidRequest(f"The header {header} is not for this path; {advice}.", param=header)
        check_stage(self._gateway.registry)
        background = body.get("background") is True
        kept = background or body.get("store") is not False
        opened = await open_request(request, self._gateway, "/v1/responses", body, PREFIX, kept=kept)
        reading = ResponseReading(self._gateway.bridge, opened.reading)
        renderer = ResponseRenderer(reading.request, body, int(time.time()), model=model_of(body))
        mode: Mode = "stream" if body.get("stream") is True else "background" if background else "whole"
        return ResponseAnswer(reading, renderer, mode, keepalive=self._settings.keepalive_interval)

    async def compact(self) -> Any:
        raise StreamNotFound(
            "Penstock does not compact responses; send the items that the model still needs as the input of a new one.",
            code="not_found",
        )

    async def input_tokens(self, request: Request) -> Any:
        """Count the tokens of a response's prompt: of its input, of what it follows, and of its functions."""
        body = await read_as(partial(_sealed, request, self._settings), request, self._settings)
        asked = parse_responses(body)
        if asked.mcp_tools:
            fault = "tools: which tools an MCP server has is known when a response runs; count without them."
            raise InvalidRequest(fault, code="unsupported_parameter", param="tools")
        now = self._broker.now()
        job = LoopJob(
            id=f"{PREFIX}{uuid.uuid4().hex}",
            tenant=tenant_of(request),
            priority="normal",
            bridge="none",
            created=now,
            deadline=now,
            body=body,
        )
        log, conversations = await ResponseLog.of(self._broker), await Conversations.of(self._broker)
        history = History(log, conversations, self._settings.responses_ttl, self._broker.now)
        before = await history.items(job, await history.origin(job, asked))
        given, named = await history.input(job, asked), asked.namespaced
        await self._gateway.preparers.files.check(job.tenant, files_named(before, given, asked))
        try:
            card = await self._gateway.preparers.card(asked.model)
            items, sees = [*before, *given], "image" in card.modalities
            images = await self._gateway.preparers.files.shown(job.tenant, items) if sees else set()
            messages = chat_messages(items, asked.instructions, namespaced=named, before=len(before), images=images)
            chat = parse_request("/v1/chat/completions", asked.chat_body(messages, (), first=True, tools_allowed=True))
            tokens = await self._gateway.preparers.prompt(card, chat, job.tenant, size_of(request))
        except InvalidRequest as refusal:
            raise refused_in_response(refusal, asked) from None
        return {"object": "response.input_tokens", "input_tokens": len(tokens)}

    async def retrieve(self, id: str, request: Request) -> Response:
        """Show a response as it is now; with `stream=true` send its events, those after number `starting_after`."""
        stored, query = await self._find(id, request), request.query_params
        after = query.get("starting_after", "-1")
        if query.get("stream") != "true":
            return Response(orjson.dumps(shown(stored, self._broker.now())), media_type="application/json")
        if re.fullmatch("-1|[0-9]{1,9}", after) is None:
            raise InvalidRequest("starting_after must be the number of an event.", param="starting_after")
        job = stored.begun.job
        try:
            reading = await self._gateway.bridge.follow(id, job.tenant, deadline=job.deadline + LOST)
        except StreamNotFound:
            raise StreamNotFound(
                "The events of this response have expired; retrieve it without stream.", code="events_not_found"
            ) from None
        renderer = ResponseRenderer(id, job.body, int(job.created), model=job.body["model"], starting_after=int(after))
        response = ResponseReading(self._gateway.bridge, reading)
        return ResponseAnswer(response, renderer, "stream", keepalive=self._settings.keepalive_interval, begun=True)

    async def delete(self, id: str, request: Request) -> Any:
        """Delete a response; cancel it first if it runs."""
        stored = await self._stop(await self._find(id, request))
        await (await ResponseLog.of(self._broker)).delete(stored.begun.job.tenant, stored)
        return {"id": id, "object": "response", "deleted": True}

    async def cancel(self, id: str, request: Request) -> Any:
        """Cancel a response that has not ended."""
        before = await self._find(id, request)
        status = shown(before, self._broker.now())["status"]
        if status not in ("queued", "in_progress", "cancelled"):
            raise InvalidRequest(f"A response that is {status} cannot be cancelled.", code="response_over")
        return shown(await self._stop(before), self._broker.now())

    async def input_items(self, id: str, request: Request) -> Any:
        """List the input items of a response, in pages."""
        return page(request, (await self._find(id, request)).begun.input, default=20, most=100)

    async def _find(self, id: str, request: Request) -> Stored:
        log, tenant = await ResponseLog.of(self._broker), tenant_of(request)
        if is_response(id):
            # A response that leaves the queue after the first look is in the log by the second.
            for read in (log.read, self._queued, log.read):
                if (stored := await read(tenant, id)) is not None:
                    return stored
        raise StreamNotFound(f"There is no response {id[:100]!r}.", code="response_not_found", param="response_id")

    async def _queued(self, tenant: str, id: str) -> Stored | None:
        """A response that was accepted but is not in the log yet, from the queue of the stage `tools`."""
        subjects = self._gateway.bridge.subjects
        if not await self._broker.replay(EVENTS, subjects.events_at(tenant, id)):
            return None
        for priority in PRIORITIES:
            lane = lane_stream(TOOLS, priority)
            for message in await self._broker.replay(lane, subjects.tools(priority, tenant)):
                if message.headers.get(MESSAGE_ID) == f"{tenant}.{id}":
                    job = codec.decode_model(LoopJob, message.data, codec.LOOP_JOB)
                    input = items_of(parse_responses(job.body).input, id)
                    return Stored(Begun(job=job, sources=(), tools=(), input=input, items=[], index=0))
        return None

    async def _stop(self, stored: Stored) -> Stored:
        """Ask the stage `tools` to stop a response, and wait a while until it has ended."""
        job, log = stored.begun.job, await ResponseLog.of(self._broker)
        if stored.ended is not None or stored.is_lost(self._broker.now()):
            return stored
        await log.ask_to_stop(job.tenant, job.id)
        for attempt in range(MAX_POLLS):
            if attempt % 10 == 0:
                await self._broker.notify(self._gateway.bridge.subjects.cancel(job.tenant, job.id), b"")
            await asyncio.sleep(POLL_INTERVAL)
            stored = await log.read(job.tenant, job.id) or stored
            if stored.ended is not None:
                break
        return stored


def check_stage(registry: Registry) -> None:
    """Raise `Overloaded` if nothing runs responses."""
    if registry.missing(["tools"]):
        raise Overloaded(
            "No stage tools is running; start one, or try again later.", code="no_tools_stage", retry_after=2.0
        )


def shown(stored: Stored, now: float) -> dict[str, Any]:
    """A stored response as its client sees it at the time `now`."""
    ended, deadline = stored.ended, stored.begun.job.deadline
    if stored.is_lost(now):
        lost = DeadlineExceeded("The deadline passed before the end of the response was stored.")
        ended = Ended(status="failed", at=deadline, error=asdict(ErrorBody.of(lost)))
    return response_object(stored.begun, stored.turns, ended)


def _sealed(request: Request, settings: Settings, body: dict[str, Any]) -> dict[str, Any]:
    """The body with its secrets encrypted, since the broker stores it. The response names the hosted tools and the
    truncation, which are ignored. Raises `InvalidRequest`."""
    body, tenant = known_fields(body, ResponsesRequest, request, settings), tenant_of(request)
    tools = body.get("tools")
    name_ignored(request, (f"tools[{kind}]" for kind in hosted(tools)))
    name_ignored(request, ["truncation"] if body.get("truncation") == "auto" else [])
    servers = [tool for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []
    if any("sealed" in tool for tool in servers):
        raise InvalidRequest("tools: sealed is not a known parameter.", code="unknown_parameter", param="tools")
    if not any(tool.get("headers") or tool.get("authorization") for tool in servers):
        return body
    if settings.secret_key is None:
        raise InvalidRequest(
            "Headers and authorization need the setting secret_key, the same for every bridge and every stage tools; "
            "set it, or name a configured server.",
            code="unsupported_parameter",
            param="tools",
        )
    key = settings.secret_key.encode()
    parsed = {tool.server_label: tool for tool in parse_responses(body).mcp_tools}

    def without(tool: Any) -> Any:
        server = parsed.get(tool.get("server_label")) if tool.get("type") == "mcp" else None
        plain = {name: value for name, value in tool.items() if name not in ("headers", "authorization")}
        if server is None or not server.secrets:
            return plain
        return plain | {"sealed": seal(server.secrets, key, tenant, server.server_url or "")}

    return {**body, "tools": [without(tool) for tool in servers]}
