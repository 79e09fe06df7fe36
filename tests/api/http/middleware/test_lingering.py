"""Clients that read once they have sent everything get an answer that came before."""

from __future__ import annotations

import asyncio
import errno
import socket

import pytest
from http_server import Server

from penstock.api.http.middleware import counting

SIZE = 9_000_000  # beyond `max_body_size`, and beyond what the buffers of both systems hold


def head(path: str, size: int, version: str = "1.1") -> bytes:
    lines = [f"POST {path} HTTP/{version}", "Host: localhost", "Connection: close", f"Content-Length: {size}"]
    return "\r\n".join([*lines, "", ""]).encode()


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize(("path", "status"), [("/v1/completions", 413), ("/v1/nothing", 404), ("/v1/models", 405)])
async def test_who_sends_all_of_a_body_first_reads_why_it_was_refused(path: str, status: int, version: str) -> None:
    async with Server.run() as server:
        client, loop = server.socket(), asyncio.get_running_loop()
        await loop.sock_sendall(client, head(path, SIZE, version) + b"x" * SIZE)
        answer = b""
        while data := await loop.sock_recv(client, 1 << 16):
            answer += data
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert b'"error"' in answer


async def test_without_room_for_one_more_file_the_connection_still_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(connection: object) -> socket.socket:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(counting, "handed_over", refused)
    async with Server.run(max_connections=1) as server:
        client = await server.wire()
        await client.send(head("/v1/nothing", SIZE))
        assert (await client.response()).status == 404
        with pytest.raises(ConnectionError):
            while True:
                await client.send(b"x" * 1000)
        other = await server.wire()
        await other.send(head("/v1/nothing", 0))
        assert (await other.response()).status == 404


async def test_a_client_that_is_silent_then_loses_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counting, "LINGER", 0.01)
    async with Server.run(max_connections=1) as server:
        client = await server.wire()
        await client.send(head("/v1/nothing", SIZE))
        assert (await client.response()).status == 404
        assert await client.ended() == b""
        with pytest.raises(ConnectionError):
            while True:
                await client.send(b"x" * 1000)
        other = await server.wire()  # which the former no longer keeps away
        await other.send(head("/v1/nothing", 0))
        assert (await other.response()).status == 404
