"""Lets requests come while a worker still loads their model: they are validated, and wait in its lanes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from ..config.models import parse_adapters
from ..config.settings import Settings
from ..engine.adapters.files import adapter_source
from ..engine.models import ModelInfo, read_model_info
from ..engine.planning.discovery import find_backend, modalities
from ..schemas.registry import LoadProgress, ModelCard
from ..streams.lanes import open_lanes
from ..streams.outages import outage_logged
from .contract import Pipe

TOLD = 0.5  # seconds between two reports of progress
AGAIN = 60.0  # seconds between two announcements; a model that nobody announces is forgotten after some minutes


def early_card(settings: Settings, revision: int | None = None) -> ModelCard | None:
    """The model as its files describe it, before it is loaded; None where only loading finds out what it takes."""
    if settings.model is None or not find_backend(settings.backend, settings.allowed_backends).cache:
        return None
    info = read_model_info(Path(settings.model), settings.model, settings.max_sequence_length)
    return model_card(settings, info, revision)


def model_card(settings: Settings, info: ModelInfo, revision: int | None = None) -> ModelCard:
    """What a worker with these settings serves; `revision` is that of a model of the catalogue."""
    source = settings.model or "echo"
    return ModelCard(
        name=settings.served_model_name or source,
        source=source,
        backend=settings.backend,
        context_length=info.context_length,
        created=int(time.time()),
        tool_format=settings.tool_format,
        reasoning_format=settings.reasoning_format,
        revision=revision or 1,
        catalogued=revision is not None,
        modalities=modalities(info, settings.backend, settings.allowed_backends),
        ranks=info.ranks,
        adapters=tuple(adapter_source(*each) for each in parse_adapters(settings.lora_modules).items()),
    )


@contextlib.asynccontextmanager
async def announced(
    connect: Callable[[], AbstractAsyncContextManager[Pipe]], card: ModelCard, worker: str = ""
) -> AsyncIterator[Callable[[int, int], None]]:
    """Announce a model that `worker` is loading; if that fails, withdraw the model unless others serve it.

    `connect` opens a connection for that alone, as loading does not wait for the broker. Yields a callback for the
    weights that have been loaded, which any thread may call.
    """
    failure: list[BaseException] = []
    loaded = [0, 1]
    announcing = asyncio.create_task(_announce(connect, card, worker, failure, loaded))

    def report(done: int, total: int) -> None:
        loaded[:] = done, max(1, total)

    try:
        yield report
    except BaseException as error:
        failure.append(error)
        raise
    finally:
        announcing.cancel()
        await asyncio.gather(announcing, return_exceptions=True)  # what ails the connection, the worker meets itself


async def _announce(
    connect: Callable[[], AbstractAsyncContextManager[Pipe]],
    card: ModelCard,
    worker: str,
    failure: list[BaseException],
    loaded: Sequence[int],
) -> None:
    clock = asyncio.get_running_loop().time
    begun = clock()
    async with connect() as pipe:
        await open_lanes(pipe.broker, pipe.settings, card.name, card.revision)
        try:
            again = begun
            while True:
                with outage_logged("a model that is being loaded cannot be announced", model=card.name):
                    if clock() >= again and not card.catalogued:
                        await pipe.registry.announce_model(card)
                        again = clock() + AGAIN
                    done, total = loaded
                    progress = LoadProgress(
                        worker=worker,
                        model=card.name,
                        revision=card.revision,
                        percent=100 * done // total,
                        elapsed=clock() - begun,
                    )
                    await pipe.broker.notify(pipe.subjects.loading(), progress.model_dump_json().encode())
                await asyncio.sleep(TOLD)
        finally:
            if failure:
                await pipe.registry.refresh()
                if not card.catalogued and not pipe.registry.workers_for(card.name, card.revision):
                    await pipe.registry.withdraw_model(card)
