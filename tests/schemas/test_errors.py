"""However a request is refused, its client gets OpenAI's error object with a message, a type and a code."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.api.http.answers import error_response
from penstock.api.render.openai import error_message, error_payload
from penstock.schemas import errors
from penstock.schemas.errors import (
    ConfigurationError,
    InvalidRequest,
    ModelLoadError,
    PenstockError,
    Refusal,
    StreamFull,
)
from penstock.schemas.events import ErrorBody, Expired, Failed
from penstock.stages.endings import addresses, ending
from penstock.streams.port import MESSAGE_ID, Message
from penstock.streams.topology import Subjects

EXAMPLES = settings(max_examples=200, deadline=None)

text = st.text(st.characters(codec="utf-8"), max_size=40)
names = st.none() | st.from_regex(r"[a-z_]{1,20}", fullmatch=True)


def _kinds(root: type[Refusal]) -> Iterator[type[Refusal]]:
    yield root
    for kind in root.__subclasses__():
        if kind.__module__.startswith("penstock."):
            yield from _kinds(kind)


REFUSALS = [kind for kind in _kinds(Refusal) if kind is not Refusal]
refusals = st.builds(
    lambda kind, message, code, param, wait: kind(message, code=code, param=param, retry_after=wait),
    st.sampled_from(REFUSALS),
    text,
    names,
    names,
    st.none() | st.floats(0.001, 1000),
)


@EXAMPLES
@given(refusals)
def test_every_refusal_has_message_type_and_code(refusal: Refusal) -> None:
    """P24: in a response, in a stream and as an event, an error has a message, a type and a code."""
    payload = error_payload(ErrorBody.of(refusal))
    assert payload.keys() == {"error"}
    error = payload["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"] == str(refusal)
    assert isinstance(error["type"], str) and error["type"].endswith("_error")
    assert isinstance(error["code"], str) and error["code"] == (refusal.code or type(refusal).default_code)
    assert error["param"] == refusal.param

    response = error_response(ErrorBody.of(refusal))
    assert response.status_code == refusal.status
    assert json.loads(bytes(response.body)) == payload
    assert ("retry-after" in response.headers) == (refusal.retry_after is not None)
    if refusal.retry_after is not None:
        assert int(response.headers["retry-after"]) >= 1
        assert int(response.headers["retry-after-ms"]) == round(refusal.retry_after * 1000)

    message = error_message(ErrorBody.of(refusal))
    assert message.startswith(b"data: ") and message.endswith(b"\n\n") and message.count(b"\n") == 2
    assert json.loads(message.removeprefix(b"data: ")) == payload

    event = ending("r", refusal)
    assert isinstance(event, Expired if refusal.status == 408 else Failed)
    assert event.error == ErrorBody.of(refusal)


@pytest.mark.parametrize("kind", REFUSALS)
def test_every_refusal_says_its_status_type_and_code(kind: type[Refusal]) -> None:
    assert 400 <= kind.status < 600
    assert kind.default_code
    assert (kind.type == "invalid_request_error") == (kind.status in (400, 401, 403, 404, 413, 415))


def test_statuses_are_those_of_the_tree() -> None:
    drawn = re.findall(r"── (\w+) +(\d{3})\b", errors.__doc__ or "")
    assert {kind.__name__: str(kind.status) for kind in REFUSALS} == dict(drawn)


def test_configuration_error_holds_every_fault() -> None:
    error = ConfigurationError(["a is wrong", "b too"])
    assert isinstance(error, PenstockError)
    assert (str(error), error.faults) == ("a is wrong\nb too", ("a is wrong", "b too"))


ids = text | st.from_regex(r"[A-Za-z0-9_-]{1,70}", fullmatch=True) | st.integers() | st.none()


@EXAMPLES
@given(st.fixed_dictionaries({}, optional={"id": ids, "bridge": ids, "tenant": ids}) | st.lists(ids) | ids, text)
def test_every_message_can_be_answered_whoever_wrote_it(body: object, message_id: str) -> None:
    message = Message("penstock.jobs.normal.tenant", json.dumps(body).encode(), {MESSAGE_ID: message_id}, 5)
    for address in addresses(message):
        assert Subjects("penstock").events(address.tenant, address.bridge, address.request)


def test_id_with_a_final_newline_can_be_answered() -> None:
    message = Message("penstock.jobs.normal.tenant", b'{"id": "abc\\n", "body": {}}', {}, 5)
    (address,) = addresses(message)
    Subjects("penstock").events(address.tenant, address.bridge, address.request)


@pytest.mark.parametrize(
    "error",
    [
        ConfigurationError(["one.", "two."]),
        ModelLoadError("no such model"),
        InvalidRequest("no", code="c", param="p"),
        StreamFull("full", storage=True),
    ],
)
def test_an_error_comes_out_of_a_pool_of_processes_as_it_is(error: PenstockError) -> None:
    found = pickle.loads(pickle.dumps(error))
    assert (type(found), str(found), vars(found)) == (type(error), str(error), vars(error))
