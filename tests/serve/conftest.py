"""What tests of several processes share. Those with Prometheus's tool run where it is installed; `.ci/run` installs it.

With `--nats-permissions`, the parts that share a NATS server have the users and permissions that `penstock nats config`
generates, over TLS, and a part that is denied anything fails its test.
"""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from guarded import DENIED, GuardedServer
from serving import Process, Start

from penstock.streams.nats.server import EmbeddedServer

collect_ignore = [] if shutil.which("promtool") else ["test_alerts.py", "test_vllm_dashboard.py"]


@pytest.fixture
async def guarded(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[GuardedServer | None]:
    """A server with generated permissions, if these are asked for."""
    if not request.config.getoption("--nats-permissions"):
        yield None
        return
    server = await GuardedServer.start(tmp_path / "guarded")
    yield server
    await server.stop()


@pytest.fixture
async def nats_url(guarded: GuardedServer | None, tmp_path: Path) -> AsyncIterator[str]:
    """A NATS server for parts in processes of their own."""
    if guarded is not None:
        yield guarded.url
        return
    server = await EmbeddedServer.start(tmp_path / "nats")
    yield server.url
    await server.stop()


@pytest.fixture
def start(start: Start, guarded: GuardedServer | None) -> Iterator[Start]:
    """Start a `penstock` command, with its role's user if it is for the guarded server."""
    if guarded is None:
        yield start
        return
    started: list[Process] = []

    def run(*arguments: str, environment: dict[str, str] | None = None) -> Process:
        if (environment or {}).get("PENSTOCK_NATS_URL") == guarded.url:
            environment = environment or {}
            if not started:  # as `admin`, who alone may change streams
                setup = start("nats", "setup", "--apply", environment=environment | guarded.environment("admin"))
                assert setup.wait() == 0, setup.output
            environment |= guarded.of_command(*arguments)
        started.append(start(*arguments, environment=environment))
        return started[-1]

    yield run
    assert not [line for part in started for line in part.lines if DENIED.search(line)]
