"""The models on offer: OpenAI's list, and what llama.cpp's router adds to it: states, loading, unloading, and news.

A model that is "unloaded" can be asked for all the same: it is loaded for the first request.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from functools import partial
from typing import Any

import orjson
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

from ....schemas.errors import Conflict, ModelNotFound
from ....schemas.models.catalogue import Catalogue, RevisionKey
from ....schemas.models.model_state import (
    IllegalTransition,
    ModelState,
    ModelStatus,
    by_revision,
    enqueue,
    start_draining,
    unload,
)
from ....schemas.registry import ModelCard
from ....streams.lanes import waiting_in_lanes
from ....streams.outages import outage_logged
from ....streams.stores.catalogue import CatalogueStore
from ....streams.stores.registry import Registry
from ....streams.topology import lanes_of
from ..answers import AS_IT_COMES
from ..anthropic.lists import MAX_LISTED, VERSION, model_info, page
from ..openapi import STREAMED, body_of, refusals
from ..preparers import Preparers
from ..requests import Gateway, read_parsed
from .catalogue import ModelRequest, check_admin, not_catalogued, swap_of

_OUTPUTS = {"/v1/embeddings": "embeddings", "/v1/rerank": "scores"}  # what models answer with, if not with text

LOOK = 0.5  # seconds between two looks at the states, for those who listen
_WIRE: Mapping[ModelStatus, str] = {  # our words and those of llama.cpp's router
    "unloaded": "unloaded",
    "queued": "loading",
    "loading": "loading",
    "ready": "loaded",
    "draining": "loaded",
    "failed": "unloaded",
}


class ModelRoutes:
    def __init__(self, gateway: Gateway, registry: Registry, preparers: Preparers) -> None:
        self._gateway = gateway
        self._registry = registry
        self._preparers = preparers
        self._kept: CatalogueStore | None = None  # opened when it is first needed

    def add_to(self, app: FastAPI) -> None:
        errors = refusals(400, 403, 404, 408, 409, 413, 500, 503)
        for path in ("/models", "/v1/models"):
            app.get(path, tags=["openai"])(self.models)
        app.get("/models/sse", tags=["models"], response_class=StreamingResponse, responses=STREAMED)(self.news)
        app.get("/v1/models/status", tags=["models"])(self.status)
        app.get("/v1/models/{name:path}", tags=["openai"], responses=refusals(404))(self.model)
        for path, route in (("/models/load", self.load), ("/models/unload", self.unload)):
            app.post(path, tags=["models"], responses=errors, openapi_extra=body_of(ModelRequest))(route)

    async def models(self, request: Request) -> Any:
        """Every model that can be asked for, loaded or not. To Anthropic's clients, a page in Anthropic's form."""
        cards = self._registry.models.values()
        if VERSION in request.headers:
            names = [(card, name) for card in cards for name in (card.name, *(each.name for each in card.adapters))]
            return page(request, [model_info(*each) for each in names], "model", limit=MAX_LISTED)
        states = await self._states()
        return {
            "object": "list",
            "data": [each for card in cards for each in (self._described(card, states), *self._adapted(card, states))],
        }

    async def model(self, name: str, request: Request) -> Any:
        """One model, by its name or an alias, or one adapter; all of them where no name follows the slash."""
        if not name:
            return await self.models(request)
        name = await self._registry.untagged(name)
        card = await self._preparers.card(name)
        if VERSION in request.headers:
            return model_info(card, name if card.adapter(name) else card.name)
        states = await self._states()
        found = [each for each in self._adapted(card, states) if each["id"] == name]
        return found[0] if found else self._described(card, states)

    async def status(self) -> Any:
        """What the models are doing: the whole, and by model its backend, its state, what waits for it, its last error,
        and a swap that goes on or has failed."""
        catalogue, states = await self._known()
        swaps = self._swaps(catalogue, states)
        models: list[dict[str, Any]] = []
        reached: list[ModelStatus] = []
        cards = list(self._registry.models.values())
        for card, waiting in zip(cards, await asyncio.gather(*map(self._num_waiting, cards)), strict=True):
            state = states.get(RevisionKey(card.name, card.revision))
            reached.append(self._state(card, state))
            models.append(
                {
                    "id": card.name,
                    "backend": card.backend,
                    "revision": card.revision,
                    "state": reached[-1],
                    "progress": state.progress if state and state.status == "loading" else None,
                    "queue_length": waiting,
                    "workers": len(self._registry.workers_for(card.name, card.revision)),
                    "loads": state.loads if state else 0,
                    "last_error": self._last_error(card, state),
                    "swap": swaps.get(card.name),
                }
            )
        for entry in catalogue.entries:  # what no host can load
            if entry.name not in self._registry.models:
                refusal = self._registry.refusals.get(lanes_of(entry.name, entry.revision))
                reached.append("failed" if refusal else "unloaded")
                models.append(
                    {
                        "id": entry.name,
                        "backend": entry.backend,
                        "revision": entry.revision,
                        "state": reached[-1],
                        "last_error": refusal.reason if refusal else None,
                        "swap": swaps[entry.name],
                    }
                    | {"progress": None, "queue_length": 0, "workers": 0, "loads": 0}
                )
        return {"state": _overall(reached), "models": models}

    async def _num_waiting(self, card: ModelCard) -> int:
        waiting = await waiting_in_lanes(self._gateway.broker, lanes_of(card.name, card.revision))
        return sum(waiting.values())

    async def ready(self) -> set[str]:
        """The names of the models that are loaded."""
        states = await self._states()
        cards = self._registry.models.values()
        return {card.name for card in cards if self._wire(card, states)["value"] == "loaded"}

    async def load(self, request: Request) -> Any:
        """Load a model before it is asked for."""
        check_admin(request)
        await self.load_named((await read_parsed(ModelRequest, request, self._gateway.settings)).model)
        return {"success": True}

    async def load_named(self, name: str) -> None:
        """Load a model that stays loaded until it is idle. Raises as `unload_named` does."""
        key = await self._key(name)
        await self._change(key, partial(_requested, now=self._gateway.broker.now()))

    async def unload(self, request: Request) -> Any:
        """Unload a model once it has finished what it runs; what waits for it then loads it again."""
        check_admin(request)
        await self.unload_named((await read_parsed(ModelRequest, request, self._gateway.settings)).model)
        return {"success": True}

    async def unload_named(self, name: str) -> None:
        """Unload a model. Raises `Conflict`, and `InvalidRequest` or `ModelNotFound`."""
        key = await self._key(name)
        replicas = [each for each in await (await self._store()).states() if each.first == key and each != key]
        for each in (key, *replicas):
            await self._change(each, partial(_unwanted, now=self._gateway.broker.now()))

    async def news(self, request: Request) -> StreamingResponse:
        """The state of each model as SSE, and then every change."""
        return StreamingResponse(self._news(request), media_type="text/event-stream", headers=AS_IT_COMES)

    async def _news(self, request: Request) -> AsyncIterator[bytes]:
        told: dict[str, Any] = {}
        clock = asyncio.get_running_loop().time
        heard = clock()
        while not await request.is_disconnected() and not self._gateway.bridge.draining:
            with outage_logged("the states of models cannot be read"):
                catalogue, states = await self._known()
                for news in self._news_of(catalogue, states):
                    if told.get(news["model"]) != news:
                        told[news["model"]] = news
                        heard = clock()
                        yield b"event: model_status\ndata: " + orjson.dumps(news) + b"\n\n"
            if clock() - heard >= self._gateway.settings.keepalive_interval:
                heard = clock()
                yield b": ping\n\n"
            await asyncio.sleep(LOOK)

    def _news_of(self, catalogue: Catalogue, states: Mapping[RevisionKey, ModelState]) -> Iterator[dict[str, Any]]:
        """What there is to say of each model, of those that no host can load as well."""
        swaps = self._swaps(catalogue, states)
        for card in self._registry.models.values():
            news = {"model": card.name, "status": self._wire(card, states), "revision": card.revision}
            yield news | ({"swap": swap} if (swap := swaps.get(card.name)) else {})
        for entry in catalogue.entries:
            refusal = self._registry.refusals.get(lanes_of(entry.name, entry.revision))
            if entry.name not in self._registry.models and refusal is not None:
                status = {"value": "unloaded", "failed": True, "error": refusal.reason}
                yield {"model": entry.name, "status": status, "revision": entry.revision}

    async def _known(self) -> tuple[Catalogue, Mapping[RevisionKey, ModelState]]:
        store = await self._store()
        return await store.read(), by_revision((await store.states()).values())

    async def _states(self) -> Mapping[RevisionKey, ModelState]:
        if not any(card.catalogued for card in self._registry.models.values()):
            return {}
        return by_revision((await (await self._store()).states()).values())

    async def _store(self) -> CatalogueStore:
        if self._kept is None:
            self._kept = await CatalogueStore.of(self._gateway.broker)
        return self._kept

    def _swaps(
        self, catalogue: Catalogue, states: Mapping[RevisionKey, ModelState]
    ) -> dict[str, dict[str, Any] | None]:
        serving = {card.name: card.revision for card in self._registry.models.values()}
        return {entry.name: swap_of(entry, states, serving.get(entry.name)) for entry in catalogue.entries}

    def _last_error(self, card: ModelCard, state: ModelState | None) -> str | None:
        if state is not None and state.status == "failed":
            return state.reason
        refusal = self._registry.refusals.get(lanes_of(card.name, card.revision))
        return refusal.reason if refusal else None

    def _described(self, card: ModelCard, states: Mapping[RevisionKey, ModelState]) -> dict[str, Any]:
        return {
            "id": card.name,
            "object": "model",
            "created": card.created,
            "owned_by": "penstock",
            "root": card.source,
            "parent": None,
            "max_model_len": card.context_length,
            "aliases": card.aliases,
            "status": self._wire(card, states),
            "architecture": {
                "input_modalities": card.modalities,
                "output_modalities": [_OUTPUTS.get(card.endpoint, "text")],
            },
        }

    def _adapted(self, card: ModelCard, states: Mapping[RevisionKey, ModelState]) -> list[dict[str, Any]]:
        """The adapters of a model: models that name it as their parent, and share its state."""
        base = self._described(card, states)
        return [
            base | {"id": adapter.name, "root": adapter.path, "parent": card.name, "aliases": ()}
            for adapter in card.adapters
        ]

    def _wire(self, card: ModelCard, states: Mapping[RevisionKey, ModelState]) -> dict[str, Any]:
        state = states.get(RevisionKey(card.name, card.revision))
        found: dict[str, Any] = {"value": _WIRE[self._state(card, state)]}
        if state is not None and state.status == "loading":
            found["progress"] = state.progress
        if state is not None and state.status == "failed":
            found |= {"failed": True, "error": state.reason}
        return found

    def _state(self, card: ModelCard, state: ModelState | None) -> ModelStatus:
        """A model that no agent places is what its workers say of it."""
        if card.catalogued:
            return state.status if state else "unloaded"
        if self._registry.workers_for(card.name, card.revision):
            return "ready"
        return "loading" if self._gateway.bridge.loads.is_loading(card.name, card.revision) else "unloaded"

    async def _key(self, name: str) -> RevisionKey:
        """The model that an operator means. Raises `InvalidRequest` or `ModelNotFound`."""
        with contextlib.suppress(ModelNotFound):  # what was just added may not have been announced
            entry = (await (await self._store()).read()).find(name)
            return RevisionKey(entry.name, entry.revision)
        card = await self._preparers.card(name)
        if not card.catalogued:
            raise not_catalogued(card.name)
        return RevisionKey(card.name, card.revision)

    async def _change(self, key: RevisionKey, change: Callable[[ModelState], ModelState]) -> None:
        try:
            await (await self._store()).change_state(key, change)
        except IllegalTransition as error:
            raise Conflict(f"{error}.", code="model_state") from None


def _requested(state: ModelState, *, now: float) -> ModelState:
    if state.status in ("queued", "loading", "ready"):
        return state
    return enqueue(state, now, requested=True)


def _unwanted(state: ModelState, *, now: float) -> ModelState:
    reason = "an operator has unloaded it"
    match state.status:
        case "ready":
            return start_draining(state, now, reason)
        case "queued" | "failed" | "loading":
            return unload(state, now, reason)
        case _:
            return state


def _overall(states: list[ModelStatus]) -> str:
    """The word of the specification for all models together."""
    if {"queued", "loading"} & {*states}:
        return "switching" if {"ready", "draining"} & {*states} else "loading"
    if "ready" in states or "draining" in states:
        return "ready"
    return "error" if "failed" in states else "idle"
