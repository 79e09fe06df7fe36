"""The runbooks of docs/operations.md for a deployment that grows and is upgraded, with real servers and commands."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from runbooks import WORDS, begin, commands, content, store_file, whole
from serving import Process, Serve, Start, until
from setting_up import set_up

from penstock.streams.nats.broker import JetStreamBroker
from penstock.streams.nats.servers.cluster import LocalCluster
from penstock.streams.nats.servers.server import EmbeddedServer

THREE = "nats://n1.example.org:4222,nats://n2.example.org:4222,nats://n3.example.org:4222"


async def test_from_one_server_to_three(serve: Serve, start: Start, tmp_path: Path) -> None:
    """A request that runs continues on the cluster, and what is stored is there, in three copies."""
    served = serve("--backend", "echo", "--echo-rate", "4", "--drain-timeout", "0")
    file, request = store_file(served.url), begin(served.url)
    one = served.nats_url
    refused = start("nats", "backup", str(tmp_path / "early"), "--nats-url", one)
    assert refused.wait() == 2 and "only while no part runs: stop all parts first (" in refused.output
    served.process.send(signal.SIGTERM)
    assert served.process.wait() == 0

    server = await EmbeddedServer.start(served.state_dir)
    backup = {"/backup/penstock": tmp_path / "backup"}
    run(commands("penstock nats backup", backup), server.url)
    await server.stop()
    cluster = await LocalCluster.start(tmp_path / "cluster")
    try:
        run(commands("penstock nats restore", backup).replace(THREE, f'"{cluster.urls}"'), "")
        broker = await JetStreamBroker.connect(cluster.urls, namespace="penstock", timeout=20.0)
        copies = {name: await broker.present(broker.server_name(name)) for name in ("EVENTS", "files", "workers")}
        assert [config and config["num_replicas"] for config in copies.values()] == [3, 3, 3]
        await broker.close()
        again = start("serve", "--backend", "echo", "--port", "0", "--nats-url", cluster.urls)
        url = again.wait_for(r"penstock ready (http://\S+)")[1]
        assert whole(url, request) == WORDS
        assert until(lambda: content(url, file)) == b"kept"
    finally:
        await cluster.close()


def run(code: str, url: str) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path} | ({"PENSTOCK_NATS_URL": url} if url else {})
    done = subprocess.run(["bash", "-ec", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


async def test_parts_are_replaced_in_order_while_a_request_runs(start: Start, tmp_path: Path) -> None:
    """First the streams, then stages, workers and bridges, each new one before the old one ends."""
    server = await EmbeddedServer.start(tmp_path / "nats")
    settings = {"PENSTOCK_NATS_URL": server.url}
    await set_up(settings)
    kinds = {
        "stages": (("stage", "validate", "queue", "batch", "stream"), r"running.*stages="),
        "worker": (("worker", "--backend", "echo", "--echo-rate", "8"), "worker ready"),
        "bridge": (("bridge", "--port", "0"), r"penstock ready (http://\S+)"),
    }

    def started(kind: str) -> tuple[Process, str]:
        words, is_ready = kinds[kind]
        part = start(*words, environment=settings)
        return part, part.wait_for(is_ready)[0].rpartition(" ")[2]

    try:
        old = {kind: started(kind) for kind in kinds}
        request = begin(old["bridge"][1])
        plan = start("nats", "setup", "--apply", environment=settings)  # of the new release
        assert plan.wait() == 0 and plan.lines == ["nothing to change"]
        url = ""
        for kind, (part, _) in old.items():
            _, url = started(kind)
            part.send(signal.SIGTERM)
            assert part.wait() == 0, part.output
        assert whole(url, request) == WORDS
    finally:
        await server.stop()
