"""The models in the form of Ollama's API: what there is, what each can do, and what is loaded now."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import orjson
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from ....schemas.errors import ModelNotFound
from ....schemas.ollama.bodies import ModelRequest
from ....schemas.ollama.options import called_here
from ....schemas.registry import ModelCard
from ....schemas.times import rfc3339
from ....schemas.version import __version__
from ....streams.stores.registry import LATEST
from ..models.states import ModelRoutes
from ..openapi import body_of
from ..requests import Gateway, read_parsed

SPOKEN = "0.13.0"  # the version of Ollama whose API this is; clients ask for one that is new enough
LINES: dict[int | str, Any] = {  # for `responses`
    "200": {"description": "JSON objects", "content": {"application/x-ndjson": {"schema": {"type": "string"}}}}
}
_FAMILY = "penstock"  # the bridge knows no architectures; clients need the word to find a model's facts
_NEVER = "2299-12-31T23:59:59Z"  # far from the last year of what clients can tell in other time zones


class OllamaModels:
    def __init__(self, gateway: Gateway, models: ModelRoutes) -> None:
        self._gateway = gateway
        self._models = models

    def add_to(self, app: FastAPI, refused: dict[int | str, Any]) -> None:
        app.get("/api/version", tags=["ollama"])(self.version)
        app.get("/api/tags", tags=["ollama"])(self.tags)
        app.get("/api/ps", tags=["ollama"])(self.loaded)
        body = body_of(ModelRequest)
        app.post("/api/show", tags=["ollama"], openapi_extra=body, responses=refused)(self.show)
        app.post("/api/pull", tags=["ollama"], openapi_extra=body, responses=LINES | refused)(self.pull)

    async def version(self) -> Any:
        """The version of Ollama whose API this is, and of Penstock."""
        return {"version": SPOKEN, "penstock": __version__}

    async def tags(self) -> Any:
        """Every model that can be asked for, loaded or not."""
        return {"models": [_listed(card, name) for card, name in self._named()]}

    async def loaded(self) -> Any:
        """The models that are loaded now. Of their memory nothing is said, nor of when they leave it."""
        ready = await self._models.ready()
        about = {"expires_at": _NEVER, "size_vram": 0}
        return {
            "models": [
                _listed(card, name) | about | {"context_length": card.context_length}
                for card, name in self._named()
                if card.name in ready
            ]
        }

    async def show(self, request: Request) -> Response:
        """What a model is and can do."""
        asked = await read_parsed(ModelRequest, request, self._gateway.settings)
        card = await self._gateway.preparers.card(asked.named)
        template, capabilities = "", ["embedding"]
        if card.endpoint == "/v1/completions":
            preparer = await self._gateway.preparers.of(card)
            template = preparer.tokenizer.chat_template
            can = {
                "completion": True,
                "tools": preparer.form.tool_format is not None,
                "thinking": preparer.form.reasoning_format is not None,
                "vision": preparer.sees,
                "insert": preparer.fills_gaps,
            }
            capabilities = [word for word, is_so in can.items() if is_so]
        return JSONResponse(
            {
                "modelfile": "",
                "parameters": "\n".join(_parameters(card.defaults)),
                "template": template,
                "details": _details(card),
                "model_info": {
                    "general.architecture": _FAMILY,
                    "general.basename": card.name,
                    f"{_FAMILY}.context_length": card.context_length,
                },
                "capabilities": capabilities,
                "modified_at": rfc3339(card.created),
            }
        )

    async def pull(self, request: Request) -> Response:
        """Succeeds for a model that is there; nothing is downloaded."""
        asked = await read_parsed(ModelRequest, request, self._gateway.settings)
        name = await self._gateway.registry.untagged(asked.named)
        if await self._gateway.registry.find(name) is None:
            raise ModelNotFound(
                f"{self._gateway.registry.unknown(name)} Nothing is downloaded on request: an operator adds a model "
                "with `penstock models add`.",
                param="model",
            )
        done = {"status": "success"}
        if asked.stream is False:
            return JSONResponse(done)
        return StreamingResponse(_one(done), media_type="application/x-ndjson")

    def _named(self) -> list[tuple[ModelCard, str]]:
        cards = self._gateway.registry.models.values()
        return [(card, name) for card in cards for name in (card.name, *(each.name for each in card.adapters))]


async def _one(piece: dict[str, Any]) -> AsyncIterator[bytes]:
    yield orjson.dumps(piece) + b"\n"


def _listed(card: ModelCard, name: str) -> dict[str, Any]:
    tagged = name if ":" in name else name + LATEST  # Open WebUI asks for no others
    digest = hashlib.sha256(f"{card.source} {card.revision} {name}".encode()).hexdigest()
    return {
        "name": tagged,
        "model": tagged,
        "modified_at": rfc3339(card.created),
        "size": 0,
        "digest": digest,
        "details": _details(card),
    }


def _parameters(defaults: dict[str, Any]) -> Iterator[str]:
    """Lines of a Modelfile."""
    for name, value in defaults.items():
        for each in value if isinstance(value, list) else [value]:
            yield f"{called_here(name)} {orjson.dumps(each).decode()}"


def _details(card: ModelCard) -> dict[str, Any]:
    form = "gguf" if ".gguf" in card.source else "safetensors"
    return {
        "parent_model": "",
        "format": form,
        "family": _FAMILY,
        "families": [_FAMILY],
        "parameter_size": "",
        "quantization_level": "",
    }
