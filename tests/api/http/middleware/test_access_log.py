"""What the log says of requests: one line each, and one where a key is refused; of what they said, nothing."""

from __future__ import annotations

from typing import Any

import pytest
from applications import Applications, Script
from asgi import ask
from structlog.testing import capture_logs

BODY: dict[str, Any] = {"model": "echo", "prompt": "a secret", "max_tokens": 5, "ignore_eos": True}


@pytest.mark.parametrize("streams", [False, True])
def test_the_line_of_a_request_names_its_worker(applications: Applications, streams: bool) -> None:
    with capture_logs() as logs:
        applications.run(ask(applications.apps[0], "POST", "/v1/completions", BODY | {"stream": streams}))
    (line,) = (line for line in logs if line["event"] == "request")
    assert {name: line[name] for name in ("worker", "model", "status", "completion_tokens", "prompt_tokens")} == {
        "worker": "w0",
        "model": "echo",
        "status": 200,
        "completion_tokens": 5,
        "prompt_tokens": 8,
    }
    assert "secret" not in str(logs)


@pytest.mark.parametrize(
    ("headers", "reason"),
    [
        ({}, "No API key: send one as `Authorization: Bearer KEY`."),
        ({"Authorization": "Bearer sk-wrong-key"}, "Incorrect API key."),
    ],
)
async def test_a_refused_key_is_a_line_without_the_key(headers: dict[str, str], reason: str) -> None:
    script = await Script.start(api_keys=("tenant=sk-right-key",))
    with capture_logs() as logs:
        response = await ask(script.app, "GET", "/v1/models", headers=headers)
    assert response.status == 401
    refused, line = logs
    assert (refused["event"], refused["reason"], refused["log_level"]) == ("API key refused", reason, "warning")
    assert (line["status"], line["error"]) == (401, response.error["code"])
    assert "sk-wrong-key" not in str(logs)
