"""Who has had how much, and who is next."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.schemas.registry import Room
from penstock.stages.batch.usage import SEAT, TenantUsage

EXAMPLES = settings(max_examples=100, deadline=None)
LARGEST = 1_000  # weighted tokens of a job


def room(served: dict[str, int], running: dict[str, int] | None = None, process: str = "i") -> Room:
    return Room(
        worker="w",
        incarnation=process,
        free=1,
        free_high=1,
        received={},
        active=0,
        free_tokens=1,
        tenants=running or {},
        served=served,
    )


@EXAMPLES
@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, LARGEST)), min_size=1, max_size=200),
    st.fixed_dictionaries({tenant: st.integers(1, 4) for tenant in "abc"}),
)
def test_tenants_that_always_wait_get_their_shares(costs: list[tuple[str, int]], weights: dict[str, int]) -> None:
    """Whatever each job costs, and although that is known only when a worker reports it: nobody is ahead of anybody
    else by more than the largest job and what a seat is taken for."""
    usage = TenantUsage({tenant: float(weight) for tenant, weight in weights.items()})
    cost = {tenant: [size for name, size in costs if name == tenant] or [LARGEST] for tenant in "abc"}
    served, jobs = Counter[str](), Counter[str]()
    usage.hear(room(dict.fromkeys("abc", 0)))
    for _ in range(300):
        first = min("abc", key=usage.counter)
        usage.send(first, SEAT)
        served[first] += cost[first][jobs[first] % len(cost[first])]
        jobs[first] += 1
        usage.arrive(first, SEAT)
        usage.hear(room(dict(served)))
        shares = [served[tenant] / weights[tenant] for tenant in "abc"]
        assert max(shares) - min(shares) <= LARGEST


def test_whoever_comes_back_owes_nothing_and_is_owed_nothing() -> None:
    usage = TenantUsage()
    usage.hear(room({"a": 0, "b": 0}))
    usage.enter("a")
    usage.hear(room({"a": 5_000, "b": 0}))
    usage.send("a", 100)
    usage.enter("b")
    assert usage.counter("b") == 5_000  # and not 0: it would keep "a" away for 5,000 tokens
    usage.hear(room({"a": 9_000, "b": 0}))
    usage.enter("b")
    assert usage.counter("b") == 5_000  # as much as "a" had when it went last
    usage.enter("a")
    assert usage.counter("a") == 9_100


def test_what_runs_and_what_is_on_its_way_counts_until_its_worker_reports_it_or_is_gone() -> None:
    usage = TenantUsage({"a": 2.0})
    usage.hear(room({"a": 10}, {"a": 3}))
    usage.send("a", 500)
    assert usage.counter("a") == (3 * SEAT + 500) / 2  # the 10 are from before we came
    usage.arrive("a", 500)
    usage.hear(room({"a": 40}, {"a": 1}))
    assert usage.counter("a") == (SEAT + 30) / 2
    usage.hear(room({"a": 7}, process="another"))
    assert usage.counter("a") == 30 / 2
    usage.hear(room({}, {"a": 1}, process="another"))  # of an older release, or nothing new
    usage.forget("w")
    assert usage.counter("a") == 30 / 2
