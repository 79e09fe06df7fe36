"""The messages and the service of gRPC's `penstock.v1`, derived from the types that travel everywhere else.

A field's number is its position in its class, where new fields are only appended; `type`, which stands last, is not
needed. `penstock schema proto` prints the file. Knows no library of gRPC.

Source: https://protobuf.dev/reference/protobuf/proto3-spec/
"""

from __future__ import annotations

import dataclasses
import inspect
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from ..events import Accepted, Cancelled, Done, Queued, Token

PACKAGE = "penstock.v1"
SERVICE = "Penstock"
_SCALARS = {str: "string", int: "int64", float: "double", bool: "bool", bytes: "bytes"}
VALUE = "google.protobuf.Value"


@dataclass(frozen=True, slots=True)
class SubmitRequest:
    """A request, as on HTTP: `endpoint` is /v1/chat/completions (the default), /v1/completions, /v1/embeddings or
    /v1/rerank, and `body` the JSON of its body, which is always answered as a stream. `timeout` is in seconds; the
    call's deadline counts as one. A `resumable` request goes on if its client goes away. The same `idempotency_key` is
    the same request."""

    body: str
    endpoint: str = ""
    timeout: float | None = None
    resumable: bool = False
    idempotency_key: str | None = None


@dataclass(frozen=True, slots=True)
class FollowRequest:
    """Read the events of `request` after the one with the id `after`; all of them if it is empty."""

    request: str
    after: str = ""


@dataclass(frozen=True, slots=True)
class CancelRequest:
    request: str


@dataclass(frozen=True, slots=True)
class CancelResponse:
    """`cancelled` is false if the request had ended before."""

    request: str
    cancelled: bool


@dataclass(frozen=True, slots=True)
class ListModelsRequest:
    pass


@dataclass(frozen=True, slots=True)
class Model:
    """A name that requests may have as `model`: a model's own, an alias or an adapter, whose `base` is the model.
    `created` is in Unix seconds."""

    id: str
    base: str
    created: int
    context_length: int


@dataclass(frozen=True, slots=True)
class ListModelsResponse:
    models: tuple[Model, ...]


@dataclass(frozen=True, slots=True)
class Event:
    """One event of a request. Follow continues after the one whose `id` it gets. A request that fails ends its call
    with a status instead."""

    id: str
    event: Accepted | Queued | Token | Done | Cancelled


class Method(NamedTuple):
    name: str
    request: type
    response: type
    streams: bool
    text: str


METHODS = (
    Method("Submit", SubmitRequest, Event, True, "Send a request and read its events. Metadata: `penstock-request`."),
    Method("Follow", FollowRequest, Event, True, "Read a request's events, stored ones first, none of them twice."),
    Method("Cancel", CancelRequest, CancelResponse, False, "Stop a request."),
    Method("ListModels", ListModelsRequest, ListModelsResponse, False, "List what requests may have as `model`."),
)


class Field(NamedTuple):
    """`kind` is a scalar, or the name of a message; one of `choices` stands in a oneof of this name."""

    name: str
    number: int
    kind: str
    is_repeated: bool = False
    is_optional: bool = False
    oneof: str = ""


class Shape(NamedTuple):
    """A message."""

    name: str
    text: str
    fields: tuple[Field, ...]


def shapes() -> dict[str, Shape]:
    """Every message by its name, those of the methods first."""
    found: dict[str, Shape] = {}

    def visit(kind: type) -> None:
        if kind.__name__ in found:
            return
        found[kind.__name__] = Shape(kind.__name__, _text(kind), tuple(_fields(kind)))
        for hint in get_type_hints(kind).values():
            for inner in _classes(hint):
                visit(inner)

    for method in METHODS:
        visit(method.request)
        visit(method.response)
    return found | {_NUMBERS.name: _NUMBERS}


_NUMBERS = Shape("TokenIds", "The tokens of one prompt.", (Field("token_ids", 1, "int64", is_repeated=True),))


def proto() -> str:
    """The whole file."""
    lines = [
        "// Penstock's gRPC interface; `penstock schema proto` prints it. Numbers of fields never change.",
        'syntax = "proto3";',
        "",
        f"package {PACKAGE};",
        "",
        'import "google/protobuf/struct.proto";',
        "",
        f"service {SERVICE} {{",
    ]
    for method in METHODS:
        stream = "stream " if method.streams else ""
        lines += [f"  // {method.text}"]
        lines += [f"  rpc {method.name}({method.request.__name__}) returns ({stream}{method.response.__name__});"]
    lines += ["}"]
    for shape in shapes().values():
        lines += ["", *(f"// {line}" for line in shape.text.splitlines()), f"message {shape.name} {{"]
        for oneof in dict.fromkeys(field.oneof for field in shape.fields):
            indent = "    " if oneof else "  "
            lines += [f"  oneof {oneof} {{"] if oneof else []
            lines += [indent + _line(field) for field in shape.fields if field.oneof == oneof]
            lines += ["  }"] if oneof else []
        lines += ["}"]
    return "\n".join(lines) + "\n"


def _line(field: Field) -> str:
    label = "repeated " if field.is_repeated else "optional " if field.is_optional else ""
    return f"{label}{field.kind} {field.name} = {field.number};"


def _text(kind: type) -> str:
    own = kind.__doc__ or ""
    return "" if own.startswith(f"{kind.__name__}(") else inspect.cleandoc(own)


def _fields(kind: type) -> Iterator[Field]:
    hints = get_type_hints(kind)
    for number, field in enumerate(dataclasses.fields(kind), 1):
        hint = hints[field.name]
        if field.name == "type":
            continue
        if classes := _union(hint):
            for place, inner in enumerate(classes):
                yield Field(inner.__name__.lower(), number + place, inner.__name__, oneof=field.name)
            continue
        parts = [part for part in _parts(hint) if part is not types.NoneType]
        is_optional = len(parts) < len(_parts(hint))
        if field.name == "bytes":
            yield Field(field.name, number, "bytes")
        elif len(parts) > 1 and get_origin(hint) is not Literal:
            yield Field(field.name, number, VALUE)
        elif get_origin(parts[0]) is tuple:
            inner = get_args(parts[0])[0]
            repeated = _NUMBERS.name if get_origin(inner) is tuple else _kind(inner)
            yield Field(field.name, number, repeated, is_repeated=True)
        else:
            name = _kind(parts[0])
            yield Field(field.name, number, name, is_optional=is_optional and name in _SCALARS.values())


def _parts(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _union(hint: Any) -> list[type]:
    parts = _parts(hint)
    return [*parts] if len(parts) > 1 and all(map(dataclasses.is_dataclass, parts)) else []


def _kind(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return "string"
    return _SCALARS.get(hint) or str(hint.__name__)


def _classes(hint: Any) -> Iterator[type]:
    """The dataclasses in a hint."""
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        yield hint
    for part in get_args(hint):
        yield from _classes(part)
