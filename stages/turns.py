"""Who is handled next where several lanes share a stage: the highest first, and the others not never."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

PASSED_OVER = 16  # times in a row that a lane with something to do lets others go first


class Turns:
    """At most `most` at a time, of all lanes together; lane 0 goes first. A single lane is first come, first served."""

    def __init__(self, most: int, lanes: int = 1) -> None:
        self.is_shared = lanes > 1
        self._most = most
        self._running = 0
        self._waiting: tuple[deque[asyncio.Future[None]], ...] = tuple(deque() for _ in range(lanes))
        self._passed_over = [0] * lanes  # since the lane's last turn

    @property
    def free(self) -> int:
        return self._most - self._running

    def is_waiting(self, lane: int) -> bool:
        return bool(self._waiting[lane])

    async def take(self, lane: int) -> None:
        """Return when it is the caller's turn, who then owes a `give_back`."""
        if self._running < self._most and not any(self._waiting):
            self._running += 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting[lane].append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self.give_back()
            elif turn in self._waiting[lane]:
                self._waiting[lane].remove(turn)
            raise

    def give_back(self) -> None:
        self._running -= 1
        while any(self._waiting) and self.free > 0:
            turn = self._waiting[self._next()].popleft()
            if not turn.done():  # else its task is about to be cancelled
                self._running += 1
                turn.set_result(None)

    def _next(self) -> int:
        waiting = [lane for lane, turns in enumerate(self._waiting) if turns]
        lane = next((lane for lane in reversed(waiting) if self._passed_over[lane] >= PASSED_OVER), waiting[0])
        for other in waiting:
            self._passed_over[other] += other != lane
        self._passed_over[lane] = 0
        return lane


class Turn:
    """A turn that was taken, and ends once, however often it is told to."""

    def __init__(self, turns: Turns, left: Callable[[], None]) -> None:
        """`left` is called when somebody leaves it who goes on."""
        self._turns, self._left, self._is_over = turns, left, False

    def end(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._turns.give_back()

    def leave(self) -> None:
        """End it, though what it was taken for goes on."""
        self.end()
        self._left()
