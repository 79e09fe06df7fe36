"""Real MCP servers on loopback: one in the test's own event loop, in either era of the protocol, and public ones."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import mcp_types as types
import uvicorn
from mcp.server.lowlevel import Server
from mcp.shared.exceptions import MCPError
from ports import reserved_port
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

Era = Literal["2025", "2026"]

NOTHING: dict[str, Any] = {"type": "object", "properties": {}}
NUMBERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
COUNT = {"type": "object", "properties": {"count": {"type": "integer"}}, "required": ["count"]}
TOOLS = [
    types.Tool(
        name="add", description="Adds.", input_schema=NUMBERS, annotations=types.ToolAnnotations(read_only_hint=True)
    ),
    types.Tool(name="slow", input_schema=NOTHING, annotations=types.ToolAnnotations(idempotent_hint=True)),
    types.Tool(name="changes", input_schema=NOTHING),
    types.Tool(name="fails", input_schema=NOTHING),
    types.Tool(name="structured", input_schema=NOTHING, output_schema=COUNT),
    types.Tool(name="wrong", input_schema=NOTHING, output_schema=COUNT),
    types.Tool(name="big", input_schema=NOTHING),
    types.Tool(name="pictures", input_schema=NOTHING),
    types.Tool(name="tells", description="Repeats the authorisation.", input_schema=NOTHING),
]
PAGE = 3  # tools
CLOCK = str(Path(sys.executable).with_name("mcp-server-time"))
_EVERYTHING = "deploy/examples/node_modules/@modelcontextprotocol/server-everything/dist/index.js"
_PDF = types.BlobResourceContents(uri="file:///b", blob="AAAA", mime_type="application/pdf")
PICTURES: tuple[types.ContentBlock, ...] = (
    types.ImageContent(data="AAAA", mime_type="image/png"),
    types.AudioContent(data="AAAA", mime_type="audio/wav"),
    types.ResourceLink(name="notes", uri="file:///notes.txt", mime_type="text/plain"),
    types.EmbeddedResource(resource=types.TextResourceContents(uri="file:///a", text="inside")),
    types.EmbeddedResource(resource=_PDF),
)


class McpServer:
    """What it was asked is in `requests`, as (HTTP method, headers); the tool `slow` sets `started` and waits
    for `go`, which comes by itself with call number `go_after`; `left` is set when a session is given up."""

    def __init__(self, *, era: Era = "2026", json: bool = False, token: str | None = None, ttl_ms: int = 0) -> None:
        self.era = era
        self.token = token
        self.ttl_ms = ttl_ms
        self.redirect: str | None = None
        self.garbage = False
        self.requests: list[tuple[str, dict[str, str]]] = []
        self.calls: list[str] = []
        self.lists = 0
        self.started = asyncio.Event()
        self.go = asyncio.Event()
        self.go_after: int | None = None
        self.pictures: list[types.ContentBlock] = list(PICTURES)  # what the tool of this name returns
        self.left = asyncio.Event()
        self.port = 0
        self._json = json
        self._uvicorn: uvicorn.Server | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/mcp"

    async def start(self) -> None:
        """On the port it had before, if any; nothing of an earlier session is known then."""
        server: Server[Any] = Server("test", on_list_tools=self._list, on_call_tool=self._call)
        app = self._watched(server.streamable_http_app(json_response=self._json))
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self.port))
        self.port = listener.getsockname()[1]
        config = uvicorn.Config(app, log_level="critical", lifespan="on", ws="none")
        config.load()
        self._uvicorn = uvicorn.Server(config)
        self._uvicorn.lifespan = config.lifespan_class(config)
        await self._uvicorn.startup([listener])

    async def stop(self) -> None:
        """As a killed process would be gone."""
        assert self._uvicorn is not None
        for listener in self._uvicorn.servers:
            listener.close()
        for connection in list(self._uvicorn.server_state.connections):
            connection.transport.abort()
        await self._uvicorn.lifespan.shutdown()

    def _watched(self, app: ASGIApp) -> ASGIApp:
        async def watched(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "lifespan":
                return await app(scope, receive, send)
            headers = {name.decode(): value.decode() for name, value in scope["headers"]}
            self.requests.append((scope["method"], headers))
            if scope["method"] == "DELETE":
                self.left.set()
            if self.redirect is not None:
                return await RedirectResponse(self.redirect, 307)(scope, receive, send)
            if self.token is not None and headers.get("authorization") != self.token:
                return await Response("who are you?", 401)(scope, receive, send)
            if self.era == "2025" and headers.get("mcp-method") == "server/discover":
                return await Response("no such method", 404)(scope, receive, send)
            if self.garbage:
                return await Response("{not json", media_type="application/json")(scope, receive, send)
            await app(scope, receive, send)

        return watched

    async def _list(self, context: Any, params: types.PaginatedRequestParams | None) -> types.ListToolsResult:
        self.lists += 1
        first = int(params.cursor) if params is not None and params.cursor else 0
        following = first + PAGE
        return types.ListToolsResult(
            tools=TOOLS[first:following],
            next_cursor=str(following) if following < len(TOOLS) else None,
            **({"ttl_ms": self.ttl_ms} if self.ttl_ms else {}),
        )

    async def _call(self, context: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
        self.calls.append(params.name)
        if len(self.calls) == self.go_after:
            self.go.set()
        arguments = params.arguments or {}
        match params.name:
            case "add":
                return _text(str(arguments["a"] + arguments["b"]))
            case "slow":
                self.started.set()
                await self.go.wait()
                return _text("at last")
            case "changes":
                await context.session.send_tool_list_changed()
                return _text("changed")
            case "fails":
                return types.CallToolResult(content=[types.TextContent(text="out of paper")], is_error=True)
            case "structured":
                return types.CallToolResult(content=[types.TextContent(text="some")], structured_content={"count": 3})
            case "wrong":
                return types.CallToolResult(content=[], structured_content={"count": "many"})
            case "big":
                return _text("x" * 10_000_000)
            case "pictures":
                return types.CallToolResult(content=self.pictures)
            case "tells":
                return _text(f"You sent {self.requests[-1][1].get('authorization')}.")
            case _:
                raise MCPError(code=types.INVALID_PARAMS, message=f"Unknown tool: {params.name}")


def _text(text: str) -> types.CallToolResult:
    return types.CallToolResult(content=[types.TextContent(text=text)])


class Everything:
    """npm's reference server, over HTTP."""

    def __init__(self) -> None:
        self._port = reserved_port()  # the server says that it listens even where the port is taken
        self.url = f"http://127.0.0.1:{self._port}/mcp"
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        program = Path(__file__).parents[2] / _EVERYTHING
        assert program.is_file(), "run `npm ci --prefix deploy/examples` first; `make test` does"
        self._process = subprocess.Popen(
            ["node", str(program), "streamableHttp"],
            env=os.environ | {"PORT": str(self._port)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # `node` may be a script that starts the real one
        )
        assert self._process.stderr is not None
        assert any("listening on port" in line for line in iter(self._process.stderr.readline, ""))

    def kill(self) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.communicate()
            self._process = None


@asynccontextmanager
async def mcp_server(**options: Any) -> AsyncIterator[McpServer]:
    server = McpServer(**options)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


@asynccontextmanager
async def counting_socket() -> AsyncIterator[tuple[str, list[str]]]:
    """The URL of a listening socket, and a list that grows with every connection made to it."""
    connections: list[str] = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(str(writer.get_extra_info("peername")))
        writer.close()

    listener = await asyncio.start_server(accept, "127.0.0.1", 0)
    async with listener:
        yield f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}", connections
