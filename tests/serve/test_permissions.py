"""The parts of a pipeline over TLS, each as the user that `penstock nats config` writes for it.

`pytest tests/serve --nats-permissions` runs other tests of several processes so, too.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest
from guarded import DENIED, GuardedServer
from serving import Start

STAGES = ("validate", "queue", "batch", "stream")


@pytest.fixture(params=[None, "hub"], ids=["no domain", "domain"])
async def server(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[GuardedServer]:
    server = await GuardedServer.start(tmp_path / "server", request.param)
    yield server
    await server.stop()


async def test_a_chat_with_least_permissions(start: Start, server: GuardedServer) -> None:
    user = server.environment
    refused = start("nats", "setup", "--apply", environment=user("worker"))
    assert refused.wait() == 2
    domain = f"{server.domain}." if server.domain else ""
    assert f"does not allow us to publish to $JS.{domain}API.STREAM." in refused.output and "role" in refused.output
    assert "Traceback" not in refused.output
    early = start("stage", "validate", environment=user("stage-validate"))
    assert early.wait() == 2
    assert "`penstock nats setup --apply`, as a user who may create streams, such as admin" in early.output
    plan = start("nats", "setup", environment=user("admin"))
    assert plan.wait() == 0 and "nothing was changed; add --apply" in plan.output
    done = start("nats", "setup", "--apply", environment=user("admin"))
    assert done.wait() == 0, done.output
    undeclared = start("worker", "--backend", "echo", environment=user("worker"))
    assert undeclared.wait() == 2
    assert "the model 'echo' is not declared" in undeclared.output and "penstock nats setup MODEL" in undeclared.output
    declared = start("nats", "setup", "--backend", "echo", "--apply", environment=user("admin"))
    assert declared.wait() == 0 and "model echo: declared" in declared.output, declared.output

    parts = [start("stage", name, environment=user(f"stage-{name}")) for name in STAGES]
    parts.append(start("worker", "--backend", "echo", environment=user("worker")))
    parts.append(start("bridge", "--port", "0", environment=user("bridge")))
    url = parts[-1].wait_for(r"penstock ready (http://\S+)")[1]
    body = {"model": "echo", "messages": [{"role": "user", "content": "hello"}]}
    answer = httpx2.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200 and "hello" in answer.json()["choices"][0]["message"]["content"]
    assert not [line for part in parts for line in part.lines if DENIED.search(line)]
