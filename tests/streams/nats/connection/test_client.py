"""The shorter path of messages through nats-py says the same as its own, and leaves it what is out of the ordinary."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator

import nats
import pytest
import pytest_asyncio
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import BadSubjectError

from penstock.streams.nats.connection import client as client_module
from penstock.streams.nats.connection.access import Access
from penstock.streams.nats.connection.client import DirectClient
from penstock.streams.nats.servers.server import EmbeddedServer


@pytest_asyncio.fixture
async def client(server: EmbeddedServer) -> AsyncIterator[DirectClient]:
    client = DirectClient(Access())
    await client.connect(server.url)
    yield client
    await client.close()


@pytest_asyncio.fixture
async def plain(server: EmbeddedServer) -> AsyncIterator[Client]:
    client = await nats.connect(server.url)
    yield client
    await client.close()


HEADERS: list[dict[str, str] | None] = [
    None,
    {},
    {"Nats-Msg-Id": "acme.1"},
    {"One": "1", "Two": "a: b", "Empty": "", "Name": "Čapek"},
    {"Two-Lines": "one\r\ntwo", "Padded": "  in the middle  "},
]


@pytest.mark.parametrize("headers", HEADERS)
async def test_a_message_is_what_nats_py_makes_of_it(
    client: DirectClient, plain: Client, namespace: str, headers: dict[str, str] | None
) -> None:
    heard: asyncio.Queue[tuple[str, str, bytes, dict[str, str] | None]] = asyncio.Queue()

    def hear(message: Msg) -> None:
        heard.put_nowait((message.subject, message.reply, message.data, message.headers or None))

    async def hear_too(message: Msg) -> None:
        hear(message)

    await client.hear(f"{namespace}.>", hear)
    await plain.subscribe(f"{namespace}.>", cb=hear_too)
    for receiver in client, plain:
        await receiver.flush()
    await client.post(f"{namespace}.a", b"\r\nbody\x00", f"{namespace}-reply", headers)
    await client.publish(f"{namespace}.a", b"\r\nbody\x00", f"{namespace}-reply", headers)
    first, *others = [await heard.get() for _ in range(4)]
    assert first[:3] == (f"{namespace}.a", f"{namespace}-reply", b"\r\nbody\x00")
    assert others == [first] * 3


@pytest.mark.parametrize(
    "line",
    ["503", "404 No Messages", "100 Idle Heartbeat\r\nNats-Last-Consumer: 6", "409 Leader Change\r\nA: b: c"],
)
async def test_a_status_is_what_nats_py_makes_of_it(
    client: DirectClient, plain: Client, namespace: str, line: str
) -> None:
    heard: asyncio.Queue[dict[str, str] | None] = asyncio.Queue()

    async def hear(message: Msg) -> None:
        heard.put_nowait(message.headers)

    await client.hear(namespace, lambda message: heard.put_nowait(message.headers))
    await plain.subscribe(namespace, cb=hear)
    for receiver in client, plain:
        await receiver.flush()
    head = f"NATS/1.0 {line}\r\n\r\n".encode()
    await client._send_command(b"HPUB %b %d %d\r\n%b\r\n" % (namespace.encode(), len(head), len(head), head))
    await client.flush()
    first, second = [await heard.get() for _ in range(2)]
    assert first == second
    assert first is not None and first["Status"] == line[:3]


async def test_nobody_listens(client: DirectClient) -> None:
    heard: asyncio.Queue[Msg] = asyncio.Queue()
    inbox = client.new_inbox()
    await client.hear(inbox, heard.put_nowait)
    await client.post("nobody.listens", b"", inbox)
    assert ((await heard.get()).headers or {})["Status"] == "503"


async def test_a_subject_cannot_hold_a_second_command(client: DirectClient) -> None:
    for subject in "", "a b", "a 0\r\n\r\nPUB b":
        with pytest.raises(BadSubjectError):
            await client.post(subject, b"")
    with pytest.raises(BadSubjectError):
        await client.post("a", b"", "b 0\r\n\r\nPUB b")


async def test_callbacks_run_in_the_order_of_arrival(client: DirectClient, namespace: str) -> None:
    heard: asyncio.Queue[str] = asyncio.Queue()

    def hear(message: Msg) -> None:
        heard.put_nowait(message.subject)

    subjects = [f"{namespace}.{name}" for name in "abc"]
    for subject in subjects:
        await client.hear(subject, hear)
    order = [*subjects, *reversed(subjects)]
    for subject in order:
        await client.post(subject, b"")
    assert [await heard.get() for _ in order] == order


async def test_a_message_without_haste_travels_with_the_next(
    client: DirectClient, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: asyncio.Queue[bytes] = asyncio.Queue()

    def hear(message: Msg) -> None:
        heard.put_nowait(message.data)

    await client.hear(namespace, hear)
    await client.post(namespace, b"alone", linger=True)
    assert await heard.get() == b"alone"
    monkeypatch.setattr(client_module, "LINGER", 1e6)
    flush, flushes = client._flush_soon, Counter[str]()

    def counted() -> None:  # the answer to a ping of the server, which may come at any time, flushes by another way
        flushes["ours"] += 1
        flush()

    monkeypatch.setattr(client, "_flush_soon", counted)
    await client.post(namespace, b"one", linger=True)
    await client.post(namespace, b"two", linger=True)
    assert flushes.total() == 0
    await client.post(namespace, b"three")
    assert flushes.total() == 1
    assert [await heard.get() for _ in range(3)] == [b"one", b"two", b"three"]


async def test_a_callback_that_fails_is_reported_and_the_next_message_comes(
    server: EmbeddedServer, namespace: str
) -> None:
    errors: list[Exception] = []
    heard: asyncio.Queue[bytes] = asyncio.Queue()

    async def report(error: Exception) -> None:
        errors.append(error)

    def hear(message: Msg) -> None:
        heard.put_nowait(message.data)
        if message.data == b"bad":
            raise ValueError("unreadable")

    client = DirectClient(Access())
    await client.connect(server.url, error_cb=report)
    await client.hear(namespace, hear)
    for data in b"bad", b"good":
        await client.post(namespace, data)
    assert [await heard.get() for _ in range(2)] == [b"bad", b"good"]
    await client.close()
    assert [str(error) for error in errors] == ["unreadable"]


@pytest.mark.skipif(
    (3, 12) <= sys.version_info < (3, 12, 9) or (3, 13) <= sys.version_info < (3, 13, 2),
    reason="CVE-2024-12254: asyncio's writelines does not wait; uvloop's, with which Penstock's processes run, does",
)
async def test_a_server_that_reads_nothing_is_not_written_to_without_end(
    own_server: EmbeddedServer, namespace: str
) -> None:
    client = DirectClient(Access())
    await client.connect(own_server.url)
    os.kill(own_server.pid, signal.SIGSTOP)
    try:
        for _ in range(256):
            await client.post(namespace, bytes(1 << 18))
            for _ in range(3):
                await asyncio.sleep(0)  # it writes what there is room for
            if client.pending_data_size:
                break
        else:
            pytest.fail("64 MB are written to a server that reads nothing")
    finally:
        os.kill(own_server.pid, signal.SIGCONT)
    heard = asyncio.Event()
    await client.hear(namespace, lambda message: heard.set())
    await client.post(namespace, b"")
    await heard.wait()
    await client.close()
