"""What the processes of a pipeline have in common: an event loop, and a connection with all that stages share."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from ..api.serve.connecting import Meanwhile, connected
from ..config.sources import Loaded
from ..config.tracing import tracing
from ..stages import Pipe
from ..stages.cancellations import Cancellations
from ..streams.nats.administration.deployment import joined
from ..streams.stores.registry import Registry
from ..streams.topology import Subjects


@contextlib.asynccontextmanager
async def connected_pipe(loaded: Loaded, name: str, meanwhile: Meanwhile | None = None) -> AsyncIterator[Pipe]:
    """A connected broker with its topology in place and all that stages share, with the agreed settings. `meanwhile`
    goes on where the broker has to be waited for.

    Raises `ConfigurationError` if a given setting differs from the agreed one.
    """
    async with (
        tracing(loaded.settings, name) as tracer,
        connected(loaded.settings, name, patient=True, meanwhile=meanwhile) as broker,
    ):
        settings = await joined(broker, loaded)
        subjects = Subjects(settings.namespace)
        cancellations = Cancellations()
        await cancellations.listen(broker, subjects)
        registry = Registry(broker, interval=settings.heartbeat_interval, lifetime=settings.worker_ttl)
        await registry.refresh()  # a copy that starts under load must know the models before its first job
        yield Pipe(broker, subjects, settings, registry, cancellations, broker.now, tracer)


def run_process(main: Coroutine[Any, Any, None]) -> None:
    try:
        import uvloop
    except ImportError:  # not available on every system
        asyncio.run(_stoppable(main))
    else:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_stoppable(main))


async def _stoppable(main: Coroutine[Any, Any, None]) -> None:
    """Until it handles it, SIGTERM ends it, also as process 1 of a container, for which the kernel has no default."""
    if os.getpid() == 1:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, os._exit, 128 + signal.SIGTERM)
    await main
