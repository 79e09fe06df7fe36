"""Encodes and decodes messages. Every message names its type and version in a header.

Processes of two consecutive versions work together: a reader accepts its own version and the one before, ignores fields
of a newer writer, and gives fields that an older writer lacks their defaults. Only a client's `Job` is read strictly,
so that a misspelt field is refused, unless its header names a newer minor version (`job/1.1`). An unknown type, an
unknown version and a missing field without a default raise `DecodeError`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ValidationError

from ..bounds import MOST_LISTED, check_size, in_words_of_json, listed, parse_json, utf_8
from ..errors import PenstockError
from ..events import (
    Accepted,
    Cancelled,
    Delta,
    Done,
    ErrorBody,
    Event,
    Expired,
    Failed,
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
from ..jobs import InferenceBatch, Job, ValidatedJob
from ..loops import LoopJob, Step
from ..params import GenerationParams

JOB = "job/1"
VALIDATED_JOB = "validated-job/1"
BATCH = "batch/1"
LOOP_JOB = "loop-job/1"
STEP = "step/1"
OUTPUTS = "outputs/1"
EVENT = "event/1"
REPLAY = "replay/1"

Model = TypeVar("Model", Job, ValidatedJob, InferenceBatch, LoopJob, Step)

_SCHEMAS: dict[type[BaseModel], str] = {
    Job: JOB,
    ValidatedJob: VALIDATED_JOB,
    InferenceBatch: BATCH,
    LoopJob: LOOP_JOB,
    Step: STEP,
}


class DecodeError(PenstockError):
    """The bytes do not match their header. The message names the fault, never the content."""


@functools.lru_cache(256)
def is_schema(header: str | None, schema: str) -> bool:
    """Whether a message with this header can be read as `schema`: it has its version or the one before.

    A minor version may follow, as in `job/1.3`; readers of `job/1` ignore its additions.
    """
    name, _, version = (header or "").partition("/")
    ours, _, number = schema.partition("/")
    major = version.partition(".")[0]
    return name == ours and major in {number, str(int(number) - 1)} - {"0"}


Built = TypeVar("Built")


def build(kind: type[Built], values: Mapping[str, Any]) -> Built:
    """A dataclass from its fields; ignores unknown ones. Raises `TypeError` if one is missing."""
    try:
        return kind(**values)
    except TypeError:  # unknown fields are rare, and this runs for every token
        known = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
        return kind(**{name: values[name] for name in known if name in values})


def encode(value: Job | ValidatedJob | InferenceBatch | LoopJob | Step | Event) -> bytes:
    if isinstance(value, BaseModel):
        return orjson.dumps(value, default=_fields, option=orjson.OPT_NON_STR_KEYS)
    return orjson.dumps(value)


def _fields(value: Any) -> dict[str, Any]:
    """Serialises nested models for orjson; `model_dump` would first copy the whole body."""
    if isinstance(value, GenerationParams) and value.prompt_logprobs is None:
        # Earlier releases, for which this is a flag, read no null.
        return {name: each for name, each in value.__dict__.items() if name != "prompt_logprobs"}
    if isinstance(value, BaseModel):
        return value.__dict__
    raise TypeError(type(value).__name__)


def encode_outputs(outputs: Sequence[Output]) -> bytes:
    """Encode outputs of one request as one message, such as its start and its first token."""
    return orjson.dumps(outputs)


def decode_model(kind: type[Model], data: bytes, schema: str | None) -> Model:
    """Decode a model; `schema` is the message's header, which a client's job need not have. Raises `DecodeError`."""
    expected = _SCHEMAS[kind]
    if schema is not None and not is_schema(schema, expected):
        raise DecodeError(f"expected schema {expected}, got {schema}")
    try:
        if kind is not Job:
            return kind.model_validate_json(plain(data), extra="ignore")
        # orjson, which will write the job again, must read it, too: the two parsers accept different documents.
        return kind.model_validate(_job(data), extra="forbid" if schema in (None, expected) else "ignore")
    except ValidationError as error:
        raise DecodeError(faults(error)) from None


def decode_outputs(data: bytes) -> list[Output]:
    values = _json(data)
    if not isinstance(values, list) or not values:
        raise DecodeError("not a list of engine outputs")
    try:
        return [_output(value) for value in values]
    except (AttributeError, KeyError, TypeError) as error:
        raise DecodeError(f"not an engine output: {error}") from None


def _output(value: dict[str, Any]) -> Output:
    match value.get("type"):
        case "delta":
            value["token_ids"] = tuple(value["token_ids"])
            _read_logprobs(value)
            if (error := value.get("error")) is not None:
                value["error"] = build(ErrorBody, error)
            return build(Delta, value)
        case "started":
            value["prompts"] = tuple(map(tuple, value.get("prompts", ())))
            return build(Started, value)
        case _:
            raise DecodeError("unknown type of output")


def decode_event(data: bytes) -> Event:
    value = _json(data)
    if not isinstance(value, dict):
        raise DecodeError("not a JSON object")
    try:
        match value.get("type"):
            case "token":
                value["token_ids"] = tuple(value["token_ids"])
                _read_logprobs(value)
                value["tool_calls"] = tuple(build(ToolCallDelta, call) for call in value.get("tool_calls", ()))
                return build(Token, value)
            case "accepted":
                value["prompts"] = tuple(map(tuple, value.get("prompts", ())))
                return build(Accepted, value)
            case "queued":
                return build(Queued, value)
            case "item":
                return build(ItemEvent, value)
            case "turn":
                return build(Turn, value)
            case "done":
                value["finish_reasons"] = tuple(value["finish_reasons"])
                value["usage"] = build(Usage, value["usage"])
                return build(Done, value)
            case "failed":
                value["error"] = build(ErrorBody, value["error"])
                return build(Failed, value)
            case "cancelled":
                value["usage"] = build(Usage, value["usage"])
                return build(Cancelled, value)
            case "expired":
                value["error"] = build(ErrorBody, value["error"])
                return build(Expired, value)
            case _:
                raise DecodeError("unknown type of event")
    except (KeyError, TypeError) as error:
        raise DecodeError(f"not an event: {error}") from None


def faults(error: ValidationError) -> str:
    """The first faults of a pydantic error in one line, by their paths and without the values."""
    if (count := error.error_count()) > MOST_LISTED:
        return f"{count:,} faults"
    found = error.errors(include_url=False, include_input=False, include_context=False)
    named = [f"{'.'.join(str(part) for part in fault['loc']) or 'body'}: {in_words_of_json(fault)}" for fault in found]
    return "; ".join(listed(named, count))


def plain(data: bytes) -> bytes:
    """What a client or a stage of yours has sent, without a byte order mark. Raises `DecodeError` if it is no UTF-8."""
    try:
        return utf_8(data)
    except ValueError as error:
        raise DecodeError(f"it {error}") from None


def _job(data: bytes) -> Any:
    try:
        check_size(data)
        return parse_json(data)
    except ValueError as error:
        raise DecodeError(f"it {error}") from None


def _json(data: bytes) -> Any:
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise DecodeError(f"not JSON: {error}") from None


def _read_logprobs(value: dict[str, Any]) -> None:
    for name in ("logprobs", "prompt_logprobs"):
        if value.get(name) is not None:
            value[name] = _logprobs(value[name])


def _logprobs(value: list[dict[str, Any]]) -> tuple[TokenLogprob, ...]:
    return tuple(
        build(
            TokenLogprob,
            {
                **entry,
                "bytes": tuple(entry["bytes"]),
                "top": tuple(
                    build(TopLogprob, {**rival, "bytes": tuple(rival["bytes"])}) for rival in entry.get("top", ())
                ),
            },
        )
        for entry in value
    )
