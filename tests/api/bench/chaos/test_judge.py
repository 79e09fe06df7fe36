"""What `penstock bench chaos` says of stored events: every kind of fault is fed to it, and has its name."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from penstock.api.bench.chaos.judge import events_of, judge, outputs_of
from penstock.schemas.events import (
    Accepted,
    Delta,
    Done,
    ErrorBody,
    Event,
    Failed,
    ItemEvent,
    Output,
    Queued,
    Started,
    Token,
    Usage,
)
from penstock.schemas.wire import codec
from penstock.streams.port import Message

ACCEPTED = Accepted("r", "echo", 0, 7)
QUEUED = Queued("r", 1)
ONE, TWO = Token("r", 0, 0, (5, 6), "ab"), Token("r", 0, 2, (7,), "c", finish_reason="stop")
OTHER = Token("r", 1, 0, (9,), "z", finish_reason="length")
DONE = Done("r", ("stop", "length"), Usage(7, 4, 11))
FAILED = Failed("r", ErrorBody(500, "", "server_error"))
RIGHT: tuple[Event, ...] = (ACCEPTED, QUEUED, ONE, OTHER, TWO, DONE)

FIRST, SECOND = (Started("r", epoch, f"h{epoch}", "t", "b", 2, 7) for epoch in (1, 2))
AGAIN = Started("r", 1, "h9", "t", "b", 2, 7)
SAID, LAST = Delta("r", 1, 0, 0, (5, 6), "ab"), Delta("r", 2, 0, 2, (7,), "c", finish_reason="stop")
BESIDE = Delta("r", 1, 1, 0, (9,), "z", finish_reason="length")
LATE = Delta("r", 1, 0, 2, (8,), "d")
OUTPUTS: tuple[Output, ...] = (FIRST, SAID, BESIDE, SECOND, LATE, LAST)

TEXTS = {0: "abc", 1: "z"}


def stored(values: Sequence[Event] | Sequence[Output]) -> list[Message]:
    encoded = [codec.encode_outputs([v]) if isinstance(v, Started | Delta) else codec.encode(v) for v in values]
    return [Message("s", data, {}, place) for place, data in enumerate(encoded, 1)]


def laws(
    events: Sequence[Event] = RIGHT, outputs: Sequence[Output] = OUTPUTS, texts: dict[int, str] | None = TEXTS
) -> list[str]:
    broken = judge(events_of("r", stored(events)), outputs_of("r", stored(outputs)), texts)
    return [one.law for one in broken]


def test_what_is_right_breaks_no_law() -> None:
    assert laws() == []
    assert laws((FAILED,), (), None) == []


@pytest.mark.parametrize(
    ("law", "events"),
    [
        ("one final event", RIGHT[:-1]),
        ("one final event", (*RIGHT, DONE)),
        ("one final event", (*RIGHT, FAILED)),
        ("the final event is the last", (*RIGHT, QUEUED)),
        ("accepted once", (ACCEPTED, *RIGHT)),
        ("positions are told between acceptance and answer", (QUEUED, *RIGHT)),
        ("positions are told between acceptance and answer", (ACCEPTED, ONE, QUEUED, TWO, OTHER, DONE)),
        ("accepted before it is answered", (ONE, ACCEPTED, TWO, OTHER, DONE)),
        ("events are contiguous", (ACCEPTED, ONE, ONE, TWO, OTHER, DONE)),
        ("events are contiguous", (ACCEPTED, TWO, OTHER, DONE)),
        ("events end with the finish reason", (ACCEPTED, ONE, TWO, TWO, OTHER, DONE)),
        ("every choice has its finish reason", (ACCEPTED, ONE, OTHER, DONE)),
        ("the usage counts the tokens", (ACCEPTED, ONE, TWO, OTHER, Done("r", DONE.finish_reasons, Usage(7, 5, 12)))),
        ("events are the request's own", (ACCEPTED, ONE, TWO, OTHER, Done("q", DONE.finish_reasons, DONE.usage))),
        ("items have every number once", (ACCEPTED, ItemEvent("r", 0, {}), ItemEvent("r", 0, {}), FAILED)),
        ("items have every number once", (ACCEPTED, ItemEvent("r", 1, {}), FAILED)),
    ],
)
def test_a_fault_of_the_events(law: str, events: Sequence[Event]) -> None:
    assert laws(events, texts=None)[0] == law


@pytest.mark.parametrize(
    ("law", "outputs"),
    [
        ("one announcement an epoch", (FIRST, AGAIN, SAID, BESIDE, SECOND, LAST)),
        ("one announcement an epoch", (FIRST, FIRST, SAID, BESIDE, SECOND, LAST)),
        ("epochs rise", (SECOND, FIRST, LAST)),
        ("an epoch is announced first", (FIRST, SAID, BESIDE, LAST)),
        ("outputs are contiguous", (FIRST, SAID, SAID, BESIDE, SECOND, LAST)),
        ("outputs are contiguous", (FIRST, LATE, BESIDE)),
        ("outputs end with the finish reason", (FIRST, SAID, BESIDE, BESIDE, SECOND, LAST)),
        ("events are the outputs of the newest epoch", (FIRST, SAID, BESIDE)),
    ],
)
def test_a_fault_of_the_outputs(law: str, outputs: Sequence[Output]) -> None:
    assert laws(outputs=outputs)[0] == law


@pytest.mark.parametrize("texts", [{0: "abbc", 1: "z"}, {0: "ab", 1: "z"}, {0: "abc"}, {**TEXTS, 2: "y"}])
def test_a_client_that_got_something_else(texts: dict[int, str]) -> None:
    assert laws(texts=texts) == ["the client got what is stored"]


def test_what_cannot_be_read_is_named_with_its_place() -> None:
    broken = events_of("r", [Message("s", b"{", {}, 8)]).broken + outputs_of("r", [Message("s", b"[]", {}, 9)]).broken
    assert [(one.law, one.detail.partition(":")[0]) for one in broken] == [
        ("events can be read", "EVENTS 8"),
        ("one final event", "none among 1"),
        ("outputs can be read", "STREAM 9"),
    ]
