"""What operators change about the models on offer while they are served: add one, remove one, swap one for another."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from pydantic import ConfigDict, Field

from ....config.catalogue import parse_model
from ....schemas.errors import ConfigurationError, Conflict, Forbidden, InvalidRequest, ModelNotFound, Unauthorized
from ....schemas.models.catalogue import Catalogue, CatalogueEntry, RevisionKey
from ....schemas.models.model_state import ModelState
from ....schemas.openai.body import Body
from ....schemas.sources import looks_like_path
from ....streams.stores.catalogue import CatalogueStore
from ....streams.topology import lanes_of
from ..openapi import body_of, refusals
from ..requests import Gateway, read_object, read_parsed

ANNOUNCING = 2.0  # seconds in which an agent says that it can load a new model, or why it cannot
LOOK = 0.05  # seconds between two looks for that


class ModelRequest(Body):
    """Names a model, or one of its aliases."""

    model: str = Field(min_length=1)


class SwapRequest(ModelRequest):
    """`source` is the directory, as an absolute path on the server's machine, or the Hugging Face id of the new one."""

    source: str = Field(min_length=1)


class AddRequest(SwapRequest):
    """`model` is the new name; the other fields are the keys of a table of the file of models."""

    model_config = ConfigDict(extra="allow")


class CatalogueRoutes:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def add_to(self, app: FastAPI) -> None:
        errors = refusals(400, 403, 404, 408, 409, 413, 500, 503)
        for name, route, body in (
            ("add", self.add, AddRequest),
            ("remove", self.remove, ModelRequest),
            ("swap", self.swap, SwapRequest),
        ):
            app.post(f"/models/{name}", tags=["models"], responses=errors, openapi_extra=body_of(body))(route)

    async def add(self, request: Request) -> Any:
        """Offer one more model, until the server ends. Nothing is loaded before it is asked for, or has `preload`."""
        check_admin(request)
        registry = self._gateway.registry
        if not registry.agents:
            await registry.look()
        if not registry.agents:
            raise InvalidRequest(
                "Nothing here loads models on demand: start the server with --models or --model-dir, or run `penstock "
                "agent` beside it. For workers that you start yourself, declare models with `penstock nats setup`.",
                code="no_agent",
            )
        values = await read_object(request, self._gateway.settings)
        name = values.pop("model", None)
        if not isinstance(name, str) or not name:
            raise InvalidRequest("model is missing: name the new model.", param="model")
        _check_source(values.get("source"))
        try:
            entry = parse_model(name, values)
        except ConfigurationError as error:
            raise InvalidRequest("; ".join(error.faults)) from None
        settings = self._gateway.settings

        def added(catalogue: Catalogue) -> Catalogue:
            if len(catalogue.entries) >= settings.max_models:
                raise InvalidRequest(
                    f"{len(catalogue.entries)} models are offered, and max_models is {settings.max_models}: remove "
                    "one first, or start the server with a larger --max-models",
                    code="too_many_models",
                )
            return catalogue.add(entry)

        entry = (await self._change(name, added)).find(name)
        await self._announced(entry)
        return {"success": True, "revision": entry.revision}

    async def _announced(self, entry: CatalogueEntry) -> None:
        """Return once requests may name a model: an agent says so in a moment, or why it cannot load it."""
        registry, lanes = self._gateway.registry, lanes_of(entry.name, entry.revision)
        with contextlib.suppress(TimeoutError):  # an agent has much to do; the model comes all the same
            async with asyncio.timeout(ANNOUNCING):
                while (card := registry.models.get(entry.name)) is None or card.revision < entry.revision:
                    if lanes in registry.refusals:
                        return
                    await asyncio.sleep(LOOK)
                    await registry.look()

    async def remove(self, request: Request) -> Any:
        """Offer a model no longer: what waits for it is refused with the reason, what runs is finished."""
        check_admin(request)
        asked = await read_parsed(ModelRequest, request, self._gateway.settings)
        await self._change(asked.model, lambda catalogue: catalogue.remove(asked.model))
        return {"success": True}

    async def swap(self, request: Request) -> Any:
        """Replace a model by another one of the same name, once that is loaded and has answered a test request.

        The answer comes at once, with the number of the new revision; `GET /models/sse` and `GET /v1/models/status`
        say how it goes. Requests that came before finish on the old one. If the new one fails, the old one serves on.
        """
        check_admin(request)
        asked = await read_parsed(SwapRequest, request, self._gateway.settings)
        _check_source(asked.source)
        changed = await self._change(asked.model, lambda catalogue: catalogue.swap(asked.model, asked.source))
        return {"success": True, "revision": changed.find(asked.model).candidate}

    async def _change(self, name: str, update: Callable[[Catalogue], Catalogue]) -> Catalogue:
        """Raises `InvalidRequest`, `ModelNotFound`, and `Conflict` while another change is not done yet."""
        try:
            return await (await CatalogueStore.of(self._gateway.broker)).change(update)
        except ModelNotFound:
            registry = self._gateway.registry
            if (card := await registry.find(name)) is not None and not card.catalogued:
                raise not_catalogued(card.name) from None
            if not registry.agents:  # no catalogue says what there is
                raise registry.unknown(name) from None
            raise
        except InvalidRequest as error:
            if error.code == "swap_in_progress":
                raise Conflict(str(error), code=error.code, param=error.param) from None
            raise


def swap_of(
    entry: CatalogueEntry, states: Mapping[RevisionKey, ModelState], serving: int | None = None
) -> dict[str, Any] | None:
    """How the swap of a model goes, or why the last one has failed; `serving` is the revision that requests get now."""
    if (number := entry.candidate) is not None:
        state = states.get(RevisionKey(entry.name, number))
        status = state.status if state else "queued"
        word = {"loading": "loading", "ready": "probing"}.get(status, "queued")
        progress = {"progress": state.progress} if state and status == "loading" else {}
        return {"revision": number, "source": entry.sources[number], "state": word, **progress}
    if serving is not None and serving < entry.revision:
        return {"revision": entry.revision, "source": entry.source, "state": "switching"}
    if (failed := entry.failed_swap) is not None:
        return {"revision": failed.revision, "source": failed.source, "state": "failed", "error": failed.reason}
    return None


def check_admin(request: Request) -> None:
    """Raises `Forbidden` for a key that may not operate the server."""
    if not getattr(request.state, "admin", True):
        raise Forbidden("This key may not operate the server; use one with the word admin.", code="not_admin")


def is_admin_still(request: Request) -> bool:
    """Whether the key of a request that `check_admin` has passed is known and may operate the server even now."""
    owner_now = getattr(request.state, "owner_now", None)  # None where no keys are used
    try:
        return owner_now is None or owner_now().admin
    except Unauthorized:
        return False


def not_catalogued(name: str) -> InvalidRequest:
    return InvalidRequest(
        f"{name!r} is served by workers of its own, and stays loaded while they run; models that are loaded on demand "
        "come from --models or --model-dir.",
        param="model",
    )


def _check_source(source: object) -> None:
    if isinstance(source, str) and looks_like_path(source) and not Path(source).is_absolute():
        raise InvalidRequest(f"{source!r} is a relative path: give an absolute one.", param="source")
