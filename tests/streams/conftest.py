"""Brokers under test: ours in memory, and JetStream on one real server a session with a namespace a test."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from penstock.streams.memory.broker import MemoryBroker
from penstock.streams.nats.broker import JetStreamBroker
from penstock.streams.nats.servers.cluster import LocalCluster
from penstock.streams.nats.servers.server import EmbeddedServer
from penstock.streams.port import Broker

_counter = itertools.count(1)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EmbeddedServer]:
    server = await EmbeddedServer.start(tmp_path_factory.mktemp("nats"))
    yield server
    await server.stop()


@pytest.fixture
def namespace() -> str:
    return f"test{next(_counter)}"


@pytest_asyncio.fixture
async def jetstream(server: EmbeddedServer, namespace: str) -> AsyncIterator[JetStreamBroker]:
    broker = await JetStreamBroker.connect(server.url, namespace=namespace, timeout=10.0)
    yield broker
    await broker.close()


@pytest.fixture
def patience() -> float:
    """Seconds after which JetStream is away; a test that waits for them parametrizes it."""
    return 10.0


@pytest_asyncio.fixture(params=["memory", "jetstream"])
async def broker(
    request: pytest.FixtureRequest, server: EmbeddedServer, namespace: str, patience: float
) -> AsyncIterator[Broker]:
    broker: Broker
    if request.param == "memory":
        broker = MemoryBroker()
    else:
        broker = await JetStreamBroker.connect(server.url, namespace=namespace, timeout=patience)
    yield broker
    await broker.close()


@pytest_asyncio.fixture
async def own_server(tmp_path: Path) -> AsyncIterator[EmbeddedServer]:
    """A server that the test may kill."""
    server = await EmbeddedServer.start(tmp_path / "state")
    yield server
    await server.stop()


@pytest_asyncio.fixture
async def own_cluster(tmp_path: Path) -> AsyncIterator[LocalCluster]:
    """Three servers that the test may kill and stop."""
    cluster = await LocalCluster.start(tmp_path / "cluster")
    yield cluster
    await cluster.close()
