"""The weighted tokens that a worker has spent on each tenant: by these the batch stage is fair."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

_RECENT = 5.0  # seconds: longer than several reports, each of which may be lost
_MOST_REPORTED = 500
_MOST_TENANTS = 10_000


class ServedTokens:
    """`clock` is in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._totals: OrderedDict[str, tuple[int, float]] = OrderedDict()  # with when each changed, the newest last

    def add(self, tenant: str, tokens: int) -> None:
        total, _ = self._totals.get(tenant, (0, 0.0))
        self._totals[tenant] = total + tokens, self._clock()
        self._totals.move_to_end(tenant)
        if len(self._totals) > _MOST_TENANTS:
            self._totals.popitem(last=False)

    def recent(self) -> dict[str, int]:
        """The totals that have changed lately: a report is small however many tenants there are."""
        found: dict[str, int] = {}
        since = self._clock() - _RECENT
        for tenant, (total, at) in reversed(self._totals.items()):
            if at < since or len(found) == _MOST_REPORTED:
                break
            found[tenant] = total
        return found
