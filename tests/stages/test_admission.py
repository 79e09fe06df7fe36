"""Gates, rates, and what follows from them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.schemas.jobs import Priority
from penstock.schemas.registry import Admission
from penstock.stages.admission import AdmissionControl, Drain, Hysteresis

EXAMPLES = settings(max_examples=200, deadline=None)


@EXAMPLES
@given(st.floats(1, 50), st.floats(1, 50), st.lists(st.floats(0, 120), max_size=50))
def test_p7_the_gate_changes_at_the_watermarks_alone(low: float, band: float, depths: list[float]) -> None:
    """P7: above the high watermark nothing is accepted, below the low one everything is, and the state changes only at
    those crossings."""
    high = low + band
    hysteresis = Hysteresis()
    for depth in depths:
        before = hysteresis.is_open
        after = hysteresis.update(depth, low, high)
        if depth >= high:
            assert not after
        elif depth < low:
            assert after
        else:
            assert after == before


def look(control: AdmissionControl, now: float, waiting: int, left: int) -> Admission:
    depth: dict[Priority, int] = {"high": 0, "normal": waiting, "low": 0}
    return control.update(now, depth, {"high": 0, "normal": left, "low": 0}, {"normal": {"t": waiting}})


def test_a_lane_holds_no_more_than_can_be_done_in_time() -> None:
    control = AdmissionControl(limit=10_000, low=0.8, high=0.9, horizon=100.0)
    assert look(control, 0.0, waiting=1_000, left=0).accepting["normal"]  # nobody knows yet how fast it goes
    slow = look(control, 1.0, waiting=1_000, left=5)  # 5 a second: 500 in 100 s
    assert slow.accepting == {"high": True, "normal": False, "low": True}
    assert (
        slow.retry_after["normal"] == 60.0
    )  # until 400 are left takes 120 s, but nobody waits for longer than a minute
    assert control.wait("normal", "t") == pytest.approx(200.0)
    assert control.wait("high", "t") == 0.0
    assert control.wait("low", "t") == pytest.approx(200.0)
    assert not look(control, 2.0, waiting=420, left=10).accepting["normal"]
    assert look(control, 3.0, waiting=390, left=15).accepting["normal"]


def test_retry_after_follows_the_rate() -> None:
    control = AdmissionControl(limit=100, low=0.5, high=0.9, horizon=1_000.0)
    look(control, 0.0, waiting=95, left=0)
    assert look(control, 1.0, waiting=95, left=3).retry_after["normal"] == pytest.approx(15.0)  # 45 at 3 a second


def test_an_empty_lane_says_nothing_about_its_speed() -> None:
    drain = Drain()
    drain.update(0.0, left=0, depth=10)
    assert drain.update(1.0, left=10, depth=0) == pytest.approx(10.0)
    assert drain.update(100.0, left=10, depth=0) == pytest.approx(10.0)
    assert drain.update(105.0, left=10, depth=1) == pytest.approx(10.0)
    assert drain.update(110.0, left=10, depth=1) == pytest.approx(5.0)  # one that waits in vain does


def test_a_lane_in_which_nothing_waited_says_how_fast_it_is_at_least() -> None:
    drain = Drain()
    drain.update(0.0, left=0, depth=0)
    assert drain.update(1.0, left=1, depth=0) == 0  # one came, and went at once
    assert drain.update(2.0, left=2, depth=10) == 0
    assert drain.update(3.0, left=12, depth=0) == pytest.approx(10.0)
    assert drain.update(60.0, left=13, depth=0) == pytest.approx(10.0)
    assert drain.update(61.0, left=113, depth=0) > 10.0


def test_a_burst_after_single_requests_is_accepted() -> None:
    control = AdmissionControl(limit=10_000, low=0.8, high=0.9, horizon=30.0)
    for second in range(10):
        look(control, float(second), waiting=0, left=second)
    assert look(control, 10.0, waiting=500, left=10).accepting["normal"]
    slow = AdmissionControl(limit=10_000, low=0.8, high=0.9, horizon=30.0)
    look(slow, 0.0, waiting=63, left=0)
    assert look(slow, 1.0, waiting=63, left=1).accepting["normal"]  # so few may always wait
    assert not look(slow, 2.0, waiting=64, left=2).accepting["normal"]


def test_a_moment_says_nothing_about_the_rate() -> None:
    drain = Drain()
    drain.update(0.0, left=0, depth=10)
    drain.update(1.0, left=10, depth=10)
    assert drain.update(1.01, left=15, depth=10) == pytest.approx(10.0)
    assert drain.update(2.0, left=20, depth=10) == pytest.approx(10.0)


def test_a_full_lane_is_closed_to_those_that_fill_it() -> None:
    control = AdmissionControl(limit=100, low=0.8, high=0.9, horizon=1_000.0)
    waits = {"many": 90, "few": 5}
    depth: dict[Priority, int] = {"high": 0, "normal": 95, "low": 0}
    left: dict[Priority, int] = {"high": 0, "normal": 0, "low": 0}
    control.update(0.0, depth, left, {"normal": waits})
    full = control.update(10.0, depth, left | {"normal": 10}, {"normal": waits})
    assert not full.accepting["normal"]
    allowed = [tenant for tenant in ("many", "few", "new") if full.accepts("normal", tenant)]
    assert allowed == ["few", "new"]
    # One a second leaves: 95 before one of many, and 5 + 6 before one of few, however many wait.
    assert [control.wait("normal", tenant) for tenant in ("many", "few", "new")] == [95.0, 11.0, 2.0]
    crowd = {f"t{number}": 1 for number in range(95)}
    assert control.update(20.0, depth, left, {"normal": crowd | {"t0": 2}}).accepts("normal", "new")
    small = AdmissionControl(limit=20, low=0.8, high=0.9, horizon=1_000.0)
    everyone = {f"t{number}": 1 for number in range(500)}
    closed = small.update(0.0, depth | {"normal": 500}, left, {"normal": everyone})
    assert not closed.accepts("normal", "new")  # too many to tell apart
