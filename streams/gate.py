"""Slow work of many tenants, a few pieces at a time, in turns: nobody's flood makes others wait for more than what is
under way."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ..schemas.errors import Overloaded

MOST, MOST_BYTES = 256, 256 << 20  # that wait, of all tenants together; one may have half of each


class FairGate:
    """Lets `together` callers in at a time: next comes the tenant with least under way that has waited longest."""

    def __init__(self, together: int, work: str, *, share: int | None = None, bounded: bool = True) -> None:
        """`work` names what is waited for, in refusals; without `bounded` any number waits. No tenant has more than
        `share` under way, so that others need not wait for the end of its work."""
        self._together, self._share, self._work, self._bounded = together, share or together, work, bounded
        self._running = Counter[str]()
        self._waiting: dict[str, deque[tuple[asyncio.Future[None], int]]] = {}  # with their bytes, by tenant

    @asynccontextmanager
    async def turn(self, tenant: str, size: int) -> AsyncIterator[None]:
        """Inside, the work is done; `size` is how many bytes it keeps in memory. Raises `Overloaded`."""
        if self._has_room(tenant):  # then nobody waits who might go
            self._running[tenant] += 1
        else:
            await self._wait(tenant, size)
        try:
            yield
        finally:
            self._end(tenant)

    def _has_room(self, tenant: str) -> bool:
        return self._running.total() < self._together and self._running[tenant] < self._share

    async def _wait(self, tenant: str, size: int) -> None:
        if self._bounded:
            self._check(tenant, size)
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append((turn, size))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._remove(tenant, turn)
            else:
                self._end(tenant)
            raise

    def _check(self, tenant: str, size: int) -> None:
        own = [each for _, each in self._waiting.get(tenant, ())]
        held = [each for line in self._waiting.values() for _, each in line]
        for found, part in ((held, 1), (own, 2)):
            if len(found) >= MOST // part or sum(found) + size > MOST_BYTES // part:
                raise Overloaded(
                    f"Too many requests wait for {self._work}; try again later.", code="queue_full", retry_after=5.0
                )

    def _remove(self, tenant: str, turn: asyncio.Future[None]) -> None:
        left = deque(each for each in self._waiting.get(tenant, ()) if each[0] is not turn)
        if left:
            self._waiting[tenant] = left  # where it stood
        else:
            self._waiting.pop(tenant, None)

    def _end(self, tenant: str) -> None:
        self._running[tenant] -= 1
        self._running += Counter()  # forgets who has nothing under way
        while free := [each for each in self._waiting if self._has_room(each)]:
            following = min(free, key=self._running.__getitem__)
            line = self._waiting.pop(following)
            turn, _ = line.popleft()
            if line:
                self._waiting[following] = line  # behind the others
            if not turn.done():
                self._running[following] += 1
                turn.set_result(None)
