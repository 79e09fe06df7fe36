"""A worker that is killed: the next one finds its cached prefixes on disk, and answers the same."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import httpx2
import psutil
from serving import Serve, until

PROMPT = "Once upon a time there was a cache that outlived its process. " * 12


def test_a_killed_worker_s_prefixes_are_found_by_the_next(serve: Serve, tiny_model: Path, tmp_path: Path) -> None:
    disk = tmp_path / "prefixes"
    flags = "--dtype", "float32", "--served-model-name", "tiny", "--prefix-cache-dir", str(disk)
    served = serve(str(tiny_model), *flags, "--heartbeat-interval", "0.2")
    with httpx2.Client(base_url=served.url, timeout=60) as client:

        def ask() -> dict[str, Any]:
            body = {"model": "tiny", "prompt": PROMPT, "temperature": 0, "max_tokens": 8}
            answer: dict[str, Any] = client.post("/v1/completions", json=body).raise_for_status().json()
            return answer

        def metric(name: str) -> float:
            lines = client.get("/metrics").text.splitlines()
            return sum(float(line.split()[-1]) for line in lines if line.startswith(f"penstock_prefix_disk_{name}"))

        first = ask()
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        until(lambda: metric("written_blocks_total") >= first["usage"]["total_tokens"] // 16 - 1)
        (worker,) = (one for one in psutil.Process(served.process.pid).children() if "worker" in one.cmdline())
        os.kill(worker.pid, signal.SIGKILL)
        second = ask()
        assert second["choices"] == first["choices"]
        cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached == (first["usage"]["prompt_tokens"] - 1) // 16 * 16 > 100
        until(lambda: metric("found_blocks_total") == cached // 16)
        assert metric("bytes") == sum(file.stat().st_size for file in disk.rglob("*.kv")) > 0
