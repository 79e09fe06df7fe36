"""One quota per tenant for everything stored for it: files, results of batches, responses, conversations and images.
Besides, no tenant fills a bucket that others share.

Usage is counted from the buckets, not in a counter that a crash could leave wrong. Counting takes time, some seconds
for a hundred thousand responses, so a bridge counts seldom, adds what it admits in between, and has no request wait for
long: meanwhile, the last count holds. Several bridges may therefore exceed the quota slightly and briefly.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from math import inf
from time import monotonic

import orjson
import structlog

from ...schemas.errors import QuotaExceeded, StorageFull
from ...schemas.openai.batches import FINAL, Batch
from ..port import Broker, Entry
from ..shares import crowds
from ..topology import BATCH_RESULTS, BATCH_STATES, FILES, IMAGES, OBJECT_DATA, RESPONSES
from .objects import BESIDE
from .room import Room

_log = structlog.get_logger(__name__)

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
SHARE = 0.05  # largest share of time spent on counting a tenant, during which the store is slower for all
SELDOM = 0.005  # that of one who has more than half of its quota left
PATIENCE = 1.0  # seconds that a request waits for a count
_IN_A_ROW = 500  # entries


@dataclass(slots=True)
class _Count:
    """A tenant's usage in bytes by bucket, when it was counted (by the clock), and how many seconds that took."""

    held: Counter[str] = field(default_factory=Counter)
    at: float = -inf
    took: float = 0.0
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    counting: asyncio.Task[None] | None = None
    began: float = -inf  # when that did, or did last
    admitted: Counter[str] = field(default_factory=Counter)  # since then
    freed: bool = False  # since then


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
                share = SELDOM if patience is FRESH and count.held.total() < self._quota / 2 else SHARE
                is_old = self._clock() - count.at > max(patience, count.took / share)
                if is_old or (count.freed and patience is REFUSED):
                    await self._count(tenant, count)
                held = count.held + Counter({bucket: coming})
                crowded = False
                for room in rooms:
                    await room.look()
                    left = room.free - (coming if room.bucket == bucket else 0)
                    crowded = crowded or (room.most > 0 and crowds(held[room.bucket], left))
                if held.total() <= self._quota and not crowded:
                    count.held = held
                    count.admitted[bucket] += coming
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
        self._counts[tenant].freed = True
        for rooms in self._rooms.values():
            for room in rooms:
                room.forget()

    async def _count(self, tenant: str, count: _Count) -> None:
        """Count, or go on counting, and wait for the end until `PATIENCE` has passed since the beginning."""
        if count.counting is None or count.counting.done():
            count.began = self._clock()
            count.admitted.clear()
            count.freed = False
            count.counting = asyncio.create_task(self._count_all(tenant, count))
            count.counting.add_done_callback(_tell)
        counting = count.counting
        await asyncio.wait([counting], timeout=max(0.0, count.began + PATIENCE - self._clock()))
        if counting.done():
            counting.result()

    async def _count_all(self, tenant: str, count: _Count) -> None:
        count.held = await self._held(tenant) + count.admitted
        count.at = self._clock()
        count.took = count.at - count.began

    async def _held(self, tenant: str) -> Counter[str]:
        """What is stored for a tenant. Raises `BrokerUnavailable`."""
        held = Counter[str]()
        states = await (await self._broker.bucket(BATCH_STATES)).entries(f"{tenant}.")
        for state in states:
            _add(held, BATCH_STATES, state)
        for name in (FILES, RESPONSES, IMAGES):
            await self._scan(held, name, f"{tenant}.")
        for state in states:
            batch = Batch.model_validate_json(state.value)
            if batch.status not in FINAL:  # the results of a finished batch are a file
                await self._scan(held, BATCH_RESULTS, f"{batch.id}.")
        return held

    async def _scan(self, held: Counter[str], name: str, prefix: str) -> None:
        async with aclosing((await self._broker.bucket(name)).scan(prefix)) as found:
            async for entries in found:
                for number, entry in enumerate(entries, 1):
                    _add(held, name, entry)
                    if number % _IN_A_ROW == 0:  # of very many, which must not hold up what else runs here
                        await asyncio.sleep(0)


def _add(held: Counter[str], bucket: str, entry: Entry) -> None:
    """Add the bytes of an entry, and of the object that it may describe."""
    value = orjson.loads(entry.value) if entry.value.startswith(b"{") else {}
    held[bucket] += ENTRY + len(entry.value)
    if "version" in value and "chunks" in value:
        are_beside = bucket == IMAGES or value["version"].startswith(BESIDE)
        held[bucket if are_beside else OBJECT_DATA] += int(value["size"])


def _tell(counting: asyncio.Task[None]) -> None:
    """A request may have waited for it, or none any more."""
    if not counting.cancelled() and (error := counting.exception()) is not None:
        _log.warning("usage not counted", reason=str(error))
