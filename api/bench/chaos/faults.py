"""The faults of `penstock bench chaos`: kills, TCP resets, stops, a blackout of everything, a slow follower.

A strike counts only if it had an effect: the process has died, connections were open. It ends when the part serves
again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from math import inf
from random import Random
from typing import Any, NamedTuple

from ....schemas.errors import BrokerAway, BrokerUnavailable, Transient
from ....streams.stores.registry import Registry
from ...serve.processes import ProcessKeeper
from ..answers import ReceivedAnswer
from ..brokers import Brokers
from ..load import clock
from ..offered import placed
from ..server import START_LIMIT

POLL = 0.2  # seconds between two checks whether a part is back
LEAST_SLOW = 0.05  # seconds that a slow follower is behind at least
SLOW_FOR = 20.0  # seconds until another node is the slow one

Blow = Callable[[], Coroutine[Any, Any, None]]


@dataclass(slots=True)
class Strike:
    """`at` and `away` are in seconds, the first of `clock`; `away` is None until the part is back."""

    fault: str
    part: str
    at: float
    away: float | None = None

    @property
    def kind(self) -> str:
        """The fault and what it struck, whichever copy."""
        return f"{self.fault} {self.part.partition(' ')[0]}"

    @property
    def until(self) -> float:
        """When the part was back."""
        return inf if self.away is None else self.at + self.away + POLL


class Pause(NamedTuple):
    """A time in which a client received nothing, in seconds, and the index of its request."""

    seconds: float
    request: int


def longest_pauses(strikes: Sequence[Strike], answers: Sequence[ReceivedAnswer]) -> list[Pause]:
    """The longest pause that each strike began: the first one in the pause, else the last one that was not over.

    Those of less than `POLL` are how tokens come.
    """
    found = [Pause(0.0, -1)] * len(strikes)
    order = sorted(range(len(strikes)), key=lambda index: strikes[index].at)
    for request, answer in enumerate(answers):
        for since, until in (pause for pause in answer.pauses if pause[1] - pause[0] > POLL):
            within = [index for index in order if since <= strikes[index].at < until]
            under_way = [index for index in order if strikes[index].at < since <= strikes[index].until]
            for index in within[:1] or under_way[-1:]:
                found[index] = max(found[index], Pause(until - since, request))
    return found


class Faults:
    """Strikes parts by their names: `worker 0`, `batch 0`, `bridge 1`, `broker 2`; `ports` are those of the bridges."""

    def __init__(
        self, keeper: ProcessKeeper, brokers: Brokers, registry: Registry, ports: dict[str, int], asked: Any
    ) -> None:
        self.strikes: list[Strike] = []
        self._keeper, self._brokers, self._registry = keeper, brokers, registry
        self._ports, self._asked = ports, asked
        self._random = Random(asked.seed)

    async def strike_at_random(self) -> None:
        """Kill, reset and slow down until cancelled."""
        async with asyncio.TaskGroup() as group:
            if self._asked.victims:
                group.create_task(self._repeat(self._asked.interval, self._kill_one))
            if self._asked.resets:
                group.create_task(self._repeat(self._asked.resets, self._reset_one))
            if self._asked.slow:
                group.create_task(self._slow_down())

    def planned(self) -> list[Blow]:
        """The strikes that happen once, one after the other, in this order."""
        asked, nodes = self._asked, len(self._brokers.nodes)
        kills = [partial(self._kill, f"broker {turn % nodes}") for turn in range(asked.broker_restarts)]
        stops = [partial(self._stop, seconds) for seconds in asked.stops]
        blackout = [self._black_out] if asked.blackout else []
        return [*kills, *stops, *blackout]

    async def settle(self) -> None:
        """Return when every part that was struck is back, or has not come back in `START_LIMIT`."""
        for strike in self.strikes:
            if strike.away is None:
                await self._recover(strike)

    async def _repeat(self, interval: float, strike: Blow) -> None:
        async with asyncio.TaskGroup() as group:
            while True:
                await asyncio.sleep(self._random.uniform(0.5, 1.5) * interval)
                group.create_task(strike())

    async def _kill_one(self) -> None:
        with contextlib.suppress(Transient):
            await self._registry.refresh()  # agents start and end workers at any time
        if part := self._choose():
            await self._kill(part)

    async def _kill(self, part: str) -> None:
        """Kill a part, once it is alive, and return when another process serves as it."""
        while (pid := self._living().get(part)) is None:  # noqa: ASYNC110
            await asyncio.sleep(POLL)
        strike = Strike("kill", part, clock())
        if not _signal(pid, signal.SIGKILL):
            return
        while self._living().get(part) == pid:  # noqa: ASYNC110
            await asyncio.sleep(POLL / 10)
        self.strikes.append(strike)
        await self._recover(strike, pid)

    async def _reset_one(self) -> None:
        part = self._random.choice(sorted(self._brokers.links))
        links = self._brokers.links[part]
        strike = Strike("reset", part, clock())
        if not sum(link.cut() for link in links):
            return  # it was connecting
        self.strikes.append(strike)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_LIMIT):
                while not any(link.connections for link in links):  # noqa: ASYNC110
                    await asyncio.sleep(POLL / 10)
                strike.away = clock() - strike.at

    async def _stop(self, seconds: float) -> None:
        """Stop a part, whose connections stay open, and let it continue."""
        while (part := self._choose()) is None:  # noqa: ASYNC110
            await asyncio.sleep(POLL)
        pid = self._living()[part]
        strike = Strike(f"stop {seconds:g} s", part, clock())
        if _signal(pid, signal.SIGSTOP):
            self.strikes.append(strike)
            try:
                await asyncio.sleep(seconds)
            finally:
                _signal(pid, signal.SIGCONT)
            await self._recover(strike)

    async def _black_out(self) -> None:
        """Kill everything, leave it dead for a while, and start all of it again."""
        gates = self._keeper.may_start, self._brokers.may_start
        for gate in gates:
            gate.clear()
        strike, pids = Strike("blackout", "everything", clock()), self._living()
        for pid in pids.values():
            _signal(pid, signal.SIGKILL)
        while self._living():  # noqa: ASYNC110
            await asyncio.sleep(POLL / 10)
        self.strikes.append(strike)
        await asyncio.sleep(self._asked.blackout)
        for gate in gates:
            gate.set()
        for part, pid in pids.items():
            await self._back(part, pid)
        strike.away = clock() - strike.at

    async def _slow_down(self) -> None:
        """Keep one node behind the others, another one each time, that leads nothing when it begins."""
        nodes = len(self._brokers.nodes)
        for node in cycle(range(nodes)):
            is_follower = False
            with contextlib.suppress(BrokerAway, BrokerUnavailable):  # it is dead, or the stream has no leader
                is_follower = await self._brokers.be_a_follower(node)
            if not is_follower:
                await asyncio.sleep(POLL)
                continue
            strike = Strike("slow", f"broker {node}", clock())
            self.strikes.append(strike)
            try:
                while clock() - strike.at < SLOW_FOR:
                    self._brokers.delay(node, self._random.uniform(LEAST_SLOW, self._asked.slow))
                    await asyncio.sleep(1.0)
            finally:
                self._brokers.delay(node, 0.0)
                strike.away = clock() - strike.at

    def _choose(self) -> str | None:
        """A living part of the kinds to strike, each kind with the same probability."""
        kind, copy = self._random.choice(self._asked.victims), self._random.random()
        copies = [name for name in self._living() if name.partition(" ")[0] == kind]
        return copies[int(copy * len(copies))] if copies else None

    async def _recover(self, strike: Strike, killed: int | None = None) -> None:
        if await self._back(strike.part, killed):
            strike.away = clock() - strike.at

    async def _back(self, part: str, killed: int | None) -> bool:
        """Wait until a process other than a killed one serves as `part`; False where none does in `START_LIMIT`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_LIMIT):
                while not await self._serves(part, killed):  # noqa: ASYNC110
                    await asyncio.sleep(POLL)
                return True
        return False

    async def _serves(self, part: str, killed: int | None) -> bool:
        if killed is not None and part.startswith("worker") and self._asked.names:
            return True  # another is started once its model is asked for
        pid = self._living().get(part)
        if pid in (None, killed):
            return False
        try:
            if port := self._ports.get(part):
                (await asyncio.open_connection("127.0.0.1", port))[1].close()
            else:
                await self._registry.refresh()
        except (OSError, Transient):
            return False
        serving = {card.pid for card in self._registry.workers + self._registry.stages}
        return pid in serving or part.startswith(("broker", "agent")) or part in self._ports

    def _living(self) -> dict[str, int]:
        """The process of each part."""
        found = {name: child.pid for name, child in self._keeper.running.items() if child.returncode is None}
        found |= {name: card.pid for name, card in placed(self._registry).items()}
        nodes = enumerate(self._brokers.nodes)
        return found | {f"broker {index}": node.pid for index, node in nodes if node.alive}


def _signal(pid: int, number: signal.Signals) -> bool:
    """False where the process has gone."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True
