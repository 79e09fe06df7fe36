"""A model that says what a recording has it say, behind the whole pipeline and its HTTP application."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

from asgi import HEADERS, Response, ask
from memory_pipeline import Pipeline
from office import Scripted
from starlette.types import ASGIApp

from penstock.api.http.app import create_app
from penstock.engine.models import BUNDLED, resolve_model

Made = TypeVar("Made")

PATIENCE = 120.0  # seconds: the first request with tools loads what compiles grammars


async def within_time(work: Coroutine[Any, Any, Made]) -> Made:
    async with asyncio.timeout(PATIENCE):
        return await work


class Desk:
    """The pipeline with a model that says what a recording has it say."""

    def __init__(self, runner: asyncio.Runner) -> None:
        self.run = runner.run
        source = str(resolve_model(BUNDLED))
        started = Pipeline.start(kind=Scripted, source=source, context_length=2048, relay_interval=0.0)
        self.pipeline = runner.run(started)
        pipe = self.pipeline.pipe
        self.app: ASGIApp = create_app(self.pipeline.bridge, pipe.broker, pipe.registry, pipe.settings, "0")
        assert isinstance(self.pipeline.backend, Scripted)
        self.model = self.pipeline.backend

    def ask(self, path: str, body: Any, says: str, headers: Mapping[str, str] = HEADERS) -> Response:
        self.model.texts = [says]
        return self.run(within_time(ask(self.app, "POST", path, body, headers=headers)))
