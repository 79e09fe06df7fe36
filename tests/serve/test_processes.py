"""Every part in a process of its own against a separate nats-server; parts are killed while requests run."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import requests
from serving import Process, Start, answers
from setting_up import set_up

from penstock.api.serve.connecting import connected
from penstock.api.serve.processes import FATAL_EXIT
from penstock.config.settings import Settings
from penstock.streams.nats.servers.server import EmbeddedServer
from penstock.streams.stores.registry import Registry

STAGES = ("validate", "queue", "batch", "stream")
REQUESTS = 20
TOKENS = 150


PARTS = {
    ("stage", "validate"): r"running.*stages=",
    ("worker", "--backend", "echo"): "worker ready",
    ("bridge", "--port", "0"): r"running.*stages=",
    ("serve", "--backend", "echo", "--port", "0"): "penstock ready",
}


async def test_a_broker_that_comes_late_is_waited_for(start: Start, tmp_path: Path) -> None:
    server = await EmbeddedServer.start(tmp_path / "nats")
    for name in range(len(PARTS)):
        await set_up({"PENSTOCK_NATS_URL": server.url, "PENSTOCK_NAMESPACE": f"n{name}"})
    os.kill(server.pid, signal.SIGKILL)
    await server.wait()
    parts = {}
    for name, arguments in enumerate(PARTS):
        environment = {"PENSTOCK_NATS_URL": server.url, "PENSTOCK_NAMESPACE": f"n{name}"}
        parts[arguments] = start(*arguments, environment=environment)
    address = server.url.rpartition("@")[2]
    for part in parts.values():
        part.wait_for(f"waiting for the broker.*no NATS server answers at nats://{address}")
    url = parts["bridge", "--port", "0"].wait_for("listening.*url=(\\S+)")[1]
    assert _health(url) == (200, 503, ["broker"])
    await server.restart()
    for arguments, part in parts.items():
        part.wait_for(PARTS[arguments])
        if arguments[0] == "bridge":
            assert _health(url) == (200, 503, ["validate", "queue", "batch", "infer", "stream"])
        part.send(signal.SIGTERM)  # so that nothing is left that looks for the broker
    for part in parts.values():
        assert part.wait() == 0
    await server.stop()


def _health(url: str) -> tuple[int, int, list[str]]:
    """The statuses of life and readiness, and what is missing; each in a moment, for whoever watches the process."""
    live, ready = (requests.get(f"{url}/health/{path}", timeout=30) for path in ("live", "ready"))
    return live.status_code, ready.status_code, ready.json()["missing"]


@pytest.mark.parametrize("arguments", PARTS)
def test_ctrl_c_ends_the_waiting(start: Start, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    part = start(*arguments, environment={"PENSTOCK_NATS_URL": "127.0.0.1:1", "PENSTOCK_DRAIN_TIMEOUT": "1000"})
    for delay in ("0.5", "1.0"):
        part.wait_for(f"waiting for the broker.*delay={delay}")
    part.send(signal.SIGINT)
    assert part.wait() == (0 if "serve" in arguments else 130)
    assert "Traceback" not in part.output


def test_sigterm_ends_the_waiting_of_process_1(tmp_path: Path) -> None:
    """As in a container; by default the kernel keeps signals from its first process."""
    inside = ["unshare", "--map-root-user", "--pid", "--fork", "--kill-child"]
    if shutil.which("unshare") is None or subprocess.run([*inside, "true"], capture_output=True).returncode:
        pytest.skip("needs a machine where it may make process namespaces")
    command = [*inside, sys.executable, "-m", "penstock", "stage", "queue", "--nats-url", "127.0.0.1:1"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as part:
        assert part.stderr is not None
        assert next(line for line in part.stderr if "waiting for the broker" in line)
        (first,) = psutil.Process(part.pid).children()
        first.terminate()
        assert part.wait(60) == 128 + signal.SIGTERM


@pytest.mark.parametrize("arguments", PARTS)
async def test_a_broker_that_refuses_is_told_at_once(start: Start, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    server = await EmbeddedServer.start(tmp_path / "nats")
    part = start(*arguments, environment={"PENSTOCK_NATS_URL": server.url.replace("nats://", "nats://not")})
    assert part.wait() == 2
    assert "refuses the user or token of --nats-url: Authorization Violation; correct it" in part.output
    assert "waiting" not in part.output and "Traceback" not in part.output
    await server.stop()


async def test_a_worker_that_finds_nothing_to_load_leaves_its_agent_a_word(
    start: Start, tiny_model: Path, tmp_path: Path
) -> None:
    broken = Path(shutil.copytree(tiny_model, tmp_path / "broken"))
    (broken / "model.safetensors").write_bytes(b"no weights")
    server = await EmbeddedServer.start(tmp_path / "nats")
    await set_up({"PENSTOCK_NATS_URL": server.url})
    environment = {"PENSTOCK_NATS_URL": server.url}
    part = start("worker", str(broken), "--id", "w7", "--revision", "1", environment=environment)
    assert part.wait() == FATAL_EXIT
    async with connected(Settings(nats_url=server.url), "test") as broker:
        word = await Registry(broker, interval=1.0).last_word("w7")
    assert word is not None and "not a complete safetensors file" in word
    await server.stop()


class Parts:
    """A bridge, a worker and every light stage, each its own process."""

    def __init__(self, start: Start, nats_url: str, *worker: str) -> None:
        self._start = start
        self._environment = {"PENSTOCK_NATS_URL": nats_url, "PENSTOCK_LEASE": "1", "PENSTOCK_HEARTBEAT_INTERVAL": "0.5"}
        self.stages = {name: self.stage(name) for name in STAGES}
        self.worker = start("worker", *worker, "--id", "w0", environment=self._environment)
        bridge = start("bridge", "--port", "0", environment=self._environment)
        self.url = bridge.wait_for(r"penstock ready (http://\S+)")[1]

    def stage(self, name: str) -> Process:
        return self._start("stage", name, environment=self._environment)


def test_six_processes_give_what_one_gives(start: Start, nats_url: str, tiny_model: Path, model_server: object) -> None:
    from serving import Served

    assert isinstance(model_server, Served)
    parts = Parts(start, nats_url, str(tiny_model), "--dtype", "float32", "--served-model-name", "tiny")
    prompts = [f"prompt number {place}" for place in range(8)]
    assert answers(parts.url, "tiny", prompts, TOKENS) == answers(model_server.url, "tiny", prompts, TOKENS)


def test_a_stage_killed_under_load_loses_nothing(start: Start, nats_url: str) -> None:
    """Each in its turn, of one deployment: the others are those that have seen the ones before go."""
    parts = Parts(start, nats_url, "--backend", "echo", "--echo-rate", "100")
    for victim in STAGES:
        prompts = [f"request {place} without {victim} " + "abc " * 40 for place in range(REQUESTS)]
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(answers, parts.url, "echo", prompts, TOKENS)
            first_half = pool_of_early_requests(parts.url)
            parts.stages[victim].send(signal.SIGKILL)
            parts.stages[victim].wait()
            parts.stages[victim] = parts.stage(victim)
            assert asked.result() == [prompt[:TOKENS] for prompt in prompts], victim
            assert first_half == ["early"], victim


def pool_of_early_requests(url: str) -> list[str]:
    """One short answer: when it is there, the pipeline is in the middle of the others."""
    return answers(url, "echo", ["early"], TOKENS)


def test_a_second_copy_takes_over(start: Start, nats_url: str) -> None:
    parts = Parts(start, nats_url, "--backend", "echo", "--echo-rate", "100")
    for name in STAGES:
        parts.stage(name)
    prompts = [f"request {place} " + "abc " * 40 for place in range(REQUESTS)]
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(answers, parts.url, "echo", prompts, TOKENS)
        assert pool_of_early_requests(parts.url) == ["early"]
        for process in parts.stages.values():
            process.send(signal.SIGKILL)
        assert asked.result() == [prompt[:TOKENS] for prompt in prompts]
