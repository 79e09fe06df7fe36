"""The messages of `penstock.v1` as classes of the protobuf library, made from `schemas.wire.protobuf` when needed."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, struct_pb2

from ...schemas.wire.protobuf import METHODS, PACKAGE, SERVICE, VALUE, Shape, shapes

FULL_NAME = f"{PACKAGE}.{SERVICE}"
_PROTO = descriptor_pb2.FieldDescriptorProto
_TYPES = {
    "string": _PROTO.TYPE_STRING,
    "int64": _PROTO.TYPE_INT64,
    "double": _PROTO.TYPE_DOUBLE,
    "bool": _PROTO.TYPE_BOOL,
    "bytes": _PROTO.TYPE_BYTES,
}


def file_descriptor() -> descriptor_pb2.FileDescriptorProto:
    """What protoc makes of the `.proto` file, without its comments."""
    file = descriptor_pb2.FileDescriptorProto(
        name="penstock.proto", package=PACKAGE, syntax="proto3", dependency=[struct_pb2.DESCRIPTOR.name]
    )
    for shape in shapes().values():
        _describe(file.message_type.add(), shape)
    service = file.service.add(name=SERVICE)
    for method in METHODS:
        service.method.add(
            name=method.name,
            input_type=f".{PACKAGE}.{method.request.__name__}",
            output_type=f".{PACKAGE}.{method.response.__name__}",
            server_streaming=method.streams or None,
        )
    return file


def _describe(message: descriptor_pb2.DescriptorProto, shape: Shape) -> None:
    message.name = shape.name
    oneofs = list(dict.fromkeys(field.oneof for field in shape.fields if field.oneof))
    oneofs += [f"_{field.name}" for field in shape.fields if field.is_optional]  # as proto3 has it, after the others
    for name in oneofs:
        message.oneof_decl.add(name=name)
    for field in shape.fields:
        made = message.field.add(name=field.name, number=field.number)
        made.label = _PROTO.LABEL_REPEATED if field.is_repeated else _PROTO.LABEL_OPTIONAL
        made.json_name = _json_name(field.name)
        if field.kind in _TYPES:
            made.type = _TYPES[field.kind]
        else:
            made.type = _PROTO.TYPE_MESSAGE
            made.type_name = f".{VALUE}" if field.kind == VALUE else f".{PACKAGE}.{field.kind}"
        if field.is_optional:
            made.proto3_optional = True
        if field.is_optional or field.oneof:
            made.oneof_index = oneofs.index(field.oneof or f"_{field.name}")


def _json_name(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join(part.capitalize() for part in others)


@cache
def pool() -> descriptor_pool.DescriptorPool:
    """A pool of its own, so that a program may load the same file beside it."""
    made = descriptor_pool.DescriptorPool()
    for file in (struct_pb2.DESCRIPTOR.serialized_pb, file_descriptor().SerializeToString()):
        made.AddSerializedFile(file)
    return made


@cache
def message_class(name: str) -> Any:
    """The class of a message by its name."""
    return message_factory.GetMessageClass(pool().FindMessageTypeByName(f"{PACKAGE}.{name}"))


def to_message(value: Any) -> Any:
    """The message of a dataclass that `schemas.wire.protobuf` knows."""
    message = message_class(type(value).__name__)()
    for field in shapes_of()[type(value).__name__].fields:
        given = getattr(value, field.oneof or field.name)
        if given is None or (field.oneof and type(given).__name__ != field.kind):
            continue
        target = getattr(message, field.name)
        if field.kind == "TokenIds":
            for ids in given:
                target.add(token_ids=ids)
        elif field.kind == VALUE:
            name = "string_value" if isinstance(given, str) else "number_value"
            setattr(target, name, given)
        elif field.is_repeated:
            target.extend(map(to_message, given) if field.kind not in _TYPES else given)
        elif field.kind in _TYPES:
            setattr(message, field.name, bytes(given) if field.kind == "bytes" else given)
        else:
            target.CopyFrom(to_message(given))
    return message


def from_message(kind: type[Any], message: Any) -> Any:
    """The dataclass `kind`, whose fields are all scalars, of its message."""
    given = {
        field.name: getattr(message, field.name)
        for field in shapes_of()[kind.__name__].fields
        if not field.is_optional or message.HasField(field.name)
    }
    assert {field.name for field in dataclasses.fields(kind)} >= given.keys()
    return kind(**given)


@cache
def shapes_of() -> dict[str, Shape]:
    """`shapes`, which is asked for with every event, once."""
    return shapes()
