"""A number without a fraction is an integer in every body, as JSON Schema has it, and nothing else is one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError, create_model

import penstock.api.http.app  # noqa: F401  # which imports every body
from penstock.schemas.base import Sent
from penstock.schemas.gen_ai import request_attributes
from penstock.schemas.integers import as_integer
from penstock.schemas.jobs import ReplayRequest


def _kinds(kind: type[Sent]) -> Iterator[type[Sent]]:
    for each in kind.__subclasses__():
        yield each
        yield from _kinds(each)


def _single(kind: type[Sent], name: str) -> type[Sent]:
    """A body of this field alone, `value`."""
    field = kind.model_fields[name]
    annotation: Any = Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation
    return create_model("Single", __base__=Sent, value=(annotation, ...))


def _fields() -> dict[str, tuple[type[Sent], bool]]:
    """Each field that is an integer or a list of integers, and whether it is a list."""
    found: dict[str, tuple[type[Sent], bool]] = {}
    for kind in _kinds(Sent):
        for name, schema in kind.model_json_schema().get("properties", {}).items():
            forms = [schema, *schema.get("anyOf", [])]
            lists = [form["items"] for form in forms if form.get("type") == "array" and "items" in form]
            for among, listed in ((forms, False), (lists, True)):
                own = next((own for own, field in kind.model_fields.items() if (field.alias or own) == name), None)
                if own and any(form.get("type") == "integer" for form in among):
                    found[f"{kind.__name__}.{own}"] = (_single(kind, own), listed)
    return found


FIELDS = _fields()
names = st.sampled_from(sorted(FIELDS))


def _read(name: str, value: Any) -> Any:
    """The value as the field has it, or the first fault."""
    kind, listed = FIELDS[name]
    try:
        read = kind.model_validate({"value": [value] if listed else value}).value  # type: ignore[attr-defined]
    except ValidationError as error:
        return error.errors(include_url=False, include_input=False, include_context=False)[0]
    return read[0] if listed else read


def test_fields_of_every_kind_are_among_them() -> None:
    known = {"ChatRequest.max_tokens", "CompletionRequest.prompt", "CompletionRequest.stop_token_ids"}
    known |= {"RerankRequest.top_n", "ExpiresAfter.seconds", "DetokenizeRequest.tokens", "ReplayRequest.after"}
    assert known | {"MessagesRequest.max_tokens", "ResponsesRequest.max_output_tokens"} <= FIELDS.keys()


@settings(max_examples=300, deadline=None)
@given(names, st.integers(-3, 5000) | st.integers(-(2**53), 2**53))
def test_an_integer_may_be_written_with_a_fraction_of_zero(name: str, value: int) -> None:
    read = _read(name, float(value))
    assert read == _read(name, value)
    assert not isinstance(read, float)


@settings(max_examples=300, deadline=None)
@given(
    names,
    st.booleans()
    | st.integers().map(str)
    | st.floats().filter(lambda number: not number.is_integer())
    | st.sampled_from([1e30, "4.0", {}]),
)
def test_nothing_else_is_an_integer(name: str, value: Any) -> None:
    assert isinstance(_read(name, value), dict | str)
    assert isinstance(as_integer(value), float) or as_integer(value) is value


@given(names, st.integers(2**53, 2**62))
@example("_Sampling.seed", 2**53 + 1)
def test_large_integers_keep_every_digit(name: str, value: int) -> None:
    read = _read(name, value)
    assert read == value or isinstance(read, dict)


def test_a_replay_may_be_asked_for_so() -> None:
    assert ReplayRequest.model_validate_json(b'{"after": 17.0}').after == 17
    with pytest.raises(ValidationError):
        ReplayRequest.model_validate_json(b'{"after": 17.5}')


def test_spans_have_such_integers() -> None:
    attributes = request_attributes("/v1/chat/completions", {"max_tokens": 100.0, "seed": 0.5})
    assert attributes["gen_ai.request.max_tokens"] == 100
    assert "gen_ai.request.seed" not in attributes
