"""`penstock serve`: runs the broker, a front process and workers as children, restarts them, ends them together.

The supervisor owns the listening socket: while a front process restarts, connections wait instead of failing. Children
get their settings through the environment, which hides the broker's token from other users.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import sys
from collections.abc import Collection, Sequence
from dataclasses import replace
from math import ceil
from pathlib import Path

import structlog

from ...config.broker import LEAST_STORE, check_broker
from ...config.deployment import explicit
from ...config.process import handle_stop_signals, started_by
from ...config.service_manager import ServiceManager
from ...config.settings import Settings
from ...config.sources import Loaded, variable
from ...engine.cpu.machine import human
from ...engine.planning.discovery import find_backend
from ...engine.planning.manifests import PAGED
from ...schemas.deployment import SHARED
from ...schemas.errors import BrokerAway, StartupError
from ...schemas.models.catalogue import CatalogueEntry
from ...schemas.registry import ModelCard
from ...streams.nats.administration.deployment import is_agreed, joined, owned
from ...streams.nats.broker import JetStreamBroker
from ...streams.nats.servers.server import EmbeddedServer
from ...streams.records import readable
from ...streams.topology import MODELS
from .ahead import take_ahead
from .connecting import URL_FILE, connected
from .hosting import gpus
from .listening import announce, base_url, listen, say
from .placing import place_models
from .processes import END_TIMEOUT, Part, ProcessKeeper, child_environment, keep_broker
from .watching import report

log = structlog.get_logger(__name__)


def device_shares(settings: Settings, found: Collection[str]) -> list[dict[str, str]]:
    """What each worker's environment says of its device: they take turns, and those on one share it. `found` are the
    GPUs, which "auto" leaves to backends that run on them."""
    devices = [*found] if settings.device in ("auto", "cuda") else settings.device.split(",")
    if settings.device == "auto" and "cuda" not in find_backend(settings.backend, settings.allowed_backends).devices:
        devices = []
    if not devices:
        return [{} for _ in range(settings.workers)]
    sharing = ceil(settings.workers / len(devices))
    given = {variable("workers"): str(sharing)}
    return [given | {variable("device"): devices[index % len(devices)].strip()} for index in range(settings.workers)]


def _limit_of_store(directory: Path) -> int:
    """What a new store in this directory may hold. Raises `StartupError` where its disk has no room for the least."""
    free = shutil.disk_usage(directory).free
    if free < LEAST_STORE:
        raise StartupError(
            f"the disk of the state directory {directory} has {human(free)} free, and the broker's store needs "
            f"{human(LEAST_STORE)} at least; make room, or choose another --state-dir"
        )
    return max(LEAST_STORE, free * 3 // 4)


class Supervisor:
    """Runs until a signal, or until a child exits with an error that only an operator can fix."""

    def __init__(self, loaded: Loaded, entries: Sequence[CatalogueEntry] | None = None) -> None:
        """`entries` are the models to offer, where that is not the one of the settings."""
        self._loaded = loaded
        self._entries = entries
        self._settings = loaded.settings
        self._drain = loaded.settings.stop_delay + loaded.settings.drain_timeout
        self._keeper = ProcessKeeper(self._drain)
        self._manager = ServiceManager(started_by())

    async def run(self) -> None:
        settings, keeper = self._settings, self._keeper
        check_broker(settings)
        listener = listen(settings.host, settings.port)
        self._on_signals()
        self._manager.status("starting")
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(listener.close)
            stack.callback(self._end_ahead)
            keeper.ahead = take_ahead()
            if self._entries is not None or settings.nats_url or settings.backend != PAGED.id:
                self._end_ahead()
            url = settings.nats_url or await self._embedded(stack)
            if settings.nats_url:
                await self._check_set_up()
            # Children take what was not given from the deployment; on our own broker, that is agreed by now.
            given = explicit(self._loaded) if settings.nats_url else {}
            environment = child_environment(settings, url, without=[name for name in SHARED if name not in given])
            # The front shows what the workers have counted, too.
            of_workers = {name: value for name, value in environment.items() if name != variable("metrics_port")}
            front = Part("front", ("front", "--fd", str(listener.fileno())), (listener.fileno(),))
            # On a server that others share, another `serve` may have workers too.
            own = f"{secrets.token_hex(4)}-" if settings.nats_url else ""
            # Workers outlive the front process, which finishes running requests first.
            front_gone = asyncio.Event()
            async with asyncio.TaskGroup() as group:
                if self._entries is None:
                    names = [f"{own}w{index}" for index in range(settings.workers)]
                    devices = device_shares(settings, gpus())
                    for name, device in zip(names, devices, strict=True):
                        worker = Part(f"worker {name}", ("worker", "--id", name))
                        group.create_task(keeper.keep(worker, of_workers | device, front_gone))
                else:
                    name = f"{own or 'serve-'}host"
                    group.create_task(place_models(self._loaded, self._entries, url, name, keeper, front_gone))
                expected = settings.workers if self._entries is None else 0
                announcing = group.create_task(self._announce(base_url(listener), expected))
                await keeper.keep(front, environment, keeper.stopping)
                front_gone.set()
                announcing.cancel()
        if keeper.fatal is not None:
            raise keeper.fatal

    async def _announce(self, url: str, workers: int) -> None:
        await announce(url, workers)
        self._manager.ready(f"ready; {url}")
        await report(url, self._manager)

    def _end_ahead(self) -> None:
        """End the worker that was started ahead, if it is not needed."""
        if self._keeper.ahead is not None:
            self._keeper.ahead.end()
            self._keeper.ahead = None

    def _on_signals(self) -> None:
        def begin() -> None:
            if not self._keeper.stopping.is_set():
                self._keeper.stopping.set()
                # The front ends first, then the workers, and the broker last.
                self._manager.stopping(
                    2 * self._drain + 3 * END_TIMEOUT, "stopping once running requests have finished"
                )
                say("stopping once running requests have finished; interrupt again to stop at once", sys.stderr)

        def stop() -> None:
            if self._keeper.stopping.is_set():
                self._keeper.at_once.set()
            begin()

        handle_stop_signals(stop, begin)

    async def _embedded(self, stack: contextlib.AsyncExitStack) -> str:
        settings = self._settings
        server = await EmbeddedServer.start(settings.state_dir, settings.nats_server, settings.nats_sync_interval)
        stack.push_async_callback(server.stop)
        watching = asyncio.create_task(keep_broker(server))
        stack.callback(watching.cancel)
        await self._set_up(server.url)
        path = settings.state_dir / URL_FILE
        try:
            path.unlink(missing_ok=True)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        # Another user's, in a directory in which only their owners remove files, or what is no file.
        except (PermissionError, IsADirectoryError) as error:
            raise StartupError(f"cannot replace {path}: {error.strerror}; choose another --state-dir") from error
        with os.fdopen(descriptor, "w") as file:
            file.write(server.url)
        stack.callback(path.unlink, missing_ok=True)
        return server.url

    async def _check_set_up(self) -> None:
        """Raise `StartupError` here, once for all children, if the user's own server has yet to be set up."""
        with contextlib.suppress(BrokerAway):  # they wait for it
            async with connected(self._settings, "serve") as broker:
                await joined(broker, self._loaded)

    async def _set_up(self, url: str) -> None:
        """Agree on our own settings: the flags of the broker's owner change the deployment."""
        loaded, settings = self._loaded, self._settings.model_copy(update={"nats_url": url})
        async with connected(settings, "serve") as broker:
            # What is agreed stays: less is free beside what is stored, too.
            is_new = loaded.origins["store_limit"] == "default" and not await is_agreed(broker, loaded)
            if is_new and (limit := _limit_of_store(settings.state_dir)) < settings.store_limit:
                log.warning("little disk space, store_limit lowered", store_limit=limit)
                settings = settings.model_copy(update={"store_limit": limit})
            await owned(broker, replace(loaded, settings=settings))
            await self._forget_former_models(broker)

    async def _forget_former_models(self, broker: JetStreamBroker) -> None:
        """Withdraw what an earlier start served and this one does not: such models would stay known for ten minutes.

        What waits for one stays in its lanes. Workers that others have started announce theirs again.
        """
        names = {entry.name for entry in self._entries or ()} or {self._settings.served_model_name or ""}
        announced = await broker.bucket(MODELS)
        for key, card in readable(ModelCard, await announced.entries()):
            is_agents = card.catalogued and self._entries is not None  # which withdraws them itself
            if not is_agents and card.name not in names:
                await announced.delete(key)
                log.info("a model of an earlier start is not served any more", model=card.name)
