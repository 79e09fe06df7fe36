"""`POST /generate`: what the OpenAI paths do, in Penstock's own words."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest
from applications import Applications, Script
from asgi import Response, ask, messages

from penstock.schemas.errors import Overloaded
from penstock.schemas.events import (
    Accepted,
    Cancelled,
    Done,
    ErrorBody,
    Event,
    Failed,
    Token,
    TokenLogprob,
    ToolCallDelta,
    Usage,
)

MESSAGES = [{"role": "user", "content": "abc"}]
TEXT: dict[str, Any] = {"model": "echo", "prompt": "abc"}
CHAT: dict[str, Any] = {"model": "echo", "messages": MESSAGES}
STREAM = {"stream": True}


def post(applications: Applications, body: dict[str, Any], headers: dict[str, str] | None = None) -> Response:
    return applications.run(ask(applications.apps[0], "POST", "/generate", body, headers or {}))


@pytest.mark.parametrize("body", [TEXT, CHAT, TEXT | {"prompt": [97, 98, 99]}, TEXT | {"n": 2, "logprobs": 1}])
def test_the_answer_is_that_of_the_openai_paths(applications: Applications, body: dict[str, Any]) -> None:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    theirs = orjson.loads(applications.run(ask(applications.apps[0], "POST", path, body)).body)
    response = post(applications, body)
    ours = orjson.loads(response.body)
    assert response.status == 200
    assert ours.keys() == {"id", "object", "created", "model", "choices", "usage"}
    assert (ours["id"], ours["object"], ours["model"]) == (response.headers["x-request-id"], "generation", "echo")
    assert ours["id"].startswith("gen-")
    for choice, other in zip(ours["choices"], theirs["choices"], strict=True):
        assert choice["text"] == (other["message"]["content"] if "messages" in body else other["text"])
        assert choice["finish_reason"] == other["finish_reason"]
        assert bytes(choice["token_ids"][:-1]).decode() == choice["text"]
        assert (choice["logprobs"] is None) == ("logprobs" not in body)
    assert ours["usage"]["total_tokens"] == theirs["usage"]["total_tokens"]


async def test_thoughts_calls_and_logprobs_are_told() -> None:
    script = await Script.start()
    logprob = TokenLogprob("y", 5, -0.5, (121,))
    response = await script.answer(
        [
            Accepted("", "m", 7, 1),
            Token("", 0, 0, (1, 2), "", None, None, reasoning="hm"),
            Token("", 0, 2, (3,), "", None, None, tool_calls=(ToolCallDelta(0, '{"a"', "call-1", "f"),)),
            Token("", 1, 0, (5,), "y", (logprob,), "stop_sequence"),
            Token("", 0, 3, (4,), "", None, "tool_calls", tool_calls=(ToolCallDelta(0, ":1}"),)),
            Done("", ("tool_calls", "stop_sequence"), Usage(1, 5, 6, 0, 2)),
        ],
        "POST",
        "/generate",
        {"model": "m", "prompt": "x", "n": 2},
    )
    body = orjson.loads(response.body)
    first, second = body["choices"]
    assert (body["created"], first["reasoning"], first["text"], first["token_ids"]) == (7, "hm", "", [1, 2, 3, 4])
    assert first["tool_calls"] == [{"index": 0, "arguments": '{"a":1}', "id": "call-1", "name": "f"}]
    assert (first["finish_reason"], second["finish_reason"]) == ("tool_calls", "stop_sequence")
    told = {"token": "y", "token_id": 5, "logprob": -0.5, "bytes": [121], "top": [], "rank": None}
    assert second["logprobs"] == [told]
    assert body["usage"]["reasoning_tokens"] == 2


@pytest.mark.parametrize("body", [TEXT | STREAM, CHAT | STREAM | {"n": 2}])
def test_a_stream_is_the_requests_events(applications: Applications, body: dict[str, Any]) -> None:
    response = post(applications, body)
    sent = messages(response.body)
    assert response.headers["content-type"] == "text/event-stream"
    assert b"[DONE]" not in response.body and {message.id for message in sent} == {None}
    types = [message.data["type"] for message in sent if message.data["type"] != "queued"]
    assert (types[0], types[-1], set(types[1:-1])) == ("accepted", "done", {"token"})
    request = response.headers["x-request-id"]
    stored = applications.run(ask(applications.apps[1], "GET", f"/v1/streams/{request}"))
    assert [message.data for message in messages(stored.body)] == [
        message.data for message in sent if message.data["type"] != "queued"
    ]


def test_a_stream_goes_on_where_it_broke(applications: Applications) -> None:
    resumable = {"Penstock-Resumable": "true"}
    body = TEXT | STREAM | {"max_tokens": 30, "ignore_eos": True}
    first = messages(
        applications.run(ask(applications.apps[0], "POST", "/generate", body, resumable, leave_after=2)).body
    )
    last = str(first[-1].id)
    assert last.startswith("gen-")
    rest = messages(
        applications.run(ask(applications.apps[1], "POST", "/generate", body, resumable | {"Last-Event-ID": last})).body
    )
    tokens = [message.data for message in [*first, *rest] if message.data["type"] == "token"]
    assert sum(len(token["token_ids"]) for token in tokens) == 30
    assert "accepted" not in [message.data["type"] for message in rest]
    assert rest[-1].data["type"] == "done"


def test_the_same_key_is_the_same_request(applications: Applications) -> None:
    key = {"Idempotency-Key": "generate-once"}
    assert post(applications, TEXT, key).body == post(applications, TEXT, key).body
    assert post(applications, CHAT, key).status == 409


@pytest.mark.parametrize("stream", [{}, STREAM])
def test_a_refusal_has_its_status(applications: Applications, stream: dict[str, Any]) -> None:
    for fault, status, code in (
        ({"temperature": 9}, 400, "invalid_value"),
        ({"model": "other"}, 404, "model_not_found"),
        ({"messages": MESSAGES}, 400, "unsupported_parameter"),
    ):
        response = post(applications, TEXT | stream | fault)
        assert (response.status, response.error["code"]) == (status, code)


async def test_a_failure_on_the_way_is_the_last_event() -> None:
    script = await Script.start()
    error = ErrorBody.of(Overloaded("late"))
    asking = asyncio.create_task(ask(script.app, "POST", "/generate", TEXT | STREAM))
    job = await script.job()
    await script.tell([Accepted("", "m", 1, 1), Token("", 0, 0, (1,), "a", None)], job)
    (reading,) = script.bridge._open
    while reading._ready:  # noqa: ASYNC110
        await asyncio.sleep(0)
    await script.tell([Failed("", error)], job)
    response = await asking
    assert response.status == 200
    assert messages(response.body)[-1].data["error"]["message"] == "late"


async def test_a_cancelled_request_says_so() -> None:
    script = await Script.start()
    events: list[Event] = [Accepted("", "m", 1, 1), Cancelled("", Usage(1, 0, 1))]
    whole = await script.answer(events, "POST", "/generate", TEXT)
    assert (whole.status, whole.error["code"]) == (499, "cancelled")
    streamed = await script.answer(events, "POST", "/generate", TEXT | STREAM)
    assert messages(streamed.body)[-1].data["type"] == "cancelled"


async def test_whoever_leaves_cancels() -> None:
    script = await Script.start()
    asking = asyncio.create_task(ask(script.app, "POST", "/generate", TEXT | STREAM, leave_after=1))
    job = await script.job()
    await script.tell([Accepted("", "m", 1, 1), Token("", 0, 0, (1,), "a", None)], job)
    await asking
    while not script.cancelled:  # noqa: ASYNC110
        await asyncio.sleep(0)
    await script.tell([Cancelled("", Usage(1, 1, 2))], job)
    while script.bridge._open:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert [subject.rpartition(".")[2] for subject in script.cancelled] == [job.id]
