"""The LoRA adapters of a worker: loaded before they are asked for, or for the request that asks first.

In the engine an adapter goes by its digest: a request gets the content that was offered when it came, also where that
is not offered any more, and at another worker.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Sequence

import structlog

from ...engine import InferenceEngine
from ...schemas.errors import Overloaded, PenstockError
from ...schemas.jobs import AdapterSource
from ...schemas.registry import ModelCard
from ...streams.beats import until_beat
from ...streams.outages import outage_logged
from ...streams.stores.registry import Registry

log = structlog.get_logger(__name__)

AGAIN = 10.0  # seconds until an adapter that cannot be loaded is tried again


class WorkerAdapters:
    """Loads adapters into an engine, each once, and removes what is no longer offered or used."""

    def __init__(self, engine: InferenceEngine) -> None:
        self._engine = engine
        self._users = Counter[str]()  # requests that use an adapter now, by key
        self._loads: dict[str, asyncio.Task[None]] = {}  # by key; one that has failed stays for a while
        self._failed: set[str] = set()  # keys whose failure was logged; set by keep

    @contextlib.asynccontextmanager
    async def using(self, source: AdapterSource | None) -> AsyncIterator[str | None]:
        """Keep an adapter loaded; yields its name in the engine. Raises `Overloaded` if it cannot be loaded."""
        if source is None:
            yield None
            return
        key = _key(source)
        self._users[key] += 1
        try:
            try:
                await self._loaded(source)
            except PenstockError as error:
                raise Overloaded(
                    f"The adapter {source.name!r} cannot be used: {error}", code="model_unavailable"
                ) from None
            yield key
        finally:
            self._users[key] -= 1

    async def watch(self, registry: Registry, model: ModelCard, interval: float) -> None:
        """Have every adapter ready that requests may name: those of the settings, and those added at run time."""
        while True:
            with outage_logged("adapters cannot be looked up"):
                added = await registry.added_adapters()
                await self.keep([*model.adapters, *(each.source for each in added if each.model == model.name)])
            await asyncio.sleep(until_beat(interval))

    async def keep(self, offered: Sequence[AdapterSource]) -> None:
        """Load the adapters on offer, and remove those that are neither on offer nor in use."""
        for source in offered:
            if _key(source) not in self._loads:
                try:
                    await self._loaded(source)
                except PenstockError as error:
                    if _key(source) not in self._failed:
                        log.error("adapter cannot be loaded", adapter=source.name, reason=str(error))
                    self._failed.add(_key(source))
                else:
                    self._failed.discard(_key(source))
                    log.info("adapter loaded", adapter=source.name, path=source.path)
        wanted = {_key(source) for source in offered}
        for key, load in list(self._loads.items()):
            if key not in wanted and not self._users[key] and load.done():
                del self._loads[key], self._users[key]
                if load.exception() is None:
                    self._engine.unload_adapter(key)

    async def _loaded(self, source: AdapterSource) -> None:
        """Return when the adapter is loaded; requests that wait share one load. Raises `PenstockError`."""
        key = _key(source)
        if key not in self._loads:
            load = self._loads[key] = asyncio.create_task(asyncio.to_thread(self._load, key, source))
            load.add_done_callback(lambda _: self._ended(key, load))
        await asyncio.shield(self._loads[key])

    def _ended(self, key: str, load: asyncio.Task[None]) -> None:
        if load.cancelled() or load.exception() is not None:
            asyncio.get_running_loop().call_later(AGAIN, self._forget, key, load)

    def _forget(self, key: str, load: asyncio.Task[None]) -> None:
        if self._loads.get(key) is load:
            del self._loads[key]

    def _load(self, key: str, source: AdapterSource) -> None:
        info = self._engine.load_adapter(key, source.path)
        if source.digest and info.digest != source.digest:
            self._engine.unload_adapter(key)
            raise PenstockError(
                f"the files in {source.path} have changed since it was offered; restore them, or offer it anew"
            )


def _key(source: AdapterSource) -> str:
    return source.digest or source.path
