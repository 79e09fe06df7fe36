"""Whatever is wrong with a request, the answer is OpenAI's error object with a status that says whose fault it is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest
from serving import Served

CHAT = "/v1/chat/completions"
GOOD: dict[str, Any] = {"model": "echo", "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture
def client(echo_server: Served) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=echo_server.url, timeout=60) as client:
        yield client


def error(response: httpx2.Response) -> dict[str, Any]:
    """The error object, in OpenAI's form and nothing else."""
    body = response.json()
    assert body.keys() == {"error"}
    found: dict[str, Any] = body["error"]
    assert found.keys() == {"message", "type", "param", "code"}
    assert found["message"] and found["type"] and found["code"]
    return found


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fault", "status", "code", "param"),
    [
        ({"model": "other"}, 404, "model_not_found", "model"),
        ({"messages": []}, 400, "invalid_value", "messages"),
        ({"messages": [{"role": "user", "content": "  "}]}, 400, "empty_prompt", "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, 400, "invalid_value", "messages[0].role"),
        ({"messages": [{"role": "user"}]}, 400, "invalid_value", "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, 400, "invalid_type", "messages[0].content"),
        ({"messages": "hello"}, 400, "invalid_type", "messages"),
        ({"temperature": -1}, 400, "invalid_value", "temperature"),
        ({"temperature": "hot"}, 400, "invalid_type", "temperature"),
        ({"max_tokens": 10**9}, 400, "context_length_exceeded", "max_tokens"),
        ({"messages": [{"role": "user", "content": "x" * 140_000}]}, 400, "context_length_exceeded", "messages"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, 400, "invalid_value", "max_tokens"),
        ({"top_logprobs": 3}, 400, "invalid_value", "top_logprobs"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, 400, "unsupported_parameter", "tools"),
        ({"response_format": {"type": "json_object"}}, 400, "unsupported_parameter", "response_format"),
        ({"logit_bias": {"100000": 1.0}}, 400, "invalid_value", "logit_bias"),
    ],
)
def test_a_fault_is_named(
    client: httpx2.Client, fault: dict[str, Any], status: int, code: str, param: str, stream: bool
) -> None:
    response = client.post(CHAT, json=GOOD | fault | {"stream": stream})
    found = error(response)
    assert (response.status_code, found["code"], found["param"]) == (status, code, param)
    assert response.headers["x-request-id"]


def test_a_prompt_beyond_the_context_is_told_both_numbers(client: httpx2.Client) -> None:
    longest = {"model": "echo", "max_tokens": 1, "prompt": "x" * 131_072}
    message = error(client.post("/v1/completions", json=longest))["message"]
    assert "is 131072 tokens" in message and "131072 tokens > 131071 maximum" in message
    message = error(client.post("/v1/completions", json=longest | {"prompt": "x" * 200_000}))["message"]
    assert "more than 196" in message and "is 131072 tokens" in message  # nobody counts on


# How LiteLLM, CrewAI, Qwen Code, OpenCode, LangChain and Claude Code know that they must shorten the history.
_OVERFLOWS = (
    r"(?i)this model's maximum context length is",
    r"\bmaximum context length\b",
    r"maximum context length is \d+ tokens",
    "prompt is too long",
    r"(?i)prompt is too long[^0-9]*\d+\s*tokens?\s*>\s*\d+",
)


@pytest.mark.parametrize("path", [CHAT, "/v1/responses", "/v1/messages"])
@pytest.mark.parametrize("length", [131_072, 400_000])
def test_agents_know_a_prompt_beyond_the_context_by_its_words(client: httpx2.Client, path: str, length: int) -> None:
    key = "input" if path == "/v1/responses" else "messages"
    asked = {"model": "echo", key: [{"role": "user", "content": "x" * length}]}
    response = client.post(path, json=asked | ({"max_tokens": 9} if path == "/v1/messages" else {}))
    assert response.status_code == 400
    for words in _OVERFLOWS:
        assert re.search(words, response.json()["error"]["message"]), words


@pytest.mark.parametrize(
    "body", [b"", b"{", b"nonsense", b"\xff\xfe", b"[]", b'"text"', b"null", b"1", b'{"model":', b"[" * 2000]
)
def test_a_body_that_is_no_json_object_is_400(client: httpx2.Client, body: bytes) -> None:
    response = client.post(CHAT, content=body)
    assert response.status_code == 400
    assert error(response)["code"] in ("invalid_json", "invalid_type")


def test_a_body_of_20_megabytes_is_413(client: httpx2.Client) -> None:
    response = client.post(CHAT, content=b'{"model": "' + b"x" * 20_000_000)
    assert response.status_code == 413
    assert "max_body_size" in error(response)["message"]


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/nothing", 404), ("GET", CHAT, 405)])
def test_paths_and_methods_that_do_not_exist(client: httpx2.Client, method: str, path: str, status: int) -> None:
    response = client.request(method, path)
    assert response.status_code == status
    error(response)


def test_the_official_client_raises_its_own_errors(echo_server: Served) -> None:
    with openai.OpenAI(base_url=f"{echo_server.url}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.NotFoundError, match="'other' is not served here"):
            client.chat.completions.create(model="other", messages=[{"role": "user", "content": "x"}])
        with pytest.raises(openai.BadRequestError, match="temperature"):
            client.chat.completions.create(
                model="echo", messages=[{"role": "user", "content": "x"}], temperature=-1, stream=True
            )


def test_what_changes_nothing_is_accepted(client: httpx2.Client) -> None:
    extra = {"user": "u", "metadata": {"a": "b"}, "store": False, "tools": [], "response_format": {"type": "text"}}
    assert client.post(CHAT, json=GOOD | extra).status_code == 200


def test_the_openapi_page_describes_both_bodies(client: httpx2.Client) -> None:
    page = client.get("/openapi.json").json()
    for path in (CHAT, "/v1/completions"):
        schema = page["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert "temperature" in schema["properties"]
        assert "$ref" not in str(schema)
    assert client.get("/docs").status_code == 200
