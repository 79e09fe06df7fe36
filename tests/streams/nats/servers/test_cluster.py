"""Three servers that are one broker: a stream on all of them outlives the loss of any one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from penstock.api.bench.proxy import Proxy
from penstock.streams.nats.broker import JetStreamBroker
from penstock.streams.nats.connection import isolation
from penstock.streams.nats.servers.cluster import LocalCluster
from penstock.streams.port import ConsumerSpec, Published, StreamSpec

LEDGER = StreamSpec("LEDGER", ("p.ledger",), "limits", "file")


Proxied = tuple[LocalCluster, dict[tuple[int, int], Proxy]]


@pytest.fixture
async def proxied(tmp_path: Path) -> AsyncIterator[Proxied]:
    """Three servers, and the proxies between them: from which node to which."""
    proxies: dict[tuple[int, int], Proxy] = {}

    async def dial(source: int, target: int, port: int) -> int:
        proxies[source, target] = await Proxy.start(port)
        return proxies[source, target].port

    cluster = await LocalCluster.start(tmp_path / "cluster", dial=dial)
    yield cluster, proxies
    await cluster.close()
    for proxy in proxies.values():
        await proxy.close()


async def connect(cluster: LocalCluster) -> JetStreamBroker:
    return await JetStreamBroker.connect(cluster.urls, namespace="p", timeout=30.0, replicas=3)


def until_it_stands(pid: int) -> None:
    """Return when no thread of a process that was stopped runs any more."""
    while any(" T " not in stat.read_text() for stat in Path(f"/proc/{pid}/task").glob("*/stat")):
        pass


async def test_a_stream_outlives_its_leader(own_cluster: LocalCluster) -> None:
    broker = await connect(own_cluster)
    await broker.ensure([LEDGER], [])
    assert (await broker.publish("p.ledger", b"", message_id="m1")).sequence == 1
    leader = await own_cluster.leader_of("P_LEDGER")
    assert leader is not None
    (used,) = await broker.usage()
    assert (used.leader, used.away) == (f"n{leader}", 0)
    await own_cluster.kill(leader)
    assert (await broker.publish("p.ledger", b"", message_id="m2")).sequence == 2
    assert await own_cluster.leader_of("P_LEDGER") not in (None, leader)
    async with asyncio.timeout(20):
        while [(used.leader in ("", f"n{leader}"), used.away) for used in await broker.usage()] != [(False, 1)]:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    await own_cluster.ready()
    assert await own_cluster.meta_leader() not in (None, leader)
    await own_cluster.restart(leader)
    await own_cluster.ready()
    assert (await broker.publish("p.ledger", b"", message_id="m3")).sequence == 3
    await broker.close()


async def test_a_node_that_steps_aside_leads_nothing(own_cluster: LocalCluster) -> None:
    broker = await connect(own_cluster)
    await broker.ensure([LEDGER], [])
    spec = ConsumerSpec(stream="LEDGER", name="reader", subject="p.ledger", ack_wait=5.0, max_deliver=-1)
    consumer = await broker.consume(spec, prefetch=1)
    for _ in range(2):
        leader = await own_cluster.leader_of("P_LEDGER")
        assert leader is not None
        await own_cluster.step_aside(leader)
        async with asyncio.timeout(20):
            while await own_cluster.leader_of("P_LEDGER") in (None, leader):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            while (await broker.consumers("LEDGER"))[0]["cluster"].get("leader") in (None, f"n{leader}"):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert not (await broker.publish("p.ledger", b"", message_id=f"m{leader}")).duplicate
    await consumer.close()
    await broker.close()


async def test_a_stopped_node_is_replaced_and_comes_back(own_cluster: LocalCluster) -> None:
    broker = await connect(own_cluster)
    await broker.ensure([LEDGER], [])
    leader = await own_cluster.leader_of("P_LEDGER")
    assert leader is not None
    own_cluster.stop(leader)
    assert (await broker.publish("p.ledger", b"", message_id="m1")).sequence == 1
    own_cluster.cont(leader)
    await own_cluster.ready()
    await broker.close()


async def test_a_client_leaves_a_node_that_stands_still(own_cluster: LocalCluster) -> None:
    """Its connection stays open without an answer; what is published meanwhile is stored before its timeout."""
    ports = [urlsplit(node.url).port or 0 for node in own_cluster.nodes]
    doors = [await Proxy.start(port) for port in ports]
    urls = own_cluster.urls
    for port, door in zip(ports, doors, strict=True):
        urls = urls.replace(f":{port}", f":{door.port}")
    broker = await JetStreamBroker.connect(urls, namespace="p", timeout=25.0, replicas=3)
    await broker.ensure([LEDGER], [])
    (used,) = [index for index, door in enumerate(doors) if door.connections]
    own_cluster.stop(used)
    until_it_stands(own_cluster.nodes[used].pid)
    assert (await broker.publish("p.ledger", b"", message_id="m1")).sequence == 1
    assert broker.outages >= 1  # it has left the node; on a slow machine another may be slow to answer, too
    own_cluster.cont(used)
    await own_cluster.ready()
    await broker.close()
    for door in doors:
        await door.close()


async def test_a_client_leaves_a_node_that_is_cut_off_from_the_others(
    proxied: Proxied, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node answers pings, and questions about what it knows; but it cannot store."""
    monkeypatch.setattr(isolation, "PATIENCE", 1.0)
    monkeypatch.setattr(isolation, "MOST_PATIENCE", 4.0)
    cluster, proxies = proxied
    broker = await connect(cluster)
    await broker.ensure([LEDGER], [])
    connected = broker._link._client.connected_url
    assert connected is not None
    used = [urlsplit(node.url).port for node in cluster.nodes].index(connected.port)
    for ends, proxy in proxies.items():
        if used in ends:
            proxy.stall()
    assert (await broker.publish("p.ledger", b"", message_id="m1")).sequence == 1
    assert broker.outages > 0
    for proxy in proxies.values():
        proxy.resume()
    await cluster.ready()
    assert await broker.publish("p.ledger", b"", message_id="m1") == Published(1, True)
    await broker.close()


async def test_all_come_back_under_their_addresses(own_cluster: LocalCluster) -> None:
    broker, urls = await connect(own_cluster), own_cluster.urls
    await broker.ensure([LEDGER], [])
    await broker.publish("p.ledger", b"", message_id="m1")
    await asyncio.gather(*map(own_cluster.kill, range(3)))
    await asyncio.gather(*map(own_cluster.restart, range(3)))
    await own_cluster.ready()
    assert own_cluster.urls == urls
    assert (await broker.publish("p.ledger", b"", message_id="m2")).sequence == 2
    await broker.close()


async def test_clients_learn_of_no_other_server(own_cluster: LocalCluster) -> None:
    address = urlsplit(own_cluster.nodes[0].url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    said = json.loads((await reader.readline()).removeprefix(b"INFO "))
    writer.close()
    assert said["cluster"] == "local" and not said.get("connect_urls")


async def test_a_publish_waits_for_a_leader_that_is_slow(proxied: Proxied) -> None:
    """What is sent again meanwhile is refused by the server as being in process, and is stored once all the same."""
    cluster, proxies = proxied
    broker = await connect(cluster)
    await broker.ensure([LEDGER], [])
    leader = await cluster.leader_of("P_LEDGER")
    for ends, proxy in proxies.items():
        proxy.delay = 0.8 if leader in ends else 0.0
    stored = await broker.publish("p.ledger", b"", message_id="m1")
    assert stored.sequence == (await broker.publish("p.ledger", b"", message_id="m1")).sequence == 1
    await broker.close()
