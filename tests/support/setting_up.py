"""Sets a deployment up on a NATS server, as `penstock nats setup --apply` does, without a process of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from penstock.api.serve.connecting import connected
from penstock.config.settings import Settings
from penstock.config.sources import Loaded, variable
from penstock.streams.nats.administration.deployment import owned


async def set_up(environment: Mapping[str, str]) -> None:
    """With the settings that these variables give."""
    given = {name: environment[variable(name)] for name in Settings.model_fields if variable(name) in environment}
    origins = {name: variable(name) if name in given else "default" for name in Settings.model_fields}
    loaded = Loaded(Settings.model_validate(given), origins)
    async with connected(loaded.settings, "setup") as broker:
        await owned(broker, loaded)


def set_up_now(environment: Mapping[str, str]) -> None:
    """The same for tests without an event loop, or beside it."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: asyncio.run(set_up(environment))).result()
