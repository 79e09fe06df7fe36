"""One quota per tenant for everything stored for it: files, results of batches, responses, conversations and images.

Usage is counted from the buckets, not in a counter that a crash could leave wrong. Counting takes time, so a bridge
counts seldom and adds what it admits in between. Several bridges may therefore exceed the quota slightly and briefly.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from time import monotonic

import orjson

from ...schemas.errors import QuotaExceeded
from ...schemas.openai.batches import FINAL, Batch
from ..port import Broker, Entry
from ..topology import BATCH_RESULTS, BATCH_STATES, FILES, IMAGES, RESPONSES

NO_SPACE = "insufficient_quota"  # error code; retrying does not help
ENTRY = 512  # bytes charged per entry in addition to its size
FRESH = 2.0  # seconds for which a count is valid at least
REFUSED = 0.2  # seconds after which a refusal counts again, as files may have been deleted
SHARE = 0.05  # largest share of time spent on counting a tenant


@dataclass(slots=True)
class _Count:
    """A tenant's usage in bytes, when it was counted (by the clock), and how many seconds that took."""

    held: int = 0
    at: float = -inf
    took: float = 0.0
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


class Quotas:
    """`quota` is in bytes, per tenant."""

    def __init__(self, broker: Broker, quota: int, clock: Callable[[], float] = monotonic) -> None:
        self._broker = broker
        self._quota = quota
        self._clock = clock
        self._counts: defaultdict[str, _Count] = defaultdict(_Count)

    async def check(self, tenant: str, coming: int = 0) -> None:
        """Charge a tenant for `coming` bytes before they are stored. Raises `QuotaExceeded` above the quota."""
        count = self._counts[tenant]
        async with count.turn:
            coming += ENTRY
            for patience in (FRESH, REFUSED):
                if self._clock() - count.at > max(patience, count.took / SHARE):
                    began = self._clock()
                    count.held = await self._held(tenant)
                    count.at = self._clock()
                    count.took = count.at - began
                if count.held + coming <= self._quota:
                    count.held += coming
                    return
        raise QuotaExceeded(
            f"{count.held:,} bytes are stored for you, and the setting tenant_quota allows {self._quota:,}: delete "
            "files (including the outputs of batches), responses or conversations that you do not need, or ask for a "
            "higher quota.",
            code=NO_SPACE,
        )

    async def _held(self, tenant: str) -> int:
        states = await (await self._broker.bucket(BATCH_STATES)).entries(f"{tenant}.")
        entries = list(states)
        for name in (FILES, RESPONSES, IMAGES):
            entries += await (await self._broker.bucket(name)).entries(f"{tenant}.")
        results = await self._broker.bucket(BATCH_RESULTS)
        for state in states:
            batch = Batch.model_validate_json(state.value)
            if batch.status not in FINAL:  # the results of a finished batch are a file
                entries += await results.entries(f"{batch.id}.")
        return sum(map(_size, entries))


def _size(entry: Entry) -> int:
    """The bytes of an entry and of the object that it may describe."""
    value = orjson.loads(entry.value) if entry.value.startswith(b"{") else {}
    is_object = "version" in value and "chunks" in value
    return ENTRY + len(entry.value) + (int(value["size"]) if is_object else 0)
