"""The life of a request whose worker is killed, as a server of real processes tells it."""

from __future__ import annotations

import os
import signal

import openai
import psutil
import requests
from serving import Process, Serve

from penstock.schemas.request_trace import RequestTrace

TOKENS = 100


def test_a_killed_worker_is_seen(serve: Serve) -> None:
    server = serve("--backend", "echo", "--echo-rate", "50", "--workers", "2")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        stream = client.chat.completions.create(
            model="echo",
            messages=[{"role": "user", "content": "a secret question"}],
            max_tokens=TOKENS,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        chunks = iter(stream)
        id = next(chunks).id

        def trace() -> RequestTrace:
            response = requests.get(f"{server.url}/v1/streams/{id}/trace", timeout=30)
            assert response.status_code == 200
            assert "secret" not in response.text
            return RequestTrace.model_validate_json(response.text)

        while not (running := trace()).first_token:
            next(chunks)
        assert running.status == "running"
        (first,) = (visit for visit in running.stages if visit.stage == "infer")
        workers = {child.cmdline()[child.cmdline().index("--id") + 1]: child.pid for child in _workers(server.process)}
        os.kill(workers[str(first.worker)], signal.SIGKILL)
        for _ in chunks:
            pass
    ended = trace()
    assert ended.status == "completed"
    lost, successor = (visit for visit in ended.stages if visit.stage == "infer")
    assert (lost.worker, lost.ending, lost.from_token) == (first.worker, "lost", 0)
    assert (successor.ending, successor.from_token) == ("finished", lost.tokens)
    assert 0 < lost.tokens < TOKENS == lost.tokens + successor.tokens
    is_restarted = successor.worker == lost.worker  # where the new process is faster than the batch stage
    assert is_restarted or [visit.stage for visit in ended.stages].count("batch") == 2
    (takeover,) = (mark.text for mark in ended.marks if mark.kind == "takeover")
    by = f"{successor.worker} (restarted)" if is_restarted else successor.worker
    assert takeover == f"{lost.worker} died here, {by} continued at token {lost.tokens}"

    shown = Process("trace", id, "--url", server.url)
    assert shown.wait() == 0, shown.output
    assert takeover in shown.output
    shown.end()
    unknown = Process("trace", "nobody", "--url", server.url)
    assert unknown.wait() == 2
    assert "expired" in unknown.output
    unknown.end()


def _workers(process: Process) -> list[psutil.Process]:
    return [child for child in psutil.Process(process.pid).children() if "worker" in child.cmdline()]
