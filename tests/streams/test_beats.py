"""What a process does now and then comes together."""

from __future__ import annotations

import asyncio
from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from penstock.simulation.clock import VirtualLoop
from penstock.streams.beats import until_beat


async def woken(intervals: list[float], starts: list[float], seconds: float) -> list[set[float]]:
    """The moments at which loops with these intervals and starts look, each in virtual time."""
    loop = asyncio.get_running_loop()

    async def look(interval: float, start: float, at: set[float]) -> None:
        await asyncio.sleep(start)
        while True:
            await asyncio.sleep(until_beat(interval))
            at.add(round(loop.time(), 6))

    looks: list[set[float]] = [set() for _ in intervals]
    tasks = [asyncio.create_task(look(*each)) for each in zip(intervals, starts, looks, strict=True)]
    await asyncio.sleep(seconds)
    for task in tasks:
        task.cancel()
    return looks


def watched(intervals: list[float], starts: list[float], seconds: float) -> list[set[float]]:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(woken(intervals, starts, seconds))


def test_what_comes_about_once_a_second_comes_in_few_turns() -> None:
    looks = watched([1.0, 1.0, 5 / 3, 5 / 3, 1.0], [0.1, 0.23, 0.31, 0.77, 0.9], 60.0)
    assert len(set().union(*looks)) <= 120
    assert all(58 <= len(looks[number]) <= 60 for number in (0, 1, 4))


@given(st.floats(0.001, 100.0), st.floats(0.0, 10.0))
@example(0.03, 2.84375)  # the first pause is as long as it may be
def test_nothing_comes_later_than_it_is_due_or_much_sooner(interval: float, start: float) -> None:
    (at,) = watched([interval], [start], start + 5.2 * interval + 0.0101)
    moments = [start, *sorted(at)]
    pauses = [second - first for first, second in pairwise(moments)]
    assert len(pauses) >= 5
    assert all(interval / 4 < pause <= interval + 0.0101 for pause in pauses)
