"""A table of what clients get wrong: each row is told its status, what is at fault, and a message that helps."""

from __future__ import annotations

import gzip
import json
from typing import Any, NamedTuple

import pytest
from applications import Applications, Script
from asgi import ask

CHAT, TEXT, NATIVE, TOKENIZE, DETOKENIZE = (
    "/v1/chat/completions",
    "/v1/completions",
    "/generate",
    "/tokenize",
    "/detokenize",
)
MESSAGES = [{"role": "user", "content": "hello"}]


class Row(NamedTuple):
    target: str
    body: Any
    status: int
    message: str
    param: str | None = None
    code: str = "invalid_value"
    method: str = "POST"


def chat(**fault: Any) -> dict[str, Any]:
    return {"model": "echo", "messages": MESSAGES} | fault


def text(**fault: Any) -> dict[str, Any]:
    return {"model": "echo", "prompt": "hello"} | fault


def said(*messages: Any) -> dict[str, Any]:
    return chat(messages=list(messages))


def user(content: Any, **more: Any) -> dict[str, Any]:
    return said({"role": "user", "content": content} | more)


def deep(levels: int) -> bytes:
    return b'{"model": "echo", "prompt": "x", "metadata": ' + b'{"a": ' * levels + b"1" + b"}" * levels + b"}"


def broken(body: bytes, message: str, code: str = "invalid_json") -> Row:
    return Row(CHAT, body, 400, message, None, code)


def wrong(name: str, value: Any, message: str, param: str = "", code: str = "invalid_value") -> Row:
    return Row(CHAT, chat(**{name: value}), 400, message, param or name, code)


def wrong_type(name: str, value: Any, message: str, param: str = "") -> Row:
    return wrong(name, value, message, param, "invalid_type")


def wrong_prompt(value: Any, message: str = "must be a string, a list of", code: str = "invalid_value") -> Row:
    return Row(TEXT, text(prompt=value), 400, message, "prompt", code)


BODIES = [
    broken(b"", "empty document"),
    broken(b"{", "unexpected end"),
    broken(b"nonsense", "not valid JSON"),
    broken(b"model=echo&prompt=x", "not valid JSON"),
    broken(b"{'model': 'echo'}", "expected a string key"),
    broken(b'{"model": "echo",}', "trailing comma"),
    broken(b'{"a": 1}{"b": 2}', "unexpected content after"),
    broken(b'{"model": "\xff"}', "The body is not in UTF-8; send it in UTF-8."),
    broken('{"model": "echo"}'.encode("utf-16"), "The body is not in UTF-8, but in UTF-16; send it in UTF-8."),
    broken('{"model": "echo"}'.encode("utf-16-le"), "but in UTF-16; send it in UTF-8."),
    broken('{"model": "echo"}'.encode("utf-16-be"), "but in UTF-16; send it in UTF-8."),
    broken('{"model": "echo"}'.encode("utf-32"), "but in UTF-32; send it in UTF-8."),
    broken(gzip.compress(b'{"model": "echo"}'), "The body is compressed with gzip; send it as it is."),
    broken(b'{"model": "a\x00b"}', "control character"),
    broken(b'{"model": "\\ud800", "a": \\ud800}', "surrogate"),
    Row(TEXT, b'{"model": "\\ud83d", "prompt": "x"}', 404, "The model '\ufffd' is not", "model", "model_not_found"),
    Row(TEXT, b'{"model": "\\udc00x", "prompt": "x"}', 404, "'\ufffdx'", "model", "model_not_found"),
    broken(b'{"temperature": NaN}', "not valid JSON"),
    broken(b'{"temperature": -Infinity}', "not valid JSON"),
    broken(b'{"temperature": 1e400}', "infinity"),
    broken(b'{"seed": 01}', "leading zero"),
    broken(b"[]", "must be a JSON object", "invalid_type"),
    broken(b"null", "must be a JSON object", "invalid_type"),
    broken(b'"text"', "must be a JSON object", "invalid_type"),
    broken(b"17", "must be a JSON object", "invalid_type"),
    broken(b"[" * 30_000, "depth limit"),
    broken(b'{"a": ' * 30_000, "depth limit"),
    broken(b"[" * 100_000, "100,000 objects and arrays, more than 40,000"),
    broken(b'{"a": [' + b"0," * 600_000 + b"0]}", "600,000 values"),
    broken(b"{" + b",".join(b'"%d":0' % key for key in range(150_000)) + b"}", "150,000 keys"),
    Row(TEXT, deep(100), 400, "valid string", "metadata.a", "invalid_type"),
    Row(TEXT, deep(300), 400, "deeper than 128 levels", None, "invalid_json"),
    Row(TEXT, deep(1000), 400, "deeper than 128 levels", None, "invalid_json"),
    # As every parser of JSON that clients know: the last one counts.
    Row(TEXT, b'{"model": "echo", "model": "other", "prompt": "x"}', 404, "'other'", "model", "model_not_found"),
    Row(NATIVE, b"[]", 400, "must be a JSON object", None, "invalid_type"),
    Row(TOKENIZE, b"{", 400, "not valid JSON", None, "invalid_json"),
    Row(DETOKENIZE, b'{"tokens": [1,]}', 400, "trailing comma", None, "invalid_json"),
]
PARAMETERS = [
    Row(CHAT, {}, 400, "messages is missing.", "messages", "missing_required_parameter"),
    Row(CHAT, {"model": 3}, 400, "model: Input should be a valid string.", "model", "invalid_type"),
    Row(CHAT, {"model": "echo"}, 400, "messages is missing", "messages", "missing_required_parameter"),
    Row(TEXT, {"model": "echo"}, 400, "prompt is missing", "prompt", "missing_required_parameter"),
    Row(TEXT, text(messages=MESSAGES), 400, "ask /v1/chat/completions", "messages", "unsupported_parameter"),
    Row(CHAT, chat(prompt="x"), 400, "ask /v1/completions", "prompt", "unsupported_parameter"),
    wrong("model", "other", "not served here. Served: echo.", code="model_not_found")._replace(status=404),
    wrong("model", "a\x00b", "not served", code="model_not_found")._replace(status=404),
    wrong("model", "", "at least 1 character"),
    wrong("model", "m" * 4_000_000, "at most 256 characters"),
    wrong_type("model", 5, "valid string"),
    wrong_type("model", ["echo"], "valid string"),
    wrong_type("temperature", "hot", "valid number"),
    wrong_type("temperature", True, "valid number"),
    wrong("temperature", -0.1, "greater than or equal to 0"),
    wrong("temperature", 2.1, "less than or equal to 2"),
    wrong("top_p", -0.1, "greater than or equal to 0"),
    wrong("top_p", 1.1, "less than or equal to 1"),
    wrong("top_k", -2, "greater than or equal to 1"),
    wrong_type("top_k", 1.5, "valid integer"),
    wrong("min_p", 2, "less than or equal to 1"),
    wrong("max_tokens", 0, "greater than or equal to 1"),
    wrong_type("max_tokens", "5", "valid integer"),
    wrong_type("max_tokens", 10**30, "valid integer"),
    wrong("max_tokens", 2**63, "leaves 488 tokens", code="context_length_exceeded"),
    wrong("max_completion_tokens", 10**9, "leaves 488 tokens", code="context_length_exceeded"),
    wrong("min_tokens", -1, "greater than or equal to 0"),
    wrong("n", 0, "greater than or equal to 1"),
    wrong("n", 129, "less than or equal to 128"),
    wrong("stop", [""], "at least 1 character", "stop[0]"),
    wrong("stop", ["x"] * 17, "at most 16"),
    wrong("stop_token_ids", [-1], "greater than or equal to 0", "stop_token_ids[0]"),
    wrong("stop_token_ids", [10**6], "outside the vocabulary of 259"),
    wrong("logit_bias", {"a": 1}, "keys must be token ids"),
    wrong("logit_bias", {"5": 101}, "less than or equal to 100", "logit_bias[5]"),
    wrong("logit_bias", {"999999": 1}, "outside the vocabulary of 259"),
    wrong_type("logit_bias", [1], "should be an object"),
    wrong_type("seed", "x", "valid integer"),
    wrong("seed", 2**63, "less than"),
    wrong("frequency_penalty", 3, "less than or equal to 2"),
    wrong("repetition_penalty", 0, "greater than 0"),
    wrong_type("logprobs", 3, "valid boolean"),
    wrong("top_logprobs", 5, "needs logprobs: true"),
    wrong_type("stream", "yes", "valid boolean"),
    wrong("stream_options", {"include_usage": True}, "only allowed with stream: true"),
    wrong("priority", "urgent", "'high', 'normal' or 'low'"),
    wrong_type("user", 5, "valid string"),
    wrong_type("metadata", {"a": 1}, "valid string", "metadata.a"),
    wrong("timeout", 0, "seconds above 0"),
    wrong("timeout", "soon", "a number of seconds"),
    wrong("chat_template_kwargs", {"chat_template": "{{ 1 }}"}, "not for the chat template"),
    Row(TEXT, text(logprobs=21), 400, "less than or equal to 20", "logprobs"),
    Row(TEXT, text(prompt=["a"] * 65, n=2), 400, "above 128", "n"),
]
MESSAGE_FAULTS = [
    wrong("messages", [], "at least 1 item"),
    wrong("messages", MESSAGES * 10_001, "at most 10000 items"),
    wrong_type("messages", None, "should be an array"),
    wrong_type("messages", "hello", "should be an array"),
    wrong_type("messages", MESSAGES[0], "should be an array"),
    wrong_type("messages", [None], "should be an object", "messages[0]"),
    wrong_type("messages", ["hello"], "should be an object", "messages[0]"),
    Row(CHAT, said({"role": "robot", "content": "x"}), 400, "'assistant' or 'tool'", "messages[0].role"),
    Row(CHAT, said({"content": "x"}), 400, "role is missing", "messages[0].role", "missing_required_parameter"),
    Row(CHAT, said({"role": "user"}), 400, "content is missing", "messages[0].content"),
    Row(CHAT, user(None), 400, "content is null", "messages[0].content"),
    Row(CHAT, user(5), 400, "a string or a list", "messages[0].content", "invalid_type"),
    Row(CHAT, user(" \n\t"), 400, "blank", "messages", "empty_prompt"),
    Row(CHAT, user([{"type": "smell"}]), 400, "'text'", "messages[0].content[0]"),
    Row(CHAT, user(["x"]), 400, "should be an object", "messages[0].content[0]", "invalid_type"),
    wrong_prompt(None),
    wrong_prompt(5),
    wrong_prompt([]),
    wrong_prompt(["a", 1]),
    wrong_prompt([-1]),
    wrong_prompt([1.5]),
    wrong_prompt({"a": 1}),
    wrong_prompt("", "blank", "empty_prompt"),
    wrong_prompt([""], "blank", "empty_prompt"),
    wrong_prompt([[]], "blank", "empty_prompt"),
    wrong_prompt([999_999], "outside the vocabulary of 259"),
    wrong_prompt("x" * 600, "600 tokens > 511 maximum", "context_length_exceeded"),
]
OTHER_PATHS = [
    Row(NATIVE, {}, 400, "prompt is missing.", "prompt", "missing_required_parameter"),
    Row(NATIVE, text(stop="a", stop_sequences=["b"]), 400, "differ", "stop_sequences"),
    Row(NATIVE, text(messages=MESSAGES), 400, "send messages", "prompt", "unsupported_parameter"),
    Row(TOKENIZE, {}, 400, "either prompt or messages", "prompt"),
    Row(TOKENIZE, {"prompt": "x", "messages": MESSAGES}, 400, "either prompt or messages", "prompt"),
    Row(TOKENIZE, {"prompt": 5}, 400, "valid string", "prompt", "invalid_type"),
    Row(TOKENIZE, {"prompt": "x", "model": "other"}, 404, "'other'", "model", "model_not_found"),
    Row(TOKENIZE, {"prompt": "x", "tools": []}, 400, "for messages only", "tools"),
    Row(TOKENIZE, {"messages": []}, 400, "at least 1 item", "messages"),
    Row(TOKENIZE, {"messages": MESSAGES, "add_special_tokens": True}, 400, "itself", "add_special_tokens"),
    Row(TOKENIZE, chat(chat_template_kwargs={"tokenize": 1}), 400, "not for the", "chat_template_kwargs"),
    Row(DETOKENIZE, {}, 400, "tokens is missing", "tokens", "missing_required_parameter"),
    Row(DETOKENIZE, {"tokens": "x"}, 400, "should be an array", "tokens", "invalid_type"),
    Row(DETOKENIZE, {"tokens": [-1]}, 400, "greater than or equal to 0", "tokens[0]"),
    Row(DETOKENIZE, {"tokens": [1.5]}, 400, "valid integer", "tokens[0]", "invalid_type"),
    Row(DETOKENIZE, {"tokens": [10**30]}, 400, "valid integer", "tokens[0]", "invalid_type"),
    Row(DETOKENIZE, {"tokens": [259]}, 400, "outside the vocabulary of 259", "tokens"),
    Row(CHAT, None, 405, "only the methods", None, "method_not_allowed", "GET"),
    Row(NATIVE, None, 405, "only the methods", None, "method_not_allowed", "BREW"),
    Row("/v1/models", None, 405, "only the methods", None, "method_not_allowed", "DELETE"),
    Row("/health/live", None, 405, "only the methods", None, "method_not_allowed"),
    Row("/nothing", None, 404, "no such path", None, "not_found", "GET"),
    Row("/v1/nothing", None, 404, "GET /v1/nothing: no such path; see /docs", None, "not_found", "GET"),
    Row("/chat/completions", {}, 404, "no such path; /v1/chat/completions is one", None, "not_found"),
    Row("/v1/v1/messages", {}, 404, "/v1/messages is one, so correct the client's base URL", None, "not_found"),
    Row("/v1/v1/messages", None, 404, "no such path; see /docs", None, "not_found", "GET"),
    Row("/v1/v1/v1/models", None, 404, "no such path; /v1/models is one", None, "not_found", "GET"),
    Row("//v1/completions", {}, 404, "/v1/completions is one, so correct the client's base URL", None, "not_found"),
    Row("/v1//completions", {}, 404, "/v1/completions is one, so correct the client's base URL", None, "not_found"),
    Row("//v1//models/", None, 404, "no such path; /v1/models is one", None, "not_found", "GET"),
    Row("/v1/completions/completions", {}, 404, "path; /v1/completions is one", None, "not_found"),
    Row("/v1/chat/chat/completions", {}, 404, "path; /v1/chat/completions is one", None, "not_found"),
    Row("/v1/fim/completions", {}, 404, "/v1/fim/completions: no such path; see /docs", None, "not_found"),
    Row("/v1/vector_stores/vs_1/files", None, 404, "no such path; see /docs", None, "not_found", "GET"),
    Row("/v1/threads/thread_1/messages", {}, 404, "no such path; see /docs", None, "not_found"),
    Row(
        "/openai/deployments/m/chat/completions",
        {"messages": [{"role": "user", "content": "x"}]},
        404,
        "'m' is not served",
        "model",
        "model_not_found",
    ),
    Row(
        "/openai/deployments/m/images",
        {},
        404,
        "/openai/deployments/m/images: no such path; deployments",
        None,
        "not_found",
    ),
    Row("/v1/deployments/m/chat/completions", {}, 404, "below /openai/deployments/MODEL/", None, "not_found"),
    Row("/v1", None, 404, "a base URL, and /v1/models one of the paths below it", None, "not_found", "GET"),
    Row("/v1/", None, 404, "a base URL, and /v1/models one of the paths below it", None, "not_found", "GET"),
    Row("/" + "a/" * 100_000, None, 404, "no such path; see /docs", None, "not_found", "GET"),
    Row("/docs/../openapi", None, 404, "no such path", None, "not_found", "GET"),
    Row("/static-offline-docs/../../../etc/passwd", None, 404, "no such path", None, "not_found", "GET"),
    Row("/v1/models/other", None, 404, "'other' is not served", "model", "model_not_found", "GET"),
    Row("/v1/streams/nothing", None, 404, "no such request", None, "stream_not_found", "GET"),
    Row("/v1/streams/a.*.%3E", None, 404, "no such request", None, "stream_not_found", "GET"),
    Row("/v1/streams/nothing", None, 404, "no such request", None, "stream_not_found", "DELETE"),
]


@pytest.mark.parametrize("row", [*BODIES, *PARAMETERS, *MESSAGE_FAULTS, *OTHER_PATHS])
def test_a_malformed_request_is_told_what_is_wrong(applications: Applications, row: Row) -> None:
    body = row.body if isinstance(row.body, bytes | None) else json.dumps(row.body).encode()
    response = applications.run(ask(applications.apps[0], row.method, row.target, body))
    error = response.error
    assert (response.status, error["code"], error["param"]) == (row.status, row.code, row.param)
    assert row.message in error["message"]
    assert response.headers["content-type"] == "application/json"
    assert "x-request-id" in response.headers


async def test_whatever_is_wrong_a_wrong_key_is_told_first() -> None:
    script = await Script.start(api_keys="sk-0123456789")
    for row in (*BODIES, *OTHER_PATHS):
        body = row.body if isinstance(row.body, bytes | None) else json.dumps(row.body).encode()
        response = await ask(script.app, row.method, row.target, body, {"authorization": "Bearer wrong"})
        assert response.status == (401 if not row.target.startswith("/health/") else row.status)


@pytest.mark.parametrize(
    "content_type", ["application/x-www-form-urlencoded", "text/plain", "nonsense", "", "a" * 5000]
)
def test_json_is_read_whatever_it_is_called(applications: Applications, content_type: str) -> None:
    assert (
        applications.run(ask(applications.apps[0], "POST", TEXT, text(), {"content-type": content_type})).status == 200
    )


@pytest.mark.parametrize(
    "prompt", ["a\x00b", "\u202e\ufeff\ufffe", "\U0001f9d1\u200d\U0001f680", "<|im_end|>", "\x7f\x1b[31m"]
)
def test_strange_text_is_text(applications: Applications, prompt: str) -> None:
    response = applications.run(ask(applications.apps[0], "POST", NATIVE, text(prompt=prompt)))
    assert response.status == 200
