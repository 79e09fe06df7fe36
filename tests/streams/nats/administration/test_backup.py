"""A deployment's streams in files, and back in another server: whole, or not at all."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from nats.aio.msg import Msg

from penstock.schemas.errors import StartupError
from penstock.streams.nats.administration.backup import _listening, load, save
from penstock.streams.nats.broker import JetStreamBroker
from penstock.streams.nats.connection.link import Link
from penstock.streams.nats.servers.server import EmbeddedServer
from penstock.streams.port import BucketSpec, ConsumerSpec, StreamSpec

LARGE = 200  # messages of 64 KiB that cannot be compressed: more than a server sends before it hears from us
JOBS = StreamSpec("JOBS", ("p.jobs.>",), "work_queue", "file")
BUCKETS = [BucketSpec("state", storage="file"), BucketSpec("workers")]


@pytest.fixture
async def links(tmp_path: Path) -> AsyncIterator[tuple[Link, Link]]:
    """Connections to two servers; the first has a stream in the middle of its work, and two buckets."""
    servers = [await EmbeddedServer.start(tmp_path / name) for name in ("one", "two")]
    broker = await JetStreamBroker.connect(servers[0].url, namespace="p")
    await broker.ensure([JOBS], BUCKETS)
    for number in range(LARGE):
        await broker.publish("p.jobs.a", os.urandom(64 << 10), message_id=f"m{number}", headers={"Key": str(number)})
    consumer = await broker.consume(ConsumerSpec("JOBS", "reader", "p.jobs.>"), prefetch=4)
    for delivery in await consumer.take(2):
        await delivery.ack()
    await (await broker.bucket("state")).put("key", b"value")
    await broker.close()
    found = [await Link.connect(server.url, name="test", timeout=10.0) for server in servers]
    yield found[0], found[1]
    for link in found:
        await link.close()
    for server in servers:
        await server.stop()


async def test_messages_keys_and_acknowledgements_come_back(links: tuple[Link, Link], tmp_path: Path) -> None:
    one, two = links
    names = ["KV_p_state", "P_JOBS"]  # what is in memory is of no use to others
    assert await save(one, "p", tmp_path / "backup") == names
    assert (tmp_path / "backup").stat().st_mode & 0o077 == 0
    assert await load(two, "p", tmp_path / "backup") == names
    before, after = (JetStreamBroker(link, _unused, namespace="p") for link in links)
    left = [(each.sequence, each.data, each.headers) for each in await before.replay("JOBS", ">")]
    assert left == [(each.sequence, each.data, each.headers) for each in await after.replay("JOBS", ">")]
    assert len(left) < LARGE and left[0][0] > 1
    assert await (await after.bucket("state")).get("key") == await (await before.bucket("state")).get("key")
    floors = [(await broker.consumers("JOBS"))[0]["ack_floor"]["stream_seq"] for broker in (before, after)]
    assert floors[0] == floors[1] > 0
    with pytest.raises(StartupError, match="has streams of the namespace 'p' already"):
        await load(two, "p", tmp_path / "backup")


async def test_what_is_no_whole_backup_is_refused_before_anything_is_created(
    links: tuple[Link, Link], tmp_path: Path
) -> None:
    one, two = links
    backup = tmp_path / "backup"
    with pytest.raises(StartupError, match="no streams of the namespace 'other': nothing to save"):
        await save(one, "other", backup)
    await save(one, "p", backup)
    with pytest.raises(StartupError, match="cannot be made: File exists"):
        await save(one, "p", backup)
    with pytest.raises(StartupError, match=r"is of another namespace \(KV_p_state\): give it with --namespace"):
        await load(two, "q", backup)
    about = (backup / "P_JOBS.json").rename(backup / "gone")
    with pytest.raises(StartupError, match="holds no backup, or one that broke off"):
        await load(two, "p", backup)
    about.rename(backup / "P_JOBS.json")
    data = backup / "P_JOBS.snapshot"
    data.write_bytes(data.read_bytes()[: 1 << 20])
    with pytest.raises(StartupError, match="stream P_JOBS: "):
        await load(two, "p", backup)
    after = JetStreamBroker(two, _unused, namespace="p")
    assert await after.present("P_JOBS") is None and await after.present("KV_p_state") is None


async def _unused() -> Link:
    raise AssertionError


async def test_what_reaches_nobody_is_sent_again(links: tuple[Link, Link], monkeypatch: pytest.MonkeyPatch) -> None:
    """In a cluster, the server that takes chunks may say so before ours knows that it listens."""
    link, _ = links
    heard: list[bytes] = []

    async def hear(message: Msg) -> None:
        heard.append(message.data)
        await link.send(message.reply, b"{}")

    async def take_and_listen() -> Msg:
        message = await take()
        await link.subscribe("p.chunks", hear)
        return message

    async with _listening(link) as answers:
        take = answers.take
        monkeypatch.setattr(answers, "take", take_and_listen)
        assert (await answers.ask("p.chunks", b"chunk")).data == b"{}"
        assert heard == [b"chunk"]


async def test_where_nobody_listens_a_restore_ends(links: tuple[Link, Link]) -> None:
    link, _ = links
    link.timeout = 0.1
    async with _listening(link) as answers:
        with pytest.raises(StartupError, match=r"nobody takes p\.chunks"):
            await answers.ask("p.chunks", b"chunk")
