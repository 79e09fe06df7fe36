"""The server that a benchmark measures: Penstock's own processes, always ended, or one that runs already."""

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
        if self.process is None or sys.platform != "linux":
            return times
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # one may end while it is looked at
            for child in Path(f"/proc/{self.process}/task/{self.process}/children").read_text().split():
                words = Path(f"/proc/{child}/cmdline").read_text().split("\0")
                name = words[words.index("penstock") + 1] if "penstock" in words else Path(words[0]).name
                fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
                times[name] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # utime, stime: proc(5)
        return times


@contextlib.asynccontextmanager
async def running(*arguments: str, errors: IO[bytes]) -> AsyncIterator[Process]:
    """`penstock ARGUMENTS`, a process of its own with a pipe for its output; asked to stop in the end, then killed.

    What the environment and ./penstock.toml set holds for it too.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "penstock", *arguments),
        stdin=DEVNULL,
        stdout=PIPE,
        stderr=errors,
        start_new_session=True,  # Ctrl-C reaches the benchmark alone, which ends it
        preexec_fn=functools.partial(die_with_parent, os.getpid()),
    )
    try:
        yield process
    finally:
        for end in (process.terminate, process.kill):
            with contextlib.suppress(ProcessLookupError, TimeoutError):
                end()
                await asyncio.wait_for(process.wait(), STOP_LIMIT)


async def ready(process: Process, errors: IO[bytes]) -> str:
    """Its URL, once it answers there. Raises `StartupError` with its last words if it does not in time."""
    assert process.stdout is not None
    try:
        async with asyncio.timeout(START_LIMIT):
            while line := (await process.stdout.readline()).decode():
                if line.startswith(READY):
                    return line.removeprefix(READY).strip()
            reason = "ended"
    except TimeoutError:
        reason = f"was not ready after {START_LIMIT:g} s"
    said = os.pread(errors.fileno(), 1 << 20, 0).decode(errors="replace").splitlines()
    raise StartupError("\n".join([f"the server to measure {reason}; its last words:", *said[-5:]]))


@contextlib.asynccontextmanager
async def echo_server(url: str | None, echo_rate: float, max_batch_size: int) -> AsyncIterator[Server]:
    """The server at `url`, which stays as it is, or one of our own, with its state in a directory that goes with it."""
    if url is not None:
        yield Server(url.rstrip("/"), (await served_models(url.rstrip("/")))[0])
        return
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as state, tempfile.TemporaryFile() as errors:
        options = {"backend": "echo", "echo-rate": echo_rate, "max-batch-size": max_batch_size, "port": 0}
        options |= {"drain-timeout": 1, "log-level": "warning", "state-dir": state}
        arguments = (f"--{name}={value}" for name, value in options.items())
        async with running("serve", *arguments, errors=errors) as process:
            url = await ready(process, errors)
            yield Server(url, (await served_models(url))[0], process.pid)


async def served_models(url: str, api_key: str = "") -> list[str]:
    """The names of what the server at `url` serves, at least one. Raises `StartupError` with what to do."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        async with httpx.AsyncClient(timeout=10.0, headers=headers) as client:
            answer = await client.get(f"{url}/v1/models")
        if answer.status_code in (401, 403):
            fault = f"{'refuses this key' if api_key else 'wants a key'} (HTTP {answer.status_code})"
            raise StartupError(f"the server at {url} {fault}; set OPENAI_API_KEY to a valid one")
        if models := [str(model["id"]) for model in answer.raise_for_status().json()["data"]]:
            return models
        raise StartupError(f"the server at {url} serves no model; load one there first")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        reason = str(error).partition("\n")[0].replace("All connection attempts failed", "nothing listens there")
    except (ValueError, KeyError, TypeError):
        reason = "what it says at /v1/models is no list of models"
    raise StartupError(f"no OpenAI-compatible server answers at {url}: {reason}; start one there or name another URL")
