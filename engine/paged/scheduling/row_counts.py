"""Counts rows by request and by tenant, and tells which give way to others of the same priority. Never sees a tensor.

The rows of a tenant that runs clearly more than an equal share give way. A flood fills the batch, and its prompts fill
the steps; the prompt of a tenant with few rows would wait behind all of them, and then share each step with them.
"""

from __future__ import annotations

from collections import Counter
from typing import TypeVar

from ....schemas.jobs import most_together
from .rows import Row

_Key = TypeVar("_Key")

_MUCH = 1.25  # equal shares of the running rows: whose tenant has more gives way; tenants that are about equal do not
_MOST_OVERTAKING = 500  # far fewer than a level of priority outranks


class RowCounts:
    """A tenant is a `cache_salt` here. A row gives way to no more that arrive later than a batch has."""

    def __init__(self, max_batch_size: int) -> None:
        self._most_overtaking = min(max_batch_size, _MOST_OVERTAKING)
        self._most_of_request = most_together(max_batch_size)
        self._present: Counter[str] = Counter()  # rows that wait or run, by tenant
        self._running: Counter[str] = Counter()  # those that run
        self._of_request: Counter[int] = Counter()  # the same, by the identity of their request
        self._yielding: frozenset[str] = frozenset()  # tenants; set by begin

    def add(self, row: Row) -> None:
        self._present[row.tenant] += 1

    def remove(self, row: Row) -> None:
        _take(self._present, row.tenant)

    def enter(self, row: Row) -> None:
        """A row runs."""
        self._running[row.tenant] += 1
        self._of_request[id(row.choice.request)] += 1

    def leave(self, row: Row) -> None:
        """It runs no more."""
        _take(self._running, row.tenant)
        _take(self._of_request, id(row.choice.request))

    def is_full(self, row: Row) -> bool:
        """Whether as many rows of its request run as may."""
        return self._of_request[id(row.choice.request)] >= self._most_of_request

    def begin(self) -> bool:
        """Decide for a step which rows give way; returns whether any do."""
        much = _MUCH * self._running.total() / max(len(self._present), 1)
        self._yielding = frozenset(tenant for tenant, count in self._running.items() if count > much)
        return bool(self._yielding)

    def level(self, row: Row) -> int:
        """Whom a row gives way to: those of a lower level."""
        return 2 * row.priority + (row.tenant in self._yielding)

    def place(self, row: Row) -> int:
        """Its place in the line for this step; its order, unless it gives way."""
        return row.order + self._most_overtaking * (row.tenant in self._yielding)

    def parts(self, first: Row, other: Row, completes: bool) -> bool:
        """Whether another prompt has to wait for a step without the first: it has another priority, or it gives way to
        the first, which this step completes."""
        return other.priority != first.priority or (completes and self.level(other) > self.level(first))

    def check_integrity(self, running: list[Row], waiting: list[Row]) -> None:
        assert self._of_request == Counter(id(row.choice.request) for row in running), "rows are miscounted"
        assert all(count <= self._most_of_request for count in self._of_request.values()), "too many of a request"
        assert self._running == Counter(row.tenant for row in running), "running rows of tenants are miscounted"
        assert self._present == Counter(row.tenant for row in [*running, *waiting]), "rows of tenants are miscounted"


def _take(counts: Counter[_Key], key: _Key) -> None:
    counts[key] -= 1
    if not counts[key]:
        del counts[key]
