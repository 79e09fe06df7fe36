"""What tenants need of a model's workers, and what each leaves free for the others.

A tenant that floods takes every seat that another one leaves for a moment, and the other then waits for one of the
flood's requests to end. So a worker keeps seats free for those who came lately: as many as they have needed on average,
and a margin, since they come unevenly. That is little for others that seldom come, and never more than leaves each
tenant its equal share.

Knows no broker and no clock.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from math import ceil, inf, sqrt

from .usage import MOST_TENANTS

Held = Callable[[], Counter[str]]

RECENT = 60.0  # seconds for which seats are kept for a tenant that has sent requests
# Of an average, what was needed last, each second: it rises in two and falls in twenty, and sooner if nothing more
# comes, since who waits would wait for nobody.
_RISE, _FALL = 0.5, 0.05
_MARGIN = 2.0  # in roots of what is needed: if requests come by chance, few find more of them there
_LEAST = 0.5  # seats; for less, none is kept: it would be half of a small worker, long after a flood is over


class SeatShares:
    """Of one revision of a model."""

    def __init__(self, most: float = 1.0, weights: Mapping[str, float] | None = None) -> None:
        """`most` of a worker's seats may be one tenant's while others come."""
        self._most = most
        self._weights = weights or {}
        self._came: OrderedDict[str, float] = OrderedDict()  # when each came last, that of the newest last
        self._total = 0.0  # the weights of those
        self._needs: dict[str, float] = {}  # seats that each has needed on average; set by look
        self._known: dict[int, float] = {}  # what all need of a worker, by its seats
        self._workers = 1  # how many run the model
        self._capacity = 0  # seats of the largest of them; set by allow
        self.version = 0  # what `allow` says of a worker that has not changed is the same as long as this is

    def run_by(self, workers: int) -> None:
        """So many run the model."""
        if workers != self._workers:
            self._workers = workers
            self._forget()

    def came(self, tenant: str, now: float) -> None:
        """The tenant has sent a request."""
        if tenant not in self._came:
            self._total += self._weight(tenant)
            self._forget()
        self._came[tenant] = now
        self._came.move_to_end(tenant)
        if len(self._came) > MOST_TENANTS:
            self._drop()

    def look(self, needed: Counter[str], now: float) -> None:
        """Each second: the seats that tenants hold, and those that they wait for."""
        for tenant, number in needed.items():
            if number > 0:
                self.came(tenant, now)
        while self._came and now - next(iter(self._came.values())) >= RECENT:
            self._drop()
        for tenant, came in self._came.items():
            before = self._needs.get(tenant, 0.0)
            need = min(float(needed[tenant]), self._share(tenant, self._capacity) * self._workers or inf)
            step = _RISE if need > before else min(1.0, _FALL * (1.0 + now - came))
            self._needs[tenant] = before + step * (need - before)
        self._forget()

    def allow(self, tenant: str, wanted: int, held: Held, capacity: int, free: int, now: float) -> bool:
        """Whether a tenant may have `wanted` more seats of a worker of `capacity` that has `free` ones for it.

        `held` gives those of each tenant there.
        """
        self._capacity = max(self._capacity, capacity)
        if not self._others(tenant, now):
            return True
        by_tenant = held()
        taken = by_tenant[tenant]
        if taken == 0:
            return True
        if taken + wanted > ceil(self._most * capacity):
            return False
        share = self._share(tenant, capacity)
        if taken + wanted <= share or free - wanted >= capacity - share:
            return True
        needed = self._needed(capacity) - self._part(tenant, capacity)
        kept = min(needed + _MARGIN * sqrt(max(0.0, needed)), capacity - share)
        used = sum(min(number, self._share(other, capacity)) for other, number in by_tenant.items() if other != tenant)
        return kept < _LEAST or free - wanted >= ceil(kept - used - 1e-9)

    def _others(self, tenant: str, now: float) -> bool:
        """Whether anybody else came lately."""
        for other in reversed(self._came):
            if other != tenant:
                return now - self._came[other] < RECENT
        return False

    def _needed(self, capacity: int) -> float:
        """What all together need of a worker."""
        if capacity not in self._known:
            self._known[capacity] = sum(self._part(tenant, capacity) for tenant in self._needs)
        return self._known[capacity]

    def _part(self, tenant: str, capacity: int) -> float:
        return min(self._needs.get(tenant, 0.0) / self._workers, self._share(tenant, capacity))

    def _share(self, tenant: str, capacity: int) -> float:
        """An equal share of a worker's seats, by weights."""
        return capacity * self._weight(tenant) / max(self._total, self._weight(tenant))

    def _weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)

    def _drop(self) -> None:
        tenant, _ = self._came.popitem(last=False)
        self._needs.pop(tenant, None)
        self._total -= self._weight(tenant)
        self._forget()

    def _forget(self) -> None:
        self._known.clear()
        self.version += 1
