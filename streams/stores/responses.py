"""What is kept of responses: of each a log whose entries are written once, and a ledger of the calls made for it.

Whoever goes on with a response reads where it stands from here, so that any copy can, after any death. A call is
claimed in the ledger before it is made and its result is kept there, so that nobody makes it again.

A response refers to the one that it follows, and the ledger names it there. What is deleted while others follow it is
hidden, and removed with the last of those.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Generic, NamedTuple, Self, TypeVar

import orjson

from ...schemas.loops import Begun, Ended, Items, ToolResult, Turned
from ..port import Broker, Bucket
from ..topology import RESPONSES
from .objects import Objects

HIDDEN = b"deleted"  # in place of a wish to stop
FREE = ""  # whose claim a call is that nobody makes
LOST = 60.0  # seconds after its deadline in which a response may still say how it ended

Entry = TypeVar("Entry", Begun, Turned, Ended)


@dataclass(frozen=True, slots=True)
class Stored:
    """A response, as far as it has come."""

    begun: Begun
    turns: tuple[Turned, ...] = ()
    ended: Ended | None = None
    is_unwanted: bool = False  # its client has said stop
    size: int = 0  # bytes, as stored

    def is_lost(self, now: float) -> bool:
        """Whether it has not ended although its time is over: whoever had it gave up."""
        return self.ended is None and now > self.begun.job.deadline + LOST

    @property
    def can_be_followed(self) -> bool:
        """Whether another response may have this one's items before its own."""
        return self.begun.job.body.get("store") is not False

    @property
    def output(self) -> Items:
        """Its items so far."""
        return [*self.begun.items, *(item for turn in self.turns for item in turn.items)]

    @property
    def index(self) -> int:
        """The number of events told by the end of the newest entry."""
        return self.turns[-1].index if self.turns else self.begun.index


class CallKey(NamedTuple):
    """A call: the item at `number` of a turn, or of what came before the first (`turn` 0)."""

    tenant: str
    response: str
    turn: int
    number: int

    def __str__(self) -> str:
        return f"{self.tenant}.{self.response}.call-{self.turn}-{self.number}"


class Claim(NamedTuple):
    """What the ledger says of a call: claimed by whom, just now or before, and its result once there is one."""

    owner: str
    is_new: bool
    result: ToolResult | None
    revision: int


class _Read(NamedTuple, Generic[Entry]):
    entry: Entry
    size: int


@dataclass(frozen=True, slots=True)
class ResponseLog:
    """The responses of all tenants, by tenant and id."""

    _entries: Objects
    _ledger: Bucket

    @classmethod
    async def of(cls, broker: Broker) -> Self:
        return cls(await Objects.of(broker, RESPONSES), await broker.bucket(RESPONSES))

    async def read(self, tenant: str, id: str, *, hidden: bool = False) -> Stored | None:
        """None where it has not begun, or is kept no more; `hidden`: also if it is kept only for those that follow."""
        begun, ended, stop = await asyncio.gather(
            self._read(Begun, f"{tenant}.{id}.begun"),
            self._read(Ended, f"{tenant}.{id}.ended"),
            self._ledger.get(f"{tenant}.{id}.stop"),
        )
        if begun is None or (stop is not None and stop.value == HIDDEN and not hidden):
            return None
        turns: list[Turned] = []
        size = begun.size
        while (turned := await self._read(Turned, f"{tenant}.{id}.turn-{len(turns) + 1}")) is not None:
            turns.append(turned.entry)
            size += turned.size
        return Stored(begun.entry, tuple(turns), ended.entry if ended else None, stop is not None, size)

    async def write(self, tenant: str, id: str, entry: Entry) -> Entry:
        """Add an entry, unless there is one in its place already; returns the one that stands."""
        left_out: set[str] = set()
        match entry:
            case Begun():
                name = "begun"
                if entry.follows or entry.parts:
                    # The version before knows this field alone: without it, it fails instead of going on without them.
                    left_out = {"history"}
            case Turned():
                name = f"turn-{entry.turn}"
            case Ended():
                name = "ended"

        async def data() -> AsyncIterator[bytes]:
            yield orjson.dumps(entry.model_dump(exclude=left_out))

        if await self._entries.put(f"{tenant}.{id}.{name}", data(), {}) is not None:
            return entry
        found = await self._read(type(entry), f"{tenant}.{id}.{name}")
        return found.entry if found else entry

    async def is_over(self, tenant: str, id: str) -> bool:
        """Whether it has ended, also where it is forgotten."""
        return await self._entries.info(f"{tenant}.{id}.ended") is not None

    async def ask_to_stop(self, tenant: str, id: str) -> None:
        """Whoever goes on with the response next ends it."""
        await self._ledger.put(f"{tenant}.{id}.stop", b"{}")

    async def follow(self, tenant: str, previous: str, id: str) -> bool:
        """Keep `previous` for the response `id`, also if it is deleted from now on; False where it was before."""
        await self._ledger.put(f"{tenant}.{previous}.next.{id}", b"{}")
        # Whoever deletes it writes first and then looks for this key, so that one of the two sees the other.
        stop = await self._ledger.get(f"{tenant}.{previous}.stop")
        if (stop is None or stop.value != HIDDEN) and await self._entries.info(f"{tenant}.{previous}.begun"):
            return True
        await self._ledger.delete(f"{tenant}.{previous}.next.{id}")
        return False

    async def delete(self, tenant: str, stored: Stored) -> None:
        """Forget a response, but for the fact that it is over: late news of it must not begin it anew. Where others
        follow it, it is hidden."""
        id = stored.begun.job.id
        for turn in range(len(stored.turns) + 1):
            for number in range(len(stored.turns[turn - 1].items if turn else stored.begun.items)):
                await self._ledger.delete(str(CallKey(tenant, id, turn, number)))
        await self._ledger.delete(f"{tenant}.{id}.sealed")
        if stored.can_be_followed:
            await self._ledger.put(f"{tenant}.{id}.stop", HIDDEN)
        await self._remove(tenant, stored)

    async def _remove(self, tenant: str, stored: Stored | None) -> None:
        """Remove what is hidden, unless another response follows it; then what it followed itself, if that is hidden.

        The beginning goes last, so that what is half removed is removed again.
        """
        while stored is not None:
            id, follows = stored.begun.job.id, stored.begun.follows
            if await self._ledger.entries(f"{tenant}.{id}.next."):
                return
            if follows:
                await self._ledger.delete(f"{tenant}.{follows[-1]}.next.{id}")
            for name in (*(f"turn-{turned.turn}" for turned in stored.turns), "begun"):
                if (info := await self._entries.info(f"{tenant}.{id}.{name}")) is not None:
                    await self._entries.delete(info)
            await self._ledger.delete(f"{tenant}.{id}.stop")
            if not follows:
                return
            stop = await self._ledger.get(f"{tenant}.{follows[-1]}.stop")
            is_hidden = stop is not None and stop.value == HIDDEN
            stored = await self.read(tenant, follows[-1], hidden=True) if is_hidden else None

    async def claim(self, key: CallKey, owner: str) -> Claim:
        """Claim a call; an earlier claim stands."""
        while True:
            revision = await self._ledger.create(str(key), orjson.dumps([owner]))
            if revision is not None:
                return Claim(owner, True, None, revision)
            if (entry := await self._ledger.get(str(key))) is not None:  # else it has expired in between
                first, *rest = orjson.loads(entry.value)
                return Claim(first, False, ToolResult(*rest) if rest else None, entry.revision)

    async def take_over(self, key: CallKey, claim: Claim, owner: str) -> Claim | None:
        """Make a call that nobody makes any more `owner`'s; None where somebody else was faster."""
        revision = await self._ledger.update(str(key), orjson.dumps([owner]), claim.revision)
        return None if revision is None else Claim(owner, True, None, revision)

    async def settle(self, key: CallKey, claim: Claim, result: ToolResult) -> ToolResult:
        """Keep the result of a claimed call; returns the one that stands, which is the first."""
        while await self._ledger.update(str(key), orjson.dumps([claim.owner, *result]), claim.revision) is None:
            claim = await self.claim(key, claim.owner)  # it was taken over, or is settled
            if claim.result is not None:
                return claim.result
        return result

    async def leave(self, key: CallKey, claim: Claim, result: ToolResult | None) -> None:
        """Give a claim back, or keep the result that is known of its call; harmless where somebody else has it now."""
        kept = [FREE] if result is None else [claim.owner, *result]
        await self._ledger.update(str(key), orjson.dumps(kept), claim.revision)

    async def keep_sealed(self, tenant: str, id: str, sealed: dict[str, str]) -> None:
        """Keep what was sealed for each label, until `drop_sealed`."""
        await self._ledger.put(f"{tenant}.{id}.sealed", orjson.dumps(sealed))

    async def sealed(self, tenant: str, id: str) -> dict[str, str]:
        entry = await self._ledger.get(f"{tenant}.{id}.sealed")
        found: dict[str, str] = orjson.loads(entry.value) if entry else {}
        return found

    async def drop_sealed(self, tenant: str, id: str) -> None:
        await self._ledger.delete(f"{tenant}.{id}.sealed")

    async def _read(self, kind: type[Entry], name: str) -> _Read[Entry] | None:
        info = await self._entries.info(name)
        if info is None:
            return None
        data = b"".join([piece async for piece in self._entries.read(info)])
        return _Read(kind.model_validate_json(data), info.size)
