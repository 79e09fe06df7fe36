"""LoRA adapters that an operator adds and removes while the server serves: vLLM's two paths.

An added adapter is kept in the broker: every worker of its model loads it, also one that starts later.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse
from pydantic import Field

from ....engine import find_backend
from ....engine.adapters.files import check_adapter
from ....schemas.errors import ConfigurationError, Forbidden, InvalidRequest, ModelNotFound
from ....schemas.events import Failed
from ....schemas.jobs import Job
from ....schemas.models.catalogue import AdapterName
from ....schemas.openai.body import Body, ModelName
from ....schemas.registry import AddedAdapter, ModelCard
from ....schemas.sources import is_here
from ..openapi import body_of, refusals
from ..requests import Gateway, Routes, read_parsed, tenant_of
from .catalogue import check_admin

PATIENCE = 60.0  # seconds for the first request to a new adapter


class LoadAdapter(Body):
    """`lora_path` is a directory in PEFT's format that the server's machines see. `base_model_name` is the model that
    it belongs to; without it the only one. With `load_inplace` it replaces an adapter that was added under its name."""

    lora_name: AdapterName
    lora_path: str = Field(min_length=1)
    base_model_name: ModelName | None = None
    load_inplace: bool | None = None


class UnloadAdapter(Body):
    """Names an adapter that was added."""

    lora_name: ModelName
    lora_int_id: int | None = None  # vLLM's own number of it


def add_adapters(app: FastAPI, gateway: Gateway) -> None:
    routes = AdapterRoutes(gateway)
    errors = refusals(400, 403, 404, 408, 413, 500, 503)
    for path, route, body in (
        ("/v1/load_lora_adapter", routes.load, LoadAdapter),
        ("/v1/unload_lora_adapter", routes.unload, UnloadAdapter),
    ):
        app.post(
            path, tags=["models"], response_class=PlainTextResponse, responses=errors, openapi_extra=body_of(body)
        )(route)


class AdapterRoutes(Routes):
    async def load(self, request: Request) -> PlainTextResponse:
        """Offer a LoRA adapter as a model name from now on, restarts included.

        Where a worker has its model, the adapter must answer a request first.
        """
        self._check_right(request)
        asked = await read_parsed(LoadAdapter, request, self._settings)
        name, registry = asked.lora_name, self._gateway.registry
        added, holder = await self._added(name), await registry.find(name)
        if holder is not None and holder.adapter(name) is None:
            raise InvalidRequest(
                f"{name!r} is the name of a model; choose another name for the adapter.",
                code="model_exists",
                param="lora_name",
            )
        if (added or holder) and not (added and asked.load_inplace):
            raise _loaded(name)
        if asked.base_model_name is None and len(registry.models) > 1:
            raise InvalidRequest(
                f"Say which model the adapter belongs to: {', '.join(registry.models)}.", param="base_model_name"
            )
        card = await self._gateway.preparers.card(asked.base_model_name)
        if not await asyncio.to_thread(self._runs_adapters, card.backend):
            raise InvalidRequest(
                f"The backend {card.backend} of {card.name!r} runs no adapters.", code="unsupported_capability"
            )
        new = await asyncio.to_thread(_described, asked, card)
        # One that replaces another is tried under a name of its own: no other process knows that one, so none takes
        # the former adapter for it, and clients keep the former one until it is known to be good.
        trial = new if added is None else new.model_copy(update={"name": f"{name[:160]}-{uuid.uuid4().hex}"})
        if not await registry.add_adapter(trial):
            raise _loaded(name)
        await registry.look()
        if reason := await self._fault(request, trial, card):
            await registry.remove_adapter(trial)
            await registry.look()
            raise InvalidRequest(reason.replace(trial.name, name), code="invalid_adapter", param="lora_path")
        if added is not None:
            await registry.add_adapter(new, replace=True)
            await registry.remove_adapter(trial)
            await registry.look()
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    async def unload(self, request: Request) -> PlainTextResponse:
        """Take an adapter that was added off the offer; requests that run finish with it."""
        self._check_right(request)
        name, registry = (await read_parsed(UnloadAdapter, request, self._settings)).lora_name, self._gateway.registry
        if (added := await self._added(name)) is None:
            card = await registry.find(name)
            if card is not None and card.adapter(name) is not None:
                raise InvalidRequest(
                    f"The lora adapter {name!r} comes from the settings of {card.name!r}; remove it there.",
                    param="lora_name",
                )
            raise ModelNotFound(f"The lora adapter {name!r} cannot be found.", param="lora_name")
        await registry.remove_adapter(added)
        await registry.look()
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")

    def _runs_adapters(self, backend: str) -> bool:
        try:
            return find_backend(backend, self._settings.allowed_backends).adapters
        except ConfigurationError as error:
            raise InvalidRequest(f"{error}; install it where the HTTP bridge runs, too.") from None

    def _check_right(self, request: Request) -> None:
        if not self._settings.allow_runtime_lora_updating:
            raise Forbidden(
                "Adapters cannot be added or removed here while the server serves; the operator allows it with "
                "--allow-runtime-lora-updating true.",
                code="runtime_lora_disabled",
            )
        check_admin(request)

    async def _added(self, name: str) -> AddedAdapter | None:
        return next((each for each in await self._gateway.registry.added_adapters() if each.name == name), None)

    async def _fault(self, request: Request, adapter: AddedAdapter, card: ModelCard) -> str | None:
        """Why a worker cannot use the adapter, from the answer to a first request; None where no worker could say."""
        if not self._gateway.registry.workers_for(card.name, card.revision):
            return None
        bridge = self._gateway.bridge
        body = {"model": adapter.name, "prompt": [1], "max_tokens": 1}
        job = Job(id=f"cmpl-{uuid.uuid4().hex}", endpoint="/v1/completions", bridge=bridge.name, body=body)
        reading = await bridge.open(
            job, priority="normal", tenant=tenant_of(request), deadline=bridge.broker.now() + PATIENCE
        )
        try:
            while not reading.ended:
                await reading.take(PATIENCE)
            final = reading.final
        finally:
            reading.close()
        is_unusable = isinstance(final, Failed) and final.error.code == "model_unavailable"
        return final.error.message if isinstance(final, Failed) and is_unusable else None


def _loaded(name: str) -> InvalidRequest:
    return InvalidRequest(
        f"The lora adapter {name!r} has already been loaded; to replace one that was added at run time, set "
        "load_inplace to true.",
        code="model_exists",
        param="lora_name",
    )


def _described(asked: LoadAdapter, card: ModelCard) -> AddedAdapter:
    """The adapter, checked as far as its files and those of its model tell. Raises `InvalidRequest`."""
    path, base = Path(asked.lora_path).expanduser().resolve(), Path(card.source)
    try:
        digest = check_adapter(path, base if is_here(base) else None)
    except InvalidRequest as error:
        raise InvalidRequest(str(error), code=error.code, param="lora_path") from None
    return AddedAdapter(name=asked.lora_name, path=str(path), digest=digest, model=card.name, created=int(time.time()))
