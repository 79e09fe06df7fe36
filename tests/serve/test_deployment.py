"""Real processes agree on one configuration: they adopt it, or refuse to start and say why."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from serving import Serve, Start

from penstock.streams.server import EmbeddedServer


@pytest.fixture
async def own_nats(tmp_path: Path) -> AsyncIterator[str]:
    server = await EmbeddedServer.start(tmp_path / "nats")
    yield server.url
    await server.stop()


def agreed(start: Start, state_dir: Path) -> dict[str, str]:
    shown = start("config", "agreed", "--state-dir", str(state_dir))
    assert shown.wait() == 0, shown.output
    return dict(line.split() for line in shown.lines)


def test_parts_adopt_or_refuse_and_serve_changes_what_it_owns(serve: Serve, start: Start) -> None:
    served = serve("--backend", "echo", "--tenant-limit", "5", "--responses-ttl", "7776000")
    where = ("--backend", "echo", "--state-dir", str(served.state_dir))
    other = start("worker", *where, "--tenant-limit", "7")
    assert other.wait() == 2
    assert "tenant_limit is 7 (--tenant-limit), and this deployment" in other.output and "agreed on 5" in other.output
    assert "penstock config apply --tenant-limit 7" in other.output
    start("worker", *where).wait_for("worker ready")  # it used to reset both
    kept = {"tenant_limit": "5", "responses_ttl": "7776000", "queue_limit": "10000"}
    assert kept.items() <= agreed(start, served.state_dir).items()
    served.process.send(signal.SIGTERM)
    assert served.process.wait() == 0

    served = serve("--backend", "echo", "--queue-limit", "9", environment={"PENSTOCK_STREAM_PARTITIONS": "4"})
    assert "a setting of the deployment changes" in served.process.output
    changed = kept | {"queue_limit": "9", "stream_partitions": "4"}
    assert changed.items() <= agreed(start, served.state_dir).items()


async def test_serve_refuses_on_a_server_that_others_use(start: Start, own_nats: str) -> None:
    environment = {"PENSTOCK_NATS_URL": own_nats}
    start("stage", "validate", "--lease", "3", environment=environment).wait_for("running")
    refused = start("serve", "--backend", "echo", "--port", "0", "--lease", "4", environment=environment)
    assert refused.wait() == 2
    assert "lease is 4 (PENSTOCK_LEASE), and this deployment" in refused.output and "agreed on 3" in refused.output
    served = start("serve", "--backend", "echo", "--port", "0", environment=environment)
    served.wait_for("penstock ready")
