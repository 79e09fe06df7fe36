"""A repeated `Idempotency-Key` is the same request, on any bridge and whatever became of the first one."""

from __future__ import annotations

import asyncio
import hashlib
import time
from dataclasses import replace
from typing import Any

import orjson
import pytest
from applications import Applications, Script
from asgi import ask, messages

from penstock.schemas.events import Accepted, Cancelled, Done, ErrorBody, Event, Expired, Failed, Token, Usage
from penstock.streams.topology import IDEMPOTENCY, topology

COMPLETIONS = "/v1/completions"
BODY: dict[str, Any] = {"model": "echo", "prompt": "one two three", "max_tokens": 50, "ignore_eos": True}
ANSWER: list[Event] = [
    Accepted("", "echo", 1, 1),
    Token("", 0, 0, (1,), "ok", finish_reason="stop"),
    Done("", ("stop",), Usage(1, 1, 2)),
]
KEY = {"Idempotency-Key": "key"}


def key(request: pytest.FixtureRequest) -> dict[str, str]:
    return {"Idempotency-Key": request.node.name}


def test_a_repeat_on_another_bridge_gets_the_same_answer(
    applications: Applications, request: pytest.FixtureRequest
) -> None:
    first, second = (applications.run(ask(app, "POST", COMPLETIONS, BODY, key(request))) for app in applications.apps)
    assert first.status == 200
    assert second == first
    other = applications.run(ask(applications.apps[1], "POST", COMPLETIONS, BODY, {"Idempotency-Key": "another"}))
    assert other.headers["x-request-id"] != first.headers["x-request-id"]


def test_repeats_at_the_same_time_are_one_request(applications: Applications, request: pytest.FixtureRequest) -> None:
    async def together() -> list[Any]:
        asked = [ask(app, "POST", COMPLETIONS, BODY, key(request)) for app in applications.apps * 4]
        return await asyncio.gather(*asked)

    answers = applications.run(together())
    assert answers == [answers[0]] * 8
    assert answers[0].status == 200


def test_a_client_that_left_finds_its_answer(applications: Applications, request: pytest.FixtureRequest) -> None:
    body = BODY | {"stream": True}
    left = applications.run(ask(applications.apps[0], "POST", COMPLETIONS, body, key(request), leave_after=2))
    again = applications.run(ask(applications.apps[1], "POST", COMPLETIONS, body, key(request)))
    assert again.headers["x-request-id"] == left.headers["x-request-id"]
    chunks = [sent.data["choices"][0] for sent in messages(again.body) if sent.data != "[DONE]"]
    assert "".join(chunk["text"] for chunk in chunks) == ("one two three" * 4)[:50]
    assert [chunk["finish_reason"] for chunk in chunks if chunk["finish_reason"]] == ["length"]


@pytest.mark.parametrize(
    ("target", "change"),
    [(COMPLETIONS, {"prompt": "four"}), (COMPLETIONS, {"stream": True}), ("/v1/chat/completions", {})],
)
def test_a_key_of_another_request_is_409(
    applications: Applications, request: pytest.FixtureRequest, target: str, change: dict[str, Any]
) -> None:
    applications.run(ask(applications.apps[0], "POST", COMPLETIONS, BODY, key(request)))
    response = applications.run(ask(applications.apps[1], "POST", target, BODY | change, key(request)))
    assert (response.status, response.error["code"]) == (409, "idempotency_key_reused")
    assert "used for another request" in response.error["message"]


def test_the_order_of_a_bodys_fields_does_not_matter(
    applications: Applications, request: pytest.FixtureRequest
) -> None:
    turned = dict(reversed(BODY.items()))
    first, second = (
        applications.run(ask(applications.apps[0], "POST", COMPLETIONS, body, key(request))) for body in (BODY, turned)
    )
    assert second == first


async def claim(script: Script, request: str, age: float) -> None:
    """What a bridge leaves that dies before it has published."""
    name = hashlib.sha256(b"default key").hexdigest()
    body = orjson.dumps(BODY, option=orjson.OPT_SORT_KEYS)
    fingerprint = hashlib.sha256(f"{COMPLETIONS} ".encode() + body).hexdigest()
    value = {"request": request, "fingerprint": fingerprint, "created": time.time() - age}
    await (await script.broker.bucket("idempotency")).create(name, orjson.dumps(value))


@pytest.mark.parametrize(("age", "same"), [(0.0, True), (500.0, True), (1000.0, False)])
async def test_a_request_that_was_claimed_and_never_published_is_published(age: float, same: bool) -> None:
    script = await Script.start()
    await claim(script, "cmpl-claimed", age)
    response = await script.answer(ANSWER, "POST", COMPLETIONS, BODY, KEY)
    assert response.status == 200
    assert len(script.jobs) == 1
    assert (response.headers["x-request-id"] == "cmpl-claimed") is same
    assert await ask(script.app, "POST", COMPLETIONS, BODY, KEY) == response
    assert len(script.jobs) == 1


async def test_keys_of_before_make_room_for_new_ones() -> None:
    """A client that gives each of its requests a key is never refused for them."""
    script = await Script.start()
    buckets = topology("penstock", ()).buckets
    (spec,) = (spec for spec in buckets if spec.name == IDEMPOTENCY)
    await script.broker.reconfigure([], [replace(spec, max_bytes=2_000)])
    for number in range(20):
        mine = {"Idempotency-Key": f"key {number}"}
        response = await script.answer(ANSWER, "POST", COMPLETIONS, BODY, mine)
        assert response.status == 200, response.body
        assert await ask(script.app, "POST", COMPLETIONS, BODY, mine) == response
    assert len(script.jobs) == 20


BUSY = ErrorBody(503, "Busy.", "overloaded_error", "server_busy")


@pytest.mark.parametrize(
    ("final", "again"),
    [
        (Failed("", BUSY), True),
        (Failed("", ErrorBody(429, "Quota.", "rate_limit_error", "quota_exceeded")), True),
        (Expired("", ErrorBody(408, "Late.", "timeout_error", "deadline_exceeded")), True),
        (Cancelled("", Usage(1, 0, 1)), True),
        (Failed("", ErrorBody(400, "No.", "invalid_request_error", "invalid_value")), False),
    ],
)
async def test_what_came_to_nothing_is_tried_anew(final: Event, again: bool) -> None:
    script = await Script.start()
    first = await script.answer([final], "POST", COMPLETIONS, BODY, KEY)
    assert first.status >= 400
    if again:
        second = await script.answer(ANSWER, "POST", COMPLETIONS, BODY, KEY)
        assert second.status == 200
        assert second.headers["x-request-id"] != first.headers["x-request-id"]
        first = second
    assert await ask(script.app, "POST", COMPLETIONS, BODY, KEY) == first
    assert len(script.jobs) == 1 + again
