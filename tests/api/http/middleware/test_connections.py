"""What a client can draw out or pile up on a connection has an end."""

from __future__ import annotations

import asyncio
import resource
import socket
from dataclasses import replace
from typing import Any

import orjson
import pytest
from http_server import Server, request

from penstock.api.http.middleware import connections
from penstock.api.http.middleware.connections import MAX_PIPELINED
from penstock.api.http.middleware.counting import Connections, network
from penstock.api.http.middleware.vanished import end_with_client
from penstock.api.http.server import _room_for
from penstock.config.settings import Settings
from penstock.schemas.events import Accepted, Done, Token, Usage
from penstock.schemas.jobs import Job

LIVE = request("GET", "/health/live")
STREAM = {"model": "echo", "prompt": "abc", "stream": True}


def token(index: int, text: str) -> Token:
    return Token("", 0, index, (7,), text)


async def accepted(server: Server, job: Job, *, text: str = "x") -> None:
    await server.script.tell([Accepted("", "echo", 1, 1), token(0, text)], job)


async def test_a_connection_serves_one_request_after_another() -> None:
    async with Server.run() as server:
        wire = await server.wire()
        for _ in range(3):
            await wire.send(LIVE)
            assert (await wire.response()).status == 200
        await wire.send(LIVE[:20], LIVE[20:])
        assert (await wire.response()).status == 200
        await wire.send(LIVE * 5)
        assert [(await wire.response()).status for _ in range(5)] == [200] * 5


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 5000,
        b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"A: b\r\n" * 1000,
        b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"A: b\r\n" * 1000 + b"\r\n",
        b"GET /" + b"x" * 5000,
        b"GET /" + b"x" * 5000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"X" * 5000,
    ],
)
async def test_a_head_that_is_too_large_is_refused(head: bytes) -> None:
    async with Server.run(max_header_size=4096) as server:
        wire = await server.wire()
        await wire.send(LIVE)
        await wire.response()
        await wire.send(*(head[place : place + 1000] for place in range(0, len(head), 1000)))
        response = await wire.response()
        assert (response.status, response.error["code"]) == (431, "headers_too_large")
        assert response.headers["connection"] == "close"
        assert "max_header_size" in response.error["message"]
        assert await wire.ended() == b""


async def test_headers_without_end_are_not_kept() -> None:
    """The client never stops, nor reads; the server takes no more than its limit."""
    async with Server.run(max_header_size=4096) as server:
        wire = await server.wire()

        async def flood() -> None:
            await wire.send(b"GET / HTTP/1.1\r\nHost: localhost\r\n")
            while True:
                await wire.send(b"X: " + b"x" * 1000 + b"\r\n")

        with pytest.raises(ConnectionError):
            await flood()


async def test_a_refused_client_cannot_go_on_sending(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has all the time to read the error, but must not fill the server's with what nobody reads."""
    monkeypatch.setattr(connections, "LINGER", 1e6)
    async with Server.run(max_header_size=4096) as server:
        wire = await server.wire()
        with pytest.raises(ConnectionError):
            await wire.send(b"GET / HTTP/1.1\r\n", *[b"X: " + b"x" * 65_000 + b"\r\n"] * 1_000)


@pytest.mark.parametrize(
    ("begin", "more"),
    [
        (b"1\r\n{\r\n0\r\n", b"A: b\r\n" * 100),
        (b"1\r\n{\r\n0\r\nX: ", b"x" * 500),
        (b"1;", b"x" * 500),
        (b"", b"0" * 500),
    ],
)
async def test_what_surrounds_a_body_is_bounded_too(begin: bytes, more: bytes) -> None:
    async with Server.run(max_header_size=4096, body_timeout=1000) as server:
        wire = await server.wire()
        await wire.send(request("POST", "/tokenize", transfer_encoding="chunked"), begin)
        with pytest.raises(ConnectionError):
            while True:
                await wire.send(more)


@pytest.mark.parametrize(
    ("coding", "body"), [("chunked", b"zz\r\n"), ("chunked", b"1\r\n{x0\r\n\r\n"), ("gzip", b"x"), ("xchunked", b"")]
)
async def test_a_body_whose_end_cannot_be_found_is_refused(coding: str, body: bytes) -> None:
    async with asyncio.timeout(10), Server.run() as server:
        wire = await server.wire()
        await wire.send(request("POST", "/v1/completions", transfer_encoding=coding), body)
        response = await wire.response()
        assert (response.status, response.headers["connection"]) == (400, "close")
        assert orjson.loads(response.body)["error"]["code"] == "invalid_http"
        assert await wire.ended() == b""


async def test_a_faulty_body_is_not_refused_in_the_place_of_an_earlier_answer() -> None:
    async with asyncio.timeout(10), Server.run() as server:
        wire = await server.wire()
        await wire.send(request("POST", "/v1/completions", STREAM))
        await server.script.job()
        await wire.send(request("POST", "/v1/completions", transfer_encoding="chunked"), b"zz\r\n")
        assert await wire.ended() == b""


@pytest.mark.parametrize("sent", [LIVE[:10], LIVE[:-1], b"G"])
async def test_a_head_that_does_not_come_is_given_up(sent: bytes) -> None:
    async with Server.run(header_timeout=0.05) as server:
        wire = await server.wire()
        await wire.send(sent)
        response = await wire.response()
        assert (response.status, response.error["code"]) == (408, "header_timeout")
        assert await wire.ended() == b""


async def test_a_head_that_comes_drop_by_drop_is_given_up() -> None:
    async with Server.run(header_timeout=0.05) as server:
        wire = await server.wire()
        answer = asyncio.create_task(wire.response())
        await wire.send(b"GET / HTTP/1.1\r\nA: ")
        while not answer.done():
            await wire.send(b"x")
            await asyncio.sleep(0)
        assert (await answer).status == 408


@pytest.mark.parametrize("sent", [b"", b"\r\n"])
async def test_a_connection_that_asks_nothing_is_closed(sent: bytes) -> None:
    async with Server.run(header_timeout=0.05) as server:
        wire = await server.wire()
        await wire.send(sent)
        assert await wire.ended() == b""


@pytest.mark.parametrize("sent", [b"", b"\r\n\r\n"])
async def test_a_connection_that_asks_no_more_is_closed(sent: bytes) -> None:
    async with Server.run(idle_timeout=0.05, header_timeout=0.05) as server:
        wire = await server.wire()
        await wire.send(LIVE)
        assert (await wire.response()).status == 200
        await wire.send(sent)
        assert await wire.ended() == b""


async def test_a_body_that_goes_on_behind_its_answer_is_cut() -> None:
    async with Server.run(header_timeout=0.05) as server:
        wire = await server.wire()
        await wire.send(request("POST", "/nothing", transfer_encoding="chunked"))
        assert (await wire.response()).status == 404

        async def flood() -> None:
            while True:
                await wire.send(b"1\r\nx\r\n")

        with pytest.raises(ConnectionError):
            await flood()


async def test_an_answer_that_comes_before_the_body_leaves_the_connection_open() -> None:
    async with Server.run() as server:
        wire = await server.wire()
        await wire.send(request("POST", "/nothing", content_length="3"))
        assert (await wire.response()).status == 404
        await wire.send(b"abc", LIVE)
        assert (await wire.response()).status == 200


async def test_requests_sent_ahead_are_few() -> None:
    """Those that are taken are answered. Behind them the connection ends: the client sends the others again."""
    async with asyncio.timeout(10), Server.run() as server:
        wire = await server.wire()
        await wire.send(LIVE * (MAX_PIPELINED + 9))
        answers = [await wire.response() for _ in range(MAX_PIPELINED + 1)]
        assert {answer.status for answer in answers} == {200} and answers[-1].headers["connection"] == "close"
        assert await wire.ended() == b""


async def test_what_cannot_be_read_behind_a_request_takes_nothing_from_its_answer() -> None:
    async with asyncio.timeout(10), Server.run() as server:
        wire = await server.wire()
        await wire.send(request("POST", "/v1/completions", STREAM))
        job = await server.script.job()
        await wire.send(b"\0no request\r\n\r\n")
        said = replace(token(0, "whole"), finish_reason="stop")
        await server.script.tell([Accepted("", "echo", 1, 1), said, Done("", ("stop",), Usage(1, 1, 2))], job)
        answer = await wire.ended()
        assert b"whole" in answer and answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


@pytest.mark.parametrize(("values", "fits"), [({"max_connections": 2}, 2), ({"max_connections_per_address": 3}, 3)])
async def test_connections_beyond_the_limit_are_refused(values: dict[str, Any], fits: int) -> None:
    async with Server.run(**values) as server:
        wires = [await server.wire() for _ in range(fits)]
        for wire in wires:
            await wire.send(LIVE)
            assert (await wire.response()).status == 200
        refused = await server.wire()
        await refused.send(LIVE)
        response = await refused.response()
        assert (response.status, response.error["code"]) == (503, "too_many_connections")
        assert response.headers["retry-after"] == "1"
        assert await refused.ended() == b""
        wires[0].writer.write_eof()
        assert await wires[0].ended() == b""
        again = await server.wire()
        await again.send(LIVE)
        assert (await again.response()).status == 200


def test_every_address_has_its_own_count() -> None:
    counted = Connections(Settings(max_connections=3, max_connections_per_address=2))
    assert [counted.admit(address) for address in ("a", "a", "a", "b", "c")] == [True, True, False, True, False]
    counted.leave("a")
    assert [counted.admit(address) for address in ("c", "a")] == [True, False]
    assert counted.total == 3


@pytest.mark.parametrize(
    ("client", "expected"),
    [
        (("192.0.2.1", 5), "192.0.2.1"),
        (("::1", 5), "::/64"),
        (("2001:db8:1:2:3:4:5:6", 5), "2001:db8:1:2::/64"),
        (("fe80::1%eth0", 5), "fe80::/64"),
        (("::ffff:192.0.2.1", 5), "192.0.2.1"),
        (None, ""),
    ],
)
def test_a_host_with_many_addresses_is_one(client: tuple[str, int] | None, expected: str) -> None:
    assert network(client) == expected


class Deaf:
    """A client that sends a request and never reads."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._socket = server.socket(receive_buffer=4096)

    async def send(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self._socket, data)

    async def until_cut(self, job: Job, *, more: bool) -> None:
        """Until the server resets the connection; with `more` the request says more and more meanwhile."""
        index = 1
        with pytest.raises(ConnectionError):
            while True:
                if more:
                    await self._server.script.tell([token(index, "y" * 100_000)], job)
                    index += 1
                await self.send(b"\r\n")
                await asyncio.sleep(0)


@pytest.mark.parametrize("kept", [False, True])
async def test_a_stream_that_nobody_reads_is_cut(kept: bool) -> None:
    """Its request is cancelled, unless its client may come back."""
    async with Server.run(write_timeout=0.05) as server:
        client, cancelled = Deaf(server), asyncio.Event()
        script = server.script
        await script.broker.listen(script.subjects.cancel_all(), lambda _: cancelled.set())
        headers = {"Penstock_Resumable": "true"} if kept else {}
        await client.send(request("POST", "/v1/completions", STREAM, **headers))
        job = await script.job()
        await accepted(server, job)
        await client.until_cut(job, more=True)
        if not kept:
            await cancelled.wait()
    assert bool(script.cancelled) is not kept


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="the system has no limit for this")
async def test_a_short_stream_whose_client_has_vanished_is_cut() -> None:
    """What waits fits into the system's buffers: as far as the server knows, all of it was sent."""
    async with Server.run(write_timeout=0.05) as server:
        client, cancelled = Deaf(server), asyncio.Event()
        script = server.script
        await script.broker.listen(script.subjects.cancel_all(), lambda _: cancelled.set())
        await client.send(request("POST", "/v1/completions", STREAM))
        job = await script.job()
        await accepted(server, job, text="x" * 10_000)
        async with asyncio.timeout(10.0):
            await cancelled.wait()


async def test_the_system_asks_whether_a_waiting_client_is_there() -> None:
    async with await asyncio.start_server(lambda _, writer: found.set_result(writer), "127.0.0.1", 0) as own:
        found: asyncio.Future[asyncio.StreamWriter] = asyncio.get_running_loop().create_future()
        _, writer = await asyncio.open_connection(*own.sockets[0].getsockname())
        answer = await found  # kept, since from Python 3.13 on it closes its transport when nobody refers to it
        end_with_client(answer.transport, 60.0)
        served = answer.transport.get_extra_info("socket")
        assert served.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        probes = [served.getsockopt(socket.IPPROTO_TCP, each) for each in (socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)]
        assert probes[0] * probes[1] == 30
        writer.close()
        answer.close()


@pytest.mark.parametrize("connection", ["close", "keep-alive"])
async def test_an_answer_that_nobody_reads_does_not_hold_its_connection(connection: str) -> None:
    async with Server.run(write_timeout=0.05, idle_timeout=0.05, header_timeout=60, max_connections=2) as server:
        client = Deaf(server)
        await client.send(request("POST", "/v1/completions", {"model": "echo", "prompt": "x"}, connection=connection))
        job = await server.script.job()
        end = Done("", ("stop",), Usage(1, 1, 2))
        said = [token(place, "y" * 500_000) for place in range(20)]
        await server.script.tell(
            [Accepted("", "echo", 1, 1), *said[:-1], replace(said[-1], finish_reason="stop"), end], job
        )
        await client.until_cut(job, more=False)
        wire = await server.wire()
        await wire.send(LIVE)
        assert (await wire.response()).status == 200


async def test_a_client_that_reads_slowly_gets_all_of_a_large_answer() -> None:
    """It takes longer than a client may leave an answer unread."""
    async with Server.run(write_timeout=1.5) as server:
        client, loop = server.socket(receive_buffer=1 << 16), asyncio.get_running_loop()
        await loop.sock_sendall(client, request("POST", "/v1/completions", {"model": "echo", "prompt": "x"}))
        job = await server.script.job()
        said = [token(place, "y" * 500_000) for place in range(40)]
        said[-1] = replace(said[-1], finish_reason="stop")
        await server.script.tell([Accepted("", "echo", 1, 1), *said, Done("", ("stop",), Usage(1, 1, 2))], job)
        began, num_read = loop.time(), 0
        while num_read < 20_000_000:
            piece = await loop.sock_recv(client, 1 << 16)
            assert piece, f"cut after {num_read} bytes"
            num_read += piece.count(b"y")
            await asyncio.sleep(0.006)  # a slow line
        assert loop.time() - began > 1.5, "too fast to tell"


async def test_connections_are_refused_before_there_are_no_files_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system allows few, and no more may be had: others were closed without an answer."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 64))
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    async with Server.run() as server:
        wires = [await server.wire() for _ in range(25)]
        for wire in wires[:24]:
            await wire.send(LIVE)
            assert (await wire.response()).status == 200
        response = await wires[24].response()
        assert (response.status, response.error["code"]) == (503, "too_many_connections")


def test_as_many_connections_as_were_asked_for_where_there_are_files(monkeypatch: pytest.MonkeyPatch) -> None:
    set_to: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: set_to.append(limits))
    for soft, hard in (
        (1024, 1 << 19),
        (1024, resource.RLIM_INFINITY),
        (resource.RLIM_INFINITY, -1),
        (1 << 19, 1 << 19),
    ):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limits=(soft, hard): limits)
        assert _room_for(4096) == 4096
    assert set_to == [(4608, 1 << 19), (4608, resource.RLIM_INFINITY)]
