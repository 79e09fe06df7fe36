"""Workers on demand, as an autoscaler starts and ends them: by the metrics alone, and with none while nobody asks."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import httpx2
import pytest
from pages import ROOT
from ports import reserved_port
from serving import Process, Start, answers, until

MODEL = "echo"
SCALING = (ROOT / "deploy" / "kubernetes" / "scaling.yaml").read_text("utf-8")
QUERY = re.findall(r"^\s+\+?\s*\((.*) or vector\(0\)\)", SCALING, re.M)  # the terms of a sum
TOKENS = 60
LONG = "one two three four five six seven eight nine ten"


class Autoscaler:
    """Scrapes the parts, and computes what `scaling.yaml` asks Prometheus for."""

    def __init__(self, ports: list[int]) -> None:
        self._ports = ports

    def demand(self) -> float:
        found = 0.0
        for term in QUERY:
            name, labels = re.findall(r"(penstock_\w+)\{([^}]*)\}", term)[0]
            wanted = {pair.replace("penstock-nano", MODEL) for pair in re.split(r",\s*", labels)}
            values = [value for port in self._ports for value in self._values(port, name, wanted)]
            found += max(values, default=0.0) if term.startswith("max(") else sum(values)
        return found

    def scrape(self, port: int) -> None:
        self._ports.append(port)

    def forget(self, port: int) -> None:
        self._ports.remove(port)

    def value(self, port: int, name: str) -> float:
        return sum(self._values(port, name, {f'model_name="{MODEL}"'}))

    def _values(self, port: int, name: str, wanted: set[str]) -> Iterator[float]:
        try:
            text = httpx2.get(f"http://127.0.0.1:{port}/metrics").text
        except httpx2.HTTPError:
            return  # a part that starts
        for labels, value in re.findall(rf"^{name}\{{([^}}]*)\}} (\S+)$", text, re.M):
            if wanted <= set(labels.split(",")):
                yield float(value)


class Deployment:
    """A bridge and all stages, and workers as they are asked for."""

    def __init__(self, start: Start, url: str) -> None:
        self._start = start
        self._environment = {"PENSTOCK_NATS_URL": url, "PENSTOCK_LEASE": "1", "PENSTOCK_HEARTBEAT_INTERVAL": "0.5"}
        declared = start("nats", "setup", "--backend", MODEL, "--apply", environment=self._environment)
        assert declared.wait() == 0, declared.output
        ports = [reserved_port(), reserved_port()]
        stages = start(
            *("stage", "validate", "queue", "batch", "stream"),
            "--metrics-port",
            str(ports[0]),
            environment=self._environment,
        )
        bridge = start("bridge", "--port", "0", "--metrics-port", str(ports[1]), environment=self._environment)
        stages.wait_for("running")
        self.url = bridge.wait_for(r"penstock ready (http://\S+)")[1]
        self.scaler = Autoscaler(ports)

    def worker(self, rate: int = 0) -> tuple[Process, int]:
        port = reserved_port()
        words = ("worker", "--backend", MODEL, "--echo-rate", str(rate), "--metrics-port", str(port))
        started = self._start(*words, environment=self._environment)
        self.scaler.scrape(port)
        return started, port

    def ask(self, pool: ThreadPoolExecutor, prompts: list[str]) -> Future[list[str]]:
        return pool.submit(answers, self.url, MODEL, prompts, TOKENS)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def test_requests_without_a_worker_wait_for_the_one_that_they_start(
    start: Start, nats_url: str, pool: ThreadPoolExecutor
) -> None:
    deployment = Deployment(start, nats_url)
    scaler = deployment.scaler
    ready = httpx2.get(f"{deployment.url}/health/ready")
    assert (ready.status_code, ready.json()["workers"]) == (200, 0), "else no request would reach the bridge"
    assert len(QUERY) == SCALING.count("penstock_") and scaler.demand() == 0
    prompts = [f"request {number}" for number in range(5)]
    asked = deployment.ask(pool, prompts)
    until(lambda: scaler.demand() >= len(prompts))
    assert not asked.done()
    worker, port = deployment.worker()
    assert asked.result() == prompts
    until(lambda: scaler.demand() == 0)
    worker.send(signal.SIGTERM)
    assert worker.wait() == 0
    scaler.forget(port)
    assert scaler.demand() == 0

    # What a worker leaves when it dies is asked for, too.
    asked = deployment.ask(pool, [LONG])
    until(lambda: scaler.demand() >= 1)
    worker, port = deployment.worker(rate=20)
    until(lambda: scaler.value(port, "penstock_requests_active"))
    worker.send(signal.SIGKILL)
    worker.wait()
    scaler.forget(port)
    until(lambda: scaler.demand() >= 1)
    assert not asked.done()
    deployment.worker()
    assert asked.result() == [LONG]
