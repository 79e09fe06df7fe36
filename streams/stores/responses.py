"""Stored responses: for each a log, whose entries are written once, and a ledger of its tool calls.

After a crash, any copy of the stage reads here how far a response has come and continues it. A copy claims a call in
the ledger before it makes it and stores the result there, so that no other copy repeats it.

A response refers to its predecessor, and the ledger lists the successors of each response. A response deleted while it
has successors is hidden, and removed with the last of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, Self, TypeVar

import orjson

from ...schemas.loops import Begun, Ended, Items, ToolResult, Turned
from ..port import Broker, Bucket
from ..topology import RESPONSES
from .objects import Objects

HIDDEN = b"deleted"  # value of the `stop` entry of a hidden response
FREE = ""  # owner of a call that was claimed and given back
LOST = 60.0  # seconds after its deadline in which a response may still end

Entry = TypeVar("Entry", Begun, Turned, Ended)


@dataclass(frozen=True, slots=True)
class Stored:
    """A response and its progress."""

    begun: Begun
    turns: tuple[Turned, ...] = ()
    ended: Ended | None = None
    is_unwanted: bool = False  # its client has asked to stop
    size: int = 0  # bytes, as stored

    def is_lost(self, now: float) -> bool:
        """Whether it is past its deadline without an end: its stage has given up."""
        return self.ended is None and now > self.begun.job.deadline + LOST

    @property
    def can_be_followed(self) -> bool:
        """Whether another response may continue from this one."""
        return self.begun.job.body.get("store") is not False

    @property
    def output(self) -> Items:
        """The output items so far."""
        return [*self.begun.items, *(item for turn in self.turns for item in turn.items)]

    @property
    def spent(self) -> int:
        """The number of output tokens so far."""
        return sum(turn.usage["completion_tokens"] for turn in self.turns)

    @property
    def index(self) -> int:
        """The number of events published up to the newest entry."""
        return self.turns[-1].index if self.turns else self.begun.index


class CallKey(NamedTuple):
    """Identifies a tool call: item `number` of a turn; turn 0 are the items before the first turn.

    `str()` of it is its key in the ledger."""

    tenant: str
    response: str
    turn: int
    number: int

    def __str__(self) -> str:
        return f"{self.tenant}.{self.response}.call-{self.turn}-{self.number}"


class Claim(NamedTuple):
    """The ledger's entry of a call: its owner, whether this claim is new, and the result if there is one."""

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
        return cls(await Objects.of(broker, RESPONSES, beside=True), await broker.bucket(RESPONSES))

    async def read(self, tenant: str, id: str, *, hidden: bool = False) -> Stored | None:
        """None if there is no such response; with `hidden`, also find one that is kept only for its successors."""
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
        """Add an entry unless it exists already; returns the stored one."""
        left_out: set[str] = set()
        match entry:
            case Begun():
                name = "begun"
                if entry.follows or entry.parts:
                    # The previous version knows only this field; without it, it fails instead of omitting the rest.
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
        """Whether it has ended, even if it has been deleted since."""
        return await self._entries.info(f"{tenant}.{id}.ended") is not None

    async def ask_to_stop(self, tenant: str, id: str) -> None:
        """Have the stage end the response at its next step."""
        await self._ledger.put(f"{tenant}.{id}.stop", b"{}")

    async def follow(self, tenant: str, previous: str, id: str) -> bool:
        """Keep `previous` for the response `id` even if it is deleted later; False if it has been deleted already."""
        await self._ledger.put(f"{tenant}.{previous}.next.{id}", b"{}")
        # A deletion writes first and then looks for this key, so at least one of the two sees the other.
        stop = await self._ledger.get(f"{tenant}.{previous}.stop")
        if (stop is None or stop.value != HIDDEN) and await self._entries.info(f"{tenant}.{previous}.begun"):
            return True
        await self._ledger.delete(f"{tenant}.{previous}.next.{id}")
        return False

    async def delete(self, tenant: str, stored: Stored) -> None:
        """Delete a response except for the fact that it has ended, so that a late message does not start it again.

        If it has successors, it is hidden instead.
        """
        id = stored.begun.job.id
        for turn in range(len(stored.turns) + 1):
            for number in range(len(stored.turns[turn - 1].items if turn else stored.begun.items)):
                await self._ledger.delete(str(CallKey(tenant, id, turn, number)))
        await self._ledger.delete(f"{tenant}.{id}.sealed")
        if stored.can_be_followed:
            await self._ledger.put(f"{tenant}.{id}.stop", HIDDEN)
        await self._remove(tenant, stored)

    async def _remove(self, tenant: str, stored: Stored | None) -> None:
        """Remove a hidden response unless it has successors, then its predecessor in the same way.

        The `begun` entry goes last, so that an interrupted removal is repeated.
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
        """Claim a call, or return the earlier claim."""
        while True:
            revision = await self._ledger.create(str(key), orjson.dumps([owner]))
            if revision is not None:
                return Claim(owner, True, None, revision)
            if (entry := await self._ledger.get(str(key))) is not None:  # otherwise it has expired in between
                first, *rest = orjson.loads(entry.value)
                return Claim(first, False, _result(*rest) if rest else None, entry.revision)

    async def take_over(self, key: CallKey, claim: Claim, owner: str) -> Claim | None:
        """Transfer an abandoned call to `owner`; None if another copy was faster."""
        revision = await self._ledger.update(str(key), orjson.dumps([owner]), claim.revision)
        return None if revision is None else Claim(owner, True, None, revision)

    async def settle(self, key: CallKey, claim: Claim, result: ToolResult) -> ToolResult:
        """Store the result of a claimed call; returns the first result that was stored."""
        while await self._ledger.update(str(key), _entry(claim.owner, result), claim.revision) is None:
            claim = await self.claim(key, claim.owner)  # it was taken over or settled
            if claim.result is not None:
                return claim.result
        return result

    async def leave(self, key: CallKey, claim: Claim, result: ToolResult | None) -> None:
        """Give a claim back, or store the call's known result; harmless if another copy has taken it over."""
        kept = orjson.dumps([FREE]) if result is None else _entry(claim.owner, result)
        await self._ledger.update(str(key), kept, claim.revision)

    async def keep_sealed(self, tenant: str, id: str, sealed: dict[str, str]) -> None:
        """Store the sealed headers of each label until `drop_sealed`."""
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


def _entry(owner: str, result: ToolResult) -> bytes:
    """A call that has been made; releases before images read the first three alone."""
    return orjson.dumps([owner, *(result if result.images else result[:2])])


def _result(text: str, is_error: bool, images: Sequence[str] = ()) -> ToolResult:
    return ToolResult(text, is_error, tuple(images))
