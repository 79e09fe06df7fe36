"""The order in which jobs go."""

from __future__ import annotations

import asyncio
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.schemas.jobs import Priority, ValidatedJob
from penstock.schemas.params import GenerationParams
from penstock.stages.batch.lanes import Lanes, Waiting
from penstock.stages.batch.usage import TenantUsage
from penstock.streams.topology import PRIORITIES

EXAMPLES = settings(max_examples=200, deadline=None)


def waiting(priority: Priority, sequence: int, created: float = 0.0, tenant: str = "t") -> Waiting:
    job = ValidatedJob(
        id=f"{priority}-{sequence}",
        endpoint="/v1/completions",
        bridge="b",
        tenant=tenant,
        priority=priority,
        model="m",
        prompts=((1,),),
        params=GenerationParams(),
        created=created,
        deadline=created + 1e6,
        body={},
    )
    return Waiting(job, sequence, 1, sent=asyncio.Future(loop=LOOP))


LOOP = asyncio.new_event_loop()


def drained(lanes: Lanes, now: float) -> list[Waiting]:
    order = []
    while heads := lanes.heads(now):
        lanes.pop(heads[0])
        order.append(heads[0])
    return order


@EXAMPLES
@given(st.permutations(range(30)), st.data())
def test_p6_high_before_normal_before_low_and_fifo_inside(arrival: list[int], data: st.DataObject) -> None:
    """P6: all high before normal before low, FIFO inside each."""
    lanes = Lanes(ageing=30.0)
    places = [waiting(data.draw(st.sampled_from(PRIORITIES)), sequence) for sequence in arrival]
    for place in places:
        lanes.push(place)
    assert drained(lanes, now=10.0) == sorted(places, key=lambda place: (place.rank, place.sequence))


@EXAMPLES
@given(st.integers(1, 200))
def test_no_stream_of_high_ones_keeps_a_low_one_back_for_ever(period: int) -> None:
    lanes = Lanes(ageing=30.0)
    low = waiting("low", 1)
    lanes.push(low)
    for second in range(0, 1_000, period):
        lanes.push(waiting("high", second, created=float(second)))
        first = lanes.heads(float(second))[0]
        lanes.pop(first)
        if first is low:
            assert second > 60  # two priorities' worth
            return
    assert period > 90  # it went whenever nobody else was there


@EXAMPLES
@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=40))
def test_tenants_take_turns_and_keep_their_own_order(steps: list[tuple[str, bool]]) -> None:
    """In any order of coming and going: whoever waits is passed by each other tenant once at most."""
    lanes, waits = Lanes(ageing=None), dict[str, list[int]]()
    passed = Counter[tuple[str, str]]()  # who waits, and who has gone since it was its turn or it came
    for number, (tenant, comes) in enumerate(steps):
        if comes:
            lanes.push(waiting("normal", number, tenant=tenant))
            waits.setdefault(tenant, []).append(number)
        elif heads := lanes.heads(0.0):
            lanes.pop(heads[0])
            gone = heads[0].job.tenant
            assert waits[gone].pop(0) == heads[0].sequence
            for other in [other for other, line in waits.items() if line and other != gone]:
                passed[other, gone] += 1
                assert passed[other, gone] == 1
            for pair in [pair for pair in passed if pair[0] == gone or not waits[pair[0]]]:
                del passed[pair]


def test_what_ran_already_goes_before_every_turn() -> None:
    lanes = Lanes(ageing=None)
    for number, tenant in enumerate("aab"):
        lanes.push(waiting("normal", number, tenant=tenant))
    lanes.push(waiting("normal", -5, tenant="a"))
    assert [place.sequence for place in drained(lanes, 0.0)] == [-5, 2, 0, 1]


def test_a_long_queue_does_not_make_its_tenant_more_urgent_than_others() -> None:
    """What has waited for long goes first, but not before a higher one of a tenant that has had less."""
    for tenants, first in ((["many", "few"], "high"), (["few", "many"], "normal"), (["few", "few"], "normal")):
        usage = TenantUsage()
        lanes = Lanes(ageing=30.0, usage=usage)
        old, urgent = tenants
        lanes.push(waiting("normal", 1, created=0.0, tenant=old))
        lanes.push(waiting("high", 2, created=100.0, tenant=urgent))
        usage.send("many", 1_000)
        assert lanes.heads(100.0)[0].job.priority == first


def test_without_ageing_the_order_is_strict() -> None:
    lanes = Lanes(ageing=None)
    lanes.push(waiting("low", 1))
    lanes.push(waiting("high", 2, created=1e6))
    assert [place.job.priority for place in drained(lanes, now=1e6)] == ["high", "low"]


def test_what_has_been_settled_is_passed_over_and_what_was_removed_is_gone() -> None:
    lanes = Lanes(ageing=None)
    one, two, three = (waiting("normal", sequence) for sequence in (1, 2, 3))
    for place in (one, two, three):
        lanes.push(place)
    one.sent.set_result(False)
    lanes.remove(two)
    lanes.remove(two)
    assert drained(lanes, 0.0) == [three]
    assert not lanes
