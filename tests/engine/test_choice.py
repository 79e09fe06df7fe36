"""From tokens to deltas: what is held back, what ends a choice, what a successor repeats."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine import EngineRequest, GenerationParams, ModelInfo
from penstock.engine.choice import Choice
from penstock.engine.text.byte_tokenizer import END_OF_TEXT, ByteTokenizer
from penstock.schemas.errors import Overloaded
from penstock.schemas.events import Delta

TOKENIZER = ByteTokenizer()
INFO = ModelInfo("bytes", "Echo", context_length=100, vocabulary_size=259, eos_token_ids=TOKENIZER.eos_token_ids)


def make_choice(params: GenerationParams, prompt: str = "?", generated: tuple[int, ...] = ()) -> Choice:
    request = EngineRequest("r", tuple(prompt.encode()), params, seed=0, generated=(generated,))
    return Choice(request, 0, TOKENIZER, INFO)


def feed(target: Choice, ids: list[int]) -> list[Delta]:
    """The deltas of these tokens, as far as the choice takes them."""
    deltas = []
    for token in ids:
        delta = target.append(token)
        if delta is not None:
            deltas.append(delta)
        if target.finish is not None:
            break
    return deltas


def test_tokens_are_held_back_with_their_text() -> None:
    target = make_choice(GenerationParams(stop=("END",)))
    deltas = feed(target, list(b"aENbEND"))
    assert [(delta.index, delta.text, bytes(delta.token_ids)) for delta in deltas] == [
        (0, "a", b"a"),
        (1, "ENb", b"ENb"),
        (4, "", b"END"),
    ]
    assert [delta.finish_reason for delta in deltas] == [None, None, "stop_sequence"]


@pytest.mark.parametrize(
    ("params", "ids", "reason", "text"),
    [
        (GenerationParams(), [72, END_OF_TEXT], "stop", "H"),
        (GenerationParams(stop_token_ids=(33,)), [72, 33], "stop", "H"),
        (GenerationParams(ignore_eos=True, max_tokens=3), [72, END_OF_TEXT, 73], "length", "HI"),
        (GenerationParams(ignore_eos=True, stop_token_ids=(33,)), [72, END_OF_TEXT, 33], "stop", "H"),
        (GenerationParams(max_tokens=2), [72, 73], "length", "HI"),
        (GenerationParams(max_tokens=2), [72, 0xE2], "length", "H\ufffd"),
        (GenerationParams(max_tokens=2, stop=("HI",)), [72, 73], "stop_sequence", ""),
        (GenerationParams(stop=("HIJ",)), [72, 73, END_OF_TEXT], "stop", "HI"),
        (GenerationParams(min_tokens=2, stop=("H", "J")), [72, 72], "stop_sequence", "H"),
        (GenerationParams(min_tokens=3, stop=("HI",), max_tokens=4), [72, 73, 72, 73], "stop_sequence", "HI"),
    ],
)
def test_what_ends_a_choice(params: GenerationParams, ids: list[int], reason: str, text: str) -> None:
    deltas = feed(make_choice(params), ids)
    assert deltas[-1].finish_reason == reason
    assert "".join(delta.text for delta in deltas) == text
    assert [token for delta in deltas for token in delta.token_ids] == ids


def test_the_context_ends_a_choice() -> None:
    deltas = feed(make_choice(GenerationParams(max_tokens=500), prompt="p" * 90), [72] * 200)
    assert deltas[-1].finish_reason == "length"
    assert sum(len(delta.token_ids) for delta in deltas) == 10


def test_an_end_from_outside_brings_what_was_held_back() -> None:
    target = make_choice(GenerationParams(stop=("END",)))
    feed(target, list(b"aEN\xe2"))
    last = target.end("cancelled")
    assert (last.text, bytes(last.token_ids), last.finish_reason) == ("EN\ufffd", b"EN\xe2", "cancelled")


def test_only_a_refusal_speaks_to_the_client(caplog: pytest.LogCaptureFixture) -> None:
    told = make_choice(GenerationParams()).fail(Overloaded("come back later", retry_after=2)).error
    assert told is not None and (told.status, told.message, told.retry_after) == (503, "come back later", 2)
    hidden = make_choice(GenerationParams()).fail(RuntimeError("secret path")).error
    assert hidden is not None and hidden.status == 500 and "secret" not in hidden.message
    assert "secret path" in caplog.text


def test_failing_works_where_decoding_fails(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(ByteTokenizer):
        def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
            if 0xFF in ids:
                raise ValueError("cannot decode")
            return super().decode(list(ids), skip_special_tokens)

    target = Choice(EngineRequest("r", (65,), GenerationParams(), seed=0), 0, Broken(), INFO)
    target.append(66)
    with pytest.raises(ValueError, match="cannot decode") as caught:
        target.append(0xFF)
    delta = target.fail(caught.value)
    assert (delta.index, delta.token_ids, delta.finish_reason) == (1, (), "error")


@given(
    text=st.text("aEND€", min_size=1, max_size=30),
    stops=st.lists(st.text("END€", min_size=1, max_size=3), max_size=2).map(tuple),
    cut=st.integers(0, 30),
    min_tokens=st.integers(0, 10),
)
def test_a_successor_delivers_exactly_the_rest(text: str, stops: tuple[str, ...], cut: int, min_tokens: int) -> None:
    """Whatever prefix of the deltas another worker has sent, text and tokens continue without gap or repeat."""
    params = GenerationParams(stop=stops, min_tokens=min_tokens, max_tokens=60)
    ids = [*text.encode(), END_OF_TEXT]
    whole = feed(make_choice(params), ids)
    delivered, missing = whole[:cut], whole[cut:]
    generated = tuple(token for delta in delivered for token in delta.token_ids)
    successor = make_choice(params, generated=generated)
    if not missing:
        assert successor.finish is not None and successor.finish == whole[-1].finish_reason
        last = successor.end(successor.finish)
        assert (last.index, last.token_ids, last.text) == (len(generated), (), "")
        return
    assert feed(successor, ids[len(generated) :]) == missing
