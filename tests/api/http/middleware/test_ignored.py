"""Unknown fields of a body are ignored and named, on every path alike; a strict server refuses them."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
import structlog
from applications import Applications
from asgi import Response, ask

from penstock.api.http.app import create_app
from penstock.schemas.errors import InvalidRequest
from penstock.schemas.openai.completions import parse_request

MESSAGES = [{"role": "user", "content": "hello"}]
SHORT = {"model": "echo", "max_tokens": 3}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": SHORT | {"messages": MESSAGES},
    "/v1/completions": SHORT | {"prompt": "hello"},
    "/generate": SHORT | {"messages": MESSAGES},
    "/v1/messages": SHORT | {"messages": MESSAGES},
    "/v1/responses": {"model": "echo", "max_output_tokens": 3, "input": "hello"},
    "/v1/messages/count_tokens": {"model": "echo", "messages": MESSAGES},
    "/v1/conversations": {},
    "/tokenize": {"prompt": "hello"},
    "/detokenize": {"tokens": [104]},
}
STREAMED = [path for path, body in BODIES.items() if body.keys() & {"max_tokens", "max_output_tokens"}]


def post(applications: Applications, path: str, body: dict[str, Any], **settings: Any) -> Response:
    pipe = applications.pipeline.pipe
    app = create_app(
        applications.bridges[0], pipe.broker, pipe.registry, pipe.settings.model_copy(update=settings), "0"
    )
    return applications.run(ask(app, "POST", path, body))


@pytest.mark.parametrize(
    ("path", "stream"), [*((path, {}) for path in BODIES), *((path, {"stream": True}) for path in STREAMED)]
)
def test_unknown_fields_are_ignored_and_named(applications: Applications, path: str, stream: dict[str, Any]) -> None:
    body = BODIES[path] | stream
    with structlog.testing.capture_logs() as logs:
        response = post(applications, path, body | {"client_hints": {"a": "secret"}, "repeat_last_n": 64})
    assert response.status == 200
    assert response.headers["penstock-ignored"] == "client_hints, repeat_last_n"
    (line,) = [line for line in logs if line["event"] == "fields ignored"]
    assert (line["path"], line["fields"], line["count"]) == (path, ["client_hints", "repeat_last_n"], 2)
    assert line["request"] == response.headers["x-request-id"] and "secret" not in str(logs)
    assert "penstock-ignored" not in post(applications, path, body).headers


@pytest.mark.parametrize("path", BODIES)
def test_a_strict_server_refuses_them(applications: Applications, path: str) -> None:
    response = post(applications, path, BODIES[path] | {"client_hints": {}}, strict=True)
    assert response.status == 400
    assert b"client_hints is not a known parameter" in response.body
    assert "penstock-ignored" not in response.headers


def test_a_response_that_may_be_truncated_is_not_and_says_so(applications: Applications) -> None:
    """As Cline asks in each of its requests to OpenAI."""
    body = BODIES["/v1/responses"] | {"truncation": "auto"}
    response = post(applications, "/v1/responses", body)
    assert (response.status, response.headers["penstock-ignored"]) == (200, "truncation")
    assert orjson.loads(response.body)["truncation"] == "disabled"
    refused = post(applications, "/v1/responses", body | {"input": "x" * 140_000})
    assert (refused.status, refused.error["code"]) == (400, "context_length_exceeded")
    assert refused.headers["penstock-ignored"] == "truncation"
    assert "penstock-ignored" not in post(applications, "/v1/responses", body | {"truncation": "disabled"}).headers


def test_what_is_ignored_is_told_beside_an_error(applications: Applications) -> None:
    response = post(applications, "/v1/completions", BODIES["/v1/completions"] | {"temperature": 9, "mirostat": 2})
    assert (response.status, response.error["param"]) == (400, "temperature")
    assert response.headers["penstock-ignored"] == "mirostat"


def test_strange_names_are_told_in_bounds(applications: Applications) -> None:
    names = ["a,b", "c\r\nset-cookie: x", "", "grüß", "k" * 1000, *(f"key{place}" for place in range(100))]
    with structlog.testing.capture_logs() as logs:
        response = post(applications, "/v1/completions", BODIES["/v1/completions"] | dict.fromkeys(names, 0))
    assert [line["count"] for line in logs if line["event"] == "fields ignored"] == [len(names)]
    told = response.headers["penstock-ignored"].split(", ")
    assert told[:5] == ["a?b", "c??set-cookie:?x", "?", "gr??", "k" * 64]
    assert told[5:] == [f"key{place}" for place in range(15)]


def test_a_job_over_nats_has_no_unknown_fields() -> None:
    with pytest.raises(InvalidRequest, match="client_hints is not a known parameter"):
        parse_request("/v1/completions", BODIES["/v1/completions"] | {"client_hints": {}})


def test_unknown_fields_of_messages_calls_and_tools_are_ignored() -> None:
    plain: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "hello"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "a", "content": "1"},
    ]
    call = plain[1]["tool_calls"][0]
    extra = {"provider_specific_fields": {"a": 1}, "thinking_blocks": [], "prefix": True, "cache_control": {}}
    kept = [
        {"role": "user", "content": [plain[0]["content"][0] | extra]} | extra,
        plain[1] | {"tool_calls": [call | {"function": call["function"] | extra} | extra]} | extra,
        plain[2] | extra,
    ]
    tool: dict[str, Any] = {"type": "function", "function": {"name": "f"}}

    def parsed(messages: list[Any], tool: dict[str, Any]) -> Any:
        return parse_request("/v1/chat/completions", {"model": "m", "messages": messages, "tools": [tool]})

    assert parsed(kept, tool | {"function": tool["function"] | extra} | extra) == parsed(plain, tool)
