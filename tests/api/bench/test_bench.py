"""`penstock bench pipeline` against servers of its own, and its client against servers that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from penstock.api.bench.load import Client, Event, Sample, closed_loop, open_loop, split_events
from penstock.api.bench.pipeline import figures_with_targets
from penstock.api.bench.report import milliseconds

CHUNK = b'data: {"choices": [{"delta": {"content": "hello"}}]}\n\n'
USAGE = b'data: {"choices": [], "usage": {"completion_tokens": 5}}\n\n'
DONE = b"data: [DONE]\n\n"
STREAM = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Type: text/event-stream\r\n\r\n"
END = b"0\r\n\r\n"


def chunked(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "penstock", "bench", "pipeline", *arguments]
    environment = os.environ | {"NO_COLOR": "1", "COLUMNS": "200"}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)


class Answering(asyncio.Protocol):
    """A server's end of a connection that says the same to every request, a part at a time."""

    def __init__(self, parts: tuple[bytes, ...]) -> None:
        self._parts = parts
        self.lost = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._transport.writelines(self._parts)
        if b"Connection: close" in self._parts[0]:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set()


@contextlib.asynccontextmanager
async def answering(*parts: bytes) -> AsyncIterator[tuple[Client, list[Answering]]]:
    """A client of a server that says this, and the connections that it has made."""
    connections: list[Answering] = []

    def connect() -> Answering:
        connections.append(Answering(parts))
        return connections[-1]

    server = await asyncio.get_running_loop().create_server(connect, "127.0.0.1", 0)
    async with server:
        with contextlib.closing(Client(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")) as client:
            yield client, connections
        for connection in connections:
            await connection.lost.wait()


async def ask(client: Client, *, stream: bool = True) -> Sample:
    return await client.post("/v1/chat/completions", {"model": "m", "stream": stream})


def test_the_command_measures_and_writes_a_report(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    options = {"rate": 20, "seconds": 1, "tokens": 4, "concurrency": 3, "relay-tokens": 16}
    ran = bench(*(f"--{name}={value}" for name, value in options.items()), f"--json={report}")
    assert ran.returncode == 0, ran.stderr
    assert "added by the pipeline, p99" in ran.stdout

    document = json.loads(report.read_text())
    assert document["benchmark"] == "pipeline"
    assert document["options"]["relay_tokens"] == 16
    assert document["machine"]["cores"] == os.cpu_count()
    assert {"penstock", "python", "nats-py"} <= document["versions"].keys()
    assert document["figures"].keys() == {
        "added by the pipeline, p50, ms",
        "added by the pipeline, p99, ms",
        "tokens relayed / s",
    }
    assert all(isinstance(figure["measured"], float) for figure in document["figures"].values())
    loads = document["loads"]
    assert list(loads) == ["engine alone", "first token", "relay", "one token"]
    for load, tokens in zip(loads.values(), (4, 4, 16, 1), strict=True):
        assert load["failed"] == 0
        assert load["output_tokens"] == tokens * load["requests"]
        assert 0 < load["completed"] == load["requests"]
    assert loads["engine alone"]["requests"] == loads["first token"]["requests"] == 20


def test_a_report_that_cannot_be_written_is_told_before_the_load(tmp_path: Path) -> None:
    ran = bench(f"--json={tmp_path}/none/report.json")
    assert ran.returncode == 2
    assert "'--json'" in ran.stderr and "No such file or directory" in ran.stderr


@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
def test_events_are_the_same_wherever_they_are_cut(newline: bytes) -> None:
    lines = (
        b": ping",
        b"",
        b"event: x",
        b"id: 7",
        b"data: one",
        b"",
        b"data:two",
        b"data:  lines",
        b"",
        b"data: [DONE]",
        b"",
        b"",
    )
    text = newline.join(lines)
    whole = [Event(b"7", b"one"), Event(b"", b"two\n lines"), Event(b"", b"[DONE]")]
    assert split_events(text) == (whole, b"")
    for place in range(len(text)):
        first, rest = split_events(text[:place])
        assert first + split_events(rest + text[place:])[0] == whole
    events: list[Event] = []
    rest = b""
    for place in range(len(text)):
        found, rest = split_events(rest + text[place : place + 1])
        events += found
    assert events == whole


async def test_a_stream_is_timed_and_counted_and_its_connection_used_again() -> None:
    async with answering(STREAM, chunked(CHUNK), chunked(CHUNK), chunked(USAGE + DONE) + END) as (client, connections):
        for _ in range(2):
            sample = await ask(client)
            assert sample.error is None
            assert sample.tokens == 5
            assert sample.to_first is not None
            assert len(sample.times) == 2 and len(sample.gaps) == 1
            assert sample.sent <= sample.times[0] <= sample.times[1] <= sample.ended
        assert len(connections) == 1


async def test_without_usage_pieces_are_counted() -> None:
    async with answering(STREAM + chunked(CHUNK * 3 + DONE) + END) as (client, _):
        assert (await ask(client)).tokens == 3


async def test_a_whole_answer_is_one_piece() -> None:
    body = b'{"choices": [{"message": {"content": "hello"}}], "usage": {"completion_tokens": 2}}'
    async with answering(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body) as (client, _):
        sample = await ask(client, stream=False)
        assert (sample.error, sample.tokens, len(sample.times)) == (None, 2, 1)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"HTTP/1.1 503 Busy\r\nContent-Length: 4\r\n\r\nbusy", "HTTP 503: busy"),
        (STREAM + chunked(CHUNK) + END, "the stream ended without"),
        (STREAM + chunked(b'data: {"error": {"message": "broken"}}\n\n') + END, "in the answer: broken"),
        (STREAM + chunked(b"data: {\n\n") + END, "cannot be read"),
        (b"nonsense\r\n\r\n", "cannot be read"),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 9\r\n\r\nhalf", "closed the connection"),
    ],
)
async def test_what_goes_wrong_is_the_samples_error(answer: bytes, error: str) -> None:
    async with answering(answer) as (client, _):
        sample = await ask(client)
        assert sample.error is not None
        assert error in sample.error


async def test_loops_send_what_they_should() -> None:
    async def send() -> Sample:
        await asyncio.sleep(0)
        return Sample()

    samples: list[Sample] = []
    await open_loop(send, samples.append, rate=1000, seconds=0.02)
    assert len(samples) == 20
    assert [sample.sent for sample in samples] == sorted(sample.sent for sample in samples)

    running = most = 0

    async def count() -> Sample:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return Sample()

    samples.clear()
    await closed_loop(count, samples.append, concurrency=3, seconds=0.01)
    assert samples
    assert most == 3
    samples.clear()
    await closed_loop(count, samples.append, concurrency=3, requests=7)
    assert len(samples) == 7


def test_percentiles_are_values_that_were_measured() -> None:
    assert milliseconds([], 50) is None
    assert milliseconds([3.0, None, 1.0, 2.0], 50) == 2000.0
    assert milliseconds([float(x) for x in range(1, 101)], 99) == 99_000.0
    assert milliseconds([7.0], 99) == 7000.0


def test_what_is_measured_stands_beside_its_target() -> None:
    loads: dict[str, Any] = {
        "engine alone": {"ttft_ms": {"p50": 1.0, "p99": 2.0}},
        "first token": {"ttft_ms": {"p50": 6.0, "p99": 7.0}},
        "relay": {"output_tokens_per_second": 4_999.0},
    }
    assert list(figures_with_targets(loads).values()) == [
        {"measured": 5.0, "at_most": 5.0},
        {"measured": 5.0, "at_most": 20.0},
        {"measured": 4_999.0, "at_least": 5_000.0},
    ]
