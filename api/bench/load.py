"""Loads any server that speaks OpenAI's HTTP API, and records when each piece of each answer arrived.

The client shares its machine with what it measures: by httptools a chunk costs it 40 µs, by httpx2 110 µs.

A benchmark passes a loop the coroutine that sends one request: `open_loop` sends at an even rate, `closed_loop` keeps a
number of requests running. Both pass each `Sample` to a callback when it has ended, failed ones too, and raise nothing.
"""

from __future__ import annotations

import asyncio
import time
from asyncio import StreamReader, StreamWriter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil, inf
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httptools
import orjson

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
    last: str = ""  # id of its last event that had one
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
        self.last = event.id.decode() or self.last
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
            said = part.get("content") or part.get("reasoning_content") or part.get("reasoning") or part.get("text")
            # A token may have no text: a special one, or one of a random model that its tokenizer does not know.
            if said or (said == "" and part is choice and choice.get("finish_reason") is None):
                self.times.append(now)
        if usage := event.get("usage"):
            self.tokens, self.prompt_tokens = usage["completion_tokens"], usage.get("prompt_tokens", 0)


class ResponseParser:
    """Reads one answer into a sample; httptools calls what begins with `on_`."""

    def __init__(self, sample: Sample, *, streaming: bool) -> None:
        self.is_complete = self.is_reusable = False  # the answer; its connection; set by `on_message_complete`
        self.parser = httptools.HttpResponseParser(self)
        self._sample, self._streaming, self._body = sample, streaming, b""

    def feed(self, data: bytes) -> None:
        """Raises `ConnectionError` for what breaks off, or cannot be read."""
        if not data:
            raise ConnectionError("the server closed the connection before the end of its answer")
        self._sample.ended = clock()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise ConnectionError(f"an answer that cannot be read: {error.__context__ or error!r}") from error

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"retry-after" and value.isdigit():  # else it is a date
            self._sample.retry_after = float(value)

    def on_body(self, body: bytes) -> None:
        self._body += body
        if self._streaming and self.parser.get_status_code() == 200:
            events, self._body = split_events(self._body)
            for event in events:
                self._sample.take(event, self._sample.ended)

    def on_message_complete(self) -> None:
        sample, status = self._sample, self.parser.get_status_code()
        self.is_complete, self.is_reusable = True, self.parser.should_keep_alive()
        if status != 200:
            sample.error = _refusal(status, self._body)
        elif not self._streaming:
            sample.add(orjson.loads(self._body), sample.ended)
        sample.tokens = sample.tokens or len(sample.times)


def _refusal(status: int, body: bytes) -> str:
    """What went wrong, by OpenAI's error object where the body is one."""
    try:
        error = orjson.loads(body)["error"]
        return f"HTTP {status} {error.get('code') or error['type']}: {error['message']}"
    except (ValueError, TypeError, KeyError, AttributeError):
        return f"HTTP {status}: {body[:200].decode(errors='replace')}"


class ConnectionWasOver(ConnectionError):
    """The server had closed a connection that was used before, without saying so, and answered nothing: some servers do
    so after each stream."""


class Client:
    """Posts to one server over as many connections as it takes, and uses them again. `close` it."""

    def __init__(self, url: str, *, api_key: str = "", time_limit: float = 60.0) -> None:
        self._parts, self._time_limit = urlsplit(url.rstrip("/")), time_limit
        self._headers = {"Host": self._parts.netloc, "Content-Type": "application/json"}
        self._headers |= {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._idle: list[tuple[StreamReader, StreamWriter]] = []  # the last used first: the fewer, the better

    async def post(self, path: str, body: dict[str, Any]) -> Sample:
        """Ask once. What fails at the server or on the way is the sample's `error`, and never raised."""
        sample = Sample()
        try:
            async with asyncio.timeout(self._time_limit):
                while True:  # at the latest, a new connection ends it
                    with suppress(ConnectionWasOver):
                        await self.send(path, body, sample)
                        break
        except TimeoutError:
            sample.error = f"no end of the answer in {self._time_limit:g} s"
        except OSError as error:
            sample.error = str(error)
        return sample

    async def send(self, path: str, body: dict[str, Any], sample: Sample, headers: Mapping[str, str] = {}) -> None:
        """Ask once, and note what comes. Raises `OSError` where the answer breaks off, `ConnectionWasOver` where asking
        again is all that is needed; a refusal is an `error`."""
        data, streaming = orjson.dumps(body), body.get("stream") is True
        fields = {**self._headers, **headers, "Content-Length": str(len(data))}
        lines = [f"POST {self._parts.path}{path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
        reader, writer, was_used = await self._connection()
        answer = ResponseParser(sample, streaming=streaming)
        try:
            sample.sent = clock()
            writer.write("\r\n".join([*lines, "\r\n"]).encode() + data)
            while not answer.is_complete:
                answer.feed(await reader.read(1 << 16))
        except ConnectionError as error:
            if was_used and not sample.ended:
                raise ConnectionWasOver(str(error)) from error
            raise
        finally:
            if answer.is_reusable:
                self._idle.append((reader, writer))
            else:
                writer.transport.abort()
        if streaming and not sample.ends and sample.error is None:
            raise ConnectionError("the stream ended without [DONE]")

    def close(self) -> None:
        for _, writer in self._idle:
            writer.transport.abort()

    async def _connection(self) -> tuple[StreamReader, StreamWriter, bool]:
        """A connection, and whether it was used before."""
        while self._idle:
            reader, writer = self._idle.pop()
            if not (reader.at_eof() or writer.is_closing()):
                return reader, writer, True
            writer.transport.abort()
        secure = self._parts.scheme == "https"
        port = self._parts.port or (443 if secure else 80)
        return *await asyncio.open_connection(self._parts.hostname, port, ssl=secure or None), False


Ask = Callable[[], Awaitable[Sample]]
Ended = Callable[[Sample], object]


async def open_loop(ask: Ask, ended: Ended, *, rate: float, seconds: float) -> None:
    """Ask `rate` times a second for so long, at even distances, whatever becomes of it; tell `ended` of each sample."""

    async def one() -> None:
        ended(await ask())

    start = clock()
    async with asyncio.TaskGroup() as group:
        for index in range(ceil(rate * seconds)):
            await asyncio.sleep(start + index / rate - clock())
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
