"""The examples as a user runs them: two custom stages in a pipeline, one of them in JavaScript, and two clients."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import nats
import psutil
import pytest
from nats.js.api import ConsumerInfo
from serving import LOOK, START_TIMEOUT, Process, Served

EXAMPLES = Path(__file__).parents[2] / "deploy" / "examples"
PIPELINE = {"PENSTOCK_PIPELINE": "validate,blocklist,cap,queue,batch,infer,stream"}
LIMIT = 40  # tokens; the echo backend's are bytes
WORDS = "sesame, C++"


class Cap:
    """A running `cap.mjs`."""

    def __init__(self, nats_url: str) -> None:
        self._child = subprocess.Popen(
            [_node(), str(EXAMPLES / "cap.mjs")],
            env=os.environ | {"NATS_URL": nats_url, "MAX_TOKENS": str(LIMIT)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if str(LIMIT) not in line:
            self.end(signal.SIGKILL)
            raise AssertionError(f"cap.mjs did not start; see its error above. It said {line!r}")

    def send(self, number: signal.Signals) -> None:
        self._child.send_signal(number)

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal and wait for the end; returns the exit status."""
        assert self._child.stdout is not None
        self._child.send_signal(number)
        status = self._child.wait(START_TIMEOUT)
        self._child.stdout.close()
        return status


class Pipeline:
    """`penstock serve` with both custom stages beside it."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self.cap = Cap(served.nats_url)

    def restart_cap(self) -> None:
        self.cap = Cap(self.served.nats_url)

    def complete(self, prompt: Any, **parameters: Any) -> httpx2.Response:
        body = {"model": "echo", "prompt": prompt, **parameters}
        return httpx2.post(f"{self.served.url}/v1/completions", json=body, timeout=START_TIMEOUT)

    def chat(self, content: str, **parameters: Any) -> httpx2.Response:
        body = {"model": "echo", "messages": [{"role": "user", "content": content}], **parameters}
        return httpx2.post(f"{self.served.url}/v1/chat/completions", json=body, timeout=START_TIMEOUT)


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    _node()
    state_dir = tmp_path_factory.mktemp("examples") / "state"
    home = state_dir.parent
    processes = [
        Process(
            "serve", "--backend", "echo", "--port", "0", "--state-dir", str(state_dir), environment=PIPELINE, cwd=home
        )
    ]
    running: Pipeline | None = None
    try:
        served = Served(processes[0], state_dir)
        processes.append(
            Process(
                "stage",
                f"{EXAMPLES / 'blocklist.py'}:Blocklist",
                environment={**PIPELINE, "PENSTOCK_NATS_URL": served.nats_url, "BLOCKED_WORDS": WORDS},
                cwd=home,
            )
        )
        running = Pipeline(served)
        yield running
    finally:
        if running is not None:
            running.cap.end(signal.SIGKILL)
        for process in reversed(processes):
            process.end()


def _node() -> str:
    node = shutil.which("node")
    if node is None:
        pytest.fail("the examples in JavaScript need Node 20 or later on the PATH, perhaps that in .venv/node")
    if not (EXAMPLES / "node_modules" / "@nats-io" / "jetstream").is_dir():
        pytest.fail("run `npm install --prefix deploy/examples` first; `make test` does")
    return node


def test_what_no_stage_minds_is_answered_as_without_them(pipeline: Pipeline) -> None:
    answer = pipeline.complete("naïve 💧 text").json()
    assert answer["choices"][0]["text"] == "naïve 💧 text"
    assert answer["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("prompt", ["open sesame", "Open SESAME!", "is C++ hard?", ["fine", "sesame"]])
def test_blocklist_refuses_a_blocked_word(pipeline: Pipeline, prompt: Any) -> None:
    answer = pipeline.complete(prompt)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == "content_policy"
    assert error["type"] == "invalid_request_error"
    assert error["message"] == "The prompt holds a blocked word."


def test_blocklist_reads_every_message_of_a_chat(pipeline: Pipeline) -> None:
    messages = [{"role": "system", "content": [{"type": "text", "text": "sesame"}]}, {"role": "user", "content": "hi"}]
    body = {"model": "echo", "messages": messages}
    answer = httpx2.post(f"{pipeline.served.url}/v1/chat/completions", json=body, timeout=START_TIMEOUT)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "content_policy")


def test_blocklist_looks_for_whole_words(pipeline: Pipeline) -> None:
    assert pipeline.complete("sesames").status_code == 200


def test_blocklist_refuses_token_ids_that_it_cannot_read(pipeline: Pipeline) -> None:
    answer = pipeline.complete(list(b"sesame"))
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "content_policy")


def test_blocklist_without_words_says_what_to_set(pipeline: Pipeline, tmp_path: Path) -> None:
    process = Process(
        "stage",
        f"{EXAMPLES / 'blocklist.py'}:Blocklist",
        environment={**PIPELINE, "PENSTOCK_NATS_URL": pipeline.served.nats_url, "BLOCKED_WORDS": " , "},
        cwd=tmp_path,
    )
    try:
        assert process.wait() == 2
        assert "BLOCKED_WORDS" in process.output
    finally:
        process.end()


def test_cap_limits_every_answer(pipeline: Pipeline) -> None:
    for asked in ({}, {"max_tokens": LIMIT + 1}, {"max_tokens": 2 * LIMIT, "min_tokens": LIMIT + 1}):
        answer = pipeline.complete("x" * 2 * LIMIT, **asked).json()
        assert answer["usage"]["completion_tokens"] == LIMIT
        assert answer["choices"][0]["text"] == "x" * LIMIT
        assert answer["choices"][0]["finish_reason"] == "length"


def test_cap_leaves_a_lower_limit_alone(pipeline: Pipeline) -> None:
    assert pipeline.complete("x" * 2 * LIMIT, max_tokens=LIMIT - 1).json()["usage"]["completion_tokens"] == LIMIT - 1


def test_cap_keeps_what_a_number_in_javascript_cannot_hold(pipeline: Pipeline) -> None:
    answer = pipeline.complete("seed", seed=2**63 - 1, temperature=1e-7, logit_bias={"7": -99.5})
    assert (answer.status_code, answer.json()["choices"][0]["text"]) == (200, "seed")


async def test_cap_killed_with_jobs_in_hand_loses_none(pipeline: Pipeline) -> None:
    prompts = [f"request {place}" for place in range(24)]
    pipeline.cap.end()
    pipeline.restart_cap()
    await _until(pipeline, lambda cap: cap.num_waiting == 1)
    pipeline.cap.send(signal.SIGSTOP)  # it takes jobs, or rather its socket does, and does nothing with them

    def in_hand(cap: ConsumerInfo) -> bool:
        """All of them; or, where the jobs took so long that the request for them has expired, those before."""
        unsettled = cap.num_ack_pending or 0
        expired = cap.num_waiting == 0
        return unsettled + (cap.num_pending or 0) == len(prompts) and (unsettled == len(prompts) or expired)

    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = [pool.submit(pipeline.complete, prompt) for prompt in prompts]
        try:
            await _until(pipeline, in_hand)
            early = [answer.done() for answer in answers]
        finally:
            pipeline.cap.end(signal.SIGKILL)
            pipeline.restart_cap()
    assert not any(early)
    assert [answer.result().status_code for answer in answers] == [200] * len(prompts)
    assert [answer.result().json()["choices"][0]["text"] for answer in answers] == prompts


def test_cap_stopped_while_requests_run_loses_none(pipeline: Pipeline) -> None:
    prompts = [f"request {place}" for place in range(120)]
    with ThreadPoolExecutor(12) as pool:
        answers = [pool.submit(pipeline.complete, prompt) for prompt in prompts]
        answers[10].result()
        status = pipeline.cap.end(signal.SIGTERM)
        pipeline.restart_cap()
    assert status == 0
    assert [answer.result().status_code for answer in answers] == [200] * len(prompts)
    assert [answer.result().json()["choices"][0]["text"] for answer in answers] == prompts


def test_both_stages_go_on_when_the_broker_comes_back(pipeline: Pipeline) -> None:
    (broker,) = (
        child for child in psutil.Process(pipeline.served.process.pid).children() if "nats-server" in child.name()
    )
    broker.kill()
    pipeline.served.process.wait_for("broker died, restarting")
    with httpx2.Client(base_url=pipeline.served.url, timeout=START_TIMEOUT) as client:
        while (answer := client.post("/v1/completions", json={"model": "echo", "prompt": "x" * 50})).status_code != 200:
            assert answer.status_code in (404, 503), answer.text  # 404: no worker has said yet that it is still there
    assert answer.json()["choices"][0]["text"] == "x" * LIMIT
    assert pipeline.complete("sesame").status_code == 400


@pytest.fixture(params=["client.py", "client.mjs", "tenant.py"])
def client(request: pytest.FixtureRequest) -> list[str]:
    return [sys.executable if request.param.endswith(".py") else _node(), str(EXAMPLES / request.param)]


def _run(command: list[str], pipeline: Pipeline, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"NATS_URL": pipeline.served.nats_url}
    return subprocess.run(
        [*command, *arguments], env=environment, capture_output=True, text=True, timeout=START_TIMEOUT, check=True
    )


def test_client_prints_the_answer(pipeline: Pipeline, client: list[str]) -> None:
    told = pipeline.chat("Grüße, 💧").json()["choices"][0]["message"]["content"]
    assert "Grüße, 💧" in told
    assert _run(client, pipeline, "echo", "Grüße, 💧").stdout == told + "\n"


def test_client_prints_why_it_is_refused(pipeline: Pipeline, client: list[str]) -> None:
    refused = _run(client, pipeline, "echo", "sesame")
    assert (refused.stdout, refused.stderr) == ("\n", "The prompt holds a blocked word.\n")
    assert "'nobody' is not served" in _run(client, pipeline, "nobody", "hello").stderr


def test_agent_prints_the_answer_or_why_there_is_none(pipeline: Pipeline) -> None:
    agent = [sys.executable, str(EXAMPLES / "agent.py")]
    told = pipeline.chat("Grüße, 💧").json()["choices"][0]["message"]["content"]
    assert _run(agent, pipeline, "echo", "Grüße, 💧").stdout == told + "\n"
    assert _run(agent, pipeline, "echo", "sesame").stderr == "The prompt holds a blocked word.\n"
    assert "No MCP server is called nobody" in _run(agent, pipeline, "echo", "hello", "nobody").stderr


def test_lock_file_names_no_registry() -> None:
    lock = (EXAMPLES / "package-lock.json").read_text()
    assert "resolved" not in lock
    assert not re.search(r"https?://", lock)
    declared = json.loads((EXAMPLES / "package.json").read_text())["dependencies"]
    assert declared == json.loads(lock)["packages"][""]["dependencies"]


async def _until(pipeline: Pipeline, met: Callable[[ConsumerInfo], bool]) -> None:
    """Return when the broker says of the consumer `cap` what `met` looks for."""
    connection = await nats.connect(pipeline.served.nats_url)
    try:
        async with asyncio.timeout(START_TIMEOUT):
            while not met(await connection.jsm().consumer_info("PENSTOCK_STAGE_CAP_NORMAL", "cap")):  # noqa: ASYNC110
                await asyncio.sleep(LOOK)
    finally:
        await connection.close()
