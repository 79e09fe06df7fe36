"""Who gets the next seat of a worker, and for whom seats stay free."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.stages.batch.shares import SeatShares

SEATS = 32


class Worker:
    """One worker of so many seats, whose tenants' requests never end by themselves."""

    def __init__(self, most: float = 0.75, weights: dict[str, float] | None = None, seats: int = SEATS) -> None:
        self.shares = SeatShares(most, weights)
        self.seats = seats
        self.held = Counter[str]()
        self.now = 0.0

    def come(self, *tenants: str) -> None:
        for tenant in tenants:
            self.shares.came(tenant, self.now)

    def pass_with(self, seconds: int, **needed: int) -> None:
        """Seconds in which tenants hold or wait for so many seats."""
        for _ in range(seconds):
            self.now += 1.0
            self.shares.look(Counter(needed), self.now)

    def ask(self, tenant: str, wanted: int = 1) -> bool:
        seats, free = self.seats, self.seats - self.held.total()
        may = free >= wanted and self.shares.allow(tenant, wanted, lambda: Counter(self.held), seats, free, self.now)
        self.held[tenant] += wanted * may
        return may

    def flood(self, tenant: str) -> int:
        """The tenant takes all that it gets; returns how many seats it has then."""
        while self.ask(tenant):
            pass
        return self.held[tenant]


def test_little_is_kept_for_a_flood_that_is_over() -> None:
    """Eight seconds later, another tenant that has much to do gets three quarters of the worker."""
    worker = Worker(most=1.0)
    worker.come("flood", "other")
    assert worker.ask("other")
    worker.pass_with(60, flood=500, other=500)
    assert worker.flood("other") == SEATS // 2
    worker.pass_with(8, other=500)
    assert worker.flood("other") >= SEATS * 3 // 4


def test_no_seat_of_a_small_worker_stays_empty_long_after_a_flood() -> None:
    """Ten seconds, then another tenant gets the seat that is half of the worker."""
    worker = Worker(seats=2)
    worker.come("flood", "other")
    assert worker.ask("other")
    worker.pass_with(60, flood=500, other=500)
    assert worker.flood("other") == 1
    worker.pass_with(10, other=500)
    assert worker.flood("other") == 2


def test_a_tenant_alone_gets_every_seat() -> None:
    worker = Worker()
    worker.come("flood")
    worker.pass_with(60, flood=500)
    assert worker.flood("flood") == SEATS


def test_two_that_flood_have_all_seats_between_them() -> None:
    worker = Worker()
    worker.come("a", "b")
    worker.pass_with(60, a=500, b=500)
    assert (worker.flood("a"), worker.flood("b")) == (SEATS // 2, SEATS // 2)


@pytest.mark.parametrize(("needed", "most"), [(0, 24), (1, 24), (5, 22), (8, 18), (12, 16), (100, 16)])
def test_a_flood_leaves_what_the_other_needs(needed: int, most: int) -> None:
    """However much that is, it has its equal share; however little, three quarters and no more."""
    worker = Worker()
    worker.come("flood", "few")
    worker.pass_with(30, flood=500, few=needed)
    assert worker.flood("flood") == most
    assert worker.flood("few") == SEATS - most


def test_whoever_needs_no_more_gives_its_seats_back() -> None:
    worker = Worker()
    worker.come("flood", "few")
    worker.pass_with(60, flood=500, few=12)
    worker.pass_with(30, flood=500)
    assert worker.flood("flood") == 24
    worker.held.clear()
    worker.pass_with(31, flood=500)
    assert worker.flood("flood") == SEATS


def test_floods_together_leave_what_the_others_need() -> None:
    worker = Worker()
    worker.come("a", "b", "few")
    worker.pass_with(60, a=500, b=500, few=4)
    for _ in range(SEATS):
        worker.ask("a")
        worker.ask("b")
    assert worker.flood("few") >= 4


def test_many_that_seldom_come_cost_little() -> None:
    worker = Worker(most=1.0)
    worker.come("flood", *(f"few{number}" for number in range(50)))
    worker.pass_with(30, flood=500, few0=1, few7=1)
    assert worker.flood("flood") >= 26


def test_weights_are_shares() -> None:
    worker = Worker(weights={"large": 3.0})
    worker.come("large", "small")
    worker.pass_with(60, large=500, small=500)
    assert (worker.flood("small"), worker.flood("large")) == (SEATS // 4, SEATS // 4 * 3)


def test_workers_keep_seats_free_together() -> None:
    worker = Worker(most=1.0)
    worker.shares.run_by(16)
    worker.come("flood", "few")
    worker.pass_with(60, flood=500, few=4)
    assert worker.flood("flood") == SEATS - 2


@given(st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 100), min_size=1), st.data())
def test_nobody_is_kept_from_an_equal_share(needed: dict[str, int], data: st.DataObject) -> None:
    """Whatever others need, and whoever took what before."""
    worker = Worker()
    worker.come(*needed)
    worker.pass_with(10, **needed)
    for tenant in data.draw(st.lists(st.sampled_from(sorted(needed)), max_size=40)):
        worker.ask(tenant)
    for tenant in needed:
        while worker.held[tenant] + 1 <= SEATS // len(needed) and worker.held.total() < SEATS:
            assert worker.ask(tenant)
