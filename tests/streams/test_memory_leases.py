"""Leases in memory: each expires so long after its own beginning or renewal, in whatever order those come."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from penstock.simulation.clock import VirtualLoop
from penstock.streams.memory.broker import MemoryBroker
from penstock.streams.port import Consumer, ConsumerSpec, Delivery, StreamSpec

LEASE = 10.0


def spec(ack_wait: float = LEASE) -> ConsumerSpec:
    return ConsumerSpec("S", "c", "s.>", ack_wait=ack_wait)


async def opened() -> tuple[MemoryBroker, Consumer, list[Delivery]]:
    """Three messages, leased at the seconds 0, 1 and 2."""
    broker = MemoryBroker()
    await broker.ensure([StreamSpec("S", ("s.>",), "work_queue", "memory", discard="new")], [])
    consumer = await broker.consume(spec(), prefetch=1)
    leased: list[Delivery] = []
    for second in range(3):
        await asyncio.sleep(second - asyncio.get_running_loop().time())
        await broker.publish(f"s.{second}", b"", message_id=str(second))
        leased += await consumer.take(1)
    return broker, consumer, leased


async def come_again(consumer: Consumer, number: int) -> list[tuple[str, float]]:
    """The subjects of so many deliveries, and when each came."""
    found: list[tuple[str, float]] = []
    while len(found) < number:
        for delivery in await consumer.take(1):
            assert delivery.attempt > 1
            found.append((delivery.message.subject, asyncio.get_running_loop().time()))
            await delivery.ack()
    return found


async def renewed() -> list[tuple[str, float]]:
    _, consumer, (first, *_) = await opened()
    await asyncio.sleep(3)
    await first.in_progress()
    return await come_again(consumer, 3)


async def given_back() -> list[tuple[str, float]]:
    _, consumer, (first, _, third) = await opened()
    await first.nak(2.5)
    await third.ack()
    return await come_again(consumer, 2)


async def shortened() -> list[tuple[str, float]]:
    broker, consumer, _ = await opened()
    await consumer.close()
    await asyncio.sleep(1)
    return await come_again(await broker.consume(spec(ack_wait=3.5), prefetch=1), 3)


@pytest.mark.parametrize(
    ("happening", "expected"),
    [
        (renewed, [("s.1", 11.0), ("s.2", 12.0), ("s.0", 15.0)]),
        (given_back, [("s.0", 4.5), ("s.1", 11.0)]),
        (shortened, [("s.0", 3.5), ("s.1", 4.5), ("s.2", 5.5)]),
    ],
)
def test_each_comes_again_when_its_own_lease_ends(
    happening: Callable[[], Awaitable[list[tuple[str, float]]]], expected: list[tuple[str, float]]
) -> None:
    async def run() -> list[tuple[str, float]]:
        return await happening()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        assert runner.run(run()) == expected
