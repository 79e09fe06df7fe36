"""OpenAI's `/v1/conversations`: items that responses read and append to."""

from __future__ import annotations

import re
import uuid
from typing import Annotated, Any

from fastapi import FastAPI, Request
from pydantic import Field

from ...schemas.errors import StreamNotFound
from ...schemas.openai.body import Body
from ...schemas.openai.responses.items import InputItem, input_items
from ...streams.stores.conversations import Conversation, Conversations
from ...streams.stores.history import COPY_AFTER
from ...streams.topology import RESPONSES
from .files import page
from .openapi import body_of, refusals
from .requests import Gateway, Routes, read_parsed, tenant_of

MAX_ITEMS = 20  # that one request may add

Metadata = Annotated[dict[str, str], Field(max_length=16)]
_REFUSALS = refusals(400, 404, 408, 413, 429, 503, 507)


class ConversationBody(Body):
    items: Annotated[list[InputItem], Field(max_length=MAX_ITEMS)] | None = None
    metadata: Metadata | None = None


class MetadataBody(Body):
    metadata: Metadata | None


class ItemsBody(Body):
    items: Annotated[list[InputItem], Field(min_length=1, max_length=MAX_ITEMS)]


def add_conversations(app: FastAPI, gateway: Gateway) -> None:
    path = "/v1/conversations/{id}"
    routes = ConversationRoutes(gateway)
    body = body_of(ConversationBody)
    app.post("/v1/conversations", tags=["openai"], openapi_extra=body, responses=_REFUSALS)(routes.create)
    app.get(path, tags=["openai"], responses=_REFUSALS)(routes.retrieve)
    app.post(path, tags=["openai"], openapi_extra=body_of(MetadataBody), responses=_REFUSALS)(routes.update)
    app.delete(path, tags=["openai"], responses=_REFUSALS)(routes.delete)
    app.post(f"{path}/items", tags=["openai"], openapi_extra=body_of(ItemsBody), responses=_REFUSALS)(routes.add)
    app.get(f"{path}/items", tags=["openai"], responses=_REFUSALS)(routes.items)
    app.get(f"{path}/items/{{item}}", tags=["openai"], responses=_REFUSALS)(routes.item)
    app.delete(f"{path}/items/{{item}}", tags=["openai"], responses=_REFUSALS)(routes.remove)


class ConversationRoutes(Routes):
    async def create(self, request: Request) -> Any:
        """Create a conversation."""
        asked = await read_parsed(ConversationBody, request, self._settings)
        await self._gateway.quotas.check(tenant_of(request), _length(request), RESPONSES)
        now = int(self._broker.now())
        made = Conversation(id=f"conv_{uuid.uuid4().hex}", created_at=now, metadata=asked.metadata or {})
        store, tenant = await Conversations.of(self._broker), tenant_of(request)
        await store.create(tenant, made)
        if asked.items:
            await _add(store, tenant, made.id, asked.items)
        return _shown(made)

    async def retrieve(self, id: str, request: Request) -> Any:
        """Show a conversation, without its items."""
        return _shown((await self._find(id, request))[1])

    async def update(self, id: str, request: Request) -> Any:
        """Replace a conversation's metadata."""
        asked = await read_parsed(MetadataBody, request, self._settings)
        store, _ = await self._find(id, request, change=True)
        new = {"metadata": asked.metadata or {}}
        return _shown(_existing(id, await store.change(tenant_of(request), id, lambda one: one.model_copy(update=new))))

    async def delete(self, id: str, request: Request) -> Any:
        """Delete a conversation and its items, but not its responses."""
        store, found = await self._find(id, request)
        await store.delete(tenant_of(request), found)
        return {"id": id, "object": "conversation.deleted", "deleted": True}

    async def add(self, id: str, request: Request) -> Any:
        """Append items to a conversation."""
        asked = await read_parsed(ItemsBody, request, self._settings)
        store, _ = await self._find(id, request, change=True)
        await self._gateway.quotas.check(tenant_of(request), _length(request), RESPONSES)
        items = await _add(store, tenant_of(request), id, asked.items)
        ends = {"first_id": items[0]["id"], "last_id": items[-1]["id"], "has_more": False}
        return {"object": "list", "data": items, **ends}

    async def items(self, id: str, request: Request) -> Any:
        """List a conversation's items, in pages."""
        store, found = await self._find(id, request)
        items = await store.items(tenant_of(request), found, removed=True)
        return page(request, items, default=20, most=100, gone=found.removed)

    async def item(self, id: str, item: str, request: Request) -> Any:
        """Show an item of a conversation."""
        store, found = await self._find(id, request)
        return _item(await store.items(tenant_of(request), found), item)

    async def remove(self, id: str, item: str, request: Request) -> Any:
        """Delete an item of a conversation."""
        store, found = await self._find(id, request, change=True)
        _item(await store.items(tenant_of(request), found), item)

        def without(one: Conversation) -> Conversation:
            return one.model_copy(update={"removed": (*one.removed, item)})

        return _shown(_existing(id, await store.change(tenant_of(request), id, without)))

    async def _find(self, id: str, request: Request, *, change: bool = False) -> tuple[Conversations, Conversation]:
        """One that is to `change` begins to live anew with all its items, which would expire before it otherwise."""
        store = await Conversations.of(self._broker)
        valid = re.fullmatch("conv_[0-9a-f]{32}", id)
        found = _existing(id, await store.read(tenant_of(request), id) if valid else None)
        if change:
            fresh = self._settings.responses_ttl * COPY_AFTER
            await store.renew(tenant_of(request), found, self._broker.now(), fresh)
        return store, found


async def _add(store: Conversations, tenant: str, id: str, given: list[InputItem]) -> list[dict[str, Any]]:
    part = uuid.uuid4().hex
    items = input_items(given, part)
    await store.add(tenant, id, part, items)
    return items


def _length(request: Request) -> int:
    """The length of the body in bytes, about what storing it takes."""
    declared = request.headers.get("content-length", "")
    return int(declared[:20]) if declared.isdecimal() else 0


def _existing(id: str, found: Conversation | None) -> Conversation:
    if found is None:
        raise StreamNotFound(
            f"There is no conversation {id[:100]!r}.", code="conversation_not_found", param="conversation_id"
        )
    return found


def _item(items: list[dict[str, Any]], id: str) -> dict[str, Any]:
    for item in items:
        if item["id"] == id:
            return item
    raise StreamNotFound(f"The conversation has no item {id[:100]!r}.", code="item_not_found", param="item_id")


def _shown(conversation: Conversation) -> dict[str, Any]:
    shown = conversation.model_dump(include={"id", "created_at", "metadata"})
    return {**shown, "object": "conversation"}
