"""Load for any server that speaks OpenAI's HTTP, and when each piece of each answer came back.

Made to cost little, for the client shares its machine with what it measures: httptools takes HTTP apart, and text is
timed where its bytes arrive, with no task woken for it. Knows nothing of who started the server.

A benchmark makes an `Ask` of `Client.post`, and gives it to a loop: `open_loop` asks at an even rate, `closed_loop`
keeps so many running. Both hand each `Sample` that has ended to a callback, failed ones too, and raise nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil, inf
from typing import Any, NamedTuple, cast
from urllib.parse import urlsplit

import httptools
import orjson

TIME_LIMIT = 60.0  # seconds for one request

clock = time.perf_counter


class Event(NamedTuple):
    """A server-sent event; its id is empty where it has none."""

    id: bytes
    data: bytes


def split_events(text: bytes) -> tuple[list[Event], bytes]:
    """Every whole event with data in `text`, and the text that is left."""
    *blocks, rest = text.replace(b"\r\n", b"\n").split(b"\n\n")
    events = []
    for block in blocks:
        fields = [line.partition(b":") for line in block.split(b"\n")]
        if data := [value.removeprefix(b" ") for name, _, value in fields if name == b"data"]:
            ids = [value.strip() for name, _, value in fields if name == b"id"]
            events.append(Event(ids[-1] if ids else b"", b"\n".join(data)))
    return events, rest


@dataclass(slots=True, eq=False)
class Sample:
    """One request as its client saw it; the times are `clock`'s, in seconds. A text that does not stream is a piece."""

    sent: float = field(default_factory=clock)
    ended: float = 0.0
    times: list[float] = field(default_factory=list)  # when each piece of text arrived
    tokens: int = 0  # as the server counts them; the pieces, where it does not
    prompt_tokens: int = 0  # as the server counts them
    ends: int = 0  # times that a stream said [DONE]
    error: str | None = None
    retry_after: float | None = None  # seconds, where the server said so

    @property
    def to_first(self) -> float | None:
        """Seconds from the request to its first text."""
        return self.times[0] - self.sent if self.times else None

    @property
    def gaps(self) -> list[float]:
        """Seconds from each piece to the next."""
        return [later - earlier for earlier, later in pairwise(self.times)]

    def take(self, event: Event, now: float) -> None:
        """Note an event of a stream."""
        if event.data == b"[DONE]":
            self.ends += 1
        else:
            self.add(orjson.loads(event.data), now)

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
        if usage := event.get("usage"):
            self.tokens, self.prompt_tokens = usage["completion_tokens"], usage.get("prompt_tokens", 0)


Ask = Callable[[], Awaitable[Sample]]
Ended = Callable[[Sample], object]


class Connection(asyncio.Protocol):
    """A keep-alive connection with one request at a time. httptools calls what begins with `on_`."""

    def __init__(self) -> None:
        self.reusable = False  # open, and between two requests; set by `on_message_complete` and `connection_lost`
        self._parser = httptools.HttpResponseParser(self)
        self._ended = asyncio.get_running_loop().create_future()

    async def post(self, request: bytes, sample: Sample, *, streaming: bool) -> None:
        """Send and read to the end, noting in `sample` whatever comes. Raises `ConnectionError`."""
        self.reusable, self._ended = False, asyncio.get_running_loop().create_future()
        self._sample, self._streaming, self._body = sample, streaming, b""
        sample.sent = clock()
        self.transport.write(request)
        await self._ended

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # it is one, but uvloop's class does not say so

    def data_received(self, data: bytes) -> None:
        self._now = clock()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"an answer that cannot be read: {error.__context__ or error!r}")

    def connection_lost(self, exc: Exception | None) -> None:
        self.reusable = False
        self._fail(str(exc or "the server closed the connection before the end of its answer"))

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"retry-after" and value.isdigit():  # else it is a date
            self._sample.retry_after = float(value)

    def on_body(self, body: bytes) -> None:
        self._body += body
        if self._streaming and self._parser.get_status_code() == 200:
            events, self._body = split_events(self._body)
            for event in events:
                self._sample.take(event, self._now)

    def on_message_complete(self) -> None:
        sample, status = self._sample, self._parser.get_status_code()
        sample.ended = self._now
        if status != 200:
            sample.error = _refusal(status, self._body)
        elif not self._streaming:
            sample.add(orjson.loads(self._body), self._now)
        elif not sample.ends and sample.error is None:
            self._fail("the stream ended without [DONE]")
        sample.tokens = sample.tokens or len(sample.times)
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

    def __init__(self, url: str, *, api_key: str = "", time_limit: float = TIME_LIMIT) -> None:
        parts = urlsplit(url)
        self._secure = parts.scheme == "https"
        self._address = parts.hostname or "127.0.0.1", parts.port or (443 if self._secure else 80)
        self._prefix, self._time_limit = parts.path.rstrip("/"), time_limit
        self._headers = {"Host": parts.netloc, "Content-Type": "application/json"}
        self._headers |= {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._idle: list[Connection] = []  # the last used first: the fewer, the better

    async def post(self, path: str, body: dict[str, Any]) -> Sample:
        """Ask once. What fails at the server or on the way is the sample's `error`, and never raised."""
        sample = Sample()
        try:
            async with asyncio.timeout(self._time_limit):
                await self.send(path, body, sample)
        except TimeoutError:
            sample.error = f"no end of the answer in {self._time_limit:g} s"
        except OSError as error:
            sample.error = str(error)
        return sample

    async def send(self, path: str, body: dict[str, Any], sample: Sample, headers: Mapping[str, str] = {}) -> None:
        """Ask once, and note what comes. Raises `OSError` where the answer breaks off; a refusal is an `error`."""
        data = orjson.dumps(body)
        fields = {**self._headers, **headers, "Content-Length": str(len(data))}
        lines = [f"POST {self._prefix}{path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
        connection = await self._connection()
        try:
            request = "\r\n".join([*lines, "\r\n"]).encode() + data
            await connection.post(request, sample, streaming=body.get("stream") is True)
        finally:
            if connection.reusable:
                self._idle.append(connection)
            else:
                connection.transport.abort()

    def close(self) -> None:
        for connection in self._idle:
            connection.transport.abort()

    async def _connection(self) -> Connection:
        while self._idle:
            if (connection := self._idle.pop()).reusable:
                return connection
        loop = asyncio.get_running_loop()
        return (await loop.create_connection(Connection, *self._address, ssl=self._secure or None))[1]


async def open_loop(ask: Ask, ended: Ended, *, rate: float, seconds: float) -> None:
    """Ask `rate` times a second for so long, at even distances, whatever becomes of it; tell `ended` of each sample."""

    async def one() -> None:
        ended(await ask())

    start = clock()
    async with asyncio.TaskGroup() as group:
        for place in range(ceil(rate * seconds)):
            await asyncio.sleep(start + place / rate - clock())
            group.create_task(one())


async def closed_loop(ask: Ask, ended: Ended, *, concurrency: int, requests: float = inf, seconds: float = inf) -> None:
    """Keep `concurrency` running until so many were sent or so long has passed, and wait for the last."""
    until = clock() + seconds

    async def one_after_another() -> None:
        nonlocal requests
        while requests > 0 and clock() < until:
            requests -= 1
            ended(await ask())

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(one_after_another())
