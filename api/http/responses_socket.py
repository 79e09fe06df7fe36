"""OpenAI's Responses over a WebSocket: each message asks as a `POST` of its own would, and its answer's events are
messages, too.

https://developers.openai.com/api/docs/guides/websocket-mode

Messages with the same `stream_id` are answered one after another, others at the same time. What is not stored can be
followed up on the connection that it was made on, which keeps it.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import deque
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Any, NamedTuple

import orjson
import structlog
from fastapi import FastAPI, WebSocket, WebSocketDisconnect
from starlette.datastructures import Headers
from starlette.types import Message

from ...config.settings import Settings
from ...schemas.bounds import LONG
from ...schemas.errors import InvalidRequest, QuotaExceeded, Refusal
from ...schemas.events import ErrorBody
from ..render.openai import error_payload
from ..render.response_object import response_at, response_head
from .answers import error_response
from .kept_responses import KeptResponses
from .middleware.ignored import HEADER
from .middleware.upgrades import SOCKET_PATH
from .requests import Gateway, made_of

log = structlog.get_logger(__name__)

MAX_WAITING = 64  # messages of a connection that are answered or wait
MOST_KEPT = 32  # bodies of the largest size, of which all connections together keep as many bytes
_OF_ONE_REQUEST = ("idempotency-key", "last-event-id", "penstock-resumable", "penstock-events")
_OF_HANDSHAKE = (b"connection", b"upgrade", b"content-type", b"content-length", b"transfer-encoding")
_OF_RESPONSE = frozenset(
    f"response.{name}".encode() for name in ("queued", "created", "in_progress", "completed", "incomplete", "failed")
)
_SCHEMES = {"ws": "http", "wss": "https"}
_Object = dict[str, Any]
_numbers = count()  # of connections


class _Asked(NamedTuple):
    """A client's message: `stream` names its lane, `follows` the kept response that its body was completed with."""

    stream: str | None
    body: _Object
    size: int
    follows: str | None = None


def add_socket(app: FastAPI, gateway: Gateway) -> None:
    kept = KeptResponses(MOST_KEPT * gateway.settings.max_body_size)

    @app.websocket(SOCKET_PATH)
    async def responses(socket: WebSocket) -> None:
        if given := [name for name in _OF_ONE_REQUEST if name in socket.headers]:
            fault = f"The header {given[0]} is about one request, and a WebSocket carries many; leave it out."
            await socket.send_denial_response(error_response(ErrorBody.of(InvalidRequest(fault, param=given[0]))))
            return
        await socket.accept()
        await ResponsesSocket(socket, gateway.settings, kept).run()


class ResponsesSocket:
    """One connection, already accepted."""

    def __init__(self, socket: WebSocket, settings: Settings, kept: KeptResponses) -> None:
        self._socket = socket
        self._number = next(_numbers)
        self._most = settings.max_body_size  # bytes of messages that wait or are answered
        self._gone = asyncio.Event()  # the client
        self._lanes: dict[str | None, deque[_Asked]] = {}  # by `stream_id`; set by _take and _work
        self._kept = kept

    async def run(self) -> None:
        """Take messages until the client leaves, which ends what it has asked for as that of other clients."""
        try:
            async with asyncio.TaskGroup() as workers:
                try:
                    while (message := await self._socket.receive())["type"] != "websocket.disconnect":
                        text = message.get("text")
                        await self._take(message.get("bytes") or b"" if text is None else text.encode(), workers)
                except WebSocketDisconnect:
                    pass
                finally:
                    self._gone.set()
        finally:
            self._kept.forget(self._number)

    async def _take(self, raw: bytes, workers: asyncio.TaskGroup) -> None:
        stream: str | None = None
        try:
            message = await made_of(lambda message: message, raw, "message")
            if message.get("type") == "response.steer":
                await self._send(_not_steered(message))
                return
            stream = _stream_of(message)
            asked = _Asked(stream, _body_of(message), len(raw))
            pending = [one for lane in self._lanes.values() for one in lane]
            if len(pending) >= MAX_WAITING or (pending and sum(one.size for one in pending) + asked.size > self._most):
                raise QuotaExceeded(
                    f"{len(pending)} messages of this connection are not answered yet; send this one again later.",
                    code="too_many_messages",
                )
        except Refusal as refusal:
            await self._refuse(stream, ErrorBody.of(refusal))
            return
        if stream in self._lanes:
            self._lanes[stream].append(asked)
        else:
            lane = self._lanes[stream] = deque([asked])
            workers.create_task(self._work(stream, lane))

    async def _work(self, stream: str | None, lane: deque[_Asked]) -> None:
        """Answer the messages of a lane, one after another."""
        try:
            while lane and not self._gone.is_set():
                asked = self._completed(lane[0])
                if asked.body.pop("generate", True) is False:
                    await self._prepare(asked)
                else:
                    await self._answer(asked)
                lane.popleft()
        except WebSocketDisconnect:
            self._gone.set()
        finally:
            del self._lanes[stream]

    def _completed(self, asked: _Asked) -> _Asked:
        """With the items of the response that it follows, if this connection alone has them."""
        follows = asked.body.get("previous_response_id")
        kept = self._kept.find(self._number, follows) if isinstance(follows, str) else None
        if kept is None:
            return asked
        items = [*orjson.loads(kept.items), *_items(asked.body)]
        body = {**asked.body, "previous_response_id": kept.before, "input": items}
        return _Asked(asked.stream, body, asked.size + len(kept.items), follows)

    async def _answer(self, asked: _Asked) -> None:
        opening: _Object = {}

        def opened(headers: Headers) -> None:
            if ignored := headers.get(HEADER):
                opening["penstock_ignored"] = ignored

        async def told(block: bytes) -> None:
            kind, data = _parts(block)
            if not data:
                return  # what keeps a stream open; here pings do
            if kind == b"error":
                said = orjson.loads(data)
                error = {"type": "server_error"} | {name: said[name] for name in ("code", "message", "param")}
                event = {"type": "error", "error": error, "sequence_number": said["sequence_number"]}
                await self._send(_in_lane(asked.stream, event))
            elif kind in _OF_RESPONSE:
                await self._send(_in_lane(asked.stream, self._about(asked, orjson.loads(data), opening)))
            elif asked.stream is None:
                await self._socket.send_text(data.decode())
            else:
                await self._send(_in_lane(asked.stream, orjson.loads(data)))

        await self._ask(asked, "", {**asked.body, "stream": True}, opened, told)

    def _about(self, asked: _Asked, event: _Object, opening: _Object) -> _Object:
        """An event with the whole response."""
        response = event["response"]
        if asked.follows is not None:
            response["previous_response_id"] = asked.follows
        if event["type"] in ("response.completed", "response.incomplete") and asked.body.get("store") is False:
            self._keep(asked, response)
        return event | (opening if event["type"] == "response.created" else {})

    async def _prepare(self, asked: _Asked) -> None:
        """Check a request for which nothing is to be generated yet, and keep its input."""
        body, now = asked.body, time.time()
        tools = body.get("tools")
        if isinstance(tools, list):  # what an MCP server has is known when a response runs
            tools = [tool for tool in tools if not (isinstance(tool, dict) and tool.get("type") == "mcp")]
        if not await self._ask(asked, "/input_tokens", {**body, "tools": tools, "input": _items(body) or "."}):
            return
        head = response_head(f"resp_{uuid.uuid4().hex}", body, int(now), body["model"])
        head["previous_response_id"] = asked.follows or head["previous_response_id"]
        self._keep(asked, {**head, "output": []})
        for number, (kind, status) in enumerate((("created", "in_progress"), ("completed", "completed"))):
            response = response_at(head, [], [], [], status, at=now)
            event = {"type": f"response.{kind}", "response": response, "sequence_number": number}
            await self._send(_in_lane(asked.stream, event))

    def _keep(self, asked: _Asked, response: _Object) -> None:
        if asked.body.get("conversation") is not None:  # which has the items
            return
        items = [*_items(asked.body), *response["output"]]
        self._kept.put(self._number, response["id"], asked.body.get("previous_response_id"), items)

    async def _ask(
        self,
        asked: _Asked,
        path: str,
        body: _Object,
        opened: Callable[[Headers], None] = lambda headers: None,
        told: Callable[[bytes], Awaitable[None]] | None = None,
    ) -> bool:
        """Ask the application as any client would, so that its limits and its log hold here, too; returns whether it
        did not refuse. `told` hears each event."""
        data = await asyncio.to_thread(orjson.dumps, body) if asked.size > LONG else orjson.dumps(body)
        unread = [data]
        status, headers, rest = 0, Headers(), b""

        async def receive() -> Message:
            if unread:
                return {"type": "http.request", "body": unread.pop(), "more_body": False}
            await self._gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            nonlocal status, headers, rest
            if message["type"] == "http.response.start":
                status, headers = message["status"], Headers(raw=message["headers"])
                opened(headers)
                return
            rest += message.get("body", b"")
            if status != 200 or told is None or self._gone.is_set():
                return
            *blocks, rest = rest.split(b"\n\n")
            try:
                for block in blocks:
                    await told(block)
            except WebSocketDisconnect:
                self._gone.set()

        try:
            await self._socket.app(self._scope(path, len(data)), receive, send)
        except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # as `Failures`, which has answered 500
            log.exception("a message over a WebSocket failed")
        if status != 200 and not self._gone.is_set():
            await self._send(_in_lane(asked.stream, _refused(status, headers, rest)))
        return status == 200

    def _scope(self, path: str, size: int) -> _Object:
        """A request of its own, by the client of this connection."""
        scope = self._socket.scope
        headers = [
            header
            for header in scope["headers"]
            if header[0] not in _OF_HANDSHAKE and not header[0].startswith(b"sec-websocket-")
        ]
        headers += [(b"content-type", b"application/json"), (b"content-length", str(size).encode())]
        same = {name: scope[name] for name in ("asgi", "http_version", "server", "client", "root_path")}
        return {
            **same,
            "type": "http",
            "method": "POST",
            "scheme": _SCHEMES[scope["scheme"]],
            "path": scope["path"] + path,
            "raw_path": scope["raw_path"] + path.encode(),
            "query_string": b"",
            "headers": headers,
            "state": {},
        }

    async def _refuse(self, stream: str | None, error: ErrorBody) -> None:
        event = {"type": "error", "status": error.status, **error_payload(error)}
        await self._send(_in_lane(stream, event))

    async def _send(self, event: _Object) -> None:
        await self._socket.send_text(orjson.dumps(event).decode())


def _stream_of(message: _Object) -> str | None:
    stream = message.get("stream_id")
    if stream is not None and not (isinstance(stream, str) and len(stream) <= 256):
        raise InvalidRequest("stream_id must be a string of at most 256 characters.", param="stream_id")
    return stream


def _body_of(message: _Object) -> _Object:
    """The body of the request that a message stands for. Raises `InvalidRequest`."""
    kind = message.get("type")
    if kind != "response.create":
        fault = f"type is {str(kind)[:40]!r}; send response.create, with the fields of the body of a POST beside it."
        raise InvalidRequest(fault, code="unknown_event", param="type")
    for name, needless in (("background", False), ("stream", True)):
        if message.get(name) not in (None, needless):
            fault = f"{name} is not for a WebSocket, on which every response is streamed; leave it out."
            raise InvalidRequest(fault, param=name)
    if not isinstance(message.get("generate"), bool | None):
        raise InvalidRequest("generate must be true or false.", param="generate")
    return {name: value for name, value in message.items() if name not in ("type", "stream_id", "stream", "background")}


def _items(body: _Object) -> list[Any]:
    given = body.get("input")
    if isinstance(given, list):
        return given
    return [{"type": "message", "role": "user", "content": given}] if given else []


def _parts(block: bytes) -> tuple[bytes, bytes]:
    """The name and the data of an SSE message; both are empty for a comment."""
    fields = dict(line.split(b": ", 1) for line in block.split(b"\n") if b": " in line)
    return fields.get(b"event", b""), fields.get(b"data", b"")


def _in_lane(stream: str | None, event: _Object) -> _Object:
    return event if stream is None else {**event, "stream_id": stream}


def _refused(status: int, headers: Headers, body: bytes) -> _Object:
    shown = {name: headers[name] for name in ("retry-after", "retry-after-ms", "x-request-id") if name in headers}
    return {"type": "error", "status": status, "error": {**orjson.loads(body)["error"], "headers": shown}}


def _not_steered(message: _Object) -> _Object:
    text = "Penstock does not steer a response that runs; send the input in a response.create once it has ended."
    error = {"type": "invalid_request_error", "code": "steering_not_supported", "message": text}
    steer = {name: message.get(name) for name in ("previous_response_id", "input")}
    return {"type": "response.steer.failed", "error": error, "steer": steer, "sequence_number": 0}
