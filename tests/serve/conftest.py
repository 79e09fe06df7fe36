"""What tests of several processes share. Those with Prometheus's tool run where it is installed; `.ci/run` installs it.

With `--nats-permissions`, the parts that share a NATS server have the users and permissions that `penstock nats config`
generates, over TLS, and a part that is denied anything fails its test.
"""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import pytest
from guarded import DENIED, GuardedServer
from serving import Process, Start
from setting_up import set_up_now

from penstock.streams.nats.servers.server import EmbeddedServer

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
def start(request: pytest.FixtureRequest, start: Start, guarded: GuardedServer | None) -> Iterator[Start]:
    """Start a `penstock` command. Before the first one that uses the server of `nats_url`, its streams are created with
    the settings of this one; if the server is guarded, each has its role's user."""
    if "nats_url" not in request.fixturenames:
        yield start
        return
    url: str = request.getfixturevalue("nats_url")
    started: list[Process] = []
    prepared: set[tuple[str, ...]] = set()  # namespaces, and arguments of workers

    def once(*what: str) -> bool:
        is_new = what not in prepared
        prepared.add(what)
        return is_new

    def run(*arguments: str, environment: dict[str, str] | None = None) -> Process:
        environment = environment or {}
        if environment.get("PENSTOCK_NATS_URL") != url:
            return start(*arguments, environment=environment)
        setting_up = environment | (guarded.environment("admin") if guarded else {})
        if once("namespace", environment.get("PENSTOCK_NAMESPACE", "")):
            set_up_now(setting_up)
        if guarded is not None:
            if arguments[0] == "worker" and once(*(model := without_id(arguments[1:]))):  # which may create no lanes
                declaring = start("nats", "setup", *model, "--apply", environment=setting_up)
                assert declaring.wait() == 0, declaring.output
            environment |= guarded.of_command(*arguments)
        started.append(start(*arguments, environment=environment))
        return started[-1]

    yield run
    assert guarded is None or not [line for part in started for line in part.lines if DENIED.search(line)]


def without_id(arguments: Sequence[str]) -> list[str]:
    at = arguments.index("--id") if "--id" in arguments else len(arguments)
    return [*arguments[:at], *arguments[at + 2 :]]
