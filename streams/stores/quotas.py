"""One quota a tenant over all that is kept for it: files, results of batches, responses and conversations.

What a tenant holds is counted from the buckets themselves, and not in a number of its own that a death could leave
wrong: seldom, since that takes a while where there is much, and with what was let in since then added. So several
bridges may together let in a little more than the quota, never for long.
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
from ..topology import BATCH_RESULTS, BATCH_STATES, FILES, RESPONSES

NO_SPACE = "insufficient_quota"  # as a code; trying again does not help
ENTRY = 512  # bytes that each entry takes besides its own: what is small is not free
FRESH = 2.0  # seconds for which a count is good at least
REFUSED = 0.2  # seconds after which a refusal counts again: something may have been deleted
SHARE = 0.05  # of the time at most is spent on counting a tenant


@dataclass(slots=True)
class _Count:
    """What a tenant holds in bytes, at a time of the clock, and the seconds that it took to find out."""

    held: int = 0
    at: float = -inf
    took: float = 0.0
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


class Quotas:
    """`quota` in bytes, of each tenant."""

    def __init__(self, broker: Broker, quota: int, clock: Callable[[], float] = monotonic) -> None:
        self._broker = broker
        self._quota = quota
        self._clock = clock
        self._counts: defaultdict[str, _Count] = defaultdict(_Count)

    async def check(self, tenant: str, coming: int = 0) -> None:
        """Call it before so many bytes are stored for a tenant. Raises `QuotaExceeded` above the quota."""
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
            f"{count.held:,} bytes are kept for you, and the setting tenant_quota allows {self._quota:,}: delete files "
            "(the outputs of batches are among them), responses or conversations that you do not need, or have it "
            "raised.",
            code=NO_SPACE,
        )

    async def _held(self, tenant: str) -> int:
        states = await (await self._broker.bucket(BATCH_STATES)).entries(f"{tenant}.")
        entries = list(states)
        for name in (FILES, RESPONSES):
            entries += await (await self._broker.bucket(name)).entries(f"{tenant}.")
        results = await self._broker.bucket(BATCH_RESULTS)
        for state in states:
            batch = Batch.model_validate_json(state.value)
            if batch.status not in FINAL:  # afterwards they are a file
                entries += await results.entries(f"{batch.id}.")
        return sum(map(_size, entries))


def _size(entry: Entry) -> int:
    """With the object that it may stand for."""
    value = orjson.loads(entry.value) if entry.value.startswith(b"{") else {}
    is_object = "version" in value and "chunks" in value
    return ENTRY + len(entry.value) + (int(value["size"]) if is_object else 0)
