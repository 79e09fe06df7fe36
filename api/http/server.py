"""The HTTP bridge as a server: the application on a socket, and what a bridge does besides."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
from typing import Any, cast

import uvicorn

from ... import __version__
from ...config.settings import Settings
from ...streams.port import Broker
from ...streams.stores.registry import Registry
from ...streams.topology import Subjects
from ..batches.runner import BatchRunner
from ..bridge.bridge import Bridge
from .app import create_app
from .connections import protocol

SPARE_FILES = 512  # that the process opens besides connections


async def serve_http(
    broker: Broker,
    subjects: Subjects,
    registry: Registry,
    settings: Settings,
    listener: socket.socket,
    stopping: asyncio.Event,
) -> None:
    """Serve HTTP until `stopping`, then until open requests have ended or the drain limit has passed."""
    _allow_sockets(settings.max_connections)
    bridge = Bridge(broker, subjects)
    await bridge.start()
    application = create_app(bridge, broker, registry, settings, __version__)
    server = _Server(
        uvicorn.Config(
            application,
            log_config=None,
            access_log=False,
            http=cast(Any, protocol(settings)),  # a class, for all that uvicorn says
            ws="none",
            timeout_graceful_shutdown=5,
            timeout_keep_alive=cast(int, settings.idle_timeout),
        )
    )

    batches = asyncio.create_task(BatchRunner(bridge, settings).run())
    batches.add_done_callback(lambda _: stopping.set())  # without it, the process is of half use

    async def stop() -> None:
        await stopping.wait()
        batches.cancel()  # so that another process goes on with them
        await bridge.drain(settings.drain_timeout)  # meanwhile whoever comes is told so, and not left to a reset
        server.should_exit = True

    stopper = asyncio.create_task(stop())
    try:
        await server.serve(sockets=[listener])
        with contextlib.suppress(asyncio.CancelledError):
            await batches
    finally:
        stopper.cancel()
        batches.cancel()


class _Server(uvicorn.Server):
    """Leaves signals to us: what must drain first is not uvicorn's to know."""

    def capture_signals(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        return contextlib.nullcontext()


def _allow_sockets(count: int) -> None:
    """Have the system let this process open so many, as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
