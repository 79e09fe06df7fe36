"""How a process finds and reaches its broker."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import structlog

from ...config.settings import Settings
from ...schemas.errors import BrokerAway, BrokerUnavailable, StartupError
from ...streams.nats.broker import JetStreamBroker
from ...streams.nats.clock import BrokerClock
from ...streams.nats.connection.access import Access
from .processes import LEAST_DELAY

log = structlog.get_logger(__name__)

Meanwhile = contextlib.AbstractAsyncContextManager[None]
"""What goes on while a process waits for its broker."""

BROKER_DELAY = 5.0  # longest delay between two attempts to connect, in seconds
URL_FILE = "nats-url"  # file in the state directory in which local parts and clients find the broker


@contextlib.asynccontextmanager
async def connected(
    settings: Settings, name: str, *, patient: bool = False, meanwhile: Meanwhile | None = None
) -> AsyncIterator[JetStreamBroker]:
    """Connect to the broker at `broker_url(settings)` under the client name `penstock-<name>`.

    Raises `BrokerAway` if it is unavailable; with `patient`, waits for it and logs each attempt, within `meanwhile`.
    Raises `StartupError` if the server refuses us, also when it does so later, and without `patient` if it does not
    answer a call.
    """
    async with contextlib.AsyncExitStack() as waiting:
        broker = await _found(settings, name, waiting, patient=patient, meanwhile=meanwhile)
    try:
        async with _until_refused(broker), _following(broker.clock):
            yield broker
    except BrokerUnavailable as error:
        if patient:
            raise
        raise StartupError(f"{error}; try again when it does") from error
    finally:
        await broker.close()


async def _found(
    settings: Settings, name: str, waiting: contextlib.AsyncExitStack, *, patient: bool, meanwhile: Meanwhile | None
) -> JetStreamBroker:
    """Enters `meanwhile` where the broker is not there at once; `waiting` leaves it."""
    access = Access.of(settings)
    delay = LEAST_DELAY
    while True:
        try:
            return await JetStreamBroker.connect(
                broker_url(settings),
                namespace=settings.namespace,
                timeout=settings.nats_timeout,
                name=f"penstock-{name}",
                replicas=settings.nats_replicas,
                access=access,
            )
        except BrokerAway as error:
            if not patient and settings.nats_url is None:
                raise BrokerAway(
                    f"no broker: the `penstock serve` with the state directory {settings.state_dir} does not answer; "
                    "it starts, or it was killed: start it again"
                ) from error
            if not patient:
                raise
            log.warning("waiting for the broker", reason=str(error), delay=delay)
        if meanwhile is not None:
            await waiting.enter_async_context(meanwhile)
            meanwhile = None
        await asyncio.sleep(delay)
        delay = min(2 * delay, BROKER_DELAY)


@contextlib.asynccontextmanager
async def _following(clock: BrokerClock) -> AsyncIterator[None]:
    await clock.look()
    following = asyncio.create_task(clock.follow())
    try:
        yield
    finally:
        following.cancel()


@contextlib.asynccontextmanager
async def _until_refused(broker: JetStreamBroker) -> AsyncIterator[None]:
    """Cancel the body, and raise why, when the server does not have us back."""
    body = asyncio.current_task()
    assert body is not None
    watching = asyncio.create_task(broker.refused())

    def end(task: asyncio.Task[StartupError]) -> None:
        if not task.cancelled():
            body.cancel()

    watching.add_done_callback(end)
    try:
        yield
    except asyncio.CancelledError:
        if not watching.done() or body.uncancel() > 0:
            raise
        raise watching.result() from None
    finally:
        watching.cancel()


def broker_url(settings: Settings) -> str:
    """The URL of the broker: the setting, or that of the `penstock serve` that uses the same state directory.

    Raises `StartupError` if there is neither.
    """
    if settings.nats_url is not None:
        return settings.nats_url
    path: Path = settings.state_dir / URL_FILE
    try:
        return path.read_text()
    except PermissionError:
        raise StartupError(
            f"no broker: only the user who runs the `penstock serve` with {path} may read that file; run as that user, "
            "or give a NATS server with --nats-url"
        ) from None
    except OSError:
        raise StartupError(
            f"no broker: no `penstock serve` is running with the state directory {settings.state_dir}; "
            "give a NATS server with --nats-url, or the directory of a running one with --state-dir"
        ) from None
