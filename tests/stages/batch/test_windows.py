"""A long lane of several tenants: the oldest jobs of each are in hand, and the others come when there is room."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import ExitStack
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.schemas.errors import NotYet
from penstock.simulation.clock import VirtualLoop
from penstock.stages.batch import windows
from penstock.stages.batch.lanes import Waiting
from penstock.stages.batch.windows import LATE, LaneWindow, LaneWindows
from penstock.streams.port import DEADLINE, Delivery, Message

SIZE = 96  # jobs in hand
LOOK = 0.25
NEVER = 1e9


class Leased:
    """Implements as much of `Delivery` as a window needs."""

    def __init__(self, message: Message) -> None:
        self.message = message
        self.is_bare = False

    def shed(self) -> None:
        self.is_bare = True


class Lane:
    """A lane with one copy that takes from it. `now` stands until `look`."""

    def __init__(self) -> None:
        self.cancelled: set[int] = set()
        self.window = LaneWindow(SIZE, self._again, lambda message: message.sequence in self.cancelled)
        self.now = 0.0
        self.sent: dict[str, list[int]] = {}  # sequences by tenant, in order
        self.ended: list[int] = []  # past their deadlines
        self.deliveries = Counter[int]()  # by sequence
        self.aside: dict[int, Leased] = {}
        self.loses = False  # what is given back does not come
        self._coming: list[Message] = []
        self._stored: dict[int, Message] = {}
        self._in_hand: dict[int, tuple[Any, ExitStack]] = {}

    def add(self, tenant: str, number: int, deadline: float = NEVER) -> None:
        for sequence in range(len(self._stored) + 1, len(self._stored) + 1 + number):
            message = Message(f"p.batch.m.normal.{tenant}", b"", {DEADLINE: str(deadline)}, sequence)
            self._stored[sequence] = message
            self._coming.append(message)
        self.deliver()

    def deliver(self) -> None:
        """While there is room."""
        while self._coming and len(self._in_hand) < SIZE:
            message = self._coming.pop(0)
            self.deliveries[message.sequence] += 1
            delivery: Any = Leased(message)
            if self.window.admit(delivery, self.now):
                self._hold(message)
            else:
                self.aside[message.sequence] = delivery
            self._collect()

    def look(self, tenants: int | None = None) -> None:
        self.now += LOOK
        self.window.look(len(self.waiting) if tenants is None else tenants, self.now)
        self._collect()
        self.deliver()

    def take(self, tenant: str, number: int) -> int:
        """Send so many jobs of a tenant to workers, the oldest first; returns how many were in hand."""
        own = self.in_hand(tenant)[:number]
        for sequence in own:
            waiting, hold = self._in_hand.pop(sequence)
            waiting.sent.set_result(True)
            hold.close()
            self.sent.setdefault(tenant, []).append(sequence)
        self.deliver()
        return len(own)

    def in_hand(self, tenant: str) -> list[int]:
        return sorted(sequence for sequence, (waiting, _) in self._in_hand.items() if waiting.job.tenant == tenant)

    @property
    def waiting(self) -> Counter[str]:
        """By tenant."""
        gone = {sequence for sequences in self.sent.values() for sequence in sequences} | {*self.ended}
        return Counter(one.subject.rpartition(".")[2] for key, one in self._stored.items() if key not in gone)

    def _hold(self, message: Message) -> None:
        deadline = float(message.headers[DEADLINE])
        with ExitStack() as stack:
            place = stack.enter_context(self.window.holding(message))
            if deadline <= self.now:
                self.ended.append(message.sequence)
                return
            job: Any = SimpleNamespace(tenant=message.subject.rpartition(".")[2], deadline=deadline)
            place.waiting = Waiting(job, message.sequence)
            self._in_hand[message.sequence] = place.waiting, stack.pop_all()

    def _again(self, delivery: Delivery) -> None:
        """The broker delivers at once what is given back, and before all that is new."""
        del self.aside[delivery.message.sequence]
        if self.loses or delivery.message.sequence in self.cancelled:  # which were deleted
            return
        self._coming.insert(0, self._stored[delivery.message.sequence])

    def _collect(self) -> None:
        """What the window wants others to pass comes again."""
        for sequence, (waiting, hold) in list(self._in_hand.items()):
            if waiting.sent.done():
                assert isinstance(waiting.sent.exception(), NotYet)
                del self._in_hand[sequence]
                hold.close()
                self._coming.insert(0, self._stored[sequence])


@pytest.fixture
async def lane() -> Lane:
    """600 jobs of a flood before 30 of another tenant."""
    lane = Lane()
    lane.add("flood", 600)
    lane.add("few", 30)
    lane.look()
    return lane


async def test_jobs_behind_a_flood_come_into_hand(lane: Lane) -> None:
    assert len(lane.in_hand("few")) == 30


async def test_workers_find_jobs_whenever_they_have_room_and_each_tenants_in_order(lane: Lane) -> None:
    """However unevenly they have it, and also once the other tenant has left. Each job is delivered twice at most, and
    few a third time, when the lane began to be shared."""
    chance = Random(7)
    while lane.waiting["flood"]:
        lane.take("few", 1)
        wanted = min(chance.choice([1, 4, 30]), lane.waiting["flood"])
        assert lane.take("flood", wanted) == wanted
        if chance.random() < 0.3:
            lane.look()
    assert lane.sent["flood"] == list(range(1, 601))
    assert lane.deliveries.total() <= 2 * 630 + SIZE
    assert not lane.aside


async def test_what_is_set_aside_is_renewed_and_remembered_without_its_data(lane: Lane) -> None:
    aside: list[Any] = list(lane.aside.values())
    assert len(aside) == 600 - SIZE // 3
    assert all(one.is_bare for one in aside)
    assert lane.window.to_renew(lane.now + 3.0, 4.0) == []
    assert lane.window.to_renew(lane.now + 4.0, 4.0) == aside
    assert lane.window.to_renew(lane.now + 4.0, 4.0) == []


async def test_a_job_aside_ends_at_its_deadline(lane: Lane) -> None:
    lane.add("flood", 1, deadline=lane.now + 2 * LOOK)
    lane.look()
    assert lane.ended == []
    lane.look()
    assert lane.ended == [631]
    assert 631 not in lane.aside


async def test_those_that_were_cancelled_hold_nobody_up(lane: Lane) -> None:
    """However many there are, the next in line is in hand at once."""
    lane.cancelled = set(range(40, 500))
    for _ in range(3):
        lane.take("flood", SIZE // 3)
        assert len(lane.in_hand("flood")) == SIZE // 3
    assert lane.in_hand("flood")[0] == 500 + 3 * (SIZE // 3) - 39


async def test_one_that_was_cancelled_and_is_still_there_ends_at_once(lane: Lane) -> None:
    late = max(lane.aside)
    lane.cancelled.add(late)
    again = cast(Delivery, lane.aside[late])
    assert lane.window.admit(again, lane.now)
    assert again not in lane.window.to_renew(lane.now + 9.0, 4.0)


async def test_a_lane_that_is_one_tenants_again_gets_all_back(lane: Lane) -> None:
    lane.take("few", 30)
    for _ in range(300):
        lane.look()
    assert not lane.aside
    assert len(lane.in_hand("flood")) == SIZE


async def test_an_older_job_that_comes_late_takes_the_place_of_the_newest(lane: Lane) -> None:
    lane._stored[0] = Message("p.batch.m.normal.flood", b"", {DEADLINE: str(NEVER)}, 0)
    lane._coming.append(lane._stored[0])
    lane.deliver()
    assert lane.in_hand("flood") == list(range(SIZE // 3))
    assert SIZE // 3 in lane.aside


async def test_a_job_whose_lease_had_expired_is_there_once(lane: Lane) -> None:
    oldest = min(lane.aside)
    again: Any = Leased(lane._stored[oldest])
    assert not lane.window.admit(again, lane.now)
    assert lane.window.to_renew(lane.now + 9.0, 4.0).count(again) == 1
    lane.aside[oldest] = again
    while lane.waiting["flood"]:
        assert lane.take("flood", 1) == 1
    assert lane.sent["flood"] == list(range(1, 601))


async def test_a_place_kept_for_a_job_that_does_not_come_is_given_to_the_next(lane: Lane) -> None:
    """Another copy got it, or it was deleted."""
    lost = min(lane.aside)
    lane.loses = True
    lane.take("flood", 1)
    lane.loses = False
    assert len(lane.in_hand("flood")) == SIZE // 3 - 1
    for _ in range(LATE + 1):
        lane.look()
    assert lost not in lane.in_hand("flood")
    assert len(lane.in_hand("flood")) == SIZE // 3


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 40), st.booleans()), max_size=40))
def test_nothing_is_lost_or_there_twice(steps: list[tuple[str, int, bool]]) -> None:
    """Whoever comes, and goes: at the end all have been sent, once, and each tenant's in order."""

    async def run() -> None:
        lane = Lane()
        for tenant, number, is_sent in steps:
            if is_sent:
                assert lane.take(tenant, number) <= number
            else:
                lane.add(tenant, number)
            lane.look()
        for _ in range(2_000):
            if not lane.waiting:
                break
            for tenant in "abc":
                lane.take(tenant, 7)
            lane.look()
        assert not lane.waiting
        assert not lane.aside
        assert sum(map(len, lane.sent.values())) == len(lane._stored)
        assert all(sequences == sorted(sequences) for sequences in lane.sent.values())

    loop = VirtualLoop()
    try:
        loop.run_until_complete(run())
    finally:
        loop.close()


async def test_lanes_are_looked_at_from_the_first_job_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody looks while there are none; a lane in which nothing is left is forgotten at the next look."""
    monkeypatch.setattr(windows, "LOOK", 0.0)
    all_of_them = LaneWindows(cast(Any, None), SIZE, 30.0)
    looking = asyncio.create_task(all_of_them.run())
    await asyncio.sleep(0)
    for subject in ("p.batch.one.low.t", "p.batch.two.low.t"):
        first = all_of_them.of(subject)
        async with asyncio.timeout(30):
            while all_of_them.of(subject) is first:  # noqa: ASYNC110
                await asyncio.sleep(0)
    looking.cancel()
