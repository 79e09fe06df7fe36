"""Several models by name in `penstock bench chaos`: their catalogue, and the agent that places them."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

from pydantic import ByteSize

from ...config.process import has_ended
from ...config.settings import Settings
from ...engine import EngineConfig, resolve_model
from ...engine.planning.sizing import footprint
from ...schemas.registry import WorkerCard
from ...streams.port import Broker
from ...streams.stores.catalogue import CatalogueStore
from ...streams.stores.registry import Registry
from ..serve.processes import Part
from .answers import Request

AGENT = Part("agent 0", ("agent", "--id", "chaos"))
ROOM = 2.5  # models that fit into the memory of this benchmark; two are loaded, and a third waits for one to go
CACHE = 256 << 20  # bytes of keys and values for each model, where nothing else is set
PATIENCE = 600  # seconds that a request may wait for its model


def offered(settings: Settings, names: int, state: Path) -> Settings:
    """Settings under which an agent offers the model under several names, with room for two at once."""
    source = "no-files" if settings.model is None else str(resolve_model(settings.model))
    values: dict[str, Any] = {"backend": settings.backend, "queue_limit": 10_000, "wait_limit": PATIENCE}
    cache = None if settings.backend == "echo" else settings.kv_cache_memory or ByteSize(CACHE)
    values |= {} if cache is None else {"kv_cache_memory": int(cache), "dtype": settings.dtype}
    tables = [
        "\n".join([f"[models.m{number}]", *(f"{key} = {value!r}" for key, value in table.items()), ""])
        for number in range(names)
        if (table := {"source": f"{source}-{number}" if settings.backend == "echo" else source} | values)
    ]
    file = state / "models.toml"
    file.write_text("\n".join(tables))
    config = EngineConfig(
        model=settings.model or "echo",
        backend=settings.backend,
        device="cpu",
        dtype=settings.dtype,
        kv_cache_memory=cache,
    )
    memory = settings.models_memory or int(ROOM * footprint(config).total)
    return settings.model_copy(update={"models": file, "model": None, "models_memory": memory})


def spread(requests: list[Request], models: list[str], seed: int) -> list[Request]:
    """The same requests, each for one of the models."""
    random = Random(seed)
    return [(path, body | {"model": random.choice(models)}) for path, body in requests]


async def loads(broker: Broker) -> int:
    """How often models have been loaded so far."""
    return sum(state.loads for state in (await (await CatalogueStore.of(broker)).states()).values())


def placed(registry: Registry) -> dict[str, WorkerCard]:
    """The living workers that agents have started, by the names that parts of the benchmark have."""
    cards = [card for card in registry.workers if card.model.catalogued and not has_ended(card.host, card.pid)]
    return {f"worker {card.id}": card for card in cards}
