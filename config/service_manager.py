"""What the service manager that started this process, such as systemd, is told: that it is ready, lives, and stops.

A message is one datagram to the socket that `NOTIFY_SOCKET` names. Without that variable nothing is told. The variables
are for this process alone: `process.started_by` takes them out of the environment, so that no child is taken for it.

Source: https://www.freedesktop.org/software/systemd/man/latest/sd_notify.html
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Mapping

import structlog

from ..schemas.errors import StartupError
from .process import started_by

OFTEN = 4  # signs of life in the time after which the service manager would miss one
PATIENCE = 1.0  # seconds that a message may wait for a service manager that reads none

log = structlog.get_logger(__name__)


class ServiceManager:
    """Raises `StartupError` for a variable that no service manager sets so."""

    def __init__(self, given: Mapping[str, str]) -> None:
        self._socket = given.get("NOTIFY_SOCKET") or None
        self._has_failed = False
        self._status = ""
        if self._socket and not self._socket.startswith(("/", "@")):
            raise StartupError(
                f"NOTIFY_SOCKET={self._socket} is neither a path nor the @name of a socket; start with "
                "env --unset=NOTIFY_SOCKET, or use Type=exec"
            )
        self.interval: float | None = None
        """Seconds between two signs of life; None if nobody waits for them."""
        limit = given.get("WATCHDOG_USEC", "")
        if self._socket and limit and given.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid()):
            if not limit.isdecimal() or not int(limit):
                raise StartupError(f"WATCHDOG_USEC={limit} is no number of microseconds; use WatchdogSec= of a unit")
            self.interval = int(limit) / 1e6 / OFTEN

    @property
    def listens(self) -> bool:
        return self._socket is not None

    def ready(self, status: str) -> None:
        self._status = status
        self._tell("READY=1", f"STATUS={status}")

    def alive(self) -> None:
        if self.interval is not None:
            self._tell("WATCHDOG=1")

    def status(self, status: str) -> None:
        """What `systemctl status` shows."""
        if status != self._status:
            self._status = status
            self._tell(f"STATUS={status}")

    def stopping(self, seconds: float, status: str) -> None:
        """The process ends, in `seconds` at most."""
        self._status = status
        self._tell("STOPPING=1", f"STATUS={status}", f"EXTEND_TIMEOUT_USEC={seconds * 1e6:.0f}")

    def _tell(self, *lines: str) -> None:
        if self._socket is None:
            return
        is_abstract = self._socket.startswith("@")
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.settimeout(PATIENCE)
                sender.sendto("\n".join(lines).encode(), f"\0{self._socket[1:]}" if is_abstract else self._socket)
        except OSError as error:
            if not self._has_failed:
                log.warning("the service manager cannot be told", socket=self._socket, reason=str(error))
            self._has_failed = True
        else:
            self._has_failed = False


@contextlib.asynccontextmanager
async def at_service(stopping: asyncio.Event, seconds: float, status: str) -> AsyncIterator[None]:
    """Tell the service manager that this process is ready, that its event loop runs, and once it is `stopping`, from
    which it may take `seconds` to end."""
    manager = ServiceManager(started_by())
    manager.ready(status)
    told = asyncio.create_task(_until(manager, stopping, seconds))
    try:
        yield
    finally:
        told.cancel()


async def _until(manager: ServiceManager, stopping: asyncio.Event, seconds: float) -> None:
    while not stopping.is_set():
        manager.alive()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(manager.interval):
                await stopping.wait()
    manager.stopping(seconds, "finishing what runs")
