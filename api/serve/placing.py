"""Offers models, and runs the agent that loads and unloads them: in `penstock serve`, or alone as `penstock agent`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import replace

import structlog

from ...config.deployment import explicit
from ...config.metrics import Exposition, serve_metrics
from ...config.service_manager import at_service
from ...config.settings import Settings
from ...config.sources import Loaded
from ...schemas.deployment import SHARED
from ...schemas.models.catalogue import Catalogue, CatalogueEntry
from ...streams.family import FamilyMetrics
from ...streams.nats.administration.deployment import joined
from ...streams.stores.catalogue import CatalogueStore
from ...streams.stores.registry import Registry
from ...streams.topology import Subjects
from .agent import ModelAgent
from .connecting import connected
from .processes import END_TIMEOUT, OUR_FAMILY, ProcessKeeper, child_environment

log = structlog.get_logger(__name__)


async def place_models(
    loaded: Loaded,
    entries: Sequence[CatalogueEntry] | None,
    url: str,
    name: str,
    keeper: ProcessKeeper,
    until: asyncio.Event,
    *,
    alone: bool = False,
) -> None:
    """Offer `entries`, if any are given, and start and end the workers of the models that are asked for.

    `name` is this host's; `url` the broker's. `alone`: no front shows what the workers count. Ends the workers when
    `until` is set.
    """
    given, is_shared = explicit(loaded), loaded.settings.nats_url is not None
    own = loaded.settings.model_copy(update={"nats_url": url})
    async with connected(own, "agent", patient=True) as broker:
        settings = await joined(broker, replace(loaded, settings=own))
        store, registry = await CatalogueStore.of(broker), Registry(broker, interval=settings.heartbeat_interval)
        await registry.refresh()

        def offered(known: Catalogue) -> Catalogue:
            """Our models alone, or beside those that other hosts offer."""
            if entries is None:
                return known
            names = {entry.name for entry in entries}
            others = [entry for entry in known.entries if entry.name not in names]
            return known.offer([*entries, *(others if registry.agents and is_shared else ())])

        await store.change(offered)

        def environment(chosen: Settings) -> dict[str, str]:
            hidden = [setting for setting in SHARED if setting not in given or not is_shared]
            return child_environment(chosen, url, without=[*hidden, "models", "model_dir", "metrics_port"])

        if alone:
            workers = FamilyMetrics()
            await workers.listen(broker, Subjects(settings.namespace), OUR_FAMILY)
            serve_metrics(settings.host, settings.metrics_port, Exposition(workers.texts))
        log.info("agent runs", agent=name)
        drain = settings.drain_timeout + END_TIMEOUT
        async with at_service(until, drain, f"runs {name}") if alone else contextlib.nullcontext():
            await ModelAgent(broker, store, settings, name, keeper, environment).run(until)
