"""What a turn's tokens become: items in the order in which the model began them, however their text was cut."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.schemas.events import FinishReason, Token, TokenLogprob, ToolCallDelta, TopLogprob
from penstock.schemas.loops import Items, TurnId
from penstock.schemas.openai.responses.turns import Change, TurnItems, item_id

EXAMPLES = settings(max_examples=200, deadline=None)
HEX = "0123456789abcdef" * 2
JOB = f"resp_{HEX}-1"
CALLS = {
    "docs_search": {"label": "docs", "tool": "search", "approval": False},
    "docs_delete": {"label": "docs", "tool": "delete", "approval": True},
}
CUSTOM = frozenset({"run"})
KINDS = {
    "own": "function_call",
    "run": "custom_tool_call",
    "docs_search": "mcp_call",
    "docs_delete": "mcp_approval_request",
}

texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
scripts = st.lists(st.tuples(st.sampled_from(["reasoning", "message", *KINDS]), texts), max_size=8)


def token(text: str = "", *, think: str = "", calls: tuple[ToolCallDelta, ...] = (), **fields: Any) -> Token:
    return Token(JOB, 0, 0, (1,), text, reasoning=think, tool_calls=calls, **fields)


def call(index: int, arguments: str, name: str | None = None) -> ToolCallDelta:
    return ToolCallDelta(index, arguments, f"call_{index}" if name else None, name)


class Folded:
    """A turn that has ended: its items, and the changes that were told on the way."""

    def __init__(self, *tokens: Token, reason: FinishReason = "stop", logprobs: bool = False) -> None:
        fold = TurnItems(JOB, CALLS, custom=CUSTOM, logprobs=logprobs)
        self.changes: list[Change] = []
        self.seen: list[Items] = []  # the items after each token
        for one in tokens:
            self.changes += fold.feed(one)
            self.seen.append(fold.items)
        self.changes += fold.finish(reason)
        self.items = fold.items

    @property
    def said(self) -> list[tuple[str, str]]:
        return [(item["type"], text_of(item)) for item in self.items]


def text_of(item: dict[str, Any]) -> str:
    """Of a call of a custom tool, all that the model wrote, as it is no object with an input."""
    (said,) = [item[name] for name in ("arguments", "input") if name in item] or [item["content"][0]["text"]]
    return str(said)


@st.composite
def answers(draw: st.DrawFn) -> tuple[list[tuple[str, str]], list[Token]]:
    """What is said, and tokens that say it, a piece in each."""
    script, tokens, calls = draw(scripts), [], 0
    for kind, text in script:
        at = draw(st.integers(0, len(text)))
        pieces = [text[:at], text[at:]]
        if kind in KINDS:
            begun = call(calls, pieces[0], kind)
            tokens += [token(calls=(begun,)), token(calls=(call(calls, pieces[1]),))]
            calls += 1
        else:
            tokens += [token(think=piece) if kind == "reasoning" else token(piece) for piece in pieces]
    return script, tokens


@EXAMPLES
@given(answers())
def test_items_stand_in_the_order_of_the_answer_however_it_was_cut(
    answer: tuple[list[tuple[str, str]], list[Token]],
) -> None:
    script, tokens = answer
    folded = Folded(*tokens)
    expected: list[tuple[str, str]] = []
    for kind, group in groupby(script, key=lambda stretch: stretch[0]):
        said = [text for _, text in group]
        whole = said if kind in KINDS else ["".join(said)]
        expected += [(KINDS.get(kind, kind), text) for text in whole]
    assert folded.said == expected


@EXAMPLES
@given(answers(), st.sampled_from(["stop", "length", "cancelled"]))
def test_what_is_told_on_the_way_adds_up_to_the_items(
    answer: tuple[list[tuple[str, str]], list[Token]], reason: FinishReason
) -> None:
    folded = Folded(*answer[1], reason=reason)
    told: dict[str, str] = {}
    whole: list[dict[str, Any]] = []
    for change in folded.changes:
        if change.kind == "begun":
            assert change.item["id"] not in told and len(told) == len(whole), "one item at a time"
            told[change.item["id"]] = change.item["arguments"] if "status" not in change.item else ""
        elif change.kind == "more":
            told[change.item["id"]] += change.delta
        else:
            whole.append(change.item)
    assert whole == folded.items
    assert told == {item["id"]: text_of(item) for item in folded.items}
    for seen in folded.seen:
        for item, final in zip(seen, folded.items, strict=False):
            assert item["id"] == final["id"] and text_of(final).startswith(text_of(item))


def test_items_are_as_the_api_has_them() -> None:
    calls = (call(0, "{}", "own"), call(1, "{}", "docs_search"), call(2, "{}", "docs_delete"))
    items = Folded(token(think="Hm."), token("Yes."), *(token(calls=(one,)) for one in calls)).items
    ids = [item.pop("id") for item in items]
    assert ids == [f"{kind}_{HEX}00010000000{number}" for number, kind in enumerate(["rs", "msg", "fc", "mcp", "mcpr"])]
    part = {"type": "output_text", "text": "Yes.", "annotations": [], "logprobs": []}
    named = {"server_label": "docs", "name": "search", "arguments": "{}"}
    assert items == [
        {
            "type": "reasoning",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "Hm."}],
            "status": "completed",
        },
        {"type": "message", "role": "assistant", "content": [part], "status": "completed"},
        {"type": "function_call", "call_id": "call_0", "name": "own", "arguments": "{}", "status": "completed"},
        {
            "type": "mcp_call",
            **named,
            "status": "in_progress",  # its result is still to come
            "approval_request_id": None,
            "output": None,
            "error": None,
        },
        {"type": "mcp_approval_request", **named, "name": "delete"},
    ]


def test_the_newest_item_is_in_progress_with_what_it_has() -> None:
    first, second = Folded(token("It"), token(" is")).seen
    assert [(item["status"], text_of(item)) for item in first + second] == [
        ("in_progress", "It"),
        ("in_progress", "It is"),
    ]


def test_every_attempt_and_turn_has_ids_of_its_own() -> None:
    turns = [TurnId(f"resp_{HEX}", turn, attempt) for turn in (0, 1, 10, 1000) for attempt in (0, 1, 10)]
    ids = [item_id("message", turn, number) for turn in turns for number in (0, 1, 10, 1000)]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("name", ["own", "run"])
def test_text_between_the_pieces_of_a_call_comes_behind_it(name: str) -> None:
    folded = Folded(token(calls=(call(0, "{", name),)), token("Wait."), token(calls=(call(0, "}"),)))
    assert folded.said == [(KINDS[name], "{}"), ("message", "Wait.")]


def test_one_token_may_end_a_call_say_something_and_begin_the_next() -> None:
    pieces = (call(0, "}"), call(1, "[", "own"), call(1, "]"))
    folded = Folded(token(calls=(call(0, "{", "own"),)), token(" And ", calls=pieces))
    assert folded.said == [("function_call", "{}"), ("message", " And "), ("function_call", "[]")]


@pytest.mark.parametrize("reason", ["length", "cancelled", "deadline", "error"])
def test_only_what_was_cut_off_is_incomplete(reason: FinishReason) -> None:
    folded = Folded(
        token("A"), token(calls=(call(0, "{}", "docs_search"),)), token(calls=(call(1, "{", "own"),)), reason=reason
    )
    assert [item["status"] for item in folded.items] == ["completed", "in_progress", "incomplete"]
    folded = Folded(token(calls=(call(0, "{}", "own"),)), token("And"), reason=reason)
    assert [item["status"] for item in folded.items] == ["completed", "incomplete"]


def test_nobody_is_asked_about_half_a_call() -> None:
    begun = token(calls=(call(0, '{"all":', "docs_delete"),))
    [item] = Folded(begun, reason="length").items
    assert (item["type"], item["status"], item["arguments"]) == ("mcp_call", "incomplete", '{"all":')
    assert item["id"].startswith("mcp_")
    assert Folded(begun, token(calls=(call(0, "1}"),))).seen == [[], []], "a question shows once it is whole"


def logprob(text: str) -> TokenLogprob:
    return TokenLogprob(text, 7, -0.5, tuple(text.encode()), (TopLogprob("x", 8, -1.5, (120,)),))


def test_a_message_has_the_logprobs_of_its_own_tokens() -> None:
    tokens = [
        token(think="Hm.", logprobs=(logprob("Hm."),)),
        token("", logprobs=(logprob("half"),)),  # of a character, say
        token("whole", logprobs=(logprob("whole"),)),
        token(calls=(call(0, "{}", "own"),), logprobs=(logprob("{}"),)),
        token("", logprobs=(logprob("<end>"),)),
    ]
    part = Folded(*tokens, logprobs=True).items[1]["content"][0]
    assert [entry["token"] for entry in part["logprobs"]] == ["half", "whole"]
    assert part["logprobs"][1] == {
        "token": "whole",
        "logprob": -0.5,
        "bytes": list(b"whole"),
        "top_logprobs": [{"token": "x", "logprob": -1.5, "bytes": [120]}],
    }
    assert Folded(*tokens).items[1]["content"][0]["logprobs"] == []


def test_a_request_that_is_no_turn_has_no_items() -> None:
    with pytest.raises(ValueError, match="not a turn"):
        TurnItems("req-1", {})
