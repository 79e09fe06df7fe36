"""The parts of a pipeline over TLS, each as the user that `penstock nats config` writes for it.

`pytest tests/serve --nats-permissions` runs other tests of several processes so, too.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import nats
import pytest
from guarded import DENIED, GuardedServer
from nats.errors import NoRespondersError, TimeoutError
from pages import ROOT, blocks
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
    if not server.domain:
        assert_told_to_set_up(start, server)
    done = start("nats", "setup", "--backend", "echo", "--apply", environment=user("admin"))
    assert done.wait() == 0 and "model echo: declared" in done.output, done.output

    parts = [start("stage", name, environment=user(f"stage-{name}")) for name in STAGES]
    worker = user("worker")
    if server.domain:  # it is at the edge
        (configuration,) = blocks(ROOT / "docs" / "nats.md", "conf")
        worker = await server.start_leaf(configuration.code)
    parts.append(start("worker", "--backend", "echo", environment=worker))
    parts.append(start("bridge", "--port", "0", environment=user("bridge")))
    url = parts[-1].wait_for(r"penstock ready (http://\S+)")[1]
    body = {"model": "echo", "messages": [{"role": "user", "content": "hello"}]}
    answer = httpx2.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200 and "hello" in answer.json()["choices"][0]["message"]["content"]
    assert await server.chat_of_tenant("anna", "echo", "hello") == "hello"
    if server.leaf:
        await assert_held(server.leaf.url, str(server.domain))
    assert not [line for part in parts for line in part.lines if DENIED.search(line)]


def assert_told_to_set_up(start: Start, server: GuardedServer) -> None:
    """A part before the set-up, and a worker of a model that nobody has declared."""
    user = server.environment
    early = start("stage", "validate", environment=user("stage-validate"))
    assert early.wait() == 2
    assert "`penstock nats setup --apply`, as a user who may create streams, such as admin" in early.output
    done = start("nats", "setup", "--apply", environment=user("admin"))
    assert done.wait() == 0, done.output
    undeclared = start("worker", "--backend", "echo", environment=user("worker"))
    assert undeclared.wait() == 2
    assert "the model 'echo' is not declared" in undeclared.output and "penstock nats setup MODEL" in undeclared.output


async def assert_held(url: str, domain: str) -> None:
    """Whoever connects to the leaf node has no more rights than the worker: what it sends reaches nothing else."""
    intruder = await nats.connect(url, inbox_prefix="_in_worker")  # so that it would hear answers
    for subject in ("penstock.jobs.normal.anna", f"$JS.{domain}.API.STREAM.DELETE.PENSTOCK_JOBS_NORMAL"):
        with pytest.raises((NoRespondersError, TimeoutError)):
            await intruder.request(subject, b"{}", timeout=0.5)
    info = await intruder.request(f"$JS.{domain}.API.STREAM.INFO.PENSTOCK_JOBS_NORMAL", b"", timeout=30)
    assert b'"state"' in info.data, "the stream is still there"
    await intruder.close()
