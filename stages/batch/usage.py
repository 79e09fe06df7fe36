"""What each tenant has had of a model's workers, counted in weighted tokens: the tenant with the least is served next.

These are the virtual counters of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024). Workers report
what they have computed to every copy of the batch stage, so that copies agree without talking to each other; what this
copy has sent counts from then on. A tenant that comes back is lifted to the others: nobody saves up for later.

Knows no broker and no clock.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping

from ...schemas.jobs import ValidatedJob
from ...schemas.registry import Room

MOST_TENANTS = 10_000  # that are remembered
SEAT = 32  # weighted tokens that a running choice counts for, besides those that it has had


def cost_of(job: ValidatedJob, seats: int) -> int:
    """Weighted tokens that a job counts for until a worker reports it."""
    return job.prompt_tokens + SEAT * seats


class TenantUsage:
    """Of one revision of a model. A tenant of weight 2 may have twice as much as one of weight 1, the default."""

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights = weights or {}
        self._used: OrderedDict[str, float] = OrderedDict()  # weighted tokens, the least recently changed first
        self._sent = Counter[str]()  # weighted tokens on their way from this copy; set by send and arrive
        self._running = Counter[str]()  # seats; set by hear and forget
        self._rooms: dict[str, Room] = {}  # the newest report of each worker; set by hear and forget
        self._served: dict[str, dict[str, int]] = {}  # by worker and tenant, as its process said last; set by hear
        self._virtual = 0.0  # what the tenant served last had had by then, for its weight; set by send

    def counter(self, tenant: str) -> float:
        """Weighted tokens for each unit of the tenant's weight."""
        expected = self._sent[tenant] + SEAT * self._running[tenant]
        return self._had(tenant) + expected / self._weights.get(tenant, 1.0)

    def enter(self, tenant: str) -> None:
        """A tenant of whom nothing waited sends a job: what it did not use before is gone."""
        if (missing := self._virtual - self._had(tenant)) > 0:
            self._add(tenant, missing * self._weights.get(tenant, 1.0))

    def send(self, tenant: str, cost: int) -> None:
        """A job leaves for a worker."""
        self._virtual = self._had(tenant)
        self._sent[tenant] += cost

    def arrive(self, tenant: str, cost: int) -> None:
        """Its worker reports it from now on, or it was lost."""
        self._sent[tenant] -= cost
        if not self._sent[tenant]:
            del self._sent[tenant]

    @property
    def running(self) -> Counter[str]:
        """The seats of each tenant that workers have reported."""
        return self._running

    def hear(self, room: Room) -> None:
        """Take a worker's report."""
        before = self._rooms.get(room.worker)
        if before is not None and before.incarnation != room.incarnation:
            self.forget(room.worker)
            before = None
        if before is not None:
            self._running -= Counter(before.tenants)  # drops what has come to 0
        self._running += Counter(room.tenants)
        self._rooms[room.worker] = room
        served = self._served.setdefault(room.worker, {})
        for tenant, tokens in room.served.items():
            self._add(tenant, max(0, tokens - served.get(tenant, tokens)))  # unseen: from here on
            served[tenant] = tokens
        if len(served) > MOST_TENANTS:
            self._served[room.worker] = dict(room.served)

    def forget(self, worker: str) -> None:
        """A worker is gone."""
        if (room := self._rooms.pop(worker, None)) is not None:
            self._running -= Counter(room.tenants)
            del self._served[worker]

    def _had(self, tenant: str) -> float:
        return self._used.get(tenant, 0.0) / self._weights.get(tenant, 1.0)

    def _add(self, tenant: str, tokens: float) -> None:
        self._used[tenant] = self._used.get(tenant, 0.0) + tokens
        self._used.move_to_end(tenant)
        if len(self._used) > MOST_TENANTS:
            self._used.popitem(last=False)
