"""The laws see what is broken: each kind of fault, and nothing in a run without one."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.schemas.events import Accepted, Done, ErrorBody, Event, Failed, Token, Usage
from penstock.simulation.engine import token_at
from penstock.simulation.laws import LEAST_BEGUN, Ledger, Life, Source
from penstock.simulation.scenario import Laws

ADA, BOB = Source("ada", "normal", "m"), Source("bob", "normal", "m")
ANSWER = 6


def tokens(start: int, count: int) -> Token:
    ids = tuple(token_at(index) for index in range(start, start + count))
    return Token("r", 0, start, ids, bytes(ids).decode())


def done(count: int = ANSWER) -> Done:
    return Done("r", ("length",), Usage(3, count, 3 + count))


def ledger_of(*events: Event, laws: Laws | None = None) -> Ledger:
    ledger = Ledger(laws or Laws(), {}, token_at)
    ledger.sent("r", Life(ADA, 3, ANSWER, 0.0))
    for number, event in enumerate(events, 1):
        ledger.hear(event, float(number))
    return ledger


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, ANSWER), max_size=4))
def test_an_answer_in_any_pieces_breaks_nothing(cuts: list[int]) -> None:
    places = sorted({0, *cuts, ANSWER})
    pieces = [tokens(start, end - start) for start, end in pairwise(places)]
    ledger = ledger_of(Accepted("r", "m", 0, 3), *pieces, done())
    ledger.finish()
    assert ledger.broken == []
    assert ledger.tallies[ADA].outcomes == {"done": 1}


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ([tokens(0, 2), tokens(3, 3), done()], "a gap"),
        ([tokens(0, 2), tokens(1, 5), done()], "twice"),
        ([tokens(0, 5), done()], "5 of 6"),
        ([tokens(0, 6), done(5)], "5 of 6 tokens are counted"),
        ([tokens(0, 6), done(), done()], "behind its end"),
        ([tokens(0, 6), done(), tokens(5, 1)], "behind its end"),
        ([Token("r", 0, 0, (1, 2), "x")], "another token"),
        ([tokens(0, 6)], "never ended"),
        ([Failed("r", ErrorBody(503, "full", "overloaded", "queue_full")), done()], "behind its end"),
    ],
)
def test_what_no_client_may_see_is_seen(events: list[Event], words: str) -> None:
    ledger = ledger_of(*events)
    ledger.finish()
    assert any(words in line for line in ledger.broken)


def test_who_waits_too_long_is_named_once() -> None:
    ledger = ledger_of(laws=Laws(longest_wait=10))
    ledger.look(10.0)
    assert not ledger.broken
    for now in (11.0, 12.0):
        ledger.look(now)
    assert [line.partition(":")[0] for line in ledger.broken] == ["r of ada"]


def serve(ledger: Ledger, source: Source, count: int, now: float) -> None:
    """So many requests of a source are answered."""
    waiting = [request for request, life in ledger.running.items() if life.source == source][:count]
    for request in waiting:
        for event in (tokens(0, ANSWER), done()):
            ledger.hear(replaced(event, request), now)


def replaced(event: Any, request: str) -> Event:
    fields = {name: getattr(event, name) for name in event.__dataclass_fields__ if name not in ("request", "type")}
    made: Callable[..., Event] = type(event)
    return made(request, **fields)


@pytest.mark.parametrize(("share", "is_broken"), [(1.0, False), (0.6, False), (0.4, True)])
def test_a_tenant_that_gets_too_little_is_named(share: float, is_broken: bool) -> None:
    ledger = Ledger(Laws(fair_share=0.5, fair_window=10), {}, token_at)
    most = 4 * LEAST_BEGUN
    for number in range(10 * most):
        for source in (ADA, BOB):
            ledger.sent(f"{source.tenant}{number}", Life(source, 3, ANSWER, 0.0))
    ledger.look(10.0)
    serve(ledger, ADA, most, 15.0)
    serve(ledger, BOB, round(share * most), 15.0)
    ledger.look(20.0)
    assert ledger.lowest_share == pytest.approx(share)
    assert bool(ledger.broken) == is_broken


def test_who_asks_for_little_is_not_wronged() -> None:
    ledger = Ledger(Laws(fair_window=10), {}, token_at)
    for number in range(1000):
        ledger.sent(f"ada{number}", Life(ADA, 3, ANSWER, 0.0))
    for number in range(LEAST_BEGUN):
        ledger.sent(f"bob{number}", Life(BOB, 3, ANSWER, 0.0))
    ledger.look(10.0)
    serve(ledger, ADA, 500, 15.0)
    serve(ledger, BOB, LEAST_BEGUN, 15.0)
    ledger.look(20.0)
    assert (ledger.broken, ledger.lowest_share) == ([], None)


@pytest.mark.parametrize(
    ("waiting", "free", "told"), [(8, 5, [20.0]), (8, 4, []), (7, 8, [])], ids=["idle", "busy", "few wait"]
)
def test_seats_that_stay_free_while_as_many_requests_wait_are_told(waiting: int, free: int, told: list[float]) -> None:
    ledger, seen = Ledger(Laws(idle_share=0.5, idle_window=10), {}, token_at), list[float]()
    for number in range(waiting):
        ledger.sent(str(number), Life(ADA, 3, ANSWER, 0.0))
    for second in range(5, 25):
        before = ledger.num_broken
        ledger.see_seats({ADA.model: (8, 0 if second < 10 else free), "another": (8, 8)}, float(second))
        seen += [float(second)] * (ledger.num_broken > before)
    assert seen == told
    assert all(f"{ADA.model}: 8 requests wait" in line for line in ledger.broken)
