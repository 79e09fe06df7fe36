"""What a JSON body may hold, and how much of it an error repeats."""

from __future__ import annotations

import json
import re
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.schemas import bounds
from penstock.schemas.bounds import load_json, shortened
from penstock.schemas.errors import InvalidRequest, Refusal
from penstock.schemas.jobs import Job
from penstock.schemas.openai.completions import parse_request
from penstock.schemas.wire import codec
from penstock.schemas.wire.codec import DecodeError, decode_model

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text('\\"[{:,é', max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('\\"[{:,é', max_size=4), inner, max_size=4),
    max_leaves=20,
)


def _containers(value: Any) -> int:
    match value:
        case dict():
            return 1 + sum(map(_containers, value.values()))
        case list():
            return 1 + sum(map(_containers, value))
        case _:
            return 0


@given(JSON, st.integers(1, 9))
def test_what_is_counted_is_what_stands_outside_texts(value: Any, piece: int) -> None:
    raw = json.dumps(value, ensure_ascii=False).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bounds, "LONG", 0)
        patch.setattr(bounds, "_PIECE", piece)
        patch.setattr(bounds, "MOST_CONTAINERS", _containers(value))
        assert load_json(raw) == value
        patch.setattr(bounds, "MOST_CONTAINERS", _containers(value) - 1)
        if _containers(value):
            with pytest.raises(ValueError, match="objects and arrays, more than"):
                load_json(raw)


PIECES = ["\ud83d", "\ude00", "\udbff", "\udc00", "\\", "u", "d83d", '"', "é", "🙂", "\n"]
HALVES = st.lists(st.sampled_from(PIECES), max_size=9).map("".join)


@given(st.dictionaries(HALVES, HALVES, max_size=3))
def test_half_a_character_stands_for_the_replacement_character(value: dict[str, str]) -> None:
    def whole(text: str) -> str:
        joined: str = json.loads(json.dumps(text))  # two halves that belong together are one
        return re.sub("[\ud800-\udfff]", "\ufffd", joined)

    raw = json.dumps(value).encode()
    expected = {whole(key): whole(text) for key, text in value.items()}
    assert load_json(raw) == expected


@pytest.mark.parametrize(
    "fault",
    [
        {f"k{key}": 0 for key in range(300_000)},
        {"body": {}, "more": [[]] * 300_000},
        {"body": {"messages": [0] * 600_000}},
    ],
)
def test_a_job_that_holds_too_much_is_not_read(fault: dict[str, Any]) -> None:
    with pytest.raises(DecodeError, match=r"^it holds .* more than .*; send it in several requests\.$"):
        decode_model(Job, orjson.dumps(fault), None)


def test_the_faults_of_a_job_are_few_and_short() -> None:
    with pytest.raises(DecodeError) as error:
        decode_model(Job, orjson.dumps({"k" * 10_000 + str(key): 0 for key in range(100)}), codec.JOB)
    assert len(str(error.value)) < 21 * (bounds.MOST_FAULT + 2)


@pytest.mark.parametrize("value", [0, {}, [], {"role": 5}])
def test_one_fault_of_a_list_is_enough(value: Any) -> None:
    with pytest.raises(InvalidRequest) as error:
        parse_request("/v1/chat/completions", {"model": "m", "messages": [value] * 400_000})
    assert error.value.param is not None and error.value.param.startswith("messages[0]")


def test_nothing_that_a_refusal_repeats_is_long() -> None:
    refusal = Refusal("x" * 1_000_000, param="p" * 1_000_000)
    assert (len(str(refusal)) <= 8000, len(str(refusal.param)) <= 200) == (True, True)
    assert shortened("abcdefghij", 5) == "ab…ij" and shortened("abcde", 5) == "abcde"
