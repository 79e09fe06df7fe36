"""Lets requests come while a worker still loads their model: they are validated, and wait in its lanes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from ..config.settings import Settings
from ..engine.models import read_model_info
from ..engine.sizing import CACHING
from ..schemas.registry import ModelCard
from ..streams.lanes import open_lanes
from ..streams.outages import outage_logged
from .contract import Pipe

AGAIN = 60.0  # seconds between two announcements; a model that nobody announces is forgotten after some minutes


def early_card(settings: Settings) -> ModelCard | None:
    """The model as its files describe it, before it is loaded; None where only loading finds out what it takes."""
    if settings.model is None or settings.backend not in CACHING:
        return None
    info = read_model_info(Path(settings.model), settings.model, settings.max_sequence_length)
    return model_card(settings, info.context_length)


def model_card(settings: Settings, context_length: int) -> ModelCard:
    """What a worker with these settings serves."""
    source = settings.model or "echo"
    return ModelCard(
        name=settings.served_model_name or source,
        source=source,
        backend=settings.backend,
        context_length=context_length,
        created=int(time.time()),
        tool_format=settings.tool_format,
        reasoning_format=settings.reasoning_format,
    )


@contextlib.asynccontextmanager
async def announced(connect: Callable[[], AbstractAsyncContextManager[Pipe]], card: ModelCard) -> AsyncIterator[None]:
    """Announce a model that is being loaded; if loading fails, withdraw it again, unless others serve it.

    `connect` opens a connection for that alone, as loading does not wait for the broker.
    """
    has_failed = asyncio.Event()
    announcing = asyncio.create_task(_announce(connect, card, has_failed))
    try:
        yield
    except BaseException:
        has_failed.set()
        raise
    finally:
        announcing.cancel()
        await asyncio.gather(announcing, return_exceptions=True)  # what ails the connection, the worker meets itself


async def _announce(
    connect: Callable[[], AbstractAsyncContextManager[Pipe]], card: ModelCard, has_failed: asyncio.Event
) -> None:
    async with connect() as pipe:
        await open_lanes(pipe.broker, pipe.settings, card.name, card.revision)
        try:
            while True:
                with outage_logged("a model that is being loaded cannot be announced", model=card.name):
                    await pipe.registry.announce_model(card)
                await asyncio.sleep(AGAIN)
        finally:
            if has_failed.is_set():
                await pipe.registry.refresh()
                if not pipe.registry.workers_for(card.name, card.revision):
                    await pipe.registry.withdraw_model(card)
