"""The parts of a pipeline, each as the user that `penstock nats config` writes for it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest
from serving import Start

from penstock.streams.nats.server import EmbeddedServer

STAGES = ("validate", "queue", "batch", "stream")


@pytest.fixture
async def guarded(start: Start, tmp_path: Path) -> AsyncIterator[EmbeddedServer]:
    written = start("nats", "config", str(tmp_path / "users"))
    assert written.wait() == 0, written.output
    lines = (tmp_path / "users" / "penstock.conf").read_text()
    server = await EmbeddedServer.start(tmp_path / "nats", more=[lines], authorization="")
    yield server
    await server.stop()


async def test_a_chat_with_least_permissions(start: Start, guarded: EmbeddedServer, tmp_path: Path) -> None:
    def user(name: str) -> dict[str, str]:
        own = {"NKEY": str(tmp_path / "users" / f"{name}.nk"), "INBOX_PREFIX": f"_in_{name}", "URL": guarded.url}
        return {f"PENSTOCK_NATS_{key}": value for key, value in own.items()}

    refused = start("nats", "setup", "--apply", environment=user("worker"))
    assert refused.wait() == 2
    assert "does not allow us to publish to $JS.API." in refused.output and "role" in refused.output
    plan = start("nats", "setup", environment=user("admin"))
    assert plan.wait() == 0 and "nothing was changed; add --apply" in plan.output
    done = start("nats", "setup", "--apply", environment=user("admin"))
    assert done.wait() == 0, done.output

    parts = [start("stage", name, environment=user(f"stage-{name}")) for name in STAGES]
    parts.append(start("worker", "--backend", "echo", environment=user("worker")))
    parts.append(start("bridge", "--port", "0", environment=user("bridge")))
    url = parts[-1].wait_for(r"penstock ready (http://\S+)")[1]
    body = {"model": "echo", "messages": [{"role": "user", "content": "hello"}]}
    answer = httpx2.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200 and "hello" in answer.json()["choices"][0]["message"]["content"]
    assert not [line for part in parts for line in part.lines if "does not allow" in line]
