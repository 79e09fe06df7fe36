"""A broker's name with several addresses, of which some are dead."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.streams.nats.broker import JetStreamBroker
from penstock.streams.nats.connection.addresses import reach
from penstock.streams.nats.servers.server import EmbeddedServer

NAME = "broker.test"
OPEN = Path("/proc/self/fd")


@contextlib.contextmanager
def silent(address: str, port: int) -> Iterator[None]:
    """An address at which the system answers nothing: those who wait there have left no room."""
    with contextlib.ExitStack() as stack:
        full = stack.enter_context(socket.socket())
        full.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        full.bind((address, port))
        full.listen(0)
        for _ in range(4):
            one = stack.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex((address, port))
        yield


def resolve(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    asked = asyncio.base_events.BaseEventLoop.getaddrinfo

    async def getaddrinfo(loop: Any, host: str, port: int, **options: Any) -> Sequence[Any]:
        hosts = addresses if host == NAME else [host]
        return [each for one in hosts for each in await asked(loop, one, port, **options)]

    monkeypatch.setattr("asyncio.base_events.BaseEventLoop.getaddrinfo", getaddrinfo)


async def test_behind_an_address_that_is_silent_the_broker_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server = await EmbeddedServer.start(tmp_path / "nats")
    credentials, _, place = server.url.rpartition("@")
    port = int(place.rpartition(":")[2])
    resolve(monkeypatch, "127.0.0.2", "127.0.0.3", "127.0.0.1")  # silent, refusing, and the server's
    with silent("127.0.0.2", port):
        broker = await JetStreamBroker.connect(f"{credentials}@{NAME}:{port}", namespace="penstock")
        assert broker.connected
        await broker.close()
    await server.stop()


@pytest.mark.skipif(not OPEN.exists(), reason="no list of open files")
async def test_the_sockets_of_other_addresses_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve(monkeypatch, "127.0.0.2", "127.0.0.3", "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as there, silent("127.0.0.2", port := there.getsockname()[1]):
        before = len(os.listdir(OPEN))
        with await reach(NAME, port) as found:
            assert found.getpeername() == ("127.0.0.1", port)
            assert len(os.listdir(OPEN)) == before + 1


async def test_of_several_that_are_dead_the_first_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve(monkeypatch, "127.0.0.2", "127.0.0.3")
    with pytest.raises(ConnectionRefusedError, match=r"127\.0\.0\.2"):
        await reach(NAME, 1)
