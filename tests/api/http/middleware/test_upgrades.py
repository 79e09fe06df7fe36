"""A client may offer another protocol with a request; Penstock answers in HTTP/1.1, and loses nothing of it."""

from __future__ import annotations

import pytest
from http_server import Server, request

# Java's `HttpClient` sends this with every request unless it is told not to: langchain4j and Spring AI are built on it.
OFFER = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": "AAEAAEAAAAIAAAAB"}
BODY = b'{"model": "nobody", "tokens": [104, 105]}'  # an answer that names it has read it
WHOLE = request("POST", "/detokenize", BODY, **OFFER)
CHUNKED = request("POST", "/detokenize", Transfer_Encoding="chunked", **OFFER) + b"".join(
    b"%x\r\n%s\r\n" % (len(piece), piece) for piece in (BODY[:9], BODY[9:], b"")
)
BODILESS = request("GET", "/health/live", **OFFER)
PLAIN = request("POST", "/detokenize", BODY)


@pytest.mark.parametrize("asked", [WHOLE, CHUNKED])
async def test_the_body_of_a_request_that_offers_http2_is_read(asked: bytes) -> None:
    """Whether it comes with the head, after it, or a byte at a time; on one connection."""
    head = asked.index(b"\r\n\r\n") + 4
    async with Server.run(header_timeout=1000, body_timeout=1000) as server:
        wire = await server.wire()
        bytewise = [asked[place : place + 1] for place in range(len(asked))]
        for pieces in ([asked], [asked[:head], asked[head:]], bytewise):
            await wire.send(*pieces)
            assert b"'nobody' is not served" in (await wire.response()).body


async def test_requests_that_were_sent_ahead_of_an_answer_are_read_too() -> None:
    async with Server.run() as server:
        wire = await server.wire()
        await wire.send(WHOLE + BODILESS + CHUNKED + PLAIN + BODILESS + WHOLE)
        answers = [(await wire.response()).body for _ in range(6)]
        assert [b"'nobody' is not served" in answer for answer in answers] == [True, False, True, True, False, True]
        assert answers[1] == answers[4] == b'{"status":"live"}'


async def test_a_websocket_is_not_opened() -> None:
    async with Server.run() as server:
        wire = await server.wire()
        offer = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
        await wire.send(request("GET", "/health/live", **offer))
        assert (await wire.response()).status == 200


async def test_http_1_0_can_ask_for_no_websocket() -> None:
    async with Server.run() as server:
        wire = await server.wire()
        offer = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
        asked = request("GET", "/v1/responses", Sec_WebSocket_Key="x" * 22 + "==", **offer)
        await wire.send(asked.replace(b"HTTP/1.1", b"HTTP/1.0"))
        assert (await wire.response()).status == 405


async def test_the_limits_of_heads_hold_for_a_client_that_offers_http2() -> None:
    async with Server.run(max_header_size=4096) as server:
        wire = await server.wire()
        await wire.send(CHUNKED)
        assert (await wire.response()).status == 404
        await wire.send(request("GET", "/health/live", X="x" * 5000, **OFFER))
        assert (await wire.response()).status == 431
        assert await wire.ended() == b""


async def test_a_malformed_body_after_an_offer_ends_the_connection() -> None:
    async with Server.run() as server:
        wire = await server.wire()
        await wire.send(request("POST", "/detokenize", Transfer_Encoding="chunked", **OFFER), b"zz\r\n")
        assert b"200 OK" not in await wire.ended()
