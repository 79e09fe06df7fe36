"""What clients of OpenAI's chats and completions send, recorded from the real programs, against the pipeline."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from asgi import Response
from desk import Desk

REQUESTS: list[dict[str, Any]] = orjson.loads((Path(__file__).parent / "recorded_chats.json").read_bytes())


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda one: one["client"])
def test_a_client_is_answered(desk: Desk, request_: dict[str, Any]) -> None:
    body = request_["body"]
    response = desk.ask(request_["path"], body, request_["says"])
    assert (response.status, response.headers.get("penstock-ignored", "")) == (200, request_["ignored"]), response.body
    text = b"".join(_as_benchmarks_read(response)) if body.get("stream") else response.body
    assert request_["hears"].encode() in text


def _as_benchmarks_read(response: Response) -> Iterator[bytes]:
    """Each message by itself, as vLLM's and SGLang's benchmarks take it: whatever comes first must be a chunk."""
    *chunks, last, end = response.body.split(b"\n\n")
    assert (last, end) == (b"data: [DONE]", b"")
    usage = None
    for place, chunk in enumerate(chunks):
        data = json.loads(chunk.removeprefix(b"data: "))
        usage = data.get("usage")
        assert data["choices"] or (usage and place == len(chunks) - 1)
        for choice in data["choices"]:
            said = choice.get("text") or choice["delta"].get("content") or ""
            calls = choice.get("delta", {}).get("tool_calls", ())
            yield "".join([said, *(call["function"]["arguments"] for call in calls)]).encode()


def test_a_prompt_is_scored_as_lm_eval_reads_it(desk: Desk) -> None:
    (asked,) = [one for one in REQUESTS if one["body"].get("echo")]
    (choice,) = orjson.loads(desk.ask(asked["path"], asked["body"], asked["says"]).body)["choices"]
    told, length = choice["logprobs"], len(asked["body"]["prompt"][0])
    assert len(told["token_logprobs"]) == len(told["top_logprobs"]) == length + 1
    assert told["token_logprobs"][0] is None and None not in told["token_logprobs"][1:]
