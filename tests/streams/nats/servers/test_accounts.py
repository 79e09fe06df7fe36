"""Tenants with NATS accounts of their own: nothing of others reaches them, even if their users may do everything."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import nats
import pytest
import pytest_asyncio
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import NoRespondersError, TimeoutError
from typer.testing import CliRunner

from penstock.__main__ import app
from penstock.streams.nats.broker import JetStreamBroker
from penstock.streams.nats.connection.access import Access
from penstock.streams.nats.servers.server import EmbeddedServer
from penstock.streams.port import Reply
from penstock.streams.topology import topology

JOBS, EVENTS = "PENSTOCK_JOBS_NORMAL", "PENSTOCK_EVENTS"
MOMENT = 0.3  # seconds in which what must not come would have come


class Accounts(NamedTuple):
    server: EmbeddedServer
    users: Path
    broker: JetStreamBroker  # the deployment's

    async def connect(self, user: str) -> Client:
        return await nats.connect(
            self.server.url, nkeys_seed=str(self.users / f"{user}.nk"), inbox_prefix=f"_in_{user}"
        )


@pytest.fixture(scope="module")
def users(tmp_path_factory: pytest.TempPathFactory) -> Path:
    users = tmp_path_factory.mktemp("accounts") / "users"
    tenants = ("--tenant", "anna", "--tenant", "bob")
    command = [sys.executable, "-m", "penstock", "nats", "config", str(users), *tenants]
    subprocess.run(command, check=True, capture_output=True)
    return users


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def accounts(users: Path) -> AsyncIterator[Accounts]:
    """A server on which the tenants' users may do all that their accounts can."""
    text = (users / "penstock.conf").read_text()
    at = text.index("TENANT_anna {")
    unbound = text[:at] + re.sub(r", permissions: \{.*\} \}", " }", text[at:])
    assert "permissions" not in unbound[at:] and text[at:].count("permissions") == 2
    server = await EmbeddedServer.start(users.parent / "state", more=[unbound], authorization="")
    access = Access(nkey=users / "admin.nk", inbox_prefix="_in_admin")
    broker = await JetStreamBroker.connect(server.url, namespace="penstock", access=access)
    await broker.ensure(*topology("penstock", ["queue"]))
    yield Accounts(server, users, broker)
    await broker.close()
    await server.stop()


@pytest.mark.asyncio(loop_scope="module")
async def test_a_tenant_publishes_cancels_and_hears_its_own(accounts: Accounts) -> None:
    anna = await accounts.connect("tenant-anna")
    cancelled: asyncio.Queue[str] = asyncio.Queue()
    listening = await accounts.broker.listen("penstock.control.cancel.*.*", lambda m: cancelled.put_nowait(m.subject))
    try:
        events = await anna.subscribe("penstock.events.anna.>")
        await anna.flush()
        answer = await anna.request("penstock.jobs.normal.anna", b"{}", headers={"Nats-Msg-Id": "1"}, timeout=30)
        assert JOBS.encode() in answer.data
        await anna.publish("penstock.control.cancel.anna.r1", b"")
        async with asyncio.timeout(30):
            assert await cancelled.get() == "penstock.control.cancel.anna.r1"
        await accounts.broker.publish("penstock.events.anna.me.r1", b"token", message_id="e1")
        message = await events.next_msg(timeout=30)
        assert (message.subject, message.data) == ("penstock.events.anna.me.r1", b"token")
    finally:
        await listening.close()
        await anna.close()


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    "subject",
    [
        "penstock.jobs.normal.bob",
        "penstock.jobs.urgent.anna",
        "penstock.queue.high.anna",
        "penstock.infer.w0",
        "penstock.stream.0.anna.r1",
        "penstock.events.bob.me.r1",
        "penstock.events.anna.me.r1",
        "penstock.batches.anna",
        "penstock.dead.validate",
        "$KV.penstock_responses.bob.r1",
        "$JS.API.INFO",
        "$JS.API.STREAM.NAMES",
        f"$JS.API.STREAM.MSG.GET.{EVENTS}",
        f"$JS.API.DIRECT.GET.{EVENTS}",
        f"$JS.API.CONSUMER.CREATE.{EVENTS}.c.penstock.events.bob.>",
        f"$JS.API.CONSUMER.MSG.NEXT.{JOBS}.validate",
        f"$JS.API.STREAM.PURGE.{JOBS}",
        f"$JS.API.STREAM.DELETE.{JOBS}",
        f"$JS.ACK.{JOBS}.validate.1.1.1.1.0",
    ],
)
async def test_what_a_tenant_publishes_elsewhere_reaches_nobody(accounts: Accounts, subject: str) -> None:
    before = {usage.name: usage.last for usage in await accounts.broker.usage()}
    anna = await accounts.connect("tenant-anna")
    try:
        with pytest.raises((NoRespondersError, TimeoutError)) as refused:
            answer = await anna.request(subject, b"{}", timeout=MOMENT)
            if b"JetStream not enabled for account" in answer.data or b'"code":503' in answer.data:
                raise NoRespondersError
        assert isinstance(refused.value, NoRespondersError)
    finally:
        await anna.close()
    assert {usage.name: usage.last for usage in await accounts.broker.usage()} == before


@pytest.mark.asyncio(loop_scope="module")
async def test_no_answer_goes_where_its_tenant_may_not_publish(accounts: Accounts) -> None:
    """JetStream answers a publisher, and a part whoever asks it, on the subject that the message names."""
    heard: list[str] = []
    listening = await accounts.broker.listen("penstock.>", lambda message: heard.append(message.subject))

    async def reply(answer: Reply) -> None:
        await answer(b"{}")

    asked: set[asyncio.Task[None]] = set()
    access = Access(nkey=accounts.users / "stage-validate.nk", inbox_prefix="_in_stage-validate")
    part = await JetStreamBroker.connect(accounts.server.url, namespace="penstock", access=access)
    await part.answer("penstock.control.replay.*.*.*", "g", lambda _, to: asked.add(asyncio.create_task(reply(to))))
    before = {usage.name: usage.last for usage in await accounts.broker.usage()}
    anna = await accounts.connect("tenant-anna")
    own = ["penstock.jobs.normal.anna", "penstock.control.replay.anna.me.r1"]
    try:
        for subject in own:
            for to in ("penstock.events.bob.me.r1", "penstock.infer.w0", "$KV.penstock_models.echo", "$JS.API.INFO"):
                await anna.publish(subject, b"{}", reply=to)
        for subject in own:  # those of before have had their answers when these have theirs
            assert (await anna.request(subject, b"{}", timeout=30)).data
        async with asyncio.timeout(30):
            while len(heard) < 10:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    finally:
        await anna.close()
        await part.close()
        await listening.close()
    assert set(heard) == set(own)
    after = {usage.name: usage.last for usage in await accounts.broker.usage()}
    assert {name for name in after if after[name] != before[name]} == {"JOBS_NORMAL"}
    assert len(asked) == 5


@pytest.mark.asyncio(loop_scope="module")
async def test_a_tenant_hears_nothing_of_others(accounts: Accounts) -> None:
    """Whatever it subscribes to: also not under names that it may import from nobody."""
    anna, bob = await accounts.connect("tenant-anna"), await accounts.connect("tenant-bob")
    heard: list[str] = []

    async def hear(message: Msg) -> None:
        heard.append(message.subject)

    try:
        for subject in (
            "penstock.events.bob.>",
            "penstock.events.>",
            "penstock.>",
            ">",
            "_in_tenant-bob.>",
            "_in_admin.>",
        ):
            await anna.subscribe(subject, cb=hear)
        await anna.flush()
        own = await bob.subscribe("penstock.events.bob.>")
        await bob.flush()
        assert b"stream" in (await bob.request("penstock.jobs.normal.bob", b"{}", timeout=30)).data
        await accounts.broker.publish("penstock.events.bob.me.r2", b"secret", message_id="e2")
        assert (await own.next_msg(timeout=30)).data == b"secret"
        await accounts.broker.publish("penstock.events.anna.me.r2", b"own", message_id="e3")
        async with asyncio.timeout(30):
            while not heard:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await anna.flush()
    finally:
        await anna.close()
        await bob.close()
    assert set(heard) == {"penstock.events.anna.me.r2"}


def test_a_name_that_fits_no_subject_is_refused(tmp_path: Path) -> None:
    ended = CliRunner().invoke(app, ["nats", "config", str(tmp_path / "users"), "--tenant", "a.b"])
    assert ended.exit_code == 2 and "--tenant" in ended.stderr, ended.output
    assert not (tmp_path / "users").exists()
