"""What a connection does while it waits: for its server, for room, for an answer, and for its own end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from typing import Any

import pytest
import pytest_asyncio
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from penstock.schemas.errors import PayloadTooLarge
from penstock.streams.nats.broker import JetStreamBroker
from penstock.streams.nats.connection import link as connection
from penstock.streams.nats.connection.client import Callback
from penstock.streams.nats.connection.link import Link
from penstock.streams.nats.direct import stored_messages
from penstock.streams.nats.servers.server import EmbeddedServer
from penstock.streams.port import StreamSpec

SIZES = {"small": b"", "large": bytes(1 << 18)}


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


async def test_a_large_message_that_is_under_way_is_not_sent_again(
    server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a slow network each copy would hold up all others, and be stored for itself."""
    monkeypatch.setattr(connection, "_RESEND_AFTER", 0.0)
    heard: list[int] = []

    async def answer(message: Msg) -> None:
        heard.append(len(message.data))
        await other.send(message.reply, b"")

    other = await Link.connect(server.url, name="other", timeout=10.0)
    await other.subscribe("here.*", answer)
    await other.flush()
    link = await Link.connect(server.url, name="test", timeout=10.0)
    held: list[tuple[Any, ...]] = []
    small = asyncio.Semaphore(0)
    post = link._client.post

    async def hold(subject: str, *rest: Any) -> None:
        held.append((subject, *rest))
        if subject == "here.small":
            small.release()

    monkeypatch.setattr(link._client, "post", hold)
    asking = [asyncio.create_task(link.exchange(f"here.{name}", data)) for name, data in SIZES.items()]
    for _ in range(3):
        await small.acquire()
    monkeypatch.setattr(link._client, "post", post)
    monkeypatch.setattr(connection, "_RESEND_AFTER", 60.0)  # none is late from here on
    for message in held:
        await post(*message)
    async with asyncio.timeout(10):
        await asyncio.gather(*asking)
    assert heard.count(len(SIZES["large"])) == 1
    for each in link, other:
        await each.close()


async def test_a_large_message_that_got_lost_is_sent_again(
    server: EmbeddedServer, link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server has read it, and nobody answers: JetStream drops what comes while it elects a leader."""
    monkeypatch.setattr(connection, "_RESEND_AFTER", 0.0)
    times = 0

    async def answer(message: Msg) -> None:
        nonlocal times
        times += 1
        if times == 2:
            await link.send(message.reply, b"")

    await link.subscribe("here.large", answer)
    async with asyncio.timeout(10):
        await link.exchange("here.large", SIZES["large"])


async def test_what_the_server_takes_no_more_is_too_large(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a reconnect to one whose operator has lowered `max_payload`. It counts headers, and would hang up."""
    most = len(SIZES["large"])
    monkeypatch.setattr(link._client, "_max_payload", most)
    for data, headers in ((SIZES["large"] + b"1", None), (SIZES["large"], {"Nats-Msg-Id": "1"})):
        with pytest.raises(PayloadTooLarge, match=f"bytes, but the broker accepts {most:,}"):
            await link.exchange("here.large", data, headers)


async def test_it_closes_though_the_loop_that_ends_has_cancelled_all_tasks(server: EmbeddedServer) -> None:
    link = await Link.connect(server.url, name="test", timeout=0.5)
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()
    async with asyncio.timeout(30):
        await link.close()
