"""Any web page can make a browser ask a server on its visitor's machine: only pages of ours are served."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import orjson
import pytest
from applications import Script
from asgi import Response, ask

FOREIGN = "https://evil.example.org"
OURS = {"host": "localhost:8000"}
JSON = {"content-type": "application/json"}
BODY = {"model": "echo", "prompt": "abc"}
FORM = b'--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--x--\r\n'
MULTIPART = {"content-type": "multipart/form-data; boundary=x"}


@pytest.fixture
async def script() -> AsyncIterator[Script]:
    yield await Script.start()


async def passed(script: Script, response: Response) -> None:
    """The request went to the application, which said what it thinks of it."""
    assert response.status in (200, 400, 404), response.body


def page(site: str, mode: str = "cors", **headers: str) -> dict[str, str]:
    return OURS | {"sec-fetch-site": site, "sec-fetch-mode": mode} | headers


ASKED = [
    ("POST", "/v1/completions", BODY, JSON),
    ("POST", "/v1/completions", BODY, {"content-type": "text/plain"}),
    ("POST", "/v1/responses", {"model": "echo", "input": "x"}, {"content-type": "text/plain;charset=UTF-8"}),
    ("POST", "/v1/messages", BODY, JSON),
    ("POST", "/v1/files", FORM, MULTIPART),
    ("POST", "/v1/responses/resp_1/cancel", None, {}),
    ("DELETE", "/v1/files/file-1", None, {}),
    ("GET", "/v1/models", None, {}),
    ("OPTIONS", "/v1/completions", None, {"access-control-request-method": "POST"}),
]


@pytest.mark.parametrize("origin", [FOREIGN, "null", "http://localhost:3000", "http://localhost", "file://", "x", ""])
@pytest.mark.parametrize(("method", "path", "body", "headers"), ASKED)
async def test_a_foreign_page_is_not_served(
    script: Script, origin: str, method: str, path: str, body: Any, headers: dict[str, str]
) -> None:
    response = await ask(script.app, method, path, body, OURS | headers | {"origin": origin})
    assert response.status == 403
    assert "--cors-origins" in orjson.loads(response.body)["error"]["message"]
    if "messages" not in path:
        assert response.error["code"] == "foreign_origin"
    assert script.jobs == []


@pytest.mark.parametrize(
    "host", ["evil.example.org", "evil.example.org:8000", "localhost.evil.org", "127.0.0.1.nip.io"]
)
@pytest.mark.parametrize("origin", ["", "http://evil.example.org:8000", "http://evil.example.org"])
async def test_a_name_that_points_here_is_not_ours(script: Script, host: str, origin: str) -> None:
    headers = {"host": host} | ({"origin": origin} if origin else {})
    for path, method, body in (("/v1/models", "GET", None), ("/v1/completions", "POST", BODY)):
        response = await ask(script.app, method, path, body, headers)
        assert (response.status, response.error["code"]) == (403, "foreign_host")
        assert "localhost" in response.error["message"]
    assert script.jobs == []
    assert (await ask(script.app, "GET", "/health/live", None, headers)).status == 200


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:8000", "localhost.", "a.localhost:1", "127.0.0.1:8000", "[::1]:8"]
)
async def test_a_loopback_server_answers_to_its_own_names(script: Script, host: str) -> None:
    assert (await ask(script.app, "GET", "/v1/models", None, {"host": host})).status == 200


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
async def test_a_request_for_two_hosts_is_for_none(host: str) -> None:
    script = await Script.start(host=host)
    response = await ask(script.app, "GET", "/v1/models", None, {"host": "localhost", "Host": "evil.example.org"})
    assert (response.status, response.error["param"]) == (400, "Host")


async def test_a_server_on_the_network_may_have_any_name() -> None:
    script = await Script.start(host="0.0.0.0")
    assert (await ask(script.app, "GET", "/v1/models", None, {"host": "llm.example.org"})).status == 200
    headers = {"host": "llm.example.org", "origin": FOREIGN}
    assert (await ask(script.app, "GET", "/v1/models", None, headers)).status == 403
    same = {"host": "llm.example.org", "origin": "https://llm.example.org"}
    assert (await ask(script.app, "GET", "/v1/models", None, same)).status == 200


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("localhost:8000", "http://localhost:8000"),
        ("127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("[::1]:8000", "http://[::1]:8000"),
        ("localhost", "http://localhost"),
        ("localhost:80", "http://localhost"),
        ("localhost", "https://localhost"),
        ("localhost:8000", "HTTP://LOCALHOST:8000"),
    ],
)
async def test_our_own_page_may_try_out_what_it_documents(script: Script, host: str, origin: str) -> None:
    headers = {"host": host, "origin": origin, "sec-fetch-site": "same-origin", "sec-fetch-mode": "cors"}
    response = await ask(script.app, "POST", "/tokenize", {"prompt": "x"}, headers | JSON)
    await passed(script, response)
    for path in ("/docs", "/openapi.json"):
        assert (await ask(script.app, "GET", path, None, page("same-origin"))).status == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (page("none", "navigate"), 200),  # what a person typed
        (page("cross-site", "navigate"), 200),  # a link
        (page("same-site", "navigate"), 200),
        (page("cross-site", "no-cors"), 403),  # an image or a script
        (page("same-site", "no-cors"), 403),
        (page("cross-site"), 403),
    ],
)
async def test_what_a_browser_says_of_a_page_without_naming_it(
    script: Script, headers: dict[str, str], status: int
) -> None:
    assert (await ask(script.app, "GET", "/v1/models", None, headers)).status == status


async def test_a_form_of_another_page_is_not_a_link(script: Script) -> None:
    response = await ask(script.app, "POST", "/v1/completions", BODY, page("cross-site", "navigate") | JSON)
    assert (response.status, script.jobs) == (403, [])


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "", "text/json", "application/jsonp"]
)
@pytest.mark.parametrize("origin", ["http://localhost:8000", FOREIGN])
async def test_a_browser_must_say_that_it_sends_json(kind: str, origin: str) -> None:
    script = await Script.start(cors_origins=FOREIGN)
    headers = OURS | {"origin": origin, "content-type": kind, "content-length": "10"}
    response = await ask(script.app, "POST", "/v1/completions", BODY, headers)
    assert (response.status, response.error["code"]) == (415, "unsupported_media_type")
    assert script.jobs == []


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON; charset=utf-8", "application/vnd.x+json"])
async def test_json_has_several_names(script: Script, kind: str) -> None:
    headers = page("same-origin", origin="http://localhost:8000") | {"content-type": kind, "content-length": "10"}
    await passed(script, await ask(script.app, "POST", "/tokenize", {"prompt": "x"}, headers))


@pytest.mark.parametrize("kind", ["application/json", "application/x-www-form-urlencoded", "text/plain", ""])
async def test_programs_send_what_they_like(script: Script, kind: str) -> None:
    headers = OURS | ({"content-type": kind} if kind else {})
    await passed(script, await ask(script.app, "POST", "/tokenize", {"prompt": "x"}, headers | {"content-length": "9"}))


@pytest.mark.parametrize("origins", [FOREIGN, "*", f"https://other.example.org,{FOREIGN.upper().lower()}"])
async def test_listed_pages_may_ask(origins: str) -> None:
    script = await Script.start(cors_origins=origins)
    headers = page("cross-site", origin=FOREIGN) | JSON
    response = await ask(script.app, "POST", "/tokenize", {"prompt": "x"}, headers)
    await passed(script, response)
    assert response.headers["access-control-allow-origin"] in ("*", FOREIGN)
    # A proxy of that name may stand in front.
    assert (await ask(script.app, "GET", "/v1/models", None, {"host": "evil.example.org"})).status == 200


async def test_a_page_without_an_address_needs_every_origin() -> None:
    listed, every = await Script.start(cors_origins=FOREIGN), await Script.start(cors_origins="*")
    for script, status in ((listed, 403), (every, 200)):
        assert (await ask(script.app, "GET", "/v1/models", None, OURS | {"origin": "null"})).status == status


async def test_a_refusal_for_a_browser_has_an_id_and_anthropics_form(script: Script) -> None:
    response = await ask(script.app, "POST", "/v1/messages", BODY, OURS | {"origin": FOREIGN})
    assert orjson.loads(response.body)["error"]["type"] == "permission_error"
    assert response.headers["x-request-id"].startswith("req-")
