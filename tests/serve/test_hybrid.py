"""A model with running states in real processes: a worker that dies in the middle of an answer changes none of it."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import httpx2
import psutil
from serving import Serve
from tiny_model import make_tiny_model

PROMPT = "Once upon a time there was a state that nobody could roll back. " * 4
TOKENS = 400


def test_a_worker_killed_in_the_middle_of_an_answer_changes_none_of_it(serve: Serve, tmp_path: Path) -> None:
    flags = "--dtype", "float32", "--served-model-name", "tiny", "--heartbeat-interval", "0.2"
    served = serve(str(make_tiny_model(tmp_path / "model", "qwen3_5_text")), *flags)
    (worker,) = (one for one in psutil.Process(served.process.pid).children() if "worker" in one.cmdline())
    body: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "temperature": 0, "max_tokens": TOKENS}
    body |= {"ignore_eos": True}
    with httpx2.Client(base_url=served.url, timeout=120) as client:
        whole = client.post("/v1/completions", json=body).raise_for_status().json()
        assert whole["usage"]["completion_tokens"] == TOKENS
        text, killed = "", False
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        with client.stream("POST", "/v1/completions", json=body | stream) as response:
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                text += "".join(choice["text"] for choice in event["choices"])
                if text and not killed:
                    os.kill(worker.pid, signal.SIGKILL)
                    killed = True
                usage = event.get("usage")
    assert killed and not worker.is_running()
    assert text == whole["choices"][0]["text"]
    assert usage["completion_tokens"] == TOKENS
