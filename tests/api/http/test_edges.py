"""What every answer has and every request must keep to, whatever it asks for: ids, sizes, times, browsers."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urljoin

import orjson
import pytest
from applications import Applications, Script
from asgi import HEADERS, Response, ask
from starlette.types import ASGIApp, Message

ORIGIN = "https://chat.example.org"
BODY = {"model": "echo", "prompt": "abc"}
PREFLIGHT = {
    "Origin": ORIGIN,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization",
}


@pytest.mark.parametrize(
    ("method", "target", "body", "status"),
    [
        ("GET", "/health/live", None, 200),
        ("GET", "/v1/models", None, 200),
        ("GET", "/docs", None, 200),
        ("GET", "/nothing", None, 404),
        ("GET", "/generate", None, 405),
        ("OPTIONS", "/generate", None, 405),
        ("POST", "/tokenize", {"prompt": "x"}, 200),
        ("POST", "/v1/completions", {}, 400),
        ("POST", "/v1/completions", BODY, 200),
        ("POST", "/v1/completions", BODY | {"stream": True}, 200),
    ],
)
def test_every_answer_has_an_id_of_our_own(
    applications: Applications, method: str, target: str, body: Any, status: int
) -> None:
    ids = set()
    for _ in range(2):
        response = applications.run(ask(applications.apps[0], method, target, body, {"x-request-id": "req-theirs"}))
        assert response.status == status
        ids.add(response.headers["x-request-id"])
    assert len(ids) == 2
    assert all(re.fullmatch("(req|cmpl)-[0-9a-f]{32}", id) for id in ids)


@pytest.mark.parametrize("path", ["/", "/health", "/health/ready", "/health/live", "/models", "/v1/models"])
def test_monitors_may_ask_with_head(applications: Applications, path: str) -> None:
    asked, got = (applications.run(ask(applications.apps[0], method, path)) for method in ("HEAD", "GET"))
    assert asked.status == got.status and asked.status in (200, 503)
    assert asked.headers["content-length"] == got.headers["content-length"]


def test_metrics_may_be_asked_for_with_head(applications: Applications) -> None:
    assert applications.run(ask(applications.apps[0], "HEAD", "/metrics")).status == 200


@pytest.mark.parametrize(
    "path", ["/v1/models/echo", "/v1/models/nobody", "/v1/files", "/docs", "/v1/streams/none/trace"]
)
def test_what_can_be_got_can_be_asked_for_with_head(applications: Applications, path: str) -> None:
    asked, got = (applications.run(ask(applications.apps[0], method, path)) for method in ("HEAD", "GET"))
    assert asked.status == got.status
    assert asked.headers["content-length"] == got.headers["content-length"]


@pytest.mark.parametrize("path", ["/models/sse", "/v1/streams/none"])
def test_a_stream_that_may_have_no_end_is_not_begun_for_its_head(applications: Applications, path: str) -> None:
    assert applications.run(ask(applications.apps[0], "HEAD", path)).status == 405


def test_a_compressed_body_is_refused_as_that(applications: Applications) -> None:
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    response = applications.run(ask(applications.apps[0], "POST", "/v1/completions", gzip.compress(b"{}"), headers))
    assert (response.status, response.error["code"]) == (415, "unsupported_media_type")
    assert "'gzip'; send it without compression" in response.error["message"]
    assert response.headers["accept-encoding"] == "identity"
    for none in ("identity", "Identity", ""):
        headers["Content-Encoding"] = none
        assert applications.run(ask(applications.apps[0], "POST", "/v1/completions", BODY, headers)).status == 200


def test_a_body_that_windows_wrote_is_read(applications: Applications) -> None:
    body = b"\xef\xbb\xbf" + json.dumps(BODY).encode()
    headers = {"Content-Type": "application/json"}
    assert applications.run(ask(applications.apps[0], "POST", "/v1/completions", body, headers)).status == 200
    again = b"\xef\xbb\xbf" + body
    assert applications.run(ask(applications.apps[0], "POST", "/v1/completions", again, headers)).status == 400


def test_a_method_that_is_not_taken_comes_with_those_that_are(applications: Applications) -> None:
    response = applications.run(ask(applications.apps[0], "PUT", "/generate"))
    assert (response.status, response.headers["allow"], response.error["code"]) == (405, "POST", "method_not_allowed")
    for path, methods in (
        ("/v1/streams/x", "DELETE, GET"),
        ("/v1/files", "GET, HEAD, POST"),
        ("/v1/models", "GET, HEAD"),
    ):
        response = applications.run(ask(applications.apps[0], "PATCH", path))
        assert (response.status, response.headers["allow"]) == (405, methods)
        assert methods in response.error["message"]


def test_paths_have_the_names_that_others_give_them(applications: Applications) -> None:
    for path, other in (("/models", "/v1/models"), ("/v1/models/", "/v1/models"), ("/health", "/health/ready")):
        found, expected = (applications.run(ask(applications.apps[0], "GET", name)) for name in (path, other))
        assert (found.status, found.body) == (expected.status, expected.body)


@pytest.mark.parametrize("query", ["", "?tenant=default"])
def test_a_slash_at_the_end_is_led_to_the_path(applications: Applications, query: str) -> None:
    """The redirection names no host: behind a proxy that speaks TLS, the bridge would name the wrong scheme."""
    response = applications.run(ask(applications.apps[0], "POST", f"/v1/completions/{query}", BODY))
    assert response.status == 307
    for prefix in ("", "/llm"):  # below which a proxy may serve it
        base = f"https://llm.example.org{prefix}/v1/completions"
        assert urljoin(f"{base}/{query}", response.headers["location"]) == base + query
    assert applications.run(ask(applications.apps[0], "GET", "/v1/completions/")).status == 404
    assert applications.run(ask(applications.apps[0], "GET", "//evil.example/v1/files/")).status == 404


def test_a_conflict_is_not_tried_again(applications: Applications) -> None:
    key = {"Idempotency-Key": "one"}
    assert applications.run(ask(applications.apps[0], "POST", "/v1/completions", BODY, key)).status == 200
    response = applications.run(ask(applications.apps[0], "POST", "/v1/completions", BODY | {"n": 2}, key))
    assert (response.status, response.headers["x-should-retry"]) == (409, "false")
    assert "x-should-retry" not in applications.run(ask(applications.apps[0], "GET", "/nothing")).headers


class Trickle:
    """A client that sends the pieces of its body and then no more, and counts what was read of them."""

    def __init__(self, *pieces: bytes) -> None:
        self.read = 0
        self._pieces = pieces

    async def post(self, app: ASGIApp, headers: Mapping[str, str] = HEADERS, *, leaves: bool = False) -> Response:
        sent: list[Message] = []

        async def receive() -> Message:
            if self.read == len(self._pieces):
                if leaves:
                    return {"type": "http.disconnect"}
                await asyncio.Event().wait()
            self.read += 1
            return {"type": "http.request", "body": self._pieces[self.read - 1], "more_body": True}

        async def send(message: Message) -> None:
            sent.append(message)

        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/completions",
            "query_string": b"",
            "headers": raw,
            "root_path": "",
        }
        await app(scope, receive, send)
        answered = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
        return Response(sent[0]["status"], answered, b"".join(message.get("body", b"") for message in sent[1:]))


@pytest.mark.parametrize("pieces", [(), (b"",), (b'{"model"', b': "echo", ')])
async def test_a_body_that_does_not_come_is_given_up(pieces: tuple[bytes, ...]) -> None:
    script = await Script.start(body_timeout=0.01)
    response = await Trickle(*pieces).post(script.app)
    assert (response.status, response.error["code"]) == (408, "body_timeout")
    assert response.headers["connection"] == "close"
    assert script.jobs == []


async def test_a_client_that_leaves_within_its_body_is_no_failure() -> None:
    script = await Script.start()
    await Trickle(b"{").post(script.app, leaves=True)
    assert script.jobs == []


async def test_a_body_declared_too_large_is_not_read() -> None:
    script = await Script.start(max_body_size=100)
    client = Trickle(b"x" * 50)
    response = await client.post(script.app, {"content-length": "101"})
    assert (response.status, response.error["code"], client.read) == (413, "payload_too_large", 0)


async def test_a_body_too_large_is_not_read_for_ever() -> None:
    script = await Script.start(max_body_size=100)
    client = Trickle(*(b"x" * 100 for _ in range(50)))
    assert (await client.post(script.app)).status == 413
    assert client.read < 20


@pytest.mark.parametrize("origins", [ORIGIN, f"https://other.example.org,{ORIGIN}", "*"])
async def test_a_page_of_a_listed_origin_may_ask(origins: str) -> None:
    script = await Script.start(cors_origins=origins, api_keys="sk-0123456789")
    allowed = "*" if origins == "*" else ORIGIN
    preflight = await ask(script.app, "OPTIONS", "/v1/completions", None, PREFLIGHT)
    assert preflight.status == 200
    assert preflight.headers["access-control-allow-origin"] == allowed
    assert "authorization" in preflight.headers["access-control-allow-headers"]
    assert preflight.headers["x-request-id"]
    refused = await ask(script.app, "POST", "/v1/completions", BODY, {"Origin": ORIGIN})
    assert (refused.status, refused.headers["access-control-allow-origin"]) == (401, allowed)
    assert "x-request-id" in refused.headers["access-control-expose-headers"]


@pytest.mark.parametrize("origins", [None, "https://other.example.org", ""])
async def test_a_page_of_another_origin_may_not(origins: str | None) -> None:
    script = await Script.start(cors_origins=origins)
    for method, path, headers in (("OPTIONS", "/v1/completions", PREFLIGHT), ("GET", "/v1/models", {"Origin": ORIGIN})):
        assert "access-control-allow-origin" not in (await ask(script.app, method, path, None, headers)).headers


@pytest.mark.parametrize("origins", ["chat.example.org", "https://chat.example.org/", "https://a b"])
async def test_an_origin_that_no_browser_sends_is_refused(origins: str) -> None:
    with pytest.raises(ValueError, match="cors_origins"):
        await Script.start(cors_origins=origins)


@pytest.mark.parametrize("path", ["/docs", "/redoc"])
def test_the_documentation_needs_no_other_server(applications: Applications, path: str) -> None:
    """A proxy may serve it below a path of its own, which it takes off."""
    page = applications.run(ask(applications.apps[0], "GET", path)).body.decode()
    links = re.findall(r"""(?:src|href|url|spec-url)(?:=|: )["']([^"']+)["']""", page)
    assert len(links) >= 3 and "openapi.json" in links
    for link in links:
        whole = urljoin(f"http://proxy.example/below{path}", link)
        assert whole.startswith("http://proxy.example/below/")
        assert (
            applications.run(ask(applications.apps[0], "GET", whole[len("http://proxy.example/below") :])).status == 200
        )
    assert "//" not in re.sub(r"/\*.*?\*/", "", page, flags=re.DOTALL).replace("<!--", "")
    schema = orjson.loads(applications.run(ask(applications.apps[0], "GET", "/openapi.json")).body)
    servers = [urljoin("http://proxy.example/below/openapi.json", server["url"]) for server in schema["servers"]]
    assert servers == ["http://proxy.example/below/"]


def test_deep_json_is_taken_to_where_it_can_be_written_again(applications: Applications) -> None:
    def post(body: dict[str, Any]) -> Response:
        return applications.run(ask(applications.apps[0], "POST", "/v1/chat/completions", {"model": "other"} | body))

    def nested(levels: int) -> dict[str, Any]:
        inner: dict[str, Any] = {}
        for _ in range(levels - 6):
            inner = {"default": inner}
        tool = {"type": "function", "function": {"name": "f", "parameters": {"default": inner}}}
        return {"messages": [{"role": "user", "content": "x"}], "tools": [tool]}

    assert post(nested(128)).status == 404  # well understood
    assert post(nested(129)).error["message"] == "The body is nested deeper than 128 levels."
    assert post({"messages": [{"role": "user", "content": "x"}] * 1000}).status == 404  # wide is not deep
