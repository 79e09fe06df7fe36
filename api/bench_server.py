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
            yield Server(url, await _model(url), child.pid)
        finally:
            await _end(child)


@contextlib.asynccontextmanager
async def running_server(url: str) -> AsyncIterator[Server]:
    """The server at `url`, which stays as it is. Raises `StartupError` if none answers there."""
    url = url.rstrip("/")
    yield Server(url, await _model(url))


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


async def _model(url: str) -> str:
    try:
        async with httpx.AsyncClient(timeout=10.0) as client:
            models = (await client.get(f"{url}/v1/models")).raise_for_status().json()["data"]
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        raise StartupError(f"no OpenAI-compatible server answers at {url}: {reason}; name another with --url") from None
    if not models:
        raise StartupError(f"the server at {url} serves no model")
    return str(models[0]["id"])


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
