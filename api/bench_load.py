"""Load for any server that speaks OpenAI's HTTP, and when each piece of each answer came back.

Made to cost little, for the client shares its machine with what it measures: httptools takes HTTP apart, and text is
timed where its bytes arrive, with no task woken for it. Knows nothing of who started the server.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
import orjson

MOST_OPEN = 1024  # requests at once: an arrival above that is a failure, not a queue
TIME_LIMIT = 60.0  # seconds for one request
PAUSE = 0.1  # seconds after a failure before its stream asks again: a dead server is not hammered

clock = time.perf_counter


@dataclass(slots=True, eq=False)
class Sample:
    """One request as its client saw it; the times are `clock`'s. A text that does not stream is one piece."""

    sent: float = field(default_factory=clock)
    ended: float = 0.0
    times: list[float] = field(default_factory=list)  # when each piece of text arrived
    sizes: list[int] = field(default_factory=list)  # characters of each
    tokens: int = 0  # as the server counts them; the pieces, where it does not
    prompt_tokens: int = 0  # as the server counts them
    late: float = 0.0  # seconds after its due time that it was sent; set by `open_loop`
    error: str | None = None

    @property
    def to_first(self) -> float | None:
        """Seconds from the request to its first text."""
        return self.times[0] - self.sent if self.times else None

    @property
    def gaps(self) -> list[float]:
        """Seconds from each piece to the next."""
        return [later - earlier for earlier, later in pairwise(self.times)]

    def tokens_between(self, start: float, end: float) -> float:
        """Tokens that arrived in this span, each as long as the next."""
        inside = sum(size for moment, size in zip(self.times, self.sizes, strict=True) if start <= moment < end)
        return self.tokens * inside / sum(self.sizes) if inside else 0.0

    def add(self, event: dict[str, Any], now: float) -> None:
        """Note what a stream's chunk, or a whole answer, holds."""
        if error := event.get("error"):
            self.error = f"in the answer: {error.get('message', error)}"
            return
        for choice in event.get("choices", ()):
            part = choice.get("delta") or choice.get("message") or choice
            said = part.get("content") or part.get("reasoning_content") or part.get("reasoning")
            text = said or part.get("text")
            # A token may have no text: a special one, or one of a random model that its tokenizer does not know.
            if text or (text == "" and part is choice and choice.get("finish_reason") is None):
                self.times.append(now)
                self.sizes.append(max(len(text), 1))
        if usage := event.get("usage"):
            self.tokens, self.prompt_tokens = usage["completion_tokens"], usage.get("prompt_tokens", 0)


class EventStream:
    """Server-sent events, cut anywhere, into the data of whole ones."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> list[bytes]:
        events = []
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events


class Connection(asyncio.Protocol):
    """A keep-alive connection with one request at a time. httptools calls what begins with `on_`."""

    def __init__(self) -> None:
        self.reusable = False  # open, and between two requests; set by `on_message_complete` and `connection_lost`
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._ended = asyncio.get_running_loop().create_future()

    async def post(self, request: bytes, sample: Sample, *, streaming: bool) -> None:
        """Send and read to the end, noting in `sample` whatever comes. Raises `ConnectionError`."""
        assert self._transport is not None
        self.reusable = False
        self._ended = asyncio.get_running_loop().create_future()
        self._sample, self._streaming = sample, streaming
        self._events, self._done, self._body = EventStream(), False, b""
        sample.sent = clock()
        self._transport.write(request)
        await self._ended

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # it is one, but uvloop's class does not say so

    def data_received(self, data: bytes) -> None:
        self._now = clock()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"an answer that cannot be read: {error.__context__ or error!r}")

    def connection_lost(self, exc: Exception | None) -> None:
        self.reusable = False
        self._fail(str(exc or "the server closed the connection before the end of its answer"))

    def on_body(self, body: bytes) -> None:
        if not self._streaming or self._parser.get_status_code() != 200:
            self._body += body
            return
        for data in self._events.feed(body):
            if data == b"[DONE]":
                self._done = True
            else:
                self._sample.add(orjson.loads(data), self._now)

    def on_message_complete(self) -> None:
        sample, status = self._sample, self._parser.get_status_code()
        sample.ended = self._now
        if status != 200:
            sample.error = _refusal(status, self._body)
        elif not self._streaming:
            sample.add(orjson.loads(self._body), self._now)
        elif not self._done and sample.error is None:
            sample.error = "the stream ended without [DONE]"
        sample.tokens = sample.tokens or len(sample.sizes)
        if not self._ended.done():
            self.reusable = self._parser.should_keep_alive()
            self._ended.set_result(None)

    def _fail(self, reason: str) -> None:
        if not self._ended.done():
            self._ended.set_exception(ConnectionError(reason))
            self._ended.exception()  # nobody waits for it between two requests


def _refusal(status: int, body: bytes) -> str:
    """What went wrong, by OpenAI's error object where the body is one."""
    try:
        error = orjson.loads(body)["error"]
        return f"HTTP {status} {error.get('code') or error['type']}: {error['message']}"
    except (ValueError, TypeError, KeyError, AttributeError):
        return f"HTTP {status}: {body[:200].decode(errors='replace')}"


class Client:
    """Posts to one server over as many connections as it takes, and uses them again. `close` it."""

    def __init__(self, url: str, *, api_key: str | None = None, time_limit: float = TIME_LIMIT) -> None:
        parts = urlsplit(url)
        self._secure = parts.scheme == "https"
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or (443 if self._secure else 80)
        self._prefix = parts.path.rstrip("/")
        authorization = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        self._headers = f"Host: {parts.netloc}\r\n{authorization}Content-Type: application/json\r\nContent-Length: "
        self._time_limit = time_limit
        self._idle: list[Connection] = []  # the last used first: the fewer, the better

    async def post(self, path: str, body: dict[str, Any]) -> Sample:
        """Ask once. What fails at the server or on the way is the sample's `error`, and never raised."""
        data = orjson.dumps(body)
        request = f"POST {self._prefix}{path} HTTP/1.1\r\n{self._headers}{len(data)}\r\n\r\n".encode() + data
        sample = Sample()
        connection: Connection | None = None
        try:
            async with asyncio.timeout(self._time_limit):
                connection = self._take() or await self._connect()
                await connection.post(request, sample, streaming=body.get("stream") is True)
        except TimeoutError:
            sample.error = f"no end of the answer in {self._time_limit:g} s"
        except OSError as error:
            sample.error = str(error)
        finally:
            if connection is not None and connection.reusable:
                self._idle.append(connection)
            elif connection is not None:
                connection.close()
        return sample

    def close(self) -> None:
        for connection in self._idle:
            connection.close()

    def _take(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable:
                return connection
        return None

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        return (await loop.create_connection(Connection, self._host, self._port, ssl=self._secure or None))[1]


async def open_loop(send: Callable[[], Awaitable[Sample]], *, rate: float, seconds: float) -> list[Sample]:
    """Send `rate` requests a second at even distances, whatever becomes of them; the samples in that order."""
    slots = asyncio.Semaphore(MOST_OPEN)

    async def one(due: float) -> Sample:
        if slots.locked():
            return Sample(error=f"not sent: {MOST_OPEN} requests are open")
        async with slots:
            sample = await send()
        sample.late = sample.sent - due
        return sample

    start = clock()
    tasks = []
    async with asyncio.TaskGroup() as group:
        for place in range(ceil(rate * seconds)):
            due = start + place / rate
            await asyncio.sleep(due - clock())
            tasks.append(group.create_task(one(due)))
    return [task.result() for task in tasks]


async def closed_loop(send: Callable[[], Awaitable[Sample]], *, concurrency: int, seconds: float) -> list[Sample]:
    """Keep `concurrency` requests running for so long, and let the last ones end; the samples as they ended."""
    samples: list[Sample] = []
    until = clock() + seconds

    async def one_after_another() -> None:
        while clock() < until:
            sample = await send()
            samples.append(sample)
            if sample.error is not None:
                await asyncio.sleep(PAUSE)

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(one_after_another())
    return samples
