"""Parts create no streams and change none: they say what is missing or differs, and which command mends it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from structlog.testing import capture_logs
from typer.testing import CliRunner, Result

from penstock.__main__ import app
from penstock.config.settings import Settings
from penstock.config.sources import Loaded, flag
from penstock.schemas.errors import StartupError
from penstock.streams.nats.administration.deployment import KEY, joined, owned
from penstock.streams.nats.administration.verification import setup_command
from penstock.streams.nats.broker import JetStreamBroker
from penstock.streams.nats.management import call
from penstock.streams.nats.servers.server import EmbeddedServer
from penstock.streams.port import StreamSpec
from penstock.streams.topology import STATE

SMALL = {"store_limit": 256 << 20, "events_limit": 16 << 20}
Setup = Callable[..., Awaitable[Result]]


@pytest.fixture
def part(namespace: str) -> Loaded:
    return Loaded(
        Settings.model_validate({"namespace": namespace, **SMALL}), dict.fromkeys(Settings.model_fields, "default")
    )


@pytest.fixture
def setup(server: EmbeddedServer, namespace: str) -> Setup:
    """Run `penstock nats setup`."""
    environment = {"PENSTOCK_NATS_URL": server.url, "PENSTOCK_NAMESPACE": namespace}
    small = [f"{flag(name)}={value}" for name, value in SMALL.items()]
    invoke = CliRunner(env=environment).invoke
    return lambda *words: asyncio.to_thread(invoke, app, ["nats", "setup", *small, *words])


async def streams(broker: JetStreamBroker) -> set[str]:
    return {each.name for each in await broker.usage()}


async def test_a_part_creates_nothing_and_says_what_does(
    jetstream: JetStreamBroker, part: Loaded, setup: Setup
) -> None:
    with pytest.raises(
        StartupError, match=r"is not set up for Penstock in the namespace .*`penstock nats setup --apply"
    ) as told:
        await joined(jetstream, part)
    assert jetstream.address in str(told.value)
    assert await streams(jetstream) == set()
    assert (await setup("--apply")).exit_code == 0
    assert (await joined(jetstream, part)).queue_limit == 10_000


async def test_a_stream_that_is_missing_is_named_and_created_by_setup(
    jetstream: JetStreamBroker, part: Loaded, setup: Setup, namespace: str
) -> None:
    await owned(jetstream, part)
    assert (await setup()).stdout == "nothing to change\n"
    await jetstream.remove("JOBS_LOW")
    lost = f"{namespace}_JOBS_LOW".upper()
    with pytest.raises(StartupError, match=rf"{lost} is missing.*: mend them with `penstock nats setup --apply"):
        await joined(jetstream, part)
    plan = await setup()
    assert plan.stdout == f"  {lost}: missing → created\nnothing was changed; add --apply to make the changes\n"
    assert (await setup("--apply")).stdout.endswith("changed\n")
    await joined(jetstream, part)


async def test_streams_without_an_agreement_are_agreed_on(
    jetstream: JetStreamBroker, part: Loaded, setup: Setup
) -> None:
    await owned(jetstream, part)
    await (await jetstream.bucket(STATE)).delete(KEY)
    with pytest.raises(StartupError, match="is not set up"):
        await joined(jetstream, part)
    assert (await setup("--apply")).stdout.endswith("changed\n")
    await joined(jetstream, part)


async def test_what_a_server_has_in_memory_comes_back_with_any_part(jetstream: JetStreamBroker, part: Loaded) -> None:
    """A server that restarts has lost it, maybe while no part was there to notice."""
    await owned(jetstream, part)
    before = await streams(jetstream)
    for bucket in ("workers", "leases", "failures", "rates"):
        await _delete(jetstream, bucket)
    await joined(jetstream, part)
    assert await streams(jetstream) == before


async def test_a_stream_that_cannot_be_used_ends_a_part_and_another_limit_does_not(
    jetstream: JetStreamBroker, part: Loaded, namespace: str
) -> None:
    await owned(jetstream, part)
    low = StreamSpec("JOBS_LOW", (f"{namespace}.jobs.low.>",), "work_queue", "file", discard="new", max_messages=1)
    await jetstream.reconfigure([low], [])
    with capture_logs() as logged:
        await joined(jetstream, part)
    (entry,) = [each for each in logged if each["event"] == "streams are not as agreed"]
    assert "JOBS_LOW: max_msgs 1 instead of 1000" in entry["streams"] and "penstock nats setup --apply" in entry["mend"]

    other = StreamSpec("JOBS_LOW", (f"{namespace}.other",), "work_queue", "file", discard="new", max_messages=1)
    await jetstream.reconfigure([other], [])
    with pytest.raises(StartupError, match=r"JOBS_LOW does not store \S+\.jobs\.low\.>"):
        await joined(jetstream, part)
    await jetstream.remove("JOBS_LOW")
    wrong = StreamSpec("JOBS_LOW", (f"{namespace}.jobs.low.>",), "limits", "file")
    await jetstream.ensure([wrong], [])
    with pytest.raises(StartupError, match="exists with retention 'limits' where 'workqueue' is needed"):
        await joined(jetstream, part)


async def test_what_waits_in_a_stream_of_an_earlier_release_is_not_passed_over(
    jetstream: JetStreamBroker, part: Loaded, namespace: str
) -> None:
    """A set-up that died on its way left it."""
    await owned(jetstream, part)
    await jetstream.ensure([StreamSpec("TOOLS", (f"{namespace}.moved",), "work_queue", "file")], [])
    with pytest.raises(StartupError, match="TOOLS has yet to be moved"):
        await joined(jetstream, part)
    await owned(jetstream, part)
    await joined(jetstream, part)


def test_the_command_has_what_the_part_was_given() -> None:
    given: dict[str, Any] = {"nats_url": "nats://me:secret@h:4222", "namespace": "n", "queue_limit": 5, "port": 8001}
    origins = dict.fromkeys(Settings.model_fields, "default") | {name: flag(name) for name in given}
    loaded = Loaded(Settings(**given), origins | {"nats_url": "PENSTOCK_NATS_URL"})
    assert setup_command(loaded) == "penstock nats setup --apply --namespace n --queue-limit 5"
    command = setup_command(Loaded(Settings(**given), origins))
    assert "secret" not in command and command.startswith("penstock nats setup --apply --nats-url … ")
    given = {"nats_url": "nats://h:4222", "nats_token_file": "token"}
    loaded = Loaded(Settings(**given), dict.fromkeys(Settings.model_fields, "default") | {n: flag(n) for n in given})
    assert setup_command(loaded).endswith("--apply --nats-url nats://h:4222 --nats-token-file token")


async def _delete(broker: JetStreamBroker, bucket: str) -> None:
    await call(broker._link, f"STREAM.DELETE.{broker.server_name(bucket)}")
