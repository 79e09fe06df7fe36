"""What a client can get wrong about resuming, keys and deadlines is told by status, code and a message that helps."""

from __future__ import annotations

from typing import Any

import pytest
from applications import Applications
from asgi import ask, messages

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "echo", "prompt": "abc", "stream": True}
FAULTS: list[tuple[dict[str, Any], dict[str, str], int, str, str, str]] = [
    ({}, {"Penstock-Resumable": "yes"}, 400, "invalid_value", "Penstock-Resumable", "`true`, or left out"),
    ({}, {"Penstock-Events": "on"}, 400, "invalid_value", "Penstock-Events", "`true`, or left out"),
    ({}, {"Last-Event-ID": ""}, 400, "invalid_event_id", "Last-Event-ID", "must be an id of an event"),
    ({}, {"Last-Event-ID": "ID/"}, 400, "invalid_event_id", "Last-Event-ID", "does not belong to a stream"),
    ({}, {"Last-Event-ID": "ID/x"}, 400, "invalid_event_id", "Last-Event-ID", "must be an id of an event"),
    ({}, {"Last-Event-ID": "ID/1:1/u/u"}, 400, "invalid_event_id", "Last-Event-ID", "must be an id of an event"),
    ({}, {"Last-Event-ID": "ID/-1:1"}, 400, "invalid_event_id", "Last-Event-ID", "must be an id of an event"),
    ({}, {"Last-Event-ID": "ID/9999999999:1"}, 400, "invalid_event_id", "Last-Event-ID", "must be an id of an event"),
    ({}, {"Last-Event-ID": "a b/1:1"}, 400, "invalid_event_id", "Last-Event-ID", "must be an id of an event"),
    ({}, {"Last-Event-ID": "chatcmpl-1/1:1"}, 400, "invalid_event_id", "Last-Event-ID", "of this endpoint"),
    ({"stream": False}, {"Last-Event-ID": "REQUEST/1:1"}, 400, "invalid_event_id", "Last-Event-ID", "a stream"),
    ({}, {"Last-Event-ID": "REQUEST/5:3f"}, 400, "invalid_event_id", "Last-Event-ID", "beyond the end of the stream"),
    ({}, {"Last-Event-ID": "REQUEST/3:4f"}, 400, "invalid_event_id", "Last-Event-ID", "beyond the end of the stream"),
    ({}, {"Last-Event-ID": "REQUEST/,1:1"}, 400, "invalid_event_id", "Last-Event-ID", "beyond the end of the stream"),
    ({}, {"Last-Event-ID": "cmpl-unknown/1:1"}, 404, "stream_not_found", "", "no such request"),
    ({}, {"Idempotency-Key": "k" * 256}, 400, "invalid_value", "Idempotency-Key", "1 to 255 characters, not 256"),
    ({}, {"Idempotency-Key": ""}, 400, "invalid_value", "Idempotency-Key", "1 to 255 characters"),
    *(
        ({}, {name: "1", name.lower(): "2"}, 400, "invalid_value", name, "has 2 values, not all the same; send one")
        for name in ("Idempotency-Key", "Last-Event-ID", "Penstock-Timeout", "Penstock-Resumable")
    ),
    ({}, {"Penstock-Timeout": "-1", "penstock-timeout": "-1"}, 400, "invalid_value", "Penstock-Timeout", "above 0"),
    ({"timeout": 0}, {}, 400, "invalid_value", "timeout", "above 0"),
    ({"timeout": -1.5}, {}, 400, "invalid_value", "timeout", "above 0"),
    ({"timeout": True}, {}, 400, "invalid_value", "timeout", "a number of seconds"),
    ({"timeout": "1"}, {}, 400, "invalid_value", "timeout", "a number of seconds"),
    ({"timeout": 1e9}, {}, 400, "invalid_value", "timeout", "at most 600"),
    ({}, {"Penstock-Timeout": "soon"}, 400, "invalid_value", "Penstock-Timeout", "a number of seconds"),
    ({}, {"Penstock-Timeout": "nan"}, 400, "invalid_value", "Penstock-Timeout", "above 0"),
    ({}, {"Penstock-Timeout": "inf"}, 400, "invalid_value", "Penstock-Timeout", "at most 600"),
    ({}, {"Penstock-Timeout": "-1"}, 400, "invalid_value", "Penstock-Timeout", "above 0"),
]


@pytest.fixture(scope="module")
def request_id(applications: Applications) -> str:
    """A request of three tokens, `abc`, that has ended."""
    response = applications.run(ask(applications.apps[0], "POST", COMPLETIONS, BODY, {"Penstock-Resumable": "true"}))
    sent = messages(response.body)
    assert str(sent[-2].id).endswith("/4:3f")  # the end token is counted
    return response.headers["x-request-id"]


@pytest.mark.parametrize(("body", "headers", "status", "code", "param", "message"), FAULTS)
def test_a_fault_of_a_header_is_named(
    applications: Applications,
    request_id: str,
    body: dict[str, Any],
    headers: dict[str, str],
    status: int,
    code: str,
    param: str,
    message: str,
) -> None:
    given = {name: value.replace("REQUEST", request_id) for name, value in headers.items()}
    response = applications.run(ask(applications.apps[1], "POST", COMPLETIONS, BODY | body, given))
    error = response.error
    assert (response.status, error["code"], error["param"] or "") == (status, code, param)
    assert message in error["message"]


@pytest.mark.parametrize(
    ("target", "headers", "param"),
    [
        ("REQUEST?after=-1", {}, "after"),
        ("REQUEST?after=x", {}, "after"),
        ("REQUEST?after=1e3", {}, "after"),
        ("REQUEST?after=9999999999", {}, "after"),
        ("REQUEST", {"Last-Event-ID": "cmpl-other/1:1"}, "Last-Event-ID"),
        ("REQUEST", {"Last-Event-ID": "nonsense nonsense"}, "Last-Event-ID"),
        ("REQUEST", {"Last-Event-ID": "REQUEST/9:9"}, "Last-Event-ID"),
    ],
)
def test_a_fault_of_a_native_stream_is_named(
    applications: Applications, request_id: str, target: str, headers: dict[str, str], param: str
) -> None:
    given = {name: value.replace("REQUEST", request_id) for name, value in headers.items()}
    response = applications.run(
        ask(applications.apps[1], "GET", f"/v1/streams/{target.replace('REQUEST', request_id)}", None, given)
    )
    assert (response.status, response.error["param"]) == (400, param)


def test_a_place_of_the_other_endpoint_is_refused(applications: Applications, request_id: str) -> None:
    body = {"model": "echo", "messages": [{"role": "user", "content": "abc"}], "stream": True}
    response = applications.run(ask(applications.apps[1], "POST", CHAT, body, {"Last-Event-ID": f"{request_id}/1:1"}))
    assert (response.status, response.error["code"]) == (400, "invalid_event_id")
