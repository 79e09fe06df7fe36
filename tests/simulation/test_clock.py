"""Virtual time: the order of timers, without their waits."""

from __future__ import annotations

import asyncio

import pytest

from penstock.simulation.clock import EPOCH, Stuck, VirtualLoop


def test_an_hour_passes_and_what_is_due_first_comes_first() -> None:
    order: list[tuple[str, float]] = []

    async def wait(name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        order.append((name, asyncio.get_running_loop().time()))

    async def run() -> float:
        await asyncio.gather(wait("last", 3600), wait("first", 1), wait("middle", 1800))
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        return loop.now()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        assert runner.run(run()) == pytest.approx(EPOCH + 3600)
    assert order == [("first", 1.0), ("middle", 1800.0), ("last", 3600.0)]


def test_no_time_passes_while_a_thread_would_work() -> None:
    async def run() -> tuple[int, float]:
        async with asyncio.timeout(0.001):
            return await asyncio.to_thread(sum, range(100_000)), asyncio.get_running_loop().time()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        assert runner.run(run()) == (4999950000, 0.0)


def test_what_waits_for_ever_is_an_error() -> None:
    async def run() -> None:
        await asyncio.Event().wait()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner, pytest.raises(Stuck):
        runner.run(run())


def test_an_error_in_a_callback_is_told_and_the_others_go_on() -> None:
    told: list[BaseException | None] = []
    order: list[str] = []

    async def run() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: told.append(context.get("exception")))
        loop.call_soon(int, "no number")
        loop.call_soon(order.append, "next")
        loop.call_later(1.0, order.append, "later")
        await asyncio.sleep(2.0)

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(run())
    assert order == ["next", "later"]
    assert [type(error) for error in told] == [ValueError]
