"""The proxy of `penstock bench chaos`: what goes through, and what a cut, a stall and a delay do to it."""

from __future__ import annotations

import asyncio
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator
from typing import NamedTuple

import pytest
import pytest_asyncio

from penstock.api.bench.proxy import Proxy


class Ends(NamedTuple):
    """A proxied connection: both of the client's halves, and both of the server's."""

    proxy: Proxy
    reader: StreamReader
    writer: StreamWriter
    at_server: StreamReader
    from_server: StreamWriter


@pytest_asyncio.fixture
async def ends() -> AsyncIterator[Ends]:
    accepted: asyncio.Queue[tuple[StreamReader, StreamWriter]] = asyncio.Queue()
    server = await asyncio.start_server(lambda *pair: accepted.put_nowait(pair), "127.0.0.1", 0)
    proxy = await Proxy.start(server.sockets[0].getsockname()[1])
    pair = await asyncio.open_connection("127.0.0.1", proxy.port)
    ends = Ends(proxy, *pair, *(await accepted.get()))
    yield ends
    ends.writer.close()
    ends.from_server.close()
    await proxy.close()
    server.close()


async def test_bytes_go_both_ways_and_the_end_comes_after_the_last(ends: Ends) -> None:
    ends.writer.write(b"ping")
    assert await ends.at_server.readexactly(4) == b"ping"
    ends.from_server.write(b"pong" * 100_000)
    ends.from_server.close()
    assert await ends.reader.read(-1) == b"pong" * 100_000


async def test_a_cut_is_a_reset_on_both_sides(ends: Ends) -> None:
    ends.writer.write(b"x")
    await ends.at_server.readexactly(1)
    assert ends.proxy.cut() == 1
    for reader in (ends.reader, ends.at_server):
        with pytest.raises(ConnectionResetError):
            await reader.read(1)
    assert ends.proxy.cut() == 0


async def test_each_direction_is_stalled_alone_and_loses_nothing(ends: Ends) -> None:
    ends.proxy.stall(received=False)
    ends.writer.write(b"up")
    ends.from_server.write(b"down")
    assert await ends.reader.readexactly(4) == b"down"
    arriving = asyncio.create_task(ends.at_server.readexactly(2))
    ends.from_server.write(b"more")
    assert await ends.reader.readexactly(4) == b"more" and not arriving.done()
    ends.proxy.resume()
    assert await arriving == b"up"


async def test_what_is_late_keeps_its_order(ends: Ends) -> None:
    clock = asyncio.get_running_loop().time
    ends.proxy.delay, began = 0.05, clock()
    ends.writer.write(b"first")
    assert await ends.at_server.readexactly(5) == b"first"
    assert clock() - began >= 0.05
    ends.writer.write(b"second")
    ends.proxy.delay = 0.0
    ends.writer.write(b"third")
    assert await ends.at_server.readexactly(11) == b"secondthird"


async def test_a_server_that_is_away_is_a_connection_that_breaks() -> None:
    gone = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = gone.sockets[0].getsockname()[1]
    gone.close()
    proxy = await Proxy.start(port)
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    assert await reader.read(-1) == b""
    writer.close()
    await proxy.close()
