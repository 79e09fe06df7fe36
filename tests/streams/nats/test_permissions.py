"""The users that `penstock nats config` writes: what each attack meets on a real server, and what a tenant may do."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import nats
import pytest
import pytest_asyncio
from nats.aio.client import Client

from penstock.streams.nats.broker import JetStreamBroker
from penstock.streams.nats.connection.access import Access
from penstock.streams.nats.servers.server import EmbeddedServer
from penstock.streams.topology import topology


class Guarded(NamedTuple):
    server: EmbeddedServer
    directory: Path

    async def connect(self, user: str, denials: asyncio.Queue[str]) -> Client:
        async def hear(error: Exception) -> None:
            denials.put_nowait(str(error))

        seed = str(self.directory / f"{user}.nk")
        return await nats.connect(self.server.url, nkeys_seed=seed, inbox_prefix=f"_in_{user}", error_cb=hear)


@pytest.fixture(scope="module")
def users(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `penstock nats config` writes."""
    directory = tmp_path_factory.mktemp("guarded") / "users"
    command = ["penstock", "nats", "config", str(directory), "--tenant", "anna", "--tenant", "bob"]
    subprocess.run([sys.executable, "-m", *command], check=True, capture_output=True)
    return directory


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def guarded(users: Path) -> AsyncIterator[Guarded]:
    """A server with these users, and the streams of a deployment."""
    directory = users
    server = await EmbeddedServer.start(
        directory.parent / "state", more=[(directory / "penstock.conf").read_text()], authorization=""
    )
    access = Access(nkey=directory / "admin.nk", inbox_prefix="_in_admin")
    admin = await JetStreamBroker.connect(server.url, namespace="penstock", access=access)
    await admin.ensure(*topology("penstock", ["queue"]))
    await admin.close()
    yield Guarded(server, directory)
    await server.stop()


_API = "$JS.API."
_EVENTS, _JOBS = "PENSTOCK_EVENTS", "PENSTOCK_JOBS_NORMAL"


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("user", "action", "subject"),
    [
        ("tenant-anna", "subscribe", "penstock.events.bob.>"),
        ("tenant-anna", "subscribe", "penstock.events.>"),
        ("tenant-anna", "subscribe", "_in_tenant-bob.>"),
        ("tenant-anna", "subscribe", "penstock.jobs.>"),
        ("tenant-anna", "publish", "penstock.jobs.normal.bob"),
        ("tenant-anna", "publish", "penstock.events.anna.default.forged"),
        ("tenant-anna", "publish", "penstock.control.cancel.bob.r1"),
        ("tenant-anna", "publish", "penstock.control.replay.bob.me.r1"),
        ("tenant-anna", "publish", f"$JS.ACK.{_JOBS}.validate.1.1.1.1.0"),
        ("tenant-anna", "publish", f"{_API}CONSUMER.CREATE.{_EVENTS}.c.penstock.events.bob.>"),
        ("tenant-anna", "publish", f"{_API}CONSUMER.CREATE.{_EVENTS}"),
        ("tenant-anna", "publish", f"{_API}CONSUMER.DURABLE.CREATE.{_EVENTS}.c"),
        ("tenant-anna", "publish", f"{_API}CONSUMER.MSG.NEXT.{_JOBS}.validate"),
        ("tenant-anna", "publish", f"{_API}STREAM.MSG.GET.{_EVENTS}"),
        ("tenant-anna", "publish", f"{_API}DIRECT.GET.{_EVENTS}"),
        ("tenant-anna", "publish", "$KV.penstock_responses.bob.r1"),
        ("worker", "publish", "penstock.jobs.high.anna"),
        ("worker", "publish", "penstock.infer.other"),
        ("worker", "publish", f"{_API}CONSUMER.MSG.NEXT.{_JOBS}.validate"),
        ("worker", "publish", f"{_API}STREAM.DELETE.{_JOBS}"),
        ("worker", "publish", f"{_API}STREAM.UPDATE.{_JOBS}"),
        ("worker", "publish", f"{_API}STREAM.PURGE.{_JOBS}"),
        ("stage-queue", "publish", f"{_API}CONSUMER.CREATE.{_JOBS}.validate.penstock.jobs.normal.>"),
        ("stage-queue", "publish", f"{_API}CONSUMER.MSG.NEXT.{_JOBS}.validate"),
        ("stage-queue", "publish", f"{_API}STREAM.MSG.GET.{_JOBS}"),
        ("stage-queue", "publish", f"$JS.ACK.{_JOBS}.validate.1.1.1.1.0"),
        ("stage-validate", "publish", f"{_API}CONSUMER.MSG.NEXT.PENSTOCK_STAGE_QUEUE_NORMAL.queue"),
        ("stage-batch", "subscribe", "penstock.events.>"),
        ("tools", "publish", f"{_API}CONSUMER.MSG.NEXT.{_JOBS}.validate"),
        ("bridge", "publish", f"{_API}STREAM.UPDATE.{_JOBS}"),
        ("tenant-anna", "subscribe", ">"),
        ("tenant-anna", "subscribe", "_in_bridge.>"),
        ("tenant-anna", "publish", f"{_API}CONSUMER.DELETE.{_EVENTS}.c"),
        ("tenant-anna", "publish", f"{_API}STREAM.MSG.DELETE.{_JOBS}"),
        ("tenant-anna", "publish", f"{_API}STREAM.PURGE.{_JOBS}"),
        ("tenant-anna", "publish", f"{_API}STREAM.DELETE.{_EVENTS}"),
        ("tenant-anna", "publish", "penstock.control.cancel.*.r1"),
        ("worker", "publish", f"{_API}CONSUMER.CREATE.{_JOBS}.c.penstock.jobs.normal.>"),
        ("worker", "subscribe", "penstock.jobs.>"),
        ("stage-stream", "publish", f"{_API}CONSUMER.CREATE.PENSTOCK_INFER.c.penstock.infer.*"),
        ("stage-batch", "publish", f"{_API}CONSUMER.MSG.NEXT.{_JOBS}.validate"),
        ("stage-batch", "publish", "penstock.jobs.normal.anna"),
        ("tenant-anna", "publish", "$KV.penstock_rates.anna"),
        ("tenant-anna", "publish", "penstock.control.rates.anna"),
        ("bridge", "publish", "$KV.penstock_rates.anna"),
        ("worker", "publish", f"{_API}STREAM.PURGE.KV_penstock_rates"),
        ("tools", "publish", f"{_API}DIRECT.GET.KV_penstock_rates"),
        ("worker", "publish", f"{_API}STREAM.CREATE.PENSTOCK_BATCH_0123456789ABCDEF_HIGH"),
        ("worker", "publish", f"{_API}STREAM.CREATE.PENSTOCK_DEAD"),
        ("bridge", "publish", f"{_API}STREAM.CREATE.PENSTOCK_DEAD"),
        ("stage-validate", "publish", f"{_API}STREAM.CREATE.KV_penstock_state"),
        ("agent", "publish", f"{_API}STREAM.UPDATE.{_JOBS}"),
        ("agent", "publish", f"{_API}STREAM.PURGE.{_JOBS}"),
        ("agent", "publish", "penstock.jobs.high.anna"),
        ("agent", "publish", f"{_API}CONSUMER.CREATE.{_JOBS}.c.penstock.jobs.normal.>"),
        ("agent", "subscribe", "penstock.jobs.>"),
    ],
)
async def test_an_attack_is_denied(guarded: Guarded, user: str, action: str, subject: str) -> None:
    denials: asyncio.Queue[str] = asyncio.Queue()
    client = await guarded.connect(user, denials)
    try:
        if action == "subscribe":
            await client.subscribe(subject)
        else:
            await client.publish(subject, b"{}")
        await client.flush()
        async with asyncio.timeout(30):
            denial = await denials.get()
    finally:
        await client.close()
    assert "permissions violation" in denial and f'"{subject.lower()}"' in denial


@pytest.mark.asyncio(loop_scope="module")
async def test_a_tenant_publishes_its_own_jobs_and_hears_its_own_events(guarded: Guarded) -> None:
    denials: asyncio.Queue[str] = asyncio.Queue()
    anna, bridge = await guarded.connect("tenant-anna", denials), await guarded.connect("bridge", denials)
    try:
        events = await anna.subscribe("penstock.events.anna.>")
        answer = await anna.request("penstock.jobs.normal.anna", b"{}", timeout=30)
        assert b'"stream":"PENSTOCK_JOBS_NORMAL"' in answer.data
        await anna.publish("penstock.control.cancel.anna.r1", b"")
        await anna.flush()
        await anna.publish("penstock.control.replay.anna.x.r1", b"")
        await anna.flush()
        await bridge.publish("penstock.events.anna.x.r1", b"token")
        assert (await events.next_msg(timeout=30)).data == b"token"
    finally:
        await anna.close()
        await bridge.close()
    assert denials.empty()


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("user", ["stage-validate", "admin"])
async def test_a_part_answers_whoever_asks_it(guarded: Guarded, user: str) -> None:
    access = Access(nkey=guarded.directory / f"{user}.nk", inbox_prefix=f"_in_{user}")
    validate = await JetStreamBroker.connect(guarded.server.url, namespace="penstock", access=access)
    bridge = await guarded.connect("bridge", asyncio.Queue())
    try:
        await validate.refuse("penstock.jobs.>", "validate", lambda _: "there is no such lane")
        answer = await bridge.request("penstock.jobs.urgent.anna", b"{}", timeout=30)
        assert b"there is no such lane" in answer.data
    finally:
        await bridge.close()
        await validate.close()


def test_files_that_are_there_are_left_alone(users: Path) -> None:
    command = [sys.executable, "-m", "penstock", "nats", "config", str(users)]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 2 and "name one that does not exist" in ended.stderr
    for path in users.iterdir():
        assert path.stat().st_mode & 0o077 == 0
