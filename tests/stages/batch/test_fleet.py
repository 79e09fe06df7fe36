"""A fleet's orders agree with a look at every worker, whatever has happened since they were made."""

from __future__ import annotations

import copy
from functools import partial

from hypothesis import given, settings
from hypothesis import strategies as st
from listed_candidates import Listed

from penstock.schemas.jobs import ValidatedJob
from penstock.schemas.params import GenerationParams
from penstock.schemas.registry import ModelCard, Room, WorkerCard
from penstock.stages.batch.fleet import Fleet
from penstock.stages.batch.seats import Seats
from penstock.stages.batch.strategies import STRATEGIES

EXAMPLES = settings(max_examples=200, deadline=None)
MODEL = ModelCard(name="m", source="m", backend="echo", context_length=100, created=0)
SIZE = 9
JOB = ValidatedJob(
    id="r",
    endpoint="/v1/completions",
    bridge="test",
    tenant="ada",
    priority="normal",
    model="m",
    prompts=((1, 2, 3),),
    params=GenerationParams(max_tokens=20),
    created=0.0,
    deadline=1.0,
    body={},
)
few = st.integers(0, 4)
reports = st.tuples(st.just("reports"), few, few, few, st.sampled_from([0, 20, 40]), st.sampled_from([0, 20, 60]))
happenings = st.one_of(
    st.tuples(st.just("sent"), st.integers(1, 3)),
    st.tuples(st.just("arrived"), st.booleans()),
    reports,
)
histories = st.lists(st.tuples(st.integers(0, SIZE - 1), happenings, st.booleans(), st.booleans()), max_size=60)


def room(worker: int, free: int = 2, high: int = 3, active: int = 0, tokens: int = 40, total: int = 60) -> Room:
    return Room(
        worker=f"w{worker}",
        incarnation="i",
        free=free,
        free_high=high,
        received={},
        active=active,
        free_tokens=tokens,
        total_tokens=total,
    )


def fits(excluded: int, urgent: bool, card: WorkerCard, seats: Seats) -> bool:
    job = JOB.model_copy(update={"priority": "high"}) if urgent else JOB
    return card.id != f"w{excluded}" and seats.free_for(job) >= card.seats_of(job)


@EXAMPLES
@given(st.sampled_from(sorted(STRATEGIES)), histories)
def test_every_strategy_picks_as_if_it_looked_at_all(name: str, history: list[tuple]) -> None:  # type: ignore[type-arg]
    cards = [WorkerCard(id=f"w{number}", model=MODEL, capacity=4, pid=1, incarnation="i") for number in range(SIZE)]
    all_seats = [Seats(room(number)) for number in range(SIZE)]
    fleet = Fleet(zip(cards, all_seats, strict=True))
    strategy = STRATEGIES[name]()
    for number, (what, *values), urgent, looks in history:
        seats = all_seats[number]
        match what:
            case "sent":
                seats.send(values[0], 0.0)
            case "arrived" if seats.in_flight:
                first = next(iter(seats.in_flight))
                if values[0]:
                    seats.lose(first)
                else:
                    seats.hear(seats.room.model_copy(update={"received": {"us": [first]}}), "us")
            case "reports":
                seats.hear(room(number, *values), "us")
        seats.check_integrity()
        if not looks:
            continue
        test = partial(fits, number, urgent)
        pairs = zip(cards, all_seats, strict=True)
        expected = Listed(one.candidate(card) for card, one in pairs if test(card, one))
        fitting = fleet.fitting(test, (number, urgent))
        assert list(fitting) == expected
        assert bool(fitting) == bool(expected)
        sizes = [one.room.total_tokens for one in all_seats]
        assert fleet.largest == (max(sizes) if all(sizes) else 0)
        if expected:
            plain = copy.deepcopy(strategy)
            assert strategy.pick(fitting, JOB) == plain.pick(expected, JOB)


def test_whom_a_choice_visits_does_not_grow_with_the_workers() -> None:
    """Of workers that are all alike, the first that is looked at is taken."""
    visited: list[str] = []

    def sees(card: WorkerCard, seats: Seats) -> bool:
        visited.append(card.id)
        return True

    cards = [WorkerCard(id=f"w{n}", model=MODEL, capacity=4, pid=1, incarnation="i") for n in range(100)]
    for name in ("round_robin", "least_loaded", "memory_aware"):
        fleet, strategy = Fleet((card, Seats(named(card.id))) for card in cards), STRATEGIES[name]()
        visited.clear()
        for _ in range(10):
            assert strategy.pick(fleet.fitting(sees, "any"), JOB) is not None
        assert len(visited) == 10


def test_who_has_refused_is_asked_again_once_it_has_changed() -> None:
    """Or else each seat that becomes free while much waits would have all workers looked at."""
    visited: list[str] = []

    def sees(card: WorkerCard, seats: Seats) -> bool:
        visited.append(card.id)
        return seats.room.active == 7

    cards = [WorkerCard(id=f"w{n}", model=MODEL, capacity=4, pid=1, incarnation="i") for n in range(100)]
    all_seats = [Seats(named(card.id)) for card in cards]
    fleet = Fleet(zip(cards, all_seats, strict=True))
    for _ in range(10):
        assert not fleet.fitting(sees, "first")
    assert len(visited) == 100
    all_seats[40].hear(named("w40").model_copy(update={"active": 7}), "us")
    assert [one.worker for one in fleet.fitting(sees, "first")] == ["w40"]
    assert visited[100:] == ["w40"]
    assert not fleet.fitting(lambda *_: False, "second")
    assert [one.worker for one in fleet.fitting(sees, "second")] == [], "what was refused is the question's"


def named(name: str) -> Room:
    return room(0).model_copy(update={"worker": name})
