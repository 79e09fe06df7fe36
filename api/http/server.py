"""The HTTP bridge as a server: the application on a socket, and the batch runner beside it."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
from collections.abc import Callable
from typing import Any, cast

import structlog
import uvicorn
from opentelemetry.trace import Tracer
from starlette.types import ASGIApp

from ...config.metrics import serve_metrics
from ...config.settings import Settings
from ...schemas.version import __version__
from ...streams.beats import until_beat
from ...streams.family import FamilyMetrics
from ...streams.port import Broker
from ...streams.stores.registry import Registry
from ...streams.topology import Subjects
from ..batches.runner import BatchRunner
from ..bridge.bridge import Bridge
from ..bridge.canary import Canary
from ..bridge.readiness import Readiness
from .app import EXPOSED, create_app
from .metrics import MetricsRoutes
from .middleware.connections import protocol

Beside = Callable[[Bridge, Callable[[], bool]], contextlib.AbstractAsyncContextManager[None]]
SPARE_FILES = 512  # file descriptors beside those of connections
OWN_FILES = 32  # of these, what a bridge has open without any

log = structlog.get_logger(__name__)


async def serve_http(
    broker: Broker,
    subjects: Subjects,
    registry: Registry,
    settings: Settings,
    listener: socket.socket,
    stopping: asyncio.Event,
    tracer: Tracer | None = None,
    beside: Beside | None = None,
) -> None:
    """Serve HTTP, and with it what is `beside`, until `stopping`, then drain: until open requests have ended or
    `drain_timeout` has passed. Both begin `stop_delay` later, for which `/health/ready` alone says so."""
    settings = settings.model_copy(update={"max_connections": _room_for(settings.max_connections)})
    bridge = Bridge(broker, subjects, tracer=tracer, settings=settings)
    await bridge.start()
    family = FamilyMetrics()
    await family.listen(broker, subjects)
    canary = Canary(bridge, registry, settings.canary_interval)
    readiness = Readiness(bridge, broker, registry, settings, canary)
    application = create_app(bridge, broker, registry, settings, __version__, family, readiness)
    server = Server(configured(application, settings))

    shown: MetricsRoutes = application.state.metrics
    serve_metrics(settings.host, settings.metrics_port, shown.whole)
    tasks = [asyncio.create_task(shown.keep_fresh())] if settings.metrics_port else []
    tasks += [asyncio.create_task(canary.run())] if settings.canary_interval else []
    batches = asyncio.create_task(BatchRunner(bridge, settings, now=broker.now).run())
    batches.add_done_callback(lambda _: stopping.set())  # a bridge without its batch runner restarts

    async def stop() -> None:
        await stopping.wait()
        batches.cancel()  # another process takes them over
        # While it drains, new requests get a 503 instead of a reset connection.
        await bridge.drain(settings.drain_timeout, settings.stop_delay)
        server.end()

    stopper = asyncio.create_task(stop())
    try:
        async with beside(bridge, lambda: readiness.is_ready) if beside else contextlib.nullcontext():
            await server.serve(sockets=[listener])
        with contextlib.suppress(asyncio.CancelledError):
            await batches
    finally:
        stopper.cancel()
        for task in tasks:
            task.cancel()
        batches.cancel()


def configured(application: ASGIApp, settings: Settings, *, drain: int = 5) -> uvicorn.Config:
    """A server of the application within the limits of the settings; responses have `drain` seconds to end in."""
    return uvicorn.Config(
        application,
        log_config=None,
        access_log=False,
        http=cast(Any, protocol(settings, EXPOSED)),  # uvicorn's types ask for a class, but it only calls it
        ws="none",  # `Connection` opens them
        ws_max_size=settings.max_body_size,
        ws_per_message_deflate=False,
        ws_ping_interval=settings.keepalive_interval,
        timeout_graceful_shutdown=drain,
        timeout_keep_alive=cast(int, settings.idle_timeout),
    )


class Server(uvicorn.Server):
    """Installs no signal handlers: the pipeline must drain before the server stops."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._ending = asyncio.Event()

    def capture_signals(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        return contextlib.nullcontext()

    def end(self) -> None:
        self.should_exit = True
        self._ending.set()

    async def last_answered(self) -> None:
        """Take no more connections, and wait until those that there are have ended."""
        for server in getattr(self, "servers", ()):  # none before it has started
            server.close()
        while self.server_state.connections:  # noqa: ASYNC110  # uvicorn tells nobody
            await asyncio.sleep(0.01)

    async def main_loop(self) -> None:
        """uvicorn's own looks ten times a second whether it is to end. What is due each second is the date that answers
        tell."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(until_beat(1.0)):
                    await self._ending.wait()


def _room_for(count: int) -> int:
    """Raise the limit of open files for `count` connections, as far as the system allows; returns how many it allows.

    A connection that finds no file is closed without a word: one too many is to be refused before.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + SPARE_FILES
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return count
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    most = max(1, limit - min(SPARE_FILES, OWN_FILES + limit // 8))
    if most < count:
        log.warning("few files may be open, max_connections lowered", max_connections=most, files=limit)
    return min(most, count)
