"""Which rows go before others of the same priority, and how many of one request may run. Never sees a tensor.

The rows of a tenant on which clearly more than an equal share was spent of late give way. A flood fills the batch, and
its prompts, or a few long ones, fill the steps; the prompt of another tenant would wait behind all of them, and then
share each step with them. Who gives way gets less, and soon gives way no more: nobody waits for ever.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from ....schemas.jobs import most_together
from ....schemas.registry import OUTPUT_WEIGHT
from .rows import Row, Scheduled

_SLACK = 0.05  # of all that was spent: tenants that are about equal do not give way to each other
_HALF_LIFE = 32  # steps after which what was spent counts half
_NOBODY: frozenset[str] = frozenset()
_OVERTAKES = 500  # that arrive later and go before one that gives way; a level of priority outranks more


class Precedence:
    """A tenant is a `cache_salt` here."""

    def __init__(self, max_batch_size: int) -> None:
        self._most_of_request = most_together(max_batch_size)
        self._of_request: Counter[int] = Counter()  # running rows, by the identity of their request
        self._present: Counter[str] = Counter()  # rows that wait or run, by tenant
        self._spent: Counter[str] = Counter()  # weighted tokens, by tenant
        self._steps = 0
        self._yielding = _NOBODY  # tenants; set by begin

    def add(self, row: Row) -> None:
        self._present[row.tenant] += 1

    def remove(self, row: Row) -> None:
        self._present[row.tenant] -= 1
        if not self._present[row.tenant]:
            del self._present[row.tenant]

    def enter(self, row: Row) -> None:
        """A row runs."""
        self._of_request[id(row.choice.request)] += 1

    def leave(self, row: Row) -> None:
        """It runs no more."""
        request = id(row.choice.request)
        self._of_request[request] -= 1
        if not self._of_request[request]:
            del self._of_request[request]

    def is_full(self, row: Row) -> bool:
        """Whether as many rows of its request run as may."""
        return self._of_request[id(row.choice.request)] >= self._most_of_request

    def begin(self) -> bool:
        """Decide for a step which rows give way; returns whether any do."""
        self._yielding = _NOBODY
        if len(self._present) > 1:
            spent = {tenant: self._spent[tenant] for tenant in self._present}
            much = (1 / len(spent) + _SLACK) * sum(spent.values())
            self._yielding = frozenset(tenant for tenant, tokens in spent.items() if tokens > much)
        return bool(self._yielding)

    def spend(self, scheduled: Iterable[Scheduled]) -> None:
        """A step is computed."""
        for row, count, samples in scheduled:
            self._spent[row.tenant] += count + OUTPUT_WEIGHT * samples
        self._steps += 1
        if self._steps % _HALF_LIFE == 0:
            self._spent = Counter({tenant: tokens // 2 for tenant, tokens in self._spent.items() if tokens > 1})

    def level(self, row: Row) -> int:
        """Whom a row gives way to: those of a lower level."""
        return 2 * row.priority + (row.tenant in self._yielding)

    def place(self, row: Row) -> int:
        """Its place in the line of this step; its order, unless it gives way."""
        return row.order + _OVERTAKES * (row.tenant in self._yielding)

    def parts(self, first: Row, other: Row, completes: bool) -> bool:
        """Whether another prompt has to wait for a step without the first: it has another priority, or it gives way to
        the first, which this step completes."""
        return other.priority != first.priority or (completes and self.level(other) > self.level(first))

    def check_integrity(self, running: list[Row], waiting: list[Row]) -> None:
        assert self._of_request == Counter(id(row.choice.request) for row in running), "rows are miscounted"
        assert all(count <= self._most_of_request for count in self._of_request.values()), "too many of a request"
        assert self._present == Counter(row.tenant for row in [*running, *waiting]), "rows of tenants are miscounted"
