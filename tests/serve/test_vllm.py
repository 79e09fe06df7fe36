"""The backend vllm in real processes: a worker that dies under several streams changes none of them."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import httpx2
import psutil
import pytest
from serving import Serve

pytest.importorskip("vllm", reason="needs pip install 'penstock[vllm]'")
TOKENS = 800  # several seconds: the worker dies in their midst
PROMPTS = [f"The story number {number} begins where the last one ended, " * (1 + number % 3) for number in range(6)]


def test_greedy_streams_go_on_when_their_worker_is_killed(serve: Serve, tiny_model: Path) -> None:
    """Each with the tokens that it has alone, none lost and none twice; drawn ones end with a reason."""
    flags = "--backend", "vllm", "--dtype", "float32", "--served-model-name", "tiny", "--kv-cache-memory", "64MiB"
    served = serve(str(tiny_model), *flags, "--workers", "2", "--heartbeat-interval", "0.2")
    workers = [one for one in psutil.Process(served.process.pid).children() if "worker" in one.cmdline()]
    body = {"model": "tiny", "max_tokens": TOKENS, "ignore_eos": True, "seed": 4}
    bodies = [body | {"prompt": prompt, "temperature": warm} for warm in (0, 1) for prompt in PROMPTS]
    begun = [Event() for _ in bodies]
    with httpx2.Client(base_url=served.url, timeout=120) as client, ThreadPoolExecutor(len(bodies)) as pool:

        def stream(body: dict[str, Any], started: Event) -> tuple[str, dict[str, Any]]:
            """The text, and the usage or the error."""
            text, last = "", dict[str, Any]()
            asked = body | {"stream": True, "stream_options": {"include_usage": True}}
            with client.stream("POST", "/v1/completions", json=asked) as response:
                for line in response.iter_lines():
                    if line.startswith("data: {"):
                        event = json.loads(line[6:])
                        text += "".join(choice["text"] for choice in event.get("choices", ()))
                        last = event.get("error") or event.get("usage") or last
                        started.set()
            return text, last

        def whole(body: dict[str, Any]) -> str:
            answer = client.post("/v1/completions", json=body).raise_for_status().json()
            return str(answer["choices"][0]["text"])

        expected = [*pool.map(whole, bodies)]
        streams = [pool.submit(stream, *one) for one in zip(bodies, begun, strict=True)]
        assert all(event.wait(120) for event in begun)
        workers[0].kill()
        served.process.wait_for("request taken over")
        for asked, future, text in zip(bodies, streams, expected, strict=True):
            found, last = future.result()
            if asked["temperature"] and "message" in last:
                assert "continues only answers at temperature 0 of another one" in last["message"]
            else:
                assert last["completion_tokens"] == TOKENS
                assert asked["temperature"] or found == text
