"""The server that a benchmark measures: a `penstock serve` of its own, always ended, or one that runs already."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import sys
import tempfile
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import httpx

from ..config.process import die_with_parent
from ..schemas.errors import StartupError

START_LIMIT, STOP_LIMIT = 60.0, 15.0  # seconds
READY = "penstock ready "


@dataclass(frozen=True, slots=True)
class Server:
    """Where it answers and what it serves; `process` is its supervisor's id, where it is ours."""

    url: str
    model: str
    process: int | None = None

    def cpu_times(self) -> dict[str, float]:
        """CPU seconds so far of each of its processes and of this one, `client`; only of this one without /proc."""
        times = {"client": time.process_time()}
        if self.process is not None and sys.platform == "linux":
            # A process may end while it is looked at.
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                for child in Path(f"/proc/{self.process}/task/{self.process}/children").read_text().split():
                    times[_process_name(child)] = _cpu_time(child)
        return times


@contextlib.asynccontextmanager
async def echo_server(*, echo_rate: float, max_batch_size: int) -> AsyncIterator[Server]:
    """Run a server of the echo backend, with its state in a directory of its own that goes with it.

    What the environment and ./penstock.toml set holds for it too. Raises `StartupError` if it does not get ready.
    """
    options = {
        "backend": "echo",
        "echo-rate": echo_rate,
        "max-batch-size": max_batch_size,
        "port": 0,
        "drain-timeout": 1,
        "log-level": "warning",
    }
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as state, tempfile.TemporaryFile() as errors:
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "penstock",
            "serve",
            *(f"--{name}={value}" for name, value in {**options, "state-dir": state}.items()),
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=errors,
            start_new_session=True,  # Ctrl-C reaches the benchmark alone, which ends it
            preexec_fn=functools.partial(die_with_parent, os.getpid()),
        )
        try:
            url = await _ready(child, errors)
            yield Server(url, (await served_models(url))[0], child.pid)
        finally:
            await _end(child)


@contextlib.asynccontextmanager
async def running_server(url: str) -> AsyncIterator[Server]:
    """The server at `url`, which stays as it is. Raises `StartupError` if none answers there."""
    url = url.rstrip("/")
    yield Server(url, (await served_models(url))[0])


async def served_models(url: str, api_key: str = "") -> list[str]:
    """The names of what the server at `url` serves, at least one. Raises `StartupError` with what to do."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        async with httpx.AsyncClient(timeout=10.0, headers=headers) as client:
            answer = await client.get(f"{url}/v1/models")
        if answer.status_code in (401, 403):
            key = "refuses this key" if api_key else "wants a key"
            raise StartupError(
                f"the server at {url} {key} (HTTP {answer.status_code}); set OPENAI_API_KEY to a valid one"
            )
        models = [str(model["id"]) for model in answer.raise_for_status().json()["data"]]
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        reason = str(error).partition("\n")[0].replace("All connection attempts failed", "nothing listens there")
    except (ValueError, KeyError, TypeError):
        reason = "what it says at /v1/models is no list of models"
    else:
        if models:
            return models
        raise StartupError(f"the server at {url} serves no model; load one there first")
    raise StartupError(f"no OpenAI-compatible server answers at {url}: {reason}; start one there or name another URL")


async def _ready(child: Process, errors: IO[bytes]) -> str:
    assert child.stdout is not None
    try:
        async with asyncio.timeout(START_LIMIT):
            while line := (await child.stdout.readline()).decode():
                if line.startswith(READY):
                    return line.removeprefix(READY).strip()
            reason = "ended"
    except TimeoutError:
        reason = f"was not ready after {START_LIMIT:g} s"
    said = os.pread(errors.fileno(), 1 << 20, 0).decode(errors="replace").splitlines()
    raise StartupError("\n".join([f"the server to measure {reason}; its last words:", *said[-5:]]))


async def _end(child: Process) -> None:
    if child.returncode is None:
        child.terminate()
    try:
        await asyncio.wait_for(child.wait(), STOP_LIMIT)
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()


def _process_name(process: str) -> str:
    """The command after `penstock`, or the program's name."""
    words = Path(f"/proc/{process}/cmdline").read_text().split("\0")
    return words[words.index("penstock") + 1] if "penstock" in words else Path(words[0]).name


def _cpu_time(process: str) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # utime and stime, see proc(5)
