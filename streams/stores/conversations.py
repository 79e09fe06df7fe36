"""Conversations: items that outlive the responses they came from, in parts that are written once.

A conversation's entry lists its parts: one for each response or request that added items. Adding a part of the same
name again is harmless.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Self

import orjson
from pydantic import BaseModel, ConfigDict, Field

from ...schemas.errors import BrokerUnavailable
from ...schemas.loops import Items
from ..port import Broker, Bucket
from ..topology import RESPONSES
from .objects import Objects

AT_ONCE = 32  # parts read concurrently


class Conversation(BaseModel):
    """`created_at` and `renewed_at` are in Unix seconds; no part is older than both. `removed` lists the ids of deleted
    items. A `deleted` conversation is kept for the responses whose history its first `used` parts are."""

    model_config = ConfigDict(frozen=True)

    id: str
    created_at: int
    renewed_at: int = 0
    metadata: dict[str, Any] = Field(default_factory=dict)
    parts: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    used: int = 0
    deleted: bool = False


@dataclass(frozen=True, slots=True)
class Conversations:
    """The conversations of all tenants, by tenant and id."""

    _heads: Bucket
    _parts: Objects

    @classmethod
    async def of(cls, broker: Broker) -> Self:
        return cls(await broker.bucket(RESPONSES), await Objects.of(broker, RESPONSES, beside=True))

    async def read(self, tenant: str, id: str, *, deleted: bool = False) -> Conversation | None:
        """None if there is no such conversation; with `deleted`, also find a deleted one."""
        entry = await self._heads.get(f"{tenant}.{id}")
        found = None if entry is None else Conversation.model_validate_json(entry.value)
        return None if found is None or (found.deleted and not deleted) else found

    async def change(
        self, tenant: str, id: str, changed: Callable[[Conversation], Conversation]
    ) -> Conversation | None:
        """Replace it by `changed` of it, retrying if another process writes first; None if there is none."""
        while (entry := await self._heads.get(f"{tenant}.{id}")) is not None:
            found = Conversation.model_validate_json(entry.value)
            if found.deleted:
                break
            made = changed(found)
            if made == found or await self._heads.update(entry.key, made.model_dump_json().encode(), entry.revision):
                return made
        return None

    async def use(self, tenant: str, id: str, now: float, fresh: float) -> Conversation | None:
        """Keep its present parts for a response; None if there is no such conversation.

        Parts may be `fresh` seconds old; later all begin to live anew, or it would lose its beginning.
        """
        if (found := await self.read(tenant, id)) is None:
            return None
        await self.renew(tenant, found, now, fresh)
        return await self.change(tenant, id, lambda one: one.model_copy(update={"used": len(one.parts)}))

    async def renew(self, tenant: str, found: Conversation, now: float, fresh: float) -> None:
        """Have its parts live as long again as new ones, unless they are `fresh` seconds old at most."""
        if now - max(found.created_at, found.renewed_at) <= fresh:
            return
        for first in range(0, len(found.parts), AT_ONCE):
            names = found.parts[first : first + AT_ONCE]
            await asyncio.gather(*(self._parts.renew(f"{tenant}.{found.id}.{name}") for name in names))

        def renewed(one: Conversation) -> Conversation:
            return one.model_copy(update={"renewed_at": max(one.renewed_at, int(now))})

        await self.change(tenant, found.id, renewed)

    async def create(self, tenant: str, conversation: Conversation) -> None:
        await self._heads.create(f"{tenant}.{conversation.id}", conversation.model_dump_json().encode())

    async def items(
        self, tenant: str, conversation: Conversation, parts: int | None = None, *, removed: bool = False
    ) -> Items:
        """Its items, or those of its first `parts`, oldest first; with `removed`, deleted ones, too."""
        names = conversation.parts[:parts]
        found: Items = []
        for first in range(0, len(names), AT_ONCE):
            reading = (self._part(f"{tenant}.{conversation.id}.{name}") for name in names[first : first + AT_ONCE])
            for items in await asyncio.gather(*reading):
                found += items
        return found if removed else [item for item in found if item["id"] not in conversation.removed]

    async def add(self, tenant: str, id: str, part: str, items: Items) -> None:
        """Add items as a part of that name; harmless if the conversation is deleted."""

        async def data() -> AsyncIterator[bytes]:
            yield orjson.dumps(items)

        def with_part(conversation: Conversation) -> Conversation:
            parts = conversation.parts
            return conversation if part in parts else conversation.model_copy(update={"parts": (*parts, part)})

        await self._parts.put(f"{tenant}.{id}.{part}", data(), {})
        if await self.change(tenant, id, with_part) is None:
            await self._drop(f"{tenant}.{id}.{part}")

    async def delete(self, tenant: str, conversation: Conversation) -> None:
        id = conversation.id
        gone = {"deleted": True, "metadata": {}}
        last = await self.change(tenant, id, lambda one: one.model_copy(update=gone))
        if last is None:
            return
        for part in last.parts[last.used :]:
            await self._drop(f"{tenant}.{id}.{part}")
        if not last.used:
            await self._heads.delete(f"{tenant}.{id}")

    async def _part(self, name: str) -> Items:
        while (info := await self._parts.info(name)) is not None:
            try:
                found: Items = orjson.loads(b"".join([piece async for piece in self._parts.read(info)]))
            except BrokerUnavailable:
                if await self._parts.info(name) == info:  # otherwise it was renewed meanwhile
                    raise
            else:
                return found
        return []

    async def _drop(self, name: str) -> None:
        if (info := await self._parts.info(name)) is not None:
            await self._parts.delete(info)
