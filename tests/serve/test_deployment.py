"""Real processes agree on one configuration: they adopt it, or refuse to start and say why."""

from __future__ import annotations

import re
import shlex
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest
from serving import Serve, Start

from penstock.streams.nats.servers.server import EmbeddedServer


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
    assert "tenant_limit is 7 (--tenant-limit), but this deployment" in other.output and "agreed on 5" in other.output
    assert "penstock config apply --tenant-limit 7" in other.output
    start("worker", *where).wait_for("worker ready")  # it used to reset both
    kept = {"tenant_limit": "5", "responses_ttl": "7776000", "queue_limit": "10000"}
    kept |= {"tenant_tokens_per_minute": "none"}
    assert kept.items() <= agreed(start, served.state_dir).items()
    served.process.send(signal.SIGTERM)
    assert served.process.wait() == 0

    limits = ("--queue-limit", "9", "--tenant-requests-per-minute", "ada=5,bob=none")
    served = serve("--backend", "echo", *limits, environment={"PENSTOCK_STREAM_PARTITIONS": "4"})
    assert "deployment setting changed" in served.process.output
    changed = kept | {"queue_limit": "9", "stream_partitions": "4", "tenant_requests_per_minute": "ada=5,bob=none"}
    assert changed.items() <= agreed(start, served.state_dir).items()


def test_requests_run_while_the_store_is_full_of_what_is_kept(serve: Serve) -> None:
    """Each stream and bucket has its share: what is kept cannot take the room of what runs."""
    served = serve("--backend", "echo", "--store-limit", "64MiB", "--events-limit", "8MiB")
    with httpx2.Client(base_url=served.url, timeout=60) as client:

        def upload() -> httpx2.Response:
            return client.post("/v1/files", files={"file": bytes(2 << 20)}, data={"purpose": "user_data"})

        answers = [upload() for _ in range(20)]
        statuses = [answer.status_code for answer in answers]
        assert 200 in statuses and statuses == sorted(statuses) and set(statuses) == {200, 507}
        error = answers[-1].json()["error"]
        assert error["code"] == "storage_full" and "delete files" in error["message"]
        body = {"model": "echo", "prompt": "hello", "max_tokens": 100}
        for _ in range(20):
            answer = client.post("/v1/completions", json=body)
            assert (answer.status_code, answer.json()["choices"][0]["text"]) == (200, "hello")
        assert client.get("/health/ready").status_code == 200
        assert client.delete(f"/v1/files/{answers[0].json()['id']}").status_code == 200
        assert upload().status_code == 200


async def test_serve_refuses_on_a_server_that_others_use(start: Start, own_nats: str) -> None:
    environment = {"PENSTOCK_NATS_URL": own_nats}
    first = start("stage", "validate", "--lease", "3", environment=environment)
    assert first.wait() == 2
    typed = re.search("create the streams with `penstock (.*?)`", first.output)
    assert typed is not None and typed[1] == "nats setup --apply --lease 3", first.output
    assert start(*shlex.split(typed[1]), environment=environment).wait() == 0
    start("stage", "validate", "--lease", "3", environment=environment).wait_for("running")
    refused = start("serve", "--backend", "echo", "--port", "0", "--lease", "4", environment=environment)
    assert refused.wait() == 2
    assert "lease is 4 (--lease), but this deployment" in refused.output and "agreed on 3" in refused.output
    served = start("serve", "--backend", "echo", "--port", "0", environment=environment)
    served.wait_for("penstock ready")


def test_two_serves_share_a_server(start: Start, own_nats: str) -> None:
    served, urls = [], []
    first = start("serve", "--backend", "echo", "--port", "0", f"--nats-url={own_nats}")
    assert first.wait() == 2
    assert first.output.count("is not set up for Penstock") == 1, "one message, and not one for each child"
    assert start("nats", "setup", "--apply", f"--nats-url={own_nats}").wait() == 0
    for _ in range(2):
        served.append(start("serve", "--backend", "echo", "--port", "0", f"--nats-url={own_nats}"))
        served[-1].wait_for("worker ready")
        urls.append(served[-1].wait_for(r"penstock ready (\S+)")[1])
    ask = {"model": "echo", "prompt": "hello", "max_tokens": 8}
    assert [httpx2.post(f"{url}/v1/completions", json=ask).status_code for url in urls] == [200, 200]
    served[0].send(signal.SIGTERM)
    assert served[0].wait() == 0
    assert httpx2.post(f"{urls[1]}/v1/completions", json=ask).json()["choices"][0]["text"] == "hello"
