"""Slow work is done a few pieces at a time, and no tenant keeps another from its turn."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.schemas.errors import Overloaded
from penstock.streams.gate import MOST, MOST_BYTES, FairGate


class Office:
    """Work that goes on until it is told to end; `order` is who began."""

    def __init__(self, together: int = 2, share: int | None = None) -> None:
        self.gate = FairGate(together, "work", share=share)
        self.order: list[str] = []
        self.under_way: list[tuple[str, asyncio.Event]] = []
        self.tasks: list[asyncio.Task[None]] = []

    async def begin(self, tenant: str, size: int = 1) -> asyncio.Task[None]:
        async def work() -> None:
            async with self.gate.turn(tenant, size):
                entry = (tenant, asyncio.Event())
                self.order.append(tenant)
                self.under_way.append(entry)
                try:
                    await entry[1].wait()
                finally:
                    self.under_way.remove(entry)

        self.tasks.append(asyncio.create_task(work()))
        await settled()
        return self.tasks[-1]

    async def end_first(self) -> None:
        self.under_way[0][1].set()
        await settled()

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_another_tenant_comes_next_however_many_wait() -> None:
    office = Office()
    for _ in range(20):
        await office.begin("many")
    await office.begin("one")
    await office.end_first()
    assert office.order == ["many", "many", "one"]
    await office.end_first()
    await office.end_first()
    assert office.order[3:] == ["many", "many"]
    await office.close()


@pytest.mark.parametrize(("count", "size"), [(MOST // 2, 1), (4, MOST_BYTES // 8)])
async def test_a_tenant_has_half_of_the_room(count: int, size: int) -> None:
    office = Office(1)
    for _ in range(1 + count):
        await office.begin("many", size)
    with pytest.raises(Overloaded, match="Too many requests wait for work") as refused:
        await (await office.begin("many", size))
    assert refused.value.retry_after
    assert not (await office.begin("one", size)).done()
    await office.close()


async def test_who_gives_up_costs_the_tenant_no_place() -> None:
    office = Office(1)
    await office.begin("first")
    leaving = await office.begin("second")
    await office.begin("second")
    await office.begin("third")
    leaving.cancel()
    await settled()
    await office.end_first()
    assert office.order == ["first", "second"]
    await office.close()


async def test_who_gives_up_just_as_the_turn_comes_gives_it_back() -> None:
    office = Office(1)
    async with office.gate.turn("first", 1):
        leaving = await office.begin("second")
    leaving.cancel()  # it has its turn, and does not know
    await settled()
    assert not office.order
    await office.begin("third")
    assert office.order == ["third"]
    await office.close()


async def test_a_tenant_leaves_room_for_others() -> None:
    office = Office(4, share=3)
    for _ in range(10):
        await office.begin("many")
    assert len(office.under_way) == 3
    await office.begin("one")
    assert len(office.under_way) == 4
    await office.close()


@given(
    st.lists(st.tuples(st.sampled_from(["begin", "end", "cancel"]), st.integers(0, 5))),
    st.integers(1, 4),
    st.integers(1, 4),
)
def test_the_gate_is_never_shut_while_somebody_waits(acts: list[tuple[str, int]], together: int, share: int) -> None:
    """Whatever begins, ends and is cancelled: so many are under way as may be, and nobody is forgotten."""

    async def scene() -> None:
        office, tenants = Office(together, share), list[str]()
        for act, number in acts:
            open_tasks = [task for task in office.tasks if not task.done()]
            if act == "begin":
                tenants.append("abc"[number % 3])
                await office.begin(tenants[-1])
            elif act == "end" and office.under_way:
                await office.end_first()
            elif act == "cancel" and open_tasks:
                task = open_tasks[number % len(open_tasks)]
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
                await settled()
            left = Counter(tenant for tenant, task in zip(tenants, office.tasks, strict=True) if not task.done())
            assert len(office.under_way) == min(together, sum(min(each, share) for each in left.values()))
            assert all(each <= share for each in Counter(tenant for tenant, _ in office.under_way).values())
        while office.under_way:
            await office.end_first()
        assert all(task.done() for task in office.tasks)

    asyncio.run(scene())
