"""A page of an allowed origin uses the API as any program does, with the official clients for browsers: it may send
their headers, and it reads every answer, refusals and failures included."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest
from applications import Script
from asgi import Response, ask
from http_server import Server, request
from starlette.routing import Route

from penstock.schemas.errors import Overloaded
from penstock.schemas.events import ErrorBody, Failed

PAGE = "https://chat.example.org"
SENT = {"host": "localhost:8000", "origin": PAGE, "sec-fetch-site": "cross-site", "sec-fetch-mode": "cors"}
JSON = {"content-type": "application/json"}
KEY = {"authorization": "Bearer ada-key-12345"}
CLAUDE = {"x-api-key": "ada-key-12345", "anthropic-version": "2023-06-01"}
CLIENTS = (
    "authorization,content-type,idempotency-key,last-event-id,openai-organization,openai-project,penstock-resumable,"
    "traceparent,x-stainless-arch,x-stainless-lang,x-stainless-os,x-stainless-package-version,x-stainless-retry-count,"
    "x-stainless-runtime,x-stainless-runtime-version,x-stainless-timeout",
    "anthropic-beta,anthropic-dangerous-direct-browser-access,anthropic-version,content-type,x-api-key,"
    "x-stainless-helper-method,x-stainless-lang,x-stainless-retry-count",
)


class PanicException(BaseException):
    """What a panic in Rust is in Python."""


PATHS = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/responses"),
    ("DELETE", "/v1/responses/resp_1"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/echo"),
    ("POST", "/v1/embeddings"),
    ("POST", "/v1/files"),
    ("DELETE", "/v1/files/file-1"),
    ("POST", "/v1/batches"),
    ("POST", "/v1/messages/batches"),
    ("POST", "/v1/conversations"),
]


def listed(response: Response, name: str) -> set[str]:
    return {each.strip().lower() for each in response.headers[f"access-control-{name}"].split(",")}


def assert_readable(response: Response) -> None:
    """A browser gives the page this answer, and every header of it that clients read."""
    assert response.headers["access-control-allow-origin"] in (PAGE, "*"), response
    told = {name for name in response.headers if name.startswith(("x-", "request-id", "retry-", "anthropic-"))}
    assert "x-request-id" in told
    assert told <= listed(response, "expose-headers")


@pytest.mark.parametrize("origins", [PAGE, "*"])
@pytest.mark.parametrize("headers", CLIENTS)
@pytest.mark.parametrize(("method", "path"), PATHS)
async def test_a_preflight_allows_what_official_clients_send(
    method: str, path: str, headers: str, origins: str
) -> None:
    script = await Script.start(cors_origins=origins, api_keys="ada=ada-key-12345")
    asked = {"access-control-request-method": method, "access-control-request-headers": headers}
    response = await ask(script.app, "OPTIONS", path, None, SENT | asked)
    assert response.status == 200
    assert response.headers["access-control-allow-origin"] in (PAGE, "*")
    assert set(headers.split(",")) <= listed(response, "allow-headers")
    assert method.lower() in listed(response, "allow-methods")


async def test_a_page_of_the_web_may_ask_a_server_of_the_visitors_network() -> None:
    script = await Script.start(cors_origins=PAGE)
    asked = {"access-control-request-method": "POST", "access-control-request-private-network": "true"}
    response = await ask(script.app, "OPTIONS", "/v1/chat/completions", None, SENT | asked)
    assert response.status == 200
    assert response.headers["access-control-allow-private-network"] == "true"


async def test_the_preflight_of_another_page_is_refused_and_says_how_to_allow_it() -> None:
    script = await Script.start(cors_origins=PAGE)
    foreign = SENT | {"origin": "https://evil.example.org", "access-control-request-method": "POST"}
    response = await ask(script.app, "OPTIONS", "/v1/chat/completions", None, foreign)
    assert (response.status, response.error["code"]) == (403, "foreign_origin")
    assert "--cors-origins https://evil.example.org" in response.error["message"]
    assert "access-control-allow-origin" not in response.headers


@pytest.mark.parametrize(
    ("method", "path", "headers", "body", "status"),
    [
        ("GET", "/v1/models", {}, None, 401),
        ("POST", "/v1/messages", JSON, {}, 401),
        ("GET", "/v1/nowhere", KEY, None, 404),
        ("GET", "/v1/messages/nowhere", CLAUDE, None, 404),
        ("PUT", "/v1/models", KEY, None, 405),
        ("POST", "/v1/chat/completions", KEY | JSON, b"{", 400),
        ("POST", "/v1/messages", CLAUDE | JSON, b"{", 400),
        ("POST", "/v1/chat/completions", KEY | {"content-type": "text/plain", "content-length": "2"}, b"{}", 415),
    ],
)
async def test_a_page_reads_why_it_was_refused(
    method: str, path: str, headers: dict[str, str], body: Any, status: int
) -> None:
    script = await Script.start(cors_origins=PAGE, api_keys="ada=ada-key-12345")
    response = await ask(script.app, method, path, body, SENT | headers)
    assert response.status == status
    assert_readable(response)


@pytest.mark.parametrize(
    ("path", "status", "name"),
    [
        ("/v1/chat/completions", 503, "x-ratelimit-remaining-requests"),
        ("/v1/messages", 529, "anthropic-ratelimit-requests-remaining"),
    ],
)
async def test_a_page_reads_when_to_come_back_and_what_is_left(path: str, status: int, name: str) -> None:
    script = await Script.start(cors_origins=PAGE, requests_per_minute=6)
    body = {"model": "echo", "max_tokens": 3, "messages": [{"role": "user", "content": "Hi"}]}
    asking = asyncio.create_task(ask(script.app, "POST", path, body, SENT | JSON))
    full = ErrorBody.of(Overloaded("The queue is full.", code="queue_full", retry_after=3.0))
    job = await script.job()
    assert job.id is not None
    await script.tell([Failed(job.id, full)], job)
    response = await asking
    assert (response.status, response.headers["retry-after"]) == (status, "3")
    assert name in listed(response, "expose-headers")
    assert_readable(response)


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/v1/chat/broken", ArithmeticError), ("/v1/messages/broken", ArithmeticError), ("/v1/broken", PanicException)],
)
async def test_a_page_reads_that_the_server_failed(
    path: str, kind: type[BaseException], capsys: pytest.CaptureFixture[str]
) -> None:
    script = await Script.start(cors_origins=PAGE)

    async def broken(request: object) -> None:
        raise kind("of the test")

    script.app.routes.insert(0, Route(path, broken))

    async def server(scope: Any, receive: Any, send: Any) -> None:
        with pytest.raises(kind):  # what a server of ASGI applications logs
            await script.app(scope, receive, send)

    response = await ask(server, "GET", path, None, SENT)
    assert response.status == 500
    assert_readable(response)
    error = orjson.loads(response.body)
    assert "internal error" in error["error"]["message"]
    assert error.get("type") == ("error" if "messages" in path else None)
    assert "status=500" in capsys.readouterr().out  # not 499, as if the client had left


@pytest.mark.parametrize("origins", [PAGE, "*", f"https://other.example.org,{PAGE}"])
async def test_a_page_reads_a_refusal_of_its_headers(origins: str) -> None:
    async with Server.run(cors_origins=origins, max_header_size=4096) as server:
        wire = await server.wire()
        await wire.send(request("GET", "/v1/models", Origin=PAGE, Cookie="x" * 5000))
        response = await wire.response()
        assert response.status == 431
        assert_readable(response)


async def test_a_page_reads_that_there_are_too_many_connections() -> None:
    async with Server.run(cors_origins=PAGE, max_connections=1) as server:
        first = await server.wire()
        await first.send(request("GET", "/health/live"))
        await first.response()
        refused = await server.wire()
        response = await refused.response()
        assert response.status == 503
        assert_readable(response)


async def test_a_refusal_of_headers_is_not_for_pages_that_nobody_allowed() -> None:
    async with Server.run(max_header_size=4096) as server:
        wire = await server.wire()
        await wire.send(request("GET", "/v1/models", Origin=PAGE, Cookie="x" * 5000))
        assert "access-control-allow-origin" not in (await wire.response()).headers
