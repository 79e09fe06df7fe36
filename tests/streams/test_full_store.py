"""A store with no space left: what waits for it says so, what is kept says 507, and what runs has room of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from penstock.api.bridge.bridge import Bridge
from penstock.schemas.errors import StorageFull, StreamFull
from penstock.schemas.jobs import Job
from penstock.schemas.registry import ModelCard, WorkerCard
from penstock.streams.nats.broker import JetStreamBroker
from penstock.streams.nats.servers.server import EmbeddedServer
from penstock.streams.port import BucketSpec, StreamSpec
from penstock.streams.stores.objects import Objects
from penstock.streams.stores.registry import Registry
from penstock.streams.topology import OBJECT_DATA, Subjects

STORE = 2 << 20
CARD = WorkerCard(
    id="w0",
    model=ModelCard(name="m", source="m", backend="echo", context_length=10, created=1),
    capacity=1,
    pid=1,
    incarnation="i",
)


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[JetStreamBroker]:
    """On a server whose whole store is full: of a ledger that has no limit of its own."""
    server = await EmbeddedServer.start(tmp_path / "nats", max_store=STORE)
    broker = await JetStreamBroker.connect(server.url, namespace="p", timeout=5.0)
    await broker.ensure(
        [StreamSpec("LEDGER", ("p.ledger",), "limits", "file")],
        [BucketSpec("models", storage="file"), BucketSpec("workers"), BucketSpec("state"), BucketSpec(OBJECT_DATA)],
    )
    with pytest.raises(StreamFull):
        for number in range(10_000):
            await broker.publish("p.ledger", bytes(64 << 10), message_id=f"m{number}")
    yield broker
    await broker.close()
    await server.stop()


async def test_a_full_server_is_no_queue_that_empties(broker: JetStreamBroker) -> None:
    with pytest.raises(StreamFull) as full:
        await broker.publish("p.ledger", b"", message_id="last")
    assert full.value.storage


async def test_a_heartbeat_that_finds_no_space_is_transient(broker: JetStreamBroker) -> None:
    """It was no `BrokerUnavailable`, which is all that the loops of heartbeats caught: the process died."""
    with pytest.raises(StreamFull):
        await Registry(broker, interval=1.0).announce_worker(CARD)


async def test_a_request_that_finds_no_space_is_told_so(broker: JetStreamBroker) -> None:
    """It was told that too many requests were waiting, with nothing waiting."""
    await broker.ensure([StreamSpec("JOBS", ("p.jobs.>",), "work_queue", "file", discard="new", max_messages=10)], [])
    bridge = Bridge(broker, Subjects("p"))
    await bridge.start()
    job = Job(id="one", bridge=bridge.name, body={})
    with pytest.raises(StorageFull, match="The server's store is full"):
        await bridge.open(job, priority="normal", tenant="t")


async def chunks() -> AsyncIterator[bytes]:
    yield b"bytes"


async def test_an_object_that_finds_no_space_is_refused(broker: JetStreamBroker) -> None:
    objects = await Objects.of(broker, "models")
    with pytest.raises(StorageFull, match="The server's store is full: delete files"):
        await objects.put("name", chunks(), {})
    assert await (await broker.bucket(OBJECT_DATA)).entries() == [], "nothing of it is left"
