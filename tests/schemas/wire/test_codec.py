"""Everything that travels comes back as it was, and whatever else arrives is refused without being quoted."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any, get_args

import jsonschema
import orjson
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from penstock.schemas.events import (
    Accepted,
    Cancelled,
    Delta,
    Done,
    ErrorBody,
    Event,
    Expired,
    Failed,
    FinishReason,
    ItemEvent,
    Output,
    Queued,
    Started,
    Token,
    TokenLogprob,
    ToolCallDelta,
    TopLogprob,
    Turn,
    Usage,
)
from penstock.schemas.jobs import Endpoint, InferenceBatch, Job, Priority, ValidatedJob
from penstock.schemas.params import MAX_CHOICES, MAX_STOPS, MAX_TOP_LOGPROBS, GenerationParams
from penstock.schemas.wire import codec
from penstock.schemas.wire.asyncapi import json_schemas
from penstock.schemas.wire.codec import DecodeError

EXAMPLES = settings(max_examples=100, deadline=None)

text = st.text(st.characters(codec="utf-8"), max_size=30)  # all of Unicode; a lone surrogate is no character
counts = st.integers(0, 2**53)
finite = st.floats(allow_nan=False, allow_infinity=False)
tokens = st.from_regex(r"[A-Za-z0-9_-]{1,64}", fullmatch=True)
ids = st.lists(st.integers(0, 2**31), max_size=5).map(tuple)
octets = st.binary(max_size=4).map(tuple)
reasons: st.SearchStrategy[Any] = st.sampled_from(get_args(FinishReason))

json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | finite | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=8,
)
bodies = st.dictionaries(text, json_values, max_size=4)

tops = st.builds(TopLogprob, token=text, token_id=counts, logprob=finite, bytes=octets)
logprobs = st.none() | st.lists(
    st.builds(
        TokenLogprob,
        token=text,
        token_id=counts,
        logprob=finite,
        bytes=octets,
        top=st.lists(tops, max_size=2).map(tuple),
    ),
    max_size=3,
).map(tuple)
errors = st.builds(
    ErrorBody,
    status=st.integers(400, 599),
    message=text,
    type=text,
    code=st.none() | text,
    param=st.none() | text,
    retry_after=st.none() | finite,
)
usages = st.builds(Usage, prompt_tokens=counts, completion_tokens=counts, total_tokens=counts, cached_tokens=counts)
place: dict[str, st.SearchStrategy[Any]] = {
    "request": tokens,
    "choice": st.integers(0, MAX_CHOICES - 1),
    "index": counts,
    "token_ids": ids,
    "text": text,
    "logprobs": logprobs,
    "finish_reason": st.none() | reasons,
}
outputs: st.SearchStrategy[Output] = st.builds(
    Started,
    request=tokens,
    epoch=counts,
    holder=text,
    tenant=tokens,
    bridge=tokens,
    choices=st.integers(1, MAX_CHOICES),
    prompt_tokens=counts,
) | st.builds(Delta, epoch=counts, cached_tokens=counts, error=st.none() | errors, **place)
events: st.SearchStrategy[Event] = st.one_of(
    st.builds(Accepted, request=tokens, model=text, created=counts, prompt_tokens=counts),
    st.builds(Queued, request=tokens, position=counts),
    st.builds(Token, **place),
    st.builds(Done, request=tokens, finish_reasons=st.lists(reasons, max_size=3).map(tuple), usage=usages),
    st.builds(Failed, request=tokens, error=errors),
    st.builds(Cancelled, request=tokens, usage=usages),
    st.builds(Expired, request=tokens, error=errors),
)
params = st.builds(
    GenerationParams,
    max_tokens=st.integers(1_000, 2**31),
    min_tokens=st.integers(0, 1_000),
    temperature=st.floats(0, 2),
    top_p=st.floats(0, 1, exclude_min=True),
    top_k=st.none() | st.integers(1, 2**31),
    min_p=st.floats(0, 1),
    repetition_penalty=st.floats(0, 10, exclude_min=True),
    frequency_penalty=st.floats(-2, 2),
    presence_penalty=st.floats(-2, 2),
    stop=st.lists(text.filter(bool), max_size=MAX_STOPS).map(tuple),
    stop_token_ids=ids,
    logprobs=st.none() | st.integers(0, MAX_TOP_LOGPROBS),
    logit_bias=st.dictionaries(st.integers(0, 2**31), st.floats(-100, 100), max_size=4),
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    n=st.integers(1, MAX_CHOICES),
    ignore_eos=st.booleans(),
)
endpoints: st.SearchStrategy[Any] = st.sampled_from(get_args(Endpoint))
jobs = st.builds(
    Job,
    id=st.none() | tokens,
    endpoint=endpoints,
    bridge=tokens,
    timeout=st.none() | st.floats(0, 1e9, exclude_min=True),
    body=bodies,
)
validated_jobs = st.builds(
    ValidatedJob,
    id=tokens,
    endpoint=endpoints,
    bridge=tokens,
    tenant=tokens,
    priority=st.sampled_from(get_args(Priority)),
    model=text,
    prompts=st.lists(ids, min_size=1, max_size=3).map(tuple),
    params=params,
    created=finite,
    deadline=finite,
    body=bodies,
)
batches = st.builds(
    InferenceBatch, id=tokens, worker=tokens, jobs=st.lists(validated_jobs, min_size=1, max_size=3).map(tuple)
)


def _encode(value: Any) -> bytes:
    return codec.encode_outputs(value) if isinstance(value, list) else codec.encode(value)


def _first(value: Any) -> Any:
    """The value itself, or the first of several that share a message."""
    return value[0] if isinstance(value, list) else value


Decode = Callable[[bytes], Any]
DECODERS: dict[str, Decode] = {
    "Job": lambda data: codec.decode_model(Job, data, codec.JOB),
    "ValidatedJob": lambda data: codec.decode_model(ValidatedJob, data, codec.VALIDATED_JOB),
    "InferenceBatch": lambda data: codec.decode_model(InferenceBatch, data, codec.BATCH),
    "Outputs": codec.decode_outputs,
    "Event": codec.decode_event,
}
messages: st.SearchStrategy[tuple[str, Any]] = st.one_of(
    st.tuples(st.just("Job"), jobs),
    st.tuples(st.just("ValidatedJob"), validated_jobs),
    st.tuples(st.just("InferenceBatch"), batches),
    st.tuples(st.just("Outputs"), st.lists(outputs, min_size=1, max_size=3)),
    st.tuples(st.just("Event"), events),
)

_SCHEMAS = json_schemas()
VALIDATORS = {
    name: jsonschema.Draft202012Validator({"$ref": f"#/components/schemas/{name}", "components": {"schemas": _SCHEMAS}})
    for name in DECODERS
}


@EXAMPLES
@given(messages)
def test_every_message_comes_back_unchanged(message: tuple[str, Any]) -> None:
    """P25: encode → decode gives the same value, of the same type, for all that travels."""
    name, value = message
    decoded = DECODERS[name](_encode(value))
    assert decoded == value
    assert type(decoded) is type(value)
    assert repr(decoded) == repr(value)  # tuples stay tuples, whole numbers whole and fractions fractions


@EXAMPLES
@given(messages)
def test_every_message_keeps_the_schema_that_is_published(message: tuple[str, Any]) -> None:
    name, value = message
    VALIDATORS[name].validate(json.loads(_encode(value)))


@EXAMPLES
@given(messages, st.data())
def test_message_without_a_field_that_it_needs_is_refused(message: tuple[str, Any], data: st.DataObject) -> None:
    name, value = message
    content = json.loads(_encode(value))
    del _first(content)[data.draw(st.sampled_from(_needed(_first(value))))]
    with pytest.raises(DecodeError):
        DECODERS[name](orjson.dumps(content))
    assert not VALIDATORS[name].is_valid(content)


@EXAMPLES
@given(messages, st.data())
def test_unknown_field_is_ignored_but_in_a_job(message: tuple[str, Any], data: st.DataObject) -> None:
    """A newer part may say more; a client's unknown field is a mistake that it should hear of."""
    name, value = message
    content = json.loads(_encode(value))
    places = [_first(content)]
    places += [inner for key in ("usage", "error", "params") if isinstance(inner := places[0].get(key), dict)]
    data.draw(st.sampled_from(places))["unknown"] = 1
    if name == "Job":
        with pytest.raises(DecodeError, match=r"^unknown: "):
            DECODERS[name](orjson.dumps(content))
        return
    assert VALIDATORS[name].is_valid(content)
    assert DECODERS[name](orjson.dumps(content)) == value


@pytest.mark.parametrize("place", ["entry", "rival", "call"])
def test_unknown_field_inside_a_token_is_ignored(place: str) -> None:
    rival = TopLogprob("a", 1, -1.0, (97,))
    logprobs = (TokenLogprob("a", 1, -1.0, (97,), (rival,)),)
    token = Token("r", 0, 0, (1,), "a", logprobs, tool_calls=(ToolCallDelta(0, "{}"),))
    content = json.loads(codec.encode(token))
    entry = content["logprobs"][0]
    {"entry": entry, "rival": entry["top"][0], "call": content["tool_calls"][0]}[place]["unknown"] = 1
    assert codec.decode_event(orjson.dumps(content)) == token


@EXAMPLES
@given(messages, st.data())
def test_field_that_an_older_writer_does_not_know_has_its_default(
    message: tuple[str, Any], data: st.DataObject
) -> None:
    name, value = message
    content = json.loads(_encode(value))
    place = _first(content)
    optional = sorted(place.keys() - {*_needed(_first(value)), "type"})
    assume(optional)
    missing = data.draw(st.sampled_from(optional))
    del place[missing]
    kind = type(_first(value))
    needed = {name: getattr(_first(value), name) for name in _needed(_first(value))}
    decoded = _first(DECODERS[name](orjson.dumps(content)))
    assert getattr(decoded, missing) == getattr(kind(**needed), missing)


@EXAMPLES
@given(messages, text)
def test_message_of_another_type_is_refused(message: tuple[str, Any], kind: str) -> None:
    name, value = message
    assume(name in ("Outputs", "Event"))
    assume(kind not in {"started", "delta"} | {event.type for event in ALL_EVENTS})
    content = json.loads(_encode(value))
    _first(content)["type"] = kind
    with pytest.raises(DecodeError):
        DECODERS[name](orjson.dumps(content))
    del _first(content)["type"]
    with pytest.raises(DecodeError):
        DECODERS[name](orjson.dumps(content))


ALL_EVENTS: tuple[Event, ...] = (
    Accepted("r", "m", 0, 0),
    Queued("r", 1),
    ItemEvent("r", 0, {"id": "mcpl_1", "type": "mcp_list_tools"}, False),
    Turn("r", 1, "r-1", {"add": {"label": "sums", "tool": "add", "approval": True}}),
    Token("r", 0, 0, (), ""),
    Done("r", (), Usage(0, 0, 0)),
    Failed("r", ErrorBody(500, "", "")),
    Cancelled("r", Usage(0, 0, 0)),
    Expired("r", ErrorBody(408, "", "")),
)


def test_all_events_are_tried_above() -> None:
    assert {type(event) for event in ALL_EVENTS} == set(get_args(Event))
    names = {type(event).__name__.removesuffix("Event").lower() for event in ALL_EVENTS}
    assert {event.type for event in ALL_EVENTS} == names


@pytest.mark.parametrize(
    ("kind", "value", "schema"),
    [
        (Job, Job(body={}), "job/2"),
        (Job, Job(body={}), "job/2.0"),
        (Job, Job(body={}), "job/0"),
        (Job, Job(body={}), "job/"),
        (Job, Job(body={}), "job"),
        (Job, Job(body={}), "validated-job/1"),
        (Job, Job(body={}), ""),
        (ValidatedJob, None, "job/1"),
        (InferenceBatch, None, "batch/0"),
    ],
)
def test_another_version_or_type_in_the_header_is_refused(kind: Any, value: Job | None, schema: str) -> None:
    with pytest.raises(DecodeError, match=f"got {schema}$"):
        codec.decode_model(kind, codec.encode(value) if value else b"{}", schema)


@pytest.mark.parametrize(
    ("header", "schema", "readable"),
    [
        ("step/7", "step/7", True),
        ("step/6", "step/7", True),
        ("step/7.12", "step/7", True),
        ("step/8", "step/7", False),
        ("step/5", "step/7", False),
        ("step/0", "step/1", False),
        ("job/7", "step/7", False),
        (None, "step/7", False),
    ],
)
def test_version_before_and_every_minor_version_can_be_read(header: str | None, schema: str, readable: bool) -> None:
    assert codec.is_schema(header, schema) is readable


VALIDATED = ValidatedJob(
    id="r",
    endpoint="/v1/completions",
    bridge="b",
    tenant="t",
    priority="low",
    model="m",
    prompts=((1, 2),),
    params=GenerationParams(),
    created=1.0,
    deadline=2.0,
    body={},
)
PROMPT_LOGPROBS = [
    (None, None, False),
    (2, None, False),
    (2, 2, True),
    (0, 0, True),
]  # logprobs, then today's, then a flag


@pytest.mark.parametrize(("logprobs", "prompt_logprobs", "flag"), PROMPT_LOGPROBS)
def test_prompts_log_probabilities_that_earlier_releases_asked_for_by_a_flag_are_read(
    logprobs: int | None, prompt_logprobs: int | None, flag: bool
) -> None:
    job = VALIDATED.model_copy(update={"params": GenerationParams(logprobs=logprobs, prompt_logprobs=prompt_logprobs)})
    content = json.loads(codec.encode(job))
    content["params"]["prompt_logprobs"] = flag
    assert codec.decode_model(ValidatedJob, orjson.dumps(content), codec.VALIDATED_JOB) == job


def test_earlier_releases_whose_flag_was_no_null_read_jobs_without_prompts_log_probabilities() -> None:
    batch = InferenceBatch(id="b", worker="w", jobs=(VALIDATED,))
    for content in (json.loads(codec.encode(VALIDATED)), json.loads(codec.encode(batch))["jobs"][0]):
        assert content["params"].get("prompt_logprobs", False) is False


def test_job_that_names_a_newer_minor_version_may_have_newer_fields() -> None:
    data = b'{"body": {"a": 1}, "colour": "red"}'
    assert codec.decode_model(Job, data, "job/1.1") == Job(body={"a": 1})
    for schema in (None, "job/1"):
        with pytest.raises(DecodeError, match=r"^colour: "):
            codec.decode_model(Job, data, schema)


def test_job_of_a_client_needs_no_header() -> None:
    assert codec.decode_model(Job, b'{"body": {"a": 1}}', None) == Job(body={"a": 1})


def test_half_a_character_in_a_job_is_read_as_over_http() -> None:
    cut = b'{"body": {"a": "\\ud83d", "b": "\\ud83d\\ude00"}}'  # as JavaScript writes a text that was cut in an emoji
    assert codec.decode_model(Job, cut, None) == Job(body={"a": "\ufffd", "b": "\U0001f600"})


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize(
    "data",
    [b"", b"null", b"[]", b"1", b'"secret"', b"{", b'{"secret": ', b"\xff", b'{"body": {"a": \\ud800}}', b"[1]"],
)
def test_what_is_no_message_at_all_is_refused(name: str, data: bytes) -> None:
    with pytest.raises(DecodeError) as raised:
        DECODERS[name](data)
    assert "secret" not in str(raised.value)


SECRET = "Iff-you-read-this-it-leaked"


@EXAMPLES
@given(messages, st.data())
def test_decode_error_never_quotes_a_value(message: tuple[str, Any], data: st.DataObject) -> None:
    name, value = message
    content = json.loads(_encode(value))
    wrong = data.draw(st.sampled_from([SECRET, [SECRET], {"id": SECRET}, {"bytes": SECRET}]))
    place = _first(content)
    for key in data.draw(st.sets(st.sampled_from([key for key in place if key != "type"]), min_size=1)):
        place[key] = wrong
    try:
        DECODERS[name](orjson.dumps(content))
    except DecodeError as error:
        assert SECRET not in str(error)


@pytest.mark.parametrize("number", [b"Infinity", b"1e999"])
def test_job_with_an_infinite_timeout_is_refused(number: bytes) -> None:
    with pytest.raises(DecodeError):
        codec.decode_model(Job, b'{"timeout": %s, "body": {}}' % number, codec.JOB)


@pytest.mark.parametrize("number", [2**64, -(2**63) - 1, 10**30])
def test_number_of_a_body_beyond_64_bits_is_refused_or_travels(number: int) -> None:
    try:
        job = codec.decode_model(Job, b'{"body": {"metadata": %d}}' % number, codec.JOB)
    except DecodeError:
        return
    codec.encode(job)


def _needed(value: Any) -> list[str]:
    """The fields of a value without a default."""
    if dataclasses.is_dataclass(value):
        return [field.name for field in dataclasses.fields(value) if field.default is dataclasses.MISSING]
    return [name for name, field in type(value).model_fields.items() if field.is_required()]
