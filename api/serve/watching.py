"""How the server of `penstock serve` is: asked over HTTP as its clients would, and told to the service manager."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any
from urllib.parse import urlsplit

import orjson

from ...config.service_manager import ServiceManager

PAUSE = 5.0  # seconds between two questions, where no watchdog waits for signs of life


async def health(url: str) -> tuple[bool, dict[str, Any]]:
    """Whether the server at `url` is ready, and what it says of it. Raises `OSError`, or `ValueError` for no answer.

    To ask this of a child, no HTTP client is imported, nor made ready for TLS.
    """
    place = urlsplit(url)
    # What listens on all addresses is reached at those of IPv4, too, and at them alone where IPv6 is switched off.
    hosts = ["::", "127.0.0.1"] if place.hostname == "::" else [place.hostname]
    try:
        reader, writer = await asyncio.open_connection(hosts[0], place.port)
    except OSError:
        reader, writer = await asyncio.open_connection(hosts[-1], place.port)
    try:
        writer.write(f"GET /health/ready HTTP/1.1\r\nHost: {place.netloc}\r\nConnection: close\r\n\r\n".encode())
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    finally:
        writer.close()
    return head.startswith(b"HTTP/1.1 200 "), orjson.loads(body)


async def ready(url: str, workers: int = 1) -> None:
    """Return when the server at `url` is ready and has at least `workers` workers."""
    while True:
        with contextlib.suppress(OSError, ValueError):  # it is not there yet, or gone again
            async with asyncio.timeout(5.0):
                is_ready, answer = await health(url)
            if is_ready and answer["workers"] >= workers:
                return
        await asyncio.sleep(0.1)


async def report(url: str, manager: ServiceManager) -> None:
    """Tell the service manager how the server at `url` is, until cancelled, and that it lives while it answers.

    It may answer that it waits for something: to start it again would not bring that.
    """
    while manager.listens:
        try:
            async with asyncio.timeout(2 * (manager.interval or PAUSE)):
                _, answer = await health(url)
        except (OSError, ValueError):
            manager.status(f"no answer at {url}")
        else:
            manager.alive()
            manager.status(f"{_worded(answer)}; {url}")
        await asyncio.sleep(manager.interval or PAUSE)


def _worded(answer: dict[str, Any]) -> str:
    match answer:
        case {"status": "waiting", "missing": [*missing]}:
            return f"waiting for {', '.join(missing)}"
        case {"status": "failing", "fault": fault}:
            return f"failing: {fault}"
        case {"status": "stopping"}:
            return "stopping"
        case {"status": "ready", "workers": int(workers)}:
            return f"ready, {workers} worker{'s' * (workers != 1)}"
        case _:
            return "busy"  # it refuses connections
