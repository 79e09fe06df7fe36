"""Which worker is picked, what a filling memory takes away, and who counts as alive."""

from __future__ import annotations

import asyncio
import time
import uuid

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.schemas.registry import ModelCard, WorkerCard
from penstock.stages.degradation import slots
from penstock.stages.scheduling import Candidate, LeastLoaded, MemoryAware, RoundRobin
from penstock.streams.memory import MemoryBroker
from penstock.streams.registry import Registry
from penstock.streams.topology import topology

EXAMPLES = settings(max_examples=100, deadline=None)
workers = st.lists(
    st.builds(Candidate, st.uuids().map(str), st.integers(0, 50), st.integers(0, 10_000)),
    min_size=1,
    max_size=8,
    unique_by=lambda candidate: candidate.worker,
)


@EXAMPLES
@given(workers, st.integers(1, 10))
def test_p16_least_loaded_picks_one_with_the_fewest(among: list[Candidate], rounds: int) -> None:
    """P16: least-loaded picks a worker with the fewest active batches."""
    strategy = LeastLoaded()
    for _ in range(rounds):
        picked = strategy.pick(among, 1)
        assert picked in among
        assert picked.active == min(candidate.active for candidate in among)


@EXAMPLES
@given(workers, st.integers(1, 12_000))
def test_p17_memory_aware_picks_one_with_room_or_refuses(among: list[Candidate], tokens: int) -> None:
    """P17: memory-aware picks a worker with room for the batch, or refuses."""
    picked = MemoryAware().pick(among, tokens)
    if picked is None:
        assert all(candidate.free_tokens < tokens for candidate in among)
    else:
        assert picked in among and picked.free_tokens >= tokens


@EXAMPLES
@given(workers)
def test_round_robin_gives_everyone_a_turn(among: list[Candidate]) -> None:
    strategy = RoundRobin()
    picked = [strategy.pick(among, 1) for _ in range(2 * len(among))]
    assert all(picked.count(candidate) == 2 for candidate in among)


def card(name: str) -> WorkerCard:
    model = ModelCard(name="m", source="m", backend="echo", context_length=10, created=int(time.time()))
    return WorkerCard(id=name, model=model, capacity=1, pid=1, incarnation=uuid.uuid4().hex)


@EXAMPLES
@given(st.lists(st.booleans(), min_size=1, max_size=6))
def test_p18_p19_p20_who_beats_is_eligible_and_nobody_else(lives: list[bool]) -> None:
    """P18: a worker that fails its check gets no batch after the interval. P19: one that recovers is eligible again.
    P20: N configured workers means N ready workers."""

    async def check() -> None:
        broker, interval = MemoryBroker(), 0.01
        await broker.ensure(*topology("penstock", (), workers_ttl=3 * interval))
        registry = Registry(broker, interval=interval)
        cards = [card(f"w{place}") for place in range(len(lives))]

        async def seen() -> list[str]:
            await registry.refresh()
            return [worker.id for worker in registry.workers_for("m")]

        for each in cards:
            await registry.announce_worker(each)
        assert await seen() == [each.id for each in cards]
        wanted = [each.id for each, alive in zip(cards, lives, strict=True) if alive]
        async with asyncio.timeout(10):
            while await seen() != wanted:
                for each, alive in zip(cards, lives, strict=True):
                    if alive:
                        await registry.announce_worker(each)
                await asyncio.sleep(interval)
            for each in cards:
                await registry.announce_worker(each)
            assert await seen() == [each.id for each in cards]

    asyncio.run(check())


@EXAMPLES
@given(st.floats(0, 1), st.floats(0, 1), st.integers(1, 64))
def test_a_fuller_memory_never_takes_more(one: float, other: float, size: int) -> None:
    less, more = slots(min(one, other), size, 2), slots(max(one, other), size, 2)
    assert less.high >= more.high and less.others >= more.others


def test_memory_takes_away_speed_first_then_the_low_then_all() -> None:
    assert [slots(pressure, 16, 2) for pressure in (0.69, 0.70, 0.89, 0.90, 0.94, 0.95)] == [
        (18, 16),
        (18, 8),
        (18, 8),
        (18, 0),
        (18, 0),
        (0, 0),
    ]
