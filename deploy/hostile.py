"""A hostile tenant beside a good one on a running `penstock serve`: is the good one served as if it were alone?

    penstock serve --port 8000 --api-keys good=sk-good-tenant,bad=sk-bad-tenant --tenant-limit 32 &
    python deploy/hostile.py http://127.0.0.1:8000 --good sk-good-tenant --bad sk-bad-tenant --seconds 300

The good tenant asks at an even rate, first alone and then beside another process that does, as the bad tenant and in
turn, whatever its key allows it and more: bodies of 400,000 keys, of 100 levels, of a million lists; headers without an
end, requests that never end, streams that nobody reads; thousands of conversations; `n: 128` and `priority: high`. With
`--nats-url` (a file with it is in the state directory) it also publishes jobs that cannot be read, and repeats ids.
Prints the outcomes of both, the time to the good one's first token, and the memory of every process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

import nats
import orjson
import typer
from nats.errors import Error
from overload import resident

from penstock.api.bench.load import Client, Sample, open_loop
from penstock.api.bench.report import milliseconds
from penstock.api.bench.server import served_models

CONVERSATIONS = 10_000
OPEN = 64  # connections that a kind of attack keeps open
LONG_HEADERS = 8 << 20  # bytes
Attack = Callable[[], Awaitable[str]]


class Attacker:
    """Each method is one blow, and returns what came of it."""

    def __init__(self, url: str, key: str, model: str, jobs: Any, kinds: str = "") -> None:
        self._kinds = kinds.split(",") if kinds else []
        self._at, self._key, self._model, self._jobs = urlsplit(url), key, model, jobs
        self._client = Client(url, api_key=key, time_limit=20.0)
        self._held: list[asyncio.StreamWriter] = []
        self._conversations = 0

    async def many_keys(self) -> str:
        return await self._post("/v1/completions", {f"k{place}": 1 for place in range(300_000)})

    async def deep(self) -> str:
        return await self._raw("/v1/completions", b'{"a":' * 100 + b"1" + b"}" * 100)

    async def lists(self) -> str:
        return await self._raw("/v1/chat/completions", b'{"messages":[' + b"[]," * 1_000_000 + b"[]]}")

    async def text(self) -> str:
        return await self._post("/v1/completions", {"model": self._model, "prompt": "x" * (4_000_000)})

    async def conversation(self) -> str:
        found = "none left"
        for _ in range(20):
            if self._conversations < CONVERSATIONS:
                self._conversations += 1
                items = [{"type": "message", "role": "user", "content": "x" * 2_000}]
                found = await self._post("/v1/conversations", {"items": items})
        return found

    async def wide(self) -> str:
        body = {"model": self._model, "prompt": "wide", "n": 128, "max_tokens": 64, "stream": True}
        return await self._post("/v1/completions", body)

    async def urgent(self) -> str:
        body = {"model": self._model, "prompt": str(uuid.uuid4()), "max_tokens": 64, "priority": "high"}
        return await self._post("/v1/completions", body)

    async def headers(self) -> str:
        async with self._connection() as (reader, writer):
            writer.write(b"GET /v1/models HTTP/1.1\r\n")
            for place in range(LONG_HEADERS // 65_536):
                writer.write(b"x-%d: " % place + b"y" * 65_000 + b"\r\n")
                await writer.drain()
            return (await reader.read(64)).partition(b"\r\n")[0].decode() or "cut off"

    async def half(self) -> str:
        """A request that never goes on; the oldest is let go."""
        _, writer = await self._open()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n")
        return self._hold(writer)

    async def unread(self) -> str:
        """A stream that nobody reads."""
        _, writer = await self._open()
        body = {"model": self._model, "prompt": "unread", "max_tokens": 200, "stream": True, "ignore_eos": True}
        writer.write(self._request("/v1/completions", orjson.dumps(body)))
        return self._hold(writer)

    async def unreadable_jobs(self) -> str:
        for size in (1, 1_000, 4_000_000):
            await self._publish(os.urandom(8) * (size // 8 + 1), uuid.uuid4().hex)
        return "published"

    async def repeated_ids(self) -> str:
        body = {"model": self._model, "prompt": "again", "max_tokens": 4}
        job = {"id": "again", "endpoint": "/v1/completions", "bridge": "bad", "body": body}
        for _ in range(20):
            await self._publish(orjson.dumps(job), uuid.uuid4().hex)
        return "published"

    @property
    def blows(self) -> list[Attack]:
        over_http = [self.many_keys, self.deep, self.lists, self.text, self.conversation, self.wide, self.urgent]
        over_http += [self.headers, self.half, self.unread]
        every = [*over_http, *([self.unreadable_jobs, self.repeated_ids] if self._jobs else [])]
        return [blow for blow in every if not self._kinds or getattr(blow, "__name__", "") in self._kinds]

    async def _publish(self, data: bytes, message_id: str) -> None:
        with contextlib.suppress(Error):
            await self._jobs.publish("penstock.jobs.normal.bad", data, headers={"Nats-Msg-Id": message_id}, timeout=5)

    async def _post(self, path: str, body: dict[str, Any]) -> str:
        sample = await self._client.post(path, body)
        return (sample.error or "answered").partition(":")[0]

    async def _raw(self, path: str, data: bytes) -> str:
        async with self._connection() as (reader, writer):
            writer.write(self._request(path, data))
            return (await reader.read(64)).partition(b"\r\n")[0].decode() or "cut off"

    def _request(self, path: str, data: bytes) -> bytes:
        lines = [f"POST {path} HTTP/1.1", f"Host: {self._at.netloc}", f"Authorization: Bearer {self._key}"]
        lines += ["Content-Type: application/json", f"Content-Length: {len(data)}", "", ""]
        return "\r\n".join(lines).encode() + data

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(self._at.hostname, self._at.port or 80)

    @contextlib.asynccontextmanager
    async def _connection(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        reader, writer = await self._open()
        try:
            async with asyncio.timeout(20.0):
                yield reader, writer
        finally:
            writer.transport.abort()

    def _hold(self, writer: asyncio.StreamWriter) -> str:
        self._held.append(writer)
        if len(self._held) > 2 * OPEN:
            self._held.pop(0).transport.abort()
        return "left open"


async def attack(url: str, key: str, model: str, nats_url: str, seconds: float, kinds: str) -> None:
    """Strike with the `kinds` in turn (with all if empty), eight at a time, for so long; print what came of each."""
    outcomes: Counter[str] = Counter()
    until = time.monotonic() + seconds
    connection = await nats.connect(nats_url) if nats_url else None
    attacker = Attacker(url, key, model, connection.jetstream() if connection else None, kinds)

    async def one_after_another(first: int) -> None:
        place = first
        while time.monotonic() < until:
            blow = attacker.blows[place % len(attacker.blows)]
            place += 1
            try:
                outcome = await blow()
            except (OSError, TimeoutError) as error:
                outcome = type(error).__name__
            outcomes[f"{getattr(blow, '__name__', '')}: {outcome}"] += 1

    await asyncio.gather(*(one_after_another(first) for first in range(8)))
    if connection:
        await connection.close()
    for name, count in sorted(outcomes.items()):
        print(f"  {name}: {count}")


async def measure(url: str, key: str, model: str, rate: float, seconds: float) -> list[Sample]:
    client, samples = Client(url, api_key=key, time_limit=60.0), list[Sample]()
    chance = random.Random(0)

    async def ask() -> Sample:
        prompt = " ".join(str(chance.random()) for _ in range(6))
        body = {"model": model, "prompt": prompt, "max_tokens": 16, "ignore_eos": True, "stream": True}
        return await client.post("/v1/completions", body | {"priority": "high"})

    await open_loop(ask, samples.append, rate=rate, seconds=seconds)
    client.close()
    return samples


def told(label: str, samples: list[Sample]) -> float:
    outcomes = Counter((sample.error or "answered").partition(":")[0] for sample in samples)
    half, most = (milliseconds((sample.to_first for sample in samples), share) or 0.0 for share in (50, 99))
    print(f"{label}: {dict(outcomes)}, first token p50 {half:.1f} ms, p99 {most:.1f} ms")
    return most


def hostile(
    url: str,
    good: str = "",
    bad: str = "",
    nats_url: str = "",
    rate: float = 4.0,
    seconds: float = 300.0,
    alone: float = 30.0,
    kinds: str = "",
    attacking: bool = False,
) -> None:
    """Measure a good tenant alone, and then for so many seconds beside a hostile one.

    `kinds` names the attacks to make, separated by commas (the methods of `Attacker`); all if it is empty.
    """
    if attacking:
        os.nice(19)  # it stands for another machine: what its own work costs must not count as ours
        model = asyncio.run(served_models(url, bad))[0]
        asyncio.run(attack(url, bad, model, nats_url, seconds, kinds))
        return
    model = asyncio.run(served_models(url, good))[0]
    asyncio.run(measure(url, good, model, rate, 5.0))  # warm
    before = resident()
    calm = told("good, alone", asyncio.run(measure(url, good, model, rate, alone)))
    words = [url, "--bad", bad, "--nats-url", nats_url, "--seconds", str(seconds), "--attacking"]
    words += ["--kinds", kinds]
    attacking_process = subprocess.Popen([sys.executable, __file__, *words], stdout=subprocess.PIPE, text=True)
    try:
        beside = told("good, beside a hostile one", asyncio.run(measure(url, good, model, rate, seconds)))
        outcomes, _ = attacking_process.communicate(timeout=120.0)
    finally:
        attacking_process.kill()
    after = resident()
    print(f"ratio of the p99s: {beside / calm:.2f}\nthe hostile one:\n{outcomes.rstrip()}")
    for name in sorted(before | after):
        print(f"{name}: {before.get(name, 0)} → {after.get(name, 0)} MiB")


if __name__ == "__main__":
    typer.run(hostile)
