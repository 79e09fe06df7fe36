"""Clients that speak HTTP/1.0 (`ab`, old proxies, nginx's default towards its upstreams) read what they are sent."""

from __future__ import annotations

import asyncio
import http.client
import io
from dataclasses import replace
from typing import Any, cast

import pytest
from http_server import Server, request

from penstock.schemas.events import Accepted, Done, Event, Token, Usage

STREAM = {"model": "echo", "prompt": "abc", "stream": True}


def said(index: int, text: str) -> Token:
    return Token("", 0, index, (7,), text)


def end(count: int) -> list[Event]:
    return [replace(said(count, ""), finish_reason="stop"), Done("", ("stop",), Usage(1, count + 1, count + 2))]


def as_old(head: bytes) -> bytes:
    return head.replace(b" HTTP/1.1\r\n", b" HTTP/1.0\r\n", 1)


def parsed(raw: bytes) -> tuple[http.client.HTTPResponse, bytes]:
    """What Python's own client makes of the bytes up to the end of the connection."""

    class Bytes:
        def makefile(self, *_: Any) -> io.BytesIO:
            return io.BytesIO(raw)

    response = http.client.HTTPResponse(cast(Any, Bytes()))
    response.begin()
    return response, response.read()


@pytest.mark.parametrize("keep", [{}, {"Connection": "keep-alive"}], ids=["close", "keep-alive"])
async def test_a_stream_ends_with_its_connection(keep: dict[str, str]) -> None:
    async with Server.run() as server:
        wire = await server.wire()
        await wire.send(as_old(request("POST", "/v1/completions", STREAM, **keep)))
        job = await server.script.job()
        words = [said(index, f"word{index} ") for index in range(20)]
        await server.script.tell([Accepted("", "echo", 1, 1), *words], job)
        await server.script.tell(end(20), job)
        async with asyncio.timeout(10):
            head, _, body = (await wire.ended()).partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in head.lower() and b"connection: close" in head.lower()
        assert body.startswith(b"data: {") and body.endswith(b"data: [DONE]\n\n")
        assert all(line.startswith(b"data: ") for line in body.splitlines() if line)
        assert body.count(b"word") == 20


async def test_a_client_that_reads_late_misses_nothing() -> None:
    async with Server.run(write_timeout=20.0) as server:
        client = server.socket(receive_buffer=4096)
        await asyncio.get_running_loop().sock_sendall(client, as_old(request("POST", "/v1/completions", STREAM)))
        job = await server.script.job()
        words = [said(index, "x" * 20_000) for index in range(100)]
        await server.script.tell([Accepted("", "echo", 1, 1), *words, *end(100)], job)
        raw = b""
        async with asyncio.timeout(20):
            while piece := await asyncio.get_running_loop().sock_recv(client, 1 << 16):
                raw += piece
        assert raw.count(b"x" * 20_000) == 100 and raw.endswith(b"data: [DONE]\n\n")


async def test_a_stream_that_is_cut_off_does_not_look_complete() -> None:
    async with Server.run(write_timeout=0.05) as server:
        client, cancelled = server.socket(receive_buffer=4096), asyncio.Event()
        await server.script.broker.listen(server.script.subjects.cancel_all(), lambda _: cancelled.set())
        await asyncio.get_running_loop().sock_sendall(client, as_old(request("POST", "/v1/completions", STREAM)))
        job = await server.script.job()
        words = [said(index, "x" * 20_000) for index in range(400)]
        await server.script.tell([Accepted("", "echo", 1, 1), *words], job)
        await cancelled.wait()
        with pytest.raises(ConnectionResetError):
            while await asyncio.get_running_loop().sock_recv(client, 1 << 16):
                pass


async def test_whole_answers_and_heads_are_as_before() -> None:
    async with Server.run() as server:
        wires = [await server.wire() for _ in range(3)]
        for wire, method in zip(wires, ("GET", "HEAD"), strict=False):
            await wire.send(as_old(request(method, "/health/live")))
            raw = await wire.ended()
            assert b"content-length: 17\r\n" in raw and raw.endswith(b'"live"}') is (method == "GET")
        await wires[2].send(as_old(request("GET", "/openapi.json")))
        response, body = parsed(await wires[2].ended())
        assert response.status == 200 and body.startswith(b"{") and body.endswith(b"}")


async def test_no_interim_answer_is_sent() -> None:
    async with Server.run() as server:
        wire = await server.wire()
        await wire.send(as_old(request("POST", "/v1/completions", b"[]", Expect="100-continue")))
        raw = await wire.ended()
        assert b"100 Continue" not in raw and parsed(raw)[0].status == 400


async def test_those_that_know_chunks_get_them() -> None:
    async with Server.run() as server:
        wire = await server.wire()
        await wire.send(request("POST", "/v1/completions", STREAM, Connection="close"))
        job = await server.script.job()
        await server.script.tell([Accepted("", "echo", 1, 1), *end(0)], job)
        response, body = parsed(await wire.ended())
        assert response.headers["transfer-encoding"] == "chunked" and body.endswith(b"data: [DONE]\n\n")
