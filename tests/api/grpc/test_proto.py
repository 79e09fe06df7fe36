"""The `.proto` file is what the package ships, what protoc reads, and what the server answers with."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2
from grpc_tools import protoc
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.api.grpc.messages import file_descriptor, message_class, to_message
from penstock.schemas.events import Done, Token, TokenLogprob, ToolCallDelta, TopLogprob, Usage
from penstock.schemas.wire.protobuf import Event, proto

SHIPPED = Path(__file__).parents[3] / "api" / "grpc" / "penstock.proto"
numbers = st.integers(0, 2**40)
optional = st.none() | st.text(max_size=5)
bytes_ = st.binary(max_size=4).map(tuple)
logprobs = st.builds(
    TokenLogprob,
    st.text(max_size=3),
    numbers,
    st.none() | st.floats(-50, 0),
    bytes_,
    st.lists(st.builds(TopLogprob, st.text(max_size=3), numbers, st.floats(-50, 0), bytes_), max_size=2).map(tuple),
    st.none() | st.integers(1, 1000),
)
tokens = st.builds(
    Token,
    request=st.text(max_size=5),
    choice=numbers,
    index=numbers,
    token_ids=st.lists(numbers, max_size=4).map(tuple),
    text=st.text(),
    logprobs=st.lists(logprobs, max_size=2).map(tuple),
    finish_reason=st.sampled_from(["stop", "length", None]),
    reasoning=st.text(max_size=5),
    tool_calls=st.lists(st.builds(ToolCallDelta, numbers, st.text(max_size=5), optional, optional), max_size=2).map(
        tuple
    ),
    stop_reason=st.none() | st.text(max_size=5) | st.integers(0, 2**31),
    prompt_logprobs=st.none() | st.lists(logprobs, max_size=2).map(tuple),
)
done = st.builds(
    Done,
    request=st.text(max_size=5),
    finish_reasons=st.lists(st.sampled_from(["stop", "length"]), max_size=3).map(tuple),
    usage=st.builds(Usage, numbers, numbers, numbers, numbers, numbers),
    at=st.none() | st.floats(0, 1e10),
    fallback=optional,
)


def test_the_shipped_file_is_what_the_schemas_say() -> None:
    assert SHIPPED.read_text() == proto(), "write it again: penstock schema proto > api/grpc/penstock.proto"


def test_protoc_reads_the_file_as_what_the_server_speaks(tmp_path: Path) -> None:
    out = tmp_path / "set"
    words = ["protoc", f"-I{SHIPPED.parent}", f"-I{protoc.__file__.rpartition('/')[0]}/_proto"]
    assert protoc.main([*words, f"--descriptor_set_out={out}", str(SHIPPED)]) == 0
    (read,) = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file
    assert read == file_descriptor()


def same(value: Any, message: Any) -> None:
    """Whether a message says what the value does, field by field."""
    for field in fields(value):
        mine = getattr(value, field.name)
        if field.name == "type":
            continue
        theirs = getattr(message, field.name)
        if mine is None and field.name == "prompt_logprobs":  # a list, which is empty or not
            assert len(theirs) == 0
        elif mine is None:
            assert not message.HasField(field.name)
        elif field.name == "bytes":
            assert theirs == bytes(mine)
        elif field.name == "stop_reason":
            assert mine == (theirs.string_value if isinstance(mine, str) else theirs.number_value)
        elif isinstance(mine, tuple):
            assert len(theirs) == len(mine)
            for one, other in zip(mine, theirs, strict=True):
                if hasattr(one, "__dataclass_fields__"):
                    same(one, other)
                else:
                    assert one == other
        elif hasattr(mine, "__dataclass_fields__"):
            same(mine, theirs)
        else:
            assert theirs == mine


@settings(max_examples=100, deadline=None)
@given(tokens | done)
def test_an_event_comes_through_whole(event: Token | Done) -> None:
    raw = to_message(Event("id", event)).SerializeToString()
    message = message_class("Event").FromString(raw)
    assert message.id == "id" and message.WhichOneof("event") == event.type
    same(event, getattr(message, event.type))
