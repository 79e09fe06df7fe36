"""The images of requests: objects named `<tenant>.<sha256>.<window>`, which expire by themselves.

The same image of a tenant is stored once in each window of time. A key names its window, so an image lives for at least
as long as the longest request that was let in with it, whoever else sends it, or has sent it before. Where room is
needed before, the images go whose requests have all ended.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass
from functools import partial
from math import inf
from time import monotonic
from typing import Any

import structlog

from ...schemas.errors import Overloaded, StorageFull, StreamNotFound
from ...schemas.events import FINAL
from ...schemas.wire import codec
from ..outages import through_outages
from ..port import Broker
from ..shares import crowds
from ..topology import EVENTS, IMAGE_WINDOW, IMAGES, Subjects
from .objects import ObjectInfo, Objects
from .quotas import Quotas
from .room import Room

USES = "uses"  # of an image, by request; only of those that are told apart
UNTIL = "until"  # when the last request ends that is not
MOST_USES = 32  # that are told apart
MARGIN = 60.0  # seconds after its deadline in which a request may still need its images
RESERVE = 8  # the part of the store, one in so many, that is kept free
FRESH = 1.0  # seconds in which nobody looks again for images to clear where all are needed
FULL = "The images of running requests fill the store; try again later, or have the operator raise store_limit."

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ImageUse:
    """The request that needs an image, until its end or its `deadline`, in Unix seconds."""

    request: str
    bridge: str
    deadline: float


class ImageStore:
    """Stores images. Raises `QuotaExceeded` for the tenant's quota, `Overloaded` where running requests need all the
    room, or most of it is this tenant's."""

    def __init__(
        self, broker: Broker, subjects: Subjects, quotas: Quotas, clock: Callable[[], float] = monotonic
    ) -> None:
        """`clock` returns seconds."""
        self._broker = broker
        self._subjects = subjects
        self._quotas = quotas
        self._clock = clock
        self._room = Room(broker, IMAGES, clock)
        self._clearing = asyncio.Lock()
        self._num_cleared = 0  # images; set by _clear, like these
        self._held: Counter[str] = Counter()  # bytes by tenant
        self._all_needed = False
        self._looked_at = -inf

    async def put(self, tenant: str, data: bytes, digest: str, now: float, use: ImageUse) -> str:
        """Store an image that comes at `now`, in Unix seconds, unless it is stored already. Returns its key."""
        objects, key = await Objects.of(self._broker, IMAGES, IMAGES), image_key(tenant, digest, now)
        while True:
            found = await objects.look(key)
            if found is not None and found[0].version:
                info, revision = found
                if (about := _with(info.about, use)) == info.about or await objects.note(info, about, revision):
                    return key
                continue  # another request uses it since
            await self._quotas.check(tenant, len(data), IMAGES)
            await self._make_room(objects, tenant, len(data))
            try:
                if await objects.put(key, _once(data), _with({}, use), found[1] if found else 0) is not None:
                    self._room.take(len(data))
                    self._held[tenant] += len(data)
                    return key
            except StorageFull:
                if not await self._clear(objects, len(data)):
                    raise Overloaded(FULL, retry_after=5.0) from None

    async def _make_room(self, objects: Objects, tenant: str, size: int) -> None:
        """Clear images that nobody needs before the store is full, and leave some of it to other tenants."""
        room = self._room
        await room.look()
        reserve = room.most // RESERVE
        if not room.most or room.free - size >= reserve:
            return
        if await self._clear(objects, size + 2 * reserve - room.free):
            await room.look()
        left = room.free - size
        if left < reserve and crowds(self._held[tenant] + size, left):
            raise Overloaded(FULL, retry_after=5.0)

    async def _clear(self, objects: Objects, wanted: int) -> bool:
        """Clear images of so many bytes that no request needs, the least recently used first.

        Returns whether there is more room than before.
        """
        before = self._num_cleared
        async with self._clearing:
            if self._num_cleared > before:  # for another request
                return True
            if self._all_needed and self._clock() - self._looked_at < FRESH:
                return False
            held, freed, known = Counter[str](), 0, dict[str, bool]()
            for info, revision in await objects.look_at_all("*.*."):
                is_spare = freed < wanted and info.version and not await self._is_needed(info, known)
                if is_spare and await objects.clear(info, revision):
                    self._num_cleared += 1
                    freed += info.size
                    continue
                held[info.name.split(".")[0]] += info.size
            self._held, self._looked_at, self._all_needed = held, self._clock(), freed < wanted
            if freed:
                self._room.forget()
                log.info("images cleared", images=self._num_cleared - before, bytes=freed)
        return freed > 0

    async def _is_needed(self, info: ObjectInfo, known: dict[str, bool]) -> bool:
        """Whether a request that has not ended uses it; `known` is what was found of requests before."""
        now, tenant = self._broker.now(), info.name.split(".")[0]
        if info.about.get(UNTIL, 0.0) + MARGIN > now or USES not in info.about:  # that of an earlier release
            return True
        for use in (ImageUse(**each) for each in info.about[USES]):
            if use.deadline + MARGIN <= now:
                continue
            events = self._subjects.events(tenant, use.bridge, use.request)
            if events not in known:
                newest = await self._broker.last(EVENTS, events)
                known[events] = newest is None or not isinstance(codec.decode_event(newest.data), FINAL)
            if known[events]:
                return True
        return False


def _with(about: dict[str, Any], use: ImageUse) -> dict[str, Any]:
    """What is said about an image, with one more request that uses it."""
    uses = about.get(USES, [])
    if any(each["request"] == use.request for each in uses):
        return about
    uses = [*uses, asdict(use)]
    until = max([about.get(UNTIL, 0.0), *(each["deadline"] for each in uses[:-MOST_USES])])
    return {USES: uses[-MOST_USES:], UNTIL: until}


def image_key(tenant: str, digest: str, now: float) -> str:
    """The name of an image that comes at `now`, in Unix seconds; `digest` is the sha256 of its bytes."""
    return f"{tenant}.{digest}.{int(now // IMAGE_WINDOW)}"


async def get_image(broker: Broker, key: str, digest: str) -> bytes:
    """The bytes of an image; an outage of the broker is waited out. Raises `StreamNotFound` if it has expired."""
    objects = await Objects.of(broker, IMAGES, IMAGES)
    return await through_outages(partial(_read, objects, key, digest), key)


async def _read(objects: Objects, key: str, digest: str) -> bytes:
    info = await objects.info(key)
    data = b"" if info is None else b"".join([piece async for piece in objects.read(info)])
    if hashlib.sha256(data).hexdigest() != digest:
        raise StreamNotFound("An image of the request is no longer stored; send the request again.")
    return data


async def _once(data: bytes) -> AsyncIterator[bytes]:
    yield data
