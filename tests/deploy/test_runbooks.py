"""The runbooks of docs/operations.md, with real servers: what they promise to keep is kept."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from runbooks import WORDS, begin, commands, content, no_copy_is_away, store_file, whole
from serving import Serve, Start, until
from setting_up import set_up

from penstock.streams.nats.servers.cluster import LocalCluster


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[LocalCluster]:
    cluster = await LocalCluster.start(tmp_path / "cluster")
    yield cluster
    await cluster.close()


def test_a_backup_brings_back_what_is_stored_and_what_runs(serve: Serve, tmp_path: Path) -> None:
    served = serve("--backend", "echo", "--echo-rate", "4", "--drain-timeout", "0")
    file, request = store_file(served.url), begin(served.url)
    served.process.send(signal.SIGTERM)
    assert served.process.wait() == 0
    paths = {"~/.local/state/penstock": served.state_dir, "/backup": tmp_path / "backup"}
    (tmp_path / "backup").mkdir()
    subprocess.run(["bash", "-ec", commands("tar -cf", paths)], check=True)
    shutil.rmtree(served.state_dir)
    subprocess.run(["bash", "-ec", commands("tar -xf", paths)], check=True)
    served = serve("--backend", "echo")
    assert until(lambda: content(served.url, file)) == b"kept"
    assert whole(served.url, request) == WORDS


async def test_a_node_that_lost_its_disk_is_filled_by_the_others(
    cluster: LocalCluster, start: Start, tmp_path: Path
) -> None:
    await set_up({"PENSTOCK_NATS_URL": cluster.urls, "PENSTOCK_NATS_REPLICAS": "3"})
    arguments = ("--nats-url", cluster.urls, "--state-dir", str(tmp_path / "front"))
    front = start("serve", "--backend", "echo", "--echo-rate", "8", "--port", "0", *arguments)
    url = front.wait_for(r"penstock ready (http://\S+)")[1]
    file, request = store_file(url), begin(url)
    await cluster.kill(2)
    shutil.rmtree(tmp_path / "cluster" / "n2" / "jetstream")
    await cluster.restart(2)
    await cluster.ready()
    until(lambda: no_copy_is_away(url))
    await cluster.kill(0)  # now the new one's copies count
    assert whole(url, request) == WORDS
    assert until(lambda: content(url, file)) == b"kept"
    assert front.alive
