"""From deltas to what a client reads."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.engine.text.answer_reader import AnswerReader
from penstock.schemas.events import Delta, FinishReason, Token, Usage
from penstock.schemas.jobs import Form

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
TOOLS = Form(tool_format="hermes", tools={"f": {}})


def deltas(text: str, reason: FinishReason = "stop", choice: int = 0) -> list[Delta]:
    """A token a character, and the end by itself."""
    parts = [Delta("r", 1, choice, place, (place,), letter) for place, letter in enumerate(text)]
    return [*parts, Delta("r", 1, choice, len(text), (0,), "", None, reason)]


def read(reader: AnswerReader, given: list[Delta]) -> list[Token]:
    return [reader.read(delta) for delta in given]


@pytest.mark.parametrize(
    ("text", "choice", "ended", "reason"),
    [
        (CALL, "auto", "stop", "tool_calls"),
        (CALL, "required", "stop", "tool_calls"),
        (CALL, "named", "stop", "stop"),
        (CALL, "auto", "length", "length"),
        (CALL, "auto", "cancelled", "cancelled"),
        ("Hello.", "auto", "stop", "stop"),
    ],
)
def test_why_it_ended(text: str, choice: str, ended: FinishReason, reason: FinishReason) -> None:
    reader = AnswerReader("r", TOOLS.model_copy(update={"choice": choice}), 1)
    tokens = read(reader, deltas(text, ended))
    assert [token.finish_reason for token in tokens if token.finish_reason] == [reason]
    assert reader.reason(0, ended) == reason


def test_every_delta_is_one_token_event_with_its_tokens() -> None:
    given = deltas("Look: " + CALL)
    tokens = read(AnswerReader("r", TOOLS, 1), given)
    assert [(token.index, token.token_ids) for token in tokens] == [(delta.index, delta.token_ids) for delta in given]
    assert "".join(token.text for token in tokens).strip() == "Look:"
    pieces = [piece for token in tokens for piece in token.tool_calls]
    assert [piece.name for piece in pieces if piece.name] == ["f"]
    assert "".join(piece.arguments for piece in pieces) == '{"a": 1}'


def test_the_same_deltas_say_the_same_again() -> None:
    given = deltas(CALL + CALL)
    assert read(AnswerReader("r", TOOLS, 1), given) == read(AnswerReader("r", TOOLS, 1), given)
    other = read(AnswerReader("s", TOOLS, 1), given)
    ids = [piece.id for token in read(AnswerReader("r", TOOLS, 1), given) for piece in token.tool_calls if piece.id]
    assert len(set(ids)) == 2
    assert not set(ids) & {piece.id for token in other for piece in token.tool_calls}


def test_thoughts_are_apart_and_counted() -> None:
    reader = AnswerReader("r", Form(reasoning_format="think", thinking=True), 1)
    tokens = read(reader, deltas("hm hm</think>Yes."))
    assert "".join(token.reasoning for token in tokens) == "hm hm"
    assert "".join(token.text for token in tokens) == "Yes."
    assert reader.usage(Usage(1, 17, 18)).reasoning_tokens == len("hm hm</think>")


@pytest.mark.parametrize(
    ("text", "thinking", "counted"),
    [
        ("<think>\nhm</think>\n\nYes.", False, len("<think>\nhm</think>")),
        ("\n<think>hm", False, len("\n<think>hm") + 1),  # the end of the text is a token
        ("hm</think>" + CALL, True, len("hm</think>")),
        ("<think>\n\n</think>\n\nYes.", False, 0),
        ("Yes, </think> ends a thought.", False, 0),
    ],
)
def test_a_thought_counts_as_all_tokens_up_to_its_end(text: str, thinking: bool, counted: int) -> None:
    reader = AnswerReader("r", TOOLS.model_copy(update={"reasoning_format": "think", "thinking": thinking}), 1)
    read(reader, deltas(text))
    assert reader.usage(Usage(1, 99, 100)).reasoning_tokens == counted


def test_thoughts_are_counted_though_the_answer_came_with_them() -> None:
    reader = AnswerReader("r", Form(reasoning_format="think", thinking=True), 1)
    text = "A long thought, long thought.</think>Yes."
    ids = tuple(range(len(text)))
    reader.read(Delta("r", 1, 0, 0, ids, text, None, "stop"))
    counted = reader.usage(Usage(1, len(ids), len(ids) + 1)).reasoning_tokens
    assert len("A long thought, long thought.") <= counted < len(ids) - len("Yes.")


def test_choices_are_read_apart() -> None:
    reader = AnswerReader("r", TOOLS, 2)
    mixed = [delta for pair in zip(deltas(CALL), deltas(CALL, choice=1), strict=True) for delta in pair]
    tokens = read(reader, mixed)
    for choice in (0, 1):
        said = [piece for token in tokens if token.choice == choice for piece in token.tool_calls]
        assert "".join(piece.arguments for piece in said) == '{"a": 1}'


def test_an_echo_comes_once_in_front_of_each_choice() -> None:
    reader = AnswerReader("r", Form(echo=("A:", "B:")), 4)
    said = {choice: "".join(t.text for t in read(reader, deltas("xy", choice=choice))) for choice in range(4)}
    assert said == {0: "A:xy", 1: "A:xy", 2: "B:xy", 3: "B:xy"}
    plain = AnswerReader("r", None, 1)
    assert read(plain, [replace(deltas("x")[0], text="<think>")])[0].text == "<think>"
