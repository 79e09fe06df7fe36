"""`deploy/compose` as it stands: each command with its settings and user, and the cluster that it configures."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from compose import Composed
from serving import Process, until

VARIABLES = {"NATS_CLUSTER_PASSWORD": "5e5", "PENSTOCK_SECRET_KEY": "0123456789abcdef", "GRAFANA_PASSWORD": "g"}
SLOW = {"PENSTOCK_BACKEND": "echo", "PENSTOCK_ECHO_RATE": "8"}  # tokens a second, so that an answer can be disturbed
PROMPT = " ".join(f"w{number}" for number in range(40))


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder with what the README's commands write, and the API key."""
    folder = tmp_path_factory.mktemp("compose")
    for command in (["nats", "config", "users"], ["key", "me", "--admin"]):
        done = Process(*command, cwd=folder)
        try:
            assert done.wait() == 0, done.output
        finally:
            done.end()
    (folder / "keys").write_text(done.lines[-1] + "\n")
    return folder, done.lines[1]


@pytest.fixture(scope="module")
def composed(key: tuple[Path, str]) -> Iterator[Composed]:
    composed = Composed(key[0], VARIABLES, SLOW)
    try:
        composed.start()
        yield composed
    finally:
        composed.end()


def test_each_bridge_answers_while_a_worker_and_a_bridge_die(composed: Composed, key: tuple[Path, str]) -> None:
    headers = {"Authorization": f"Bearer {key[1]}"}
    one, two = composed.urls.values()
    for url in (one, two):
        assert httpx2.get(f"{url}/v1/models").status_code == 401
        body: dict[str, object] = {"model": "penstock-nano", "prompt": "hello", "max_tokens": 8}
        answer = httpx2.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["text"] == "hello"

    body = {"model": "penstock-nano", "prompt": PROMPT, "max_tokens": 500, "stream": True}
    headers["Penstock-Resumable"] = "true"
    heard, last = "", ""
    with httpx2.stream("POST", f"{one}/v1/completions", json=body, headers=headers, timeout=120) as stream:
        killed = False
        for line in stream.iter_lines():
            last = line[4:] if line.startswith("id: ") else last
            heard += text(line)
            if heard and not killed:
                killed = True
                (running,) = until(lambda: worker(two, stream.headers["x-request-id"], headers))
                (victim,) = [each for each in composed.parts["worker"] if running in each.output]
                end(victim)
            elif "w20" in heard:
                break
        end(composed.parts["bridge-1"][0])
    headers["Last-Event-ID"] = last
    rest = httpx2.post(f"{two}/v1/completions", json=body, headers=headers, timeout=120)
    assert heard + "".join(map(text, rest.text.splitlines())) == PROMPT
    assert httpx2.get(f"{two}/health/ready").status_code == 200
    lines = [line for parts in composed.parts.values() for part in parts for line in part.lines]
    assert not [line for line in lines if "does not allow" in line or "Traceback" in line]


def text(line: str) -> str:
    """What a line of a streamed answer adds to it."""
    return str(json.loads(line[6:])["choices"][0]["text"]) if line.startswith("data: {") else ""


def end(process: Process) -> None:
    process.send(signal.SIGKILL)
    process.wait()


def worker(url: str, id: str, headers: dict[str, str]) -> list[str]:
    """The worker that runs a request, as its trace names it; empty as long as it names none."""
    told = httpx2.get(f"{url}/v1/streams/{id}/trace", headers=headers).text
    return re.findall(r'"worker": ?"([^"]+)"', told)[:1]
