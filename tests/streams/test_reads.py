"""Reads include whatever was acknowledged before, whichever replica answers and however far it lags."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest_asyncio
from nats.aio.msg import Msg

from penstock.streams.memory.stream import matcher
from penstock.streams.nats.broker import JetStreamBroker
from penstock.streams.nats.connection.link import Link
from penstock.streams.nats.management import call
from penstock.streams.nats.servers.cluster import LocalCluster
from penstock.streams.nats.servers.server import EmbeddedServer
from penstock.streams.port import Broker, Bucket, BucketSpec, Message, StreamSpec

PAIRS = 600  # of a write and a read of it, of which a cluster of three answered 4 % with what was before
AT_ONCE = 30
LARGE = bytes(7 << 20)  # close to what a message holds


class LaggingReplica:
    """Answers a stream's direct gets, in place of its server, from what `known` was when it was asked to stop there."""

    def __init__(self, link: Link, stream: str) -> None:
        self.known: list[Message] = []
        self._link = link
        self._stream = stream

    async def start(self) -> None:
        config = (await call(self._link, f"STREAM.INFO.{self._stream}"))["config"]
        await call(self._link, f"STREAM.UPDATE.{self._stream}", config | {"allow_direct": False})
        subject = f"$JS.API.DIRECT.GET.{self._stream}"
        await self._link.subscribe(subject, self._batch)
        await self._link.subscribe(f"{subject}.>", self._newest)
        await self._link.flush()

    async def _batch(self, asked: Msg) -> None:
        request = orjson.loads(asked.data)
        fits = matcher(request["next_by_subj"]).fullmatch
        found = [one for one in self.known if one.sequence >= request["seq"] and fits(one.subject)]
        for one in found:
            await self._tell(asked.reply, one, {"Nats-Num-Pending": "0"})
        await self._end(asked.reply, {"Status": "204", "Nats-Num-Pending": "0"} if found else {"Status": "404"})

    async def _newest(self, asked: Msg) -> None:
        subject = asked.subject.removeprefix(f"$JS.API.DIRECT.GET.{self._stream}.")
        found = [one for one in self.known if one.subject == subject]
        if found:
            await self._tell(asked.reply, found[-1], {})
        else:
            await self._end(asked.reply, {"Status": "404"})

    async def _tell(self, reply: str, one: Message, more: dict[str, str]) -> None:
        origin = {"Nats-Subject": one.subject, "Nats-Sequence": str(one.sequence), "Nats-Stream": self._stream}
        await self._send(reply, one.data, {**one.headers, **origin, **more})

    async def _end(self, reply: str, headers: dict[str, str]) -> None:
        await self._send(reply, b"", headers)

    async def _send(self, reply: str, data: bytes, headers: dict[str, str]) -> None:
        await self._link._client.publish(reply, data, headers=headers)


@pytest_asyncio.fixture
async def lagging(server: EmbeddedServer, namespace: str) -> AsyncIterator[Any]:
    """Makes a replica that lags behind the server's."""
    link = await Link.connect(server.url, name="replica", timeout=10.0)

    async def make(stream: str) -> LaggingReplica:
        replica = LaggingReplica(link, stream)
        await replica.start()
        return replica

    yield make
    await link.close()


async def test_a_replay_has_what_a_replica_lacks(jetstream: JetStreamBroker, namespace: str, lagging: Any) -> None:
    subject = f"{namespace}.relay.a"
    await jetstream.ensure([StreamSpec("RELAY", (f"{namespace}.relay.>",), "limits", "file")], [])
    for number in range(6):
        await jetstream.publish(f"{namespace}.relay.{'ab'[number % 2]}", b"%d" % number, message_id=f"m{number}")
    stored = await jetstream.replay("RELAY", f"{namespace}.relay.>")
    replica = await lagging(f"{namespace}_RELAY".upper())
    for known in range(len(stored) + 1):
        replica.known = stored[:known]
        assert await jetstream.replay("RELAY", f"{namespace}.relay.>") == stored
        assert await jetstream.replay("RELAY", subject) == stored[::2]
        assert await jetstream.replay("RELAY", subject, stored[2].sequence) == stored[4::2]
        assert await jetstream.last("RELAY", subject) == stored[4]
        assert await jetstream.replay("RELAY", f"{namespace}.relay.c") == []


async def test_a_scan_has_all_there_is_in_parts(broker: Broker) -> None:
    """More than a batch has at first, and after it has grown; and values of which few fit into one."""
    await broker.ensure([], [BucketSpec("things", ttl=60, storage="memory")])
    bucket = await broker.bucket("things")
    keys = [f"one.{number}" for number in range(2_000)]
    await asyncio.gather(*(bucket.put(key, key.encode()) for key in keys))
    await asyncio.gather(bucket.put("other.1", b"other"), bucket.put("ones", b"other"))
    large = [f"one.large-{number}" for number in range(3)]
    for key in large:
        await bucket.put(key, LARGE)
    await bucket.delete(keys.pop(7))
    found = [(entry.key, len(entry.value)) async for entries in bucket.scan("one.") for entry in entries]
    assert sorted(found) == sorted([*((key, len(key)) for key in keys), *((key, len(LARGE)) for key in large)])
    assert [entry async for entries in bucket.scan("none.") for entry in entries] == []
    assert [entry.key async for entries in bucket.scan("ones") for entry in entries] == ["ones"]


async def test_a_bucket_has_what_a_replica_lacks(jetstream: JetStreamBroker, namespace: str, lagging: Any) -> None:
    await jetstream.ensure([], [BucketSpec("state")])
    bucket = await jetstream.bucket("state")
    for key in ("a.gone", "a.kept", "b.gone"):
        await bucket.put(key, b"old")
    before = await messages(jetstream, namespace)
    replica = await lagging(f"KV_{namespace}_state")
    replica.known = before
    await bucket.delete("a.gone")
    await bucket.delete("b.gone")
    newer = await bucket.put("a.kept", b"new")
    made = await bucket.create("a.made", b"new")
    assert made is not None
    assert await bucket.get("a.gone") is None
    assert await bucket.get("a.kept") == ("a.kept", b"new", newer)
    assert await bucket.entries() == [("a.kept", b"new", newer), ("a.made", b"new", made)]
    assert await bucket.entries("a.m") == [("a.made", b"new", made)]
    assert await bucket.entries("b.") == []
    assert await bucket.create("a.kept", b"late") is None
    assert await bucket.create("a.gone", b"again") is not None
    assert await bucket.entries("a.g") == [await bucket.get("a.gone")]


async def messages(broker: JetStreamBroker, namespace: str) -> list[Message]:
    """What a bucket's stream holds."""
    bucket = await broker.bucket("state")
    entries = await bucket.entries()
    return [Message(f"$KV.{namespace}_state.{one.key}", one.value, {}, one.revision) for one in entries]


async def test_entries_are_asked_for_by_prefix(jetstream: JetStreamBroker, namespace: str, lagging: Any) -> None:
    """Whatever else the bucket holds, of tenants for instance, stays at the server."""
    await jetstream.ensure([], [BucketSpec("state")])
    bucket = await jetstream.bucket("state")
    for key in ("a.b.one", "a.b.other", "a.c", "ab.one", "a"):
        await bucket.put(key, b"")
    asked: list[str] = []

    async def hear(message: Msg) -> None:
        asked.append(orjson.loads(message.data)["next_by_subj"])

    await jetstream._link.subscribe(f"$JS.API.DIRECT.GET.KV_{namespace}_state", hear)
    for prefix, keys in (
        ("a.b.", ["a.b.one", "a.b.other"]),
        ("a.b.o", ["a.b.one", "a.b.other"]),
        ("a.b.on", ["a.b.one"]),
        ("a", ["a.b.one", "a.b.other", "a.c", "ab.one", "a"]),
        ("b.", []),
    ):
        assert [entry.key for entry in await bucket.entries(prefix)] == keys
    root = f"$KV.{namespace}_state."
    assert list(dict.fromkeys(asked)) == [f"{root}a.b.>", f"{root}>"]


async def test_what_is_read_again_is_fetched_only_when_it_has_changed(
    server: EmbeddedServer, jetstream: JetStreamBroker, namespace: str
) -> None:
    await jetstream.ensure([], [BucketSpec("state"), BucketSpec("leases", ttl=0.4)])
    other = await JetStreamBroker.connect(server.url, namespace=namespace, timeout=10.0)
    writer, reader = await other.bucket("state"), await jetstream.bucket("state")
    fetched = 0

    async def hear(_: Msg) -> None:
        nonlocal fetched
        fetched += 1

    await jetstream._link.subscribe(f"$JS.API.DIRECT.GET.KV_{namespace}_state", hear)

    async def held(prefix: str = "") -> dict[str, bytes]:
        again, first = await reader.entries(prefix), await reader.entries(prefix)
        assert again == first
        again.clear()  # a list of the caller's own
        return {entry.key: entry.value for entry in await reader.entries(prefix)}

    assert await held() == {}
    await writer.put("a.x", b"1")
    assert await held() == {"a.x": b"1"} == await held("a.")
    await writer.put("a.x", b"2")
    await writer.put("b.x", b"3")
    assert await held() == {"a.x": b"2", "b.x": b"3"}
    await writer.delete("a.x")
    assert await held() == {"b.x": b"3"}
    await writer.put("a.x", b"4")
    assert await held() == {"b.x": b"3", "a.x": b"4"}
    assert await held("a.") == {"a.x": b"4"}
    changes, fetched = fetched, 0
    assert changes == 6
    for prefix in ("", "a.") * 3:
        await reader.entries(prefix)
    assert fetched == 0
    for number in range(40):  # of many prefixes few are kept, and each is read as it is now
        await writer.put(f"of-{number % 10}.x", b"%d" % number)
        assert await held(f"of-{number % 10}.") == {f"of-{number % 10}.x": b"%d" % number}
    await writer.put("large.x", bytes(1 << 18))
    fetched = 0
    for _ in range(2):
        assert [len(entry.value) for entry in await reader.entries("large.")] == [1 << 18]
    assert fetched == 2, "what is large is not kept"
    shares = await jetstream.bucket("leases")
    await shares.put("share", b"")
    assert [entry.key for entry in await shares.entries()] == ["share"]
    async with asyncio.timeout(10.0):
        while await shares.entries():  # noqa: ASYNC110  (it expires without a write)
            await asyncio.sleep(0.01)
    await other.close()


async def test_what_a_restarted_server_holds_is_not_taken_for_what_it_held(tmp_path: Path) -> None:
    """A bucket in memory counts from 1 again: its numbers may be what they were, of other entries."""
    server = await EmbeddedServer.start(tmp_path)
    broker = await JetStreamBroker.connect(server.url, namespace="p", timeout=10.0)
    await broker.ensure([], [BucketSpec("state")])
    bucket = await broker.bucket("state")
    await bucket.put("key", b"before")
    assert [entry.value for entry in await bucket.entries()] == [b"before"]
    await server.stop()
    await server.restart()
    await bucket.put("key", b"after")
    assert [(entry.value, entry.revision) for entry in await bucket.entries()] == [(b"after", 1)]
    await broker.close()
    await server.stop()


async def test_the_newest_message_may_be_as_large_as_any(jetstream: JetStreamBroker, namespace: str) -> None:
    await jetstream.ensure([], [BucketSpec("state", storage="file")])
    bucket = await jetstream.bucket("state")
    revision = await bucket.put("large", LARGE)
    assert await bucket.get("large") == ("large", LARGE, revision)


async def test_of_a_cluster_every_server_gives_what_was_acknowledged(tmp_path: Path) -> None:
    # Servers that write to the disk each time lag behind each other as those of busy machines do.
    cluster = await LocalCluster.start(tmp_path, sync_interval="always")
    brokers = [
        await JetStreamBroker.connect(node.url, namespace="p", timeout=30.0, replicas=3) for node in cluster.nodes
    ]
    await brokers[0].ensure(
        [StreamSpec("RELAY", ("p.relay.>",), "limits", "file")], [BucketSpec("state", storage="file")]
    )
    buckets: list[Bucket] = [await broker.bucket("state") for broker in brokers]
    stale: list[str] = []

    async def pair(number: int) -> None:
        writer, reader = number % 3, number // 3 % 3
        key, subject = f"key.{number}", f"p.relay.{number}"
        await buckets[writer].put(key, b"")
        if await buckets[reader].get(key) is None or not await buckets[reader].entries(key):
            stale.append(key)
        await brokers[writer].publish(subject, b"", message_id=subject)
        if not await brokers[reader].replay("RELAY", subject) or await brokers[reader].last("RELAY", subject) is None:
            stale.append(subject)

    for first in range(0, PAIRS, AT_ONCE):
        await asyncio.gather(*(pair(first + number) for number in range(AT_ONCE)))
    for broker in brokers:
        await broker.close()
    await cluster.close()
    assert stale == []
