"""`penstock agent`: the part of `penstock serve` that loads and unloads models, for hosts that have nothing else."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Sequence
from typing import Annotated

import typer

from ....config.catalogue import offered_models
from ....config.logs.setup import configure_logging
from ....config.process import handle_stop_signals
from ....config.sources import Loaded
from ....schemas.errors import StartupError
from ....schemas.jobs import TOKEN_PATTERN
from ....schemas.models.catalogue import CatalogueEntry
from ...serve.connecting import broker_url
from ...serve.placing import place_models
from ...serve.processes import ProcessKeeper
from ..options import with_settings


@with_settings
def agent(
    loaded: Loaded,
    id: Annotated[str | None, typer.Option(help="A name to keep over restarts; random by default.")] = None,
) -> None:
    """Load and unload models on this host as they are asked for, with the broker of a deployment.

    Offers those of --models or --model-dir; without these it places what the deployment's catalogue offers already, as
    far as their files are here. One such process a host is enough. Ctrl-C lets running requests finish.
    """
    if id is not None and re.fullmatch(TOKEN_PATTERN, id) is None:
        raise StartupError(f"--id {id!r}: use only letters, digits, '_' and '-', at most 64")
    configure_logging(loaded.settings, process="agent")
    asyncio.run(_run(loaded, offered_models(loaded), id or f"a-{uuid.uuid4().hex[:8]}"))


async def _run(loaded: Loaded, entries: Sequence[CatalogueEntry] | None, name: str) -> None:
    keeper = ProcessKeeper(loaded.settings.drain_timeout)

    def stop() -> None:
        (keeper.at_once if keeper.stopping.is_set() else keeper.stopping).set()

    handle_stop_signals(stop, keeper.stopping.set)
    await place_models(loaded, entries, broker_url(loaded.settings), name, keeper, keeper.stopping, alone=True)
