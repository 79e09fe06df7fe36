"""A task that is told to end does, whatever it waits for: otherwise a process that is asked to stop would stay."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable

import pytest
import pytest_asyncio
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from penstock.streams.nats.broker import JetStreamBroker
from penstock.streams.nats.connection.client import Callback
from penstock.streams.nats.connection.link import Link
from penstock.streams.nats.direct import stored_messages
from penstock.streams.nats.servers.server import EmbeddedServer
from penstock.streams.port import StreamSpec


@pytest_asyncio.fixture
async def link(server: EmbeddedServer) -> AsyncIterator[Link]:
    link = await Link.connect(server.url, name="test", timeout=10.0)
    yield link
    await link.close()


async def test_a_reader_told_to_end_as_its_answer_comes(
    jetstream: JetStreamBroker, namespace: str, link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    await jetstream.ensure([StreamSpec("LEDGER", (f"{namespace}.ledger",), "limits", "memory")], [])
    await jetstream.publish(f"{namespace}.ledger", b"one", message_id="m1")
    subscribe = link.subscribe

    async def subscribe_and_cancel(subject: str, callback: Callback) -> Subscription:
        def heard(message: Msg) -> Awaitable[None] | None:
            left = callback(message)
            reading.cancel()
            return left

        return await subscribe(subject, heard)

    monkeypatch.setattr(link, "subscribe", subscribe_and_cancel)
    reading = asyncio.create_task(stored_messages(link, f"{namespace}_LEDGER".upper(), f"{namespace}.ledger"))
    with pytest.raises(asyncio.CancelledError):
        await reading


async def test_whoever_waits_for_room_in_the_buffer_is_told_to_end(link: Link) -> None:
    async def ignore(_: Msg) -> None:
        pass

    async def send() -> None:
        for _ in range(16):
            await link.send("nobody.hears", bytes(1 << 19))

    async def subscribe() -> None:
        for _ in range(16):
            await link.subscribe("nobody.speaks." + "x" * (1 << 19), ignore)

    for work in send, subscribe:
        task = asyncio.create_task(work())
        await asyncio.sleep(0)  # it runs until there is no room
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_it_closes_though_the_loop_that_ends_has_cancelled_all_tasks(server: EmbeddedServer) -> None:
    link = await Link.connect(server.url, name="test", timeout=0.5)
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()
    async with asyncio.timeout(30):
        await link.close()
