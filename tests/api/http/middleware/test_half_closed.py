"""Clients that end their side after the request, as `nc -N` does, get their answers; those that have left cost none."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import orjson
import pytest
from http_server import Server, Wire, request

from penstock.schemas.events import Accepted, Done, Event, Token, Usage

WHOLE = {"model": "echo", "prompt": "abc"}
ANSWER: list[Event] = [
    Accepted("", "echo", 1, 1),
    Token("", 0, 0, (7,), "x"),
    replace(Token("", 0, 1, (7,), ""), finish_reason="stop"),
    Done("", ("stop",), Usage(1, 2, 3)),
]


def as_old(head: bytes) -> bytes:
    return head.replace(b" HTTP/1.1\r\n", b" HTTP/1.0\r\n", 1)


async def half_closed(server: Server, sent: bytes) -> Wire:
    wire = await server.wire()
    await wire.send(sent)
    wire.writer.write_eof()
    return wire


async def to_be_cancelled(server: Server) -> asyncio.Event:
    heard = asyncio.Event()
    await server.script.broker.listen(server.script.subjects.cancel_all(), lambda _: heard.set())
    return heard


async def test_a_client_that_sends_no_more_gets_its_answer() -> None:
    async with asyncio.timeout(10), Server.run() as server:
        wire = await half_closed(server, request("POST", "/v1/completions", WHOLE))
        assert (await wire.response()).status == 100  # would reset the connection of a client that has left
        await server.script.tell(ANSWER, await server.script.job())
        response = await wire.response()
        assert (response.status, orjson.loads(response.body)["choices"][0]["text"]) == (200, "x")
        assert response.headers["connection"] == "close"
        assert await wire.ended() == b""
        assert not server.script.cancelled


async def test_a_client_that_sends_no_more_gets_its_stream() -> None:
    async with asyncio.timeout(10), Server.run() as server:
        wire = await half_closed(server, request("POST", "/v1/completions", WHOLE | {"stream": True}))
        await server.script.tell(ANSWER, await server.script.job())
        assert (await wire.ended()).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


async def test_all_requests_that_were_sent_ahead_are_answered() -> None:
    async with asyncio.timeout(10), Server.run() as server:
        wire = await half_closed(server, request("POST", "/v1/completions", WHOLE) * 2)
        for _ in range(2):
            await server.script.tell(ANSWER, await server.script.job())
        assert (await wire.ended()).count(b'"finish_reason":"stop"') == 2


@pytest.mark.parametrize("body", [WHOLE, WHOLE | {"stream": True}])
async def test_the_request_of_a_client_that_has_left_is_cancelled(body: dict[str, object]) -> None:
    async with asyncio.timeout(10), Server.run() as server:
        cancelled = await to_be_cancelled(server)
        wire = await server.wire()
        await wire.send(request("POST", "/v1/completions", body))
        await server.script.job()
        wire.writer.close()
        await cancelled.wait()


async def test_a_post_of_http_1_0_is_cancelled_since_its_client_may_be_a_proxy_that_has_given_up() -> None:
    async with asyncio.timeout(10), Server.run() as server:
        cancelled = await to_be_cancelled(server)
        wire = await half_closed(server, as_old(request("POST", "/v1/completions", WHOLE)))
        assert await wire.ended() == b""
        await cancelled.wait()


async def test_a_get_of_http_1_0_is_answered_and_without_an_interim_answer() -> None:
    async with asyncio.timeout(10), Server.run() as server:
        first = await server.wire()
        await first.send(request("POST", "/v1/completions", WHOLE | {"stream": True}))
        job = await server.script.job()
        wire = await half_closed(server, as_old(request("GET", f"/v1/streams/{job.id}")))
        await server.script.tell(ANSWER, job)
        told = await wire.ended()
        assert told.startswith(b"HTTP/1.1 200") and told.endswith(b'"type":"done"}\n\n')


async def test_a_request_that_was_cut_in_its_body_is_not_answered() -> None:
    async with asyncio.timeout(10), Server.run() as server:
        wire = await half_closed(server, request("POST", "/v1/completions", content_length="100") + b"{")
        assert await wire.ended() == b""
        assert not server.script.jobs
