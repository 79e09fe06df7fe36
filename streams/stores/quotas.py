"""One quota per tenant for everything stored for it: files, results of batches, responses, conversations and images.
Besides, no tenant fills a bucket that others share.

Usage is counted from the buckets, not in a counter that a crash could leave wrong. Counting takes time, so a bridge
counts seldom and adds what it admits in between. Several bridges may therefore exceed the quota slightly and briefly.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import inf
from time import monotonic

import orjson

from ...schemas.errors import QuotaExceeded, StorageFull
from ...schemas.openai.batches import FINAL, Batch
from ..port import Broker, Entry
from ..shares import crowds
from ..topology import BATCH_RESULTS, BATCH_STATES, FILES, IMAGES, OBJECT_DATA, RESPONSES
from .room import Room

# The buckets that are kept from being one tenant's, by that in which bytes are stored.
SHARED = {RESPONSES: (RESPONSES,), OBJECT_DATA: (OBJECT_DATA, FILES, BATCH_STATES)}
CROWDED = (
    "The server's store is nearly full, and most of it is yours: delete files, responses or conversations that you no "
    "longer need, or have the operator raise store_limit."
)
NO_SPACE = "insufficient_quota"  # error code; retrying does not help
ENTRY = 512  # bytes charged per entry in addition to its size
FRESH = 2.0  # seconds for which a count is valid at least
REFUSED = 0.2  # seconds after which a refusal counts again, as files may have been deleted
SHARE = 0.05  # largest share of time spent on counting a tenant


@dataclass(slots=True)
class _Count:
    """A tenant's usage in bytes by bucket, when it was counted (by the clock), and how many seconds that took."""

    held: Counter[str] = field(default_factory=Counter)
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
        self._rooms = {name: [Room(broker, each, clock) for each in names] for name, names in SHARED.items()}

    async def check(self, tenant: str, coming: int = 0, bucket: str = OBJECT_DATA) -> None:
        """Charge a tenant for `coming` bytes before they are stored in a bucket.

        Raises `QuotaExceeded` above the quota, and `StorageFull` where the tenant crowds the bucket.
        """
        count, rooms = self._counts[tenant], self._rooms.get(bucket, [])
        async with count.turn:
            coming += ENTRY
            for patience in (FRESH, REFUSED):
                if self._clock() - count.at > max(patience, count.took / SHARE):
                    began = self._clock()
                    count.held = await self._held(tenant)
                    count.at = self._clock()
                    count.took = count.at - began
                held = count.held + Counter({bucket: coming})
                crowded = False
                for room in rooms:
                    await room.look()
                    left = room.free - (coming if room.bucket == bucket else 0)
                    crowded = crowded or (room.most > 0 and crowds(held[room.bucket], left))
                if held.total() <= self._quota and not crowded:
                    count.held = held
                    for room in rooms:
                        if room.bucket == bucket:
                            room.take(coming)
                    return
        if crowded:
            raise StorageFull(CROWDED)
        raise QuotaExceeded(
            f"{count.held.total():,} bytes are stored for you, and the setting tenant_quota allows {self._quota:,}: "
            "delete files (including the outputs of batches), responses or conversations that you do not need, or ask "
            "for a higher quota.",
            code=NO_SPACE,
        )

    def freed(self, tenant: str) -> None:
        """Something of the tenant's was deleted here: count and measure before it is refused again."""
        self._counts[tenant].at = -inf
        for rooms in self._rooms.values():
            for room in rooms:
                room.forget()

    async def _held(self, tenant: str) -> Counter[str]:
        held = Counter[str]()
        states = await (await self._broker.bucket(BATCH_STATES)).entries(f"{tenant}.")
        held += _sizes(BATCH_STATES, states)
        for name in (FILES, RESPONSES, IMAGES):
            held += _sizes(name, await (await self._broker.bucket(name)).entries(f"{tenant}."))
        results = await self._broker.bucket(BATCH_RESULTS)
        for state in states:
            batch = Batch.model_validate_json(state.value)
            if batch.status not in FINAL:  # the results of a finished batch are a file
                held += _sizes(BATCH_RESULTS, await results.entries(f"{batch.id}."))
        return held


def _sizes(bucket: str, entries: Iterable[Entry]) -> Counter[str]:
    """The bytes of entries, and of the objects that they may describe, by bucket."""
    sizes = Counter[str]()
    for entry in entries:
        value = orjson.loads(entry.value) if entry.value.startswith(b"{") else {}
        sizes[bucket] += ENTRY + len(entry.value)
        if "version" in value and "chunks" in value:
            sizes[IMAGES if bucket == IMAGES else OBJECT_DATA] += int(value["size"])
    return sizes
