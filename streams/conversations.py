"""Conversations: items that outlive the responses they came from, in parts that are written once.

A conversation's entry lists its parts, one for each response or request that added items; a part's name makes adding it
again harmless.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Self

import orjson
from pydantic import BaseModel, ConfigDict, Field

from ..schemas.loops import Items
from .objects import Objects
from .port import Broker, Bucket
from .topology import RESPONSES


class Conversation(BaseModel):
    """`created_at` is in Unix seconds; `removed` names items that were taken out of the parts."""

    model_config = ConfigDict(frozen=True)

    id: str
    created_at: int
    metadata: dict[str, Any] = Field(default_factory=dict)
    parts: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Conversations:
    """Those of all tenants, by tenant and id."""

    _heads: Bucket
    _parts: Objects

    @classmethod
    async def of(cls, broker: Broker) -> Self:
        return cls(await broker.bucket(RESPONSES), await Objects.of(broker, RESPONSES))

    async def read(self, tenant: str, id: str) -> Conversation | None:
        entry = await self._heads.get(f"{tenant}.{id}")
        return None if entry is None else Conversation.model_validate_json(entry.value)

    async def change(
        self, tenant: str, id: str, changed: Callable[[Conversation], Conversation]
    ) -> Conversation | None:
        """Write what `changed` makes of it, however many write at a time; None where there is none."""
        while (entry := await self._heads.get(f"{tenant}.{id}")) is not None:
            made = changed(Conversation.model_validate_json(entry.value))
            if await self._heads.update(entry.key, made.model_dump_json().encode(), entry.revision) is not None:
                return made
        return None

    async def create(self, tenant: str, conversation: Conversation) -> None:
        await self._heads.create(f"{tenant}.{conversation.id}", conversation.model_dump_json().encode())

    async def items(self, tenant: str, conversation: Conversation) -> Items:
        """All of them, the oldest first."""
        found: Items = []
        for part in conversation.parts:
            if (info := await self._parts.info(f"{tenant}.{conversation.id}.{part}")) is not None:
                found += orjson.loads(b"".join([piece async for piece in self._parts.read(info)]))
        return [item for item in found if item["id"] not in conversation.removed]

    async def add(self, tenant: str, id: str, part: str, items: Items) -> None:
        """Add items under a name of their own; harmless where the conversation is gone."""

        async def data() -> AsyncIterator[bytes]:
            yield orjson.dumps(items)

        def with_part(conversation: Conversation) -> Conversation:
            parts = conversation.parts
            return conversation if part in parts else conversation.model_copy(update={"parts": (*parts, part)})

        await self._parts.put(f"{tenant}.{id}.{part}", data(), {})
        await self.change(tenant, id, with_part)

    async def delete(self, tenant: str, conversation: Conversation) -> None:
        for part in conversation.parts:
            if (info := await self._parts.info(f"{tenant}.{conversation.id}.{part}")) is not None:
                await self._parts.delete(info)
        await self._heads.delete(f"{tenant}.{conversation.id}")
