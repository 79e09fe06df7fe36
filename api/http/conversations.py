"""OpenAI's `/v1/conversations`: items that responses read and add to."""

from __future__ import annotations

import re
import time
import uuid
from typing import Annotated, Any

from fastapi import FastAPI, Request
from pydantic import Field

from ...schemas.errors import StreamNotFound
from ...schemas.openai.chat import Body
from ...schemas.openai.items import InputItem, input_items
from ...streams.stores.conversations import Conversation, Conversations
from .files import page
from .openapi import body_of, refusals
from .requests import Gateway, read_parsed, tenant_of

MOST_ITEMS = 20  # that one request adds

Metadata = Annotated[dict[str, str], Field(max_length=16)]
_FAULTS = refusals(400, 404, 408, 413, 429, 503, 507)


class ConversationBody(Body):
    items: Annotated[list[InputItem], Field(max_length=MOST_ITEMS)] | None = None
    metadata: Metadata | None = None


class MetadataBody(Body):
    metadata: Metadata | None


class ItemsBody(Body):
    items: Annotated[list[InputItem], Field(min_length=1, max_length=MOST_ITEMS)]


def add_conversations(app: FastAPI, gateway: Gateway) -> None:
    path = "/v1/conversations/{id}"

    @app.post("/v1/conversations", tags=["openai"], openapi_extra=body_of(ConversationBody), responses=_FAULTS)
    async def create(request: Request) -> Any:
        """Begin a conversation."""
        asked = await read_parsed(ConversationBody, request, gateway.settings)
        await gateway.quotas.check(tenant_of(request), _length(request))
        made = Conversation(id=f"conv_{uuid.uuid4().hex}", created_at=int(time.time()), metadata=asked.metadata or {})
        store, tenant = await Conversations.of(gateway.broker), tenant_of(request)
        await store.create(tenant, made)
        if asked.items:
            await _add(store, tenant, made.id, asked.items)
        return _shown(made)

    @app.get(path, tags=["openai"], responses=_FAULTS)
    async def retrieve(id: str, request: Request) -> Any:
        """What is known of a conversation, but for its items."""
        return _shown((await _find(id, request))[1])

    @app.post(path, tags=["openai"], openapi_extra=body_of(MetadataBody), responses=_FAULTS)
    async def update(id: str, request: Request) -> Any:
        """Give it other metadata."""
        asked = await read_parsed(MetadataBody, request, gateway.settings)
        store, _ = await _find(id, request)
        new = {"metadata": asked.metadata or {}}
        return _shown(_there(id, await store.change(tenant_of(request), id, lambda one: one.model_copy(update=new))))

    @app.delete(path, tags=["openai"], responses=_FAULTS)
    async def delete(id: str, request: Request) -> Any:
        """Forget a conversation and its items; the responses stay."""
        store, found = await _find(id, request)
        await store.delete(tenant_of(request), found)
        return {"id": id, "object": "conversation.deleted", "deleted": True}

    @app.post(f"{path}/items", tags=["openai"], openapi_extra=body_of(ItemsBody), responses=_FAULTS)
    async def add(id: str, request: Request) -> Any:
        """Add items at the end."""
        asked = await read_parsed(ItemsBody, request, gateway.settings)
        store, _ = await _find(id, request)
        await gateway.quotas.check(tenant_of(request), _length(request))
        items = await _add(store, tenant_of(request), id, asked.items)
        ends = {"first_id": items[0]["id"], "last_id": items[-1]["id"], "has_more": False}
        return {"object": "list", "data": items, **ends}

    @app.get(f"{path}/items", tags=["openai"], responses=_FAULTS)
    async def items(id: str, request: Request) -> Any:
        """Its items, in pages."""
        store, found = await _find(id, request)
        return page(request, await store.items(tenant_of(request), found), default=20, most=100)

    @app.get(f"{path}/items/{{item}}", tags=["openai"], responses=_FAULTS)
    async def item(id: str, item: str, request: Request) -> Any:
        """One of its items."""
        store, found = await _find(id, request)
        return _one(await store.items(tenant_of(request), found), item)

    @app.delete(f"{path}/items/{{item}}", tags=["openai"], responses=_FAULTS)
    async def remove(id: str, item: str, request: Request) -> Any:
        """Take an item out."""
        store, found = await _find(id, request)
        _one(await store.items(tenant_of(request), found), item)

        def without(one: Conversation) -> Conversation:
            return one.model_copy(update={"removed": (*one.removed, item)})

        return _shown(_there(id, await store.change(tenant_of(request), id, without)))

    async def _find(id: str, request: Request) -> tuple[Conversations, Conversation]:
        store = await Conversations.of(gateway.broker)
        known = re.fullmatch("conv_[0-9a-f]{32}", id)
        return store, _there(id, await store.read(tenant_of(request), id) if known else None)


async def _add(store: Conversations, tenant: str, id: str, given: list[InputItem]) -> list[dict[str, Any]]:
    part = uuid.uuid4().hex
    items = input_items(given, part)
    await store.add(tenant, id, part, items)
    return items


def _length(request: Request) -> int:
    """About what its body is stored as."""
    declared = request.headers.get("content-length", "")
    return int(declared[:20]) if declared.isdecimal() else 0


def _there(id: str, found: Conversation | None) -> Conversation:
    if found is None:
        raise StreamNotFound(
            f"There is no conversation {id[:100]!r}.", code="conversation_not_found", param="conversation_id"
        )
    return found


def _one(items: list[dict[str, Any]], id: str) -> dict[str, Any]:
    for item in items:
        if item["id"] == id:
            return item
    raise StreamNotFound(f"There is no item {id[:100]!r} here.", code="item_not_found", param="item_id")


def _shown(conversation: Conversation) -> dict[str, Any]:
    shown = conversation.model_dump(include={"id", "created_at", "metadata"})
    return {**shown, "object": "conversation"}
