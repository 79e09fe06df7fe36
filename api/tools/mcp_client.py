"""Lists and calls the tools of an MCP server.

    async with McpClient(HttpServer(url="https://example.com/mcp", headers={"Authorization": "Bearer …"})) as client:
        tools = await client.openai_tools()
        result = await client.call("search", {"query": "penstock"})

It speaks the protocol with and without sessions. Header values appear in no log, error or result.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Self, TypeVar

import anyio
import httpx2
import mcp_types as types
from mcp import Client, MCPError, StdioServerParameters
from mcp.client.session import IncomingMessage
from mcp.client.streamable_http import streamable_http_client

from ...schemas.errors import StartupError, ToolFailed
from ...schemas.loops import KeepImage, ToolResult
from ...schemas.urls import by_proxy, goes_through_proxies
from ...schemas.version import __version__
from .cutting import cut
from .mcp_config import HttpServer, ServerConfig, server_config
from .text import openai_tools, read_result

TOOLS_TTL = 300.0  # seconds that a list of tools is cached, unless the server says less or announces a change
IDLE = 300.0  # seconds after which an unused connection is closed
MAX_PAGES = 100  # of one list of tools
MAX_MESSAGE = 64 * 1024 * 1024  # bytes
CLOSING = 5.0  # seconds that a connection has to close
MIN_SECRET = 12  # characters; a shorter value could be in any text by chance

# The SDK's messages where the server sent none: the HTTP status says more.
_STAND_INS = frozenset({"Server returned an error response", "Not Found", "Session terminated"})
_CLOSED = "Connection closed"  # the error code alone may also mean one answer that broke off

T = TypeVar("T")

_statuses: ContextVar[list[int]] = ContextVar("_statuses")  # HTTP statuses of the refused requests of one operation


class McpClient:
    """A client of one server. Concurrent calls share one connection, which it makes again where it broke.

    Use a client in one event loop. `name` is the server's name in errors; a string is the URL of a server that needs no
    headers. A connection closes after `idle` seconds without a call.
    """

    def __init__(self, server: ServerConfig | str, *, name: str = "the MCP server", idle: float = IDLE) -> None:
        self.server = server_config(server)
        self.name = name
        self._idle = idle
        self._connection: _Connection | None = None
        # To connect, which all waiting calls share; set by _connected.
        self._attempt: asyncio.Task[_Connection] | None = None
        self._listing = asyncio.Lock()
        self._tools: tuple[types.Tool, ...] = ()
        self._tools_until = 0.0
        self._listed: Client | None = None  # the connection that has listed its tools; set by _list
        self._running = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def busy(self) -> bool:
        return self._running > 0

    async def list_tools(self) -> tuple[types.Tool, ...]:
        """The server's tools, of all pages. Raises `ToolFailed`."""
        async with self._listing:
            if time.monotonic() >= self._tools_until:
                try:
                    await self._ask(self._list)
                except Exception as error:
                    raise ToolFailed(f"The tools of {self.name} cannot be listed: {self._reason(error)}.") from None
            return self._tools

    async def openai_tools(self) -> list[dict[str, Any]]:
        """The value of `tools` in a chat request. Raises `ToolFailed`."""
        return openai_tools(await self.list_tools())

    async def call(self, name: str, arguments: dict[str, Any], keep: KeepImage | None = None) -> ToolResult:
        """Call a tool; `keep` stores images. Every failure becomes a result that tells the model about it."""
        try:
            result = await self._ask(lambda client: self._call(client, name, arguments))
        except Exception as error:
            return ToolResult(cut(f"{self.name} could not run {name}: {self._reason(error)}"), is_error=True)
        text, images = await read_result(result, keep)
        return ToolResult(cut(self._hidden(text)), result.is_error, images)

    async def close(self) -> None:
        """Close the connection; the next call makes another."""
        if (connection := self._connection) is not None:
            self._connection = None
            await connection.close()

    async def _ask(self, ask: Callable[[Client], Awaitable[T]]) -> T:
        self._running += 1
        try:
            connection = await self._connected()
            try:
                return await self._asked(connection, ask)
            except _Forgotten:
                await self._drop(connection)
                connection = await self._connected()
                return await self._asked(connection, ask)
        finally:
            self._running -= 1

    async def _asked(self, connection: _Connection, ask: Callable[[Client], Awaitable[T]]) -> T:
        statuses: list[int] = []
        _statuses.set(statuses)
        try:
            async with asyncio.timeout(self.server.timeout):
                return await ask(connection.client)
        except MCPError as error:
            if error.message == _CLOSED:
                await self._drop(connection)
            status = statuses[-1] if statuses else None
            told = error.message in _STAND_INS or "session" in error.message.lower()
            if connection.has_session and status in (400, 404) and told:
                raise _Forgotten(status) from None
            raise _explained(error, statuses) from None

    async def _connected(self) -> _Connection:
        if self._connection is not None and not self._connection.over:
            return self._connection
        if self._attempt is None or self._attempt.done():
            connection = _Connection(self.server, self._idle, lambda: self.busy, self._on_message)
            self._attempt = asyncio.create_task(connection.open())
        attempt = self._attempt
        try:
            self._connection = await asyncio.shield(attempt)
        finally:
            if attempt.done() and not attempt.cancelled():
                attempt.exception()  # mark it as retrieved: one of the waiting calls raises it
        return self._connection

    async def _drop(self, connection: _Connection) -> None:
        if self._connection is connection:
            self._connection = None
        await connection.close()

    async def _on_message(self, message: IncomingMessage) -> None:
        if isinstance(message, types.ToolListChangedNotification):
            self._tools_until = 0.0

    async def _list(self, client: Client) -> None:
        tools: list[types.Tool] = []
        cursor: str | None = None
        self._tools_until = time.monotonic() + TOOLS_TTL  # first: the server may announce a change between pages
        try:
            for _ in range(MAX_PAGES):
                page = await client.list_tools(cursor=cursor)
                tools += page.tools
                if "ttl_ms" in page.model_fields_set:
                    self._tools_until = min(self._tools_until, time.monotonic() + page.ttl_ms / 1000)
                cursor = page.next_cursor
                if cursor is None:
                    self._tools = tuple(tools)
                    return
            raise ToolFailed(f"the list has more than {MAX_PAGES} pages")
        except BaseException:
            self._tools_until = 0.0
            raise
        finally:
            self._listed = client

    async def _call(self, client: Client, name: str, arguments: dict[str, Any]) -> types.CallToolResult:
        async with self._listing:
            if self._listed is not client:
                # From the list the SDK's session knows the schemas of results and which arguments it sends as headers.
                with suppress(MCPError, ToolFailed):
                    await self._list(client)
        return await client.call_tool(name, arguments)

    def _reason(self, error: BaseException) -> str:
        match error:
            case TimeoutError() | httpx2.TimeoutException():
                return f"no answer within {self.server.timeout:g} seconds"
            case _Refused():
                return str(error)
            case MCPError(code=types.CONNECTION_CLOSED):
                return "the connection broke; it is unknown whether the call took effect"
            case MCPError(code=types.PARSE_ERROR):  # the lines after the first quote the answer
                return error.message.partition("\n")[0]
            case MCPError() | ToolFailed() | StartupError() | RuntimeError():
                return self._hidden(str(error))
            case httpx2.TransportError() | OSError():
                return f"it cannot be reached ({type(error).__name__}{by_proxy(getattr(self.server, 'url', ''))})"
            case _:  # its text may quote the request
                return f"its answer is invalid ({type(error).__name__})"

    def _hidden(self, text: str) -> str:
        """`text` without values of the headers, in case the server repeats them."""
        for value in self.server.headers.values() if isinstance(self.server, HttpServer) else ():
            for secret in (value, *value.split()):
                if len(secret) >= MIN_SECRET:
                    text = text.replace(secret, "[hidden]")
        return text


class _Refused(Exception):
    """The HTTP status with which the server, or a proxy in front of it, refused."""

    def __init__(self, status: int) -> None:
        note = "; redirects are not followed" if status < 400 else ""
        super().__init__(f"it answered {status} {httpx2.codes.get_reason_phrase(status)}".rstrip() + note)


class _Forgotten(_Refused):
    """The server has forgotten the session, and so did not run the call."""


def _explained(error: BaseException, statuses: list[int]) -> BaseException:
    """The cause inside anyio's exception groups, or the HTTP status where that says more than the SDK's message."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, MCPError) and statuses and (error.message in _STAND_INS or statuses[-1] < 400):
        return _Refused(statuses[-1])
    return error


class _Connection:
    """One connection, opened once and closed once. A task owns it: anyio's scopes end in the task they began in."""

    def __init__(
        self,
        server: ServerConfig,
        idle: float,
        busy: Callable[[], bool],
        on_message: Callable[[IncomingMessage], Awaitable[None]],
    ) -> None:
        self._server = server
        self._idle = idle
        self._busy = busy
        self._on_message = on_message
        self._opened: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._closing = asyncio.Event()
        self._owner: asyncio.Task[None] | None = None
        self._refusals: list[int] = []
        self.has_session = False  # that the server keeps, and can forget; set when opened

    @property
    def client(self) -> Client:
        return self._opened.result()

    @property
    def over(self) -> bool:
        return self._closing.is_set() or self._owner is None or self._owner.done()

    async def open(self) -> Self:
        """Connect. Raises what the SDK raises, and `TimeoutError`."""
        self._owner = asyncio.create_task(self._own())
        try:
            async with asyncio.timeout(self._server.timeout):
                await asyncio.shield(self._opened)
        except BaseException as error:
            await self.close()
            cause = _explained(error, self._refusals)
            if isinstance(cause, MCPError) and cause.code == types.CONNECTION_CLOSED:
                raise ConnectionResetError from None
            raise cause from None
        return self

    async def close(self) -> None:
        self._closing.set()
        if self._owner is None:
            return
        if not self._opened.done():
            self._owner.cancel()
        await asyncio.wait({self._owner}, timeout=CLOSING)
        self._owner.cancel()
        await asyncio.wait({self._owner})

    async def _own(self) -> None:
        _statuses.set(self._refusals)
        try:
            async with AsyncExitStack() as stack:
                client = await stack.enter_async_context(await self._client(stack))
                self.has_session = isinstance(self._server, HttpServer) and client.session.initialize_result is not None
                self._opened.set_result(client)
                while not self._closing.is_set():
                    with anyio.move_on_after(self._idle) as unused:
                        await self._closing.wait()
                    if unused.cancelled_caught and not self._busy():
                        self._closing.set()
        except Exception as error:  # once open, the SDK tells waiting calls that the connection is closed
            if not self._opened.done():
                self._opened.set_exception(error)
        finally:
            self._closing.set()
            self._opened.cancel()

    async def _client(self, stack: AsyncExitStack) -> Client:
        server = self._server
        about: dict[str, Any] = {"message_handler": self._on_message, "cache": None}
        about["client_info"] = types.Implementation(name="penstock", version=__version__)
        if not isinstance(server, HttpServer):
            return Client(StdioServerParameters(command=server.command, args=server.args, env=server.env), **about)
        http = httpx2.AsyncClient(
            headers=server.headers,
            # `asyncio.timeout` limits the wait for answers; streams of a session stay open between them.
            timeout=httpx2.Timeout(server.timeout, read=max(300.0, 2 * server.timeout)),
            max_redirects=0,
            trust_env=goes_through_proxies(server.url),
            event_hooks={"response": [_observe]},
        )
        await stack.enter_async_context(http)
        return Client(streamable_http_client(server.url, http_client=http, max_sse_event_size=MAX_MESSAGE), **about)


async def _observe(response: httpx2.Response) -> None:
    if response.status_code >= 300 and response.request.method == "POST":
        _statuses.get().append(response.status_code)
    if isinstance(response.stream, httpx2.AsyncByteStream) and "json" in response.headers.get("content-type", ""):
        response.stream = _Bounded(response.stream)


class _Bounded(httpx2.AsyncByteStream):
    """The body of an answer, limited to `MAX_MESSAGE` bytes, for the SDK reads it as a whole."""

    def __init__(self, stream: httpx2.AsyncByteStream) -> None:
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = 0
        async for chunk in self._stream:
            size += len(chunk)
            if size > MAX_MESSAGE:
                raise httpx2.StreamError(f"the answer is larger than {MAX_MESSAGE} bytes")
            yield chunk

    async def aclose(self) -> None:
        await self._stream.aclose()
