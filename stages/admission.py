"""How much the queue accepts: a gate with two watermarks for each lane, and the rate at which lanes drain.

Knows no broker: numbers in, decisions out.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

from ..schemas.jobs import Priority
from ..schemas.registry import Admission
from ..streams.topology import PRIORITIES

_HALF_LIFE = 5.0  # seconds after which a measurement counts half
_SHORTEST = 0.1  # seconds; shorter samples are noise
_LEAST_DEPTH = 64  # requests that may always wait
_MOST_LISTED = 100  # tenants that are told apart where a lane is closed; of more it is closed to all
_LONGEST = 60.0  # seconds; cap of Retry-After, since clients abandon longer waits


class Hysteresis:
    """Closed at or above the high watermark, open below the low one, and between them as it was."""

    def __init__(self) -> None:
        self.is_open = True

    def update(self, depth: float, low: float, high: float) -> bool:
        if depth >= high:
            self.is_open = False
        elif depth < low:
            self.is_open = True
        return self.is_open


class Drain:
    """Requests a second that leave a lane, from counts of those that have left; 0 until some did while others waited.

    From a lane in which nothing waits they leave as fast as they come: that says how fast it is at least, and no more.
    """

    def __init__(self) -> None:
        self.rate = 0.0
        self._seen: tuple[float, int] | None = None  # when, and how many had left
        self._waited = False  # whether some did at the last count

    def update(self, now: float, left: int, depth: int) -> float:
        """`left` have gone since the beginning, `depth` wait."""
        before, gone = self._seen or (now, left)
        elapsed = now - before
        if self._seen is not None and elapsed < _SHORTEST:
            return self.rate
        if elapsed > 0:
            rate = (left - gone) / elapsed
            if self._waited or rate > self.rate > 0:
                weight = 1 - 0.5 ** (elapsed / _HALF_LIFE) if self.rate else 1.0
                self.rate += weight * (rate - self.rate)
        self._seen, self._waited = (now, left), depth > 0
        return self.rate

    def resume(self, now: float) -> None:
        """Nothing has left since the last count; the next one is measured from `now`."""
        if self._seen is not None:
            self._seen = now, self._seen[1]


class AdmissionControl:
    """Decides for the lanes of a model. A lane holds at most `limit` requests, nor more than can be done in `horizon`
    seconds.

    `low` and `high` are the watermarks, as shares of that.
    """

    def __init__(self, limit: int, low: float, high: float, horizon: float) -> None:
        self._limit, self._low, self._high, self._horizon = limit, low, high, horizon
        self._gates = {priority: Hysteresis() for priority in PRIORITIES}
        self._drains = {priority: Drain() for priority in PRIORITIES}
        self.full = dict.fromkeys(PRIORITIES, inf)  # the depth at which a lane that is open closes; set by update
        self._waiting: dict[Priority, Mapping[str, int]] = {}  # by tenant; set by update
        self.last = Admission(  # set by update
            accepting=dict.fromkeys(PRIORITIES, True),
            retry_after=dict.fromkeys(PRIORITIES, 1.0),
            depth=dict.fromkeys(PRIORITIES, 0),
        )

    def update(
        self,
        now: float,
        depth: dict[Priority, int],
        left: dict[Priority, int],
        tenants: Mapping[Priority, Mapping[str, int]],
    ) -> Admission:
        """The new admission. `now` is in seconds; by lane, `depth` counts waiting jobs, `left` those that left, and
        `tenants` those that wait of each tenant.

        A closed lane is closed to those that crowd it: who has less there than an equal share for each, and one to
        spare, is accepted, until the lane's stream itself is full.
        """
        accepting: dict[Priority, bool] = {}
        retry_after: dict[Priority, float] = {}
        crowding: dict[Priority, list[str]] = {}
        for priority in PRIORITIES:
            rate = self._drains[priority].update(now, left[priority], depth[priority])
            most = min(self._limit, max(_LEAST_DEPTH / self._high, rate * self._horizon)) if rate else self._limit
            accepting[priority] = self._gates[priority].update(depth[priority], self._low * most, self._high * most)
            self.full[priority] = self._high * most if accepting[priority] else inf
            waiting = self._waiting[priority] = tenants.get(priority, {})
            if not accepting[priority]:
                share = self._high * most / (len(waiting) + 1)
                crowds = [tenant for tenant, number in waiting.items() if number >= share]
                if waiting and len(crowds) <= _MOST_LISTED:
                    crowding[priority] = crowds
            excess = max(1.0, depth[priority] - self._low * most)
            retry_after[priority] = min(_LONGEST, max(1.0, excess / rate)) if rate else _LONGEST / 12
        self.last = Admission(accepting=accepting, retry_after=retry_after, depth=depth, crowding=crowding)
        return self.last

    def resume(self, now: float) -> None:
        """The lanes have been empty until `now`, or without a worker: that time says nothing about their speed."""
        for drain in self._drains.values():
            drain.resume(now)

    def adopt(self, accepting: dict[Priority, bool]) -> None:
        """Adopt the state that all copies share."""
        for priority, is_open in accepting.items():
            self._gates[priority].is_open = is_open
        self.last = self.last.model_copy(update={"accepting": accepting})

    def waiting(self, priority: Priority, tenant: str) -> int:
        """How many of a tenant waited at the last update."""
        return self._waiting.get(priority, {}).get(tenant, 0)

    def wait(self, priority: Priority, tenant: str) -> float:
        """Seconds that a tenant's request would now wait: until those before it have gone, at the rate at which all go.

        In its own lane only as many of each other tenant are before it as of its own.
        """
        rate = sum(drain.rate for drain in self._drains.values())
        ahead = sum(self.last.depth[each] for each in PRIORITIES[: PRIORITIES.index(priority)])
        waiting = self._waiting.get(priority, {})
        own = waiting.get(tenant, 0)
        ahead += own + sum(min(own + 1, number) for other, number in waiting.items() if other != tenant)
        return ahead / rate if rate else 0.0
