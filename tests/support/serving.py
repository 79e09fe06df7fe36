"""Penstock's real processes for tests: on loopback, ended by their own ids."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Empty, Queue
from typing import Protocol, TypeVar

import openai

from penstock.streams.nats.broker import JetStreamBroker

LOOK = 0.03  # seconds between two looks at what other processes do; without them they would have no core to do it on
GUARDED = "TEST_NATS_PERMISSIONS"  # a variable that is set where parts are to have users with least permissions
START_TIMEOUT = 120.0  # seconds; loading torch in several processes on two busy cores takes a while


T = TypeVar("T")


def until(condition: Callable[[], T | None]) -> T:
    """The first true answer of `condition`; fails if there is none within START_TIMEOUT."""
    end = time.monotonic() + START_TIMEOUT
    while not (found := condition()):
        assert time.monotonic() < end
        time.sleep(LOOK)
    return found


class Process:
    """A `penstock` command as a child in a session of its own, its output kept line by line."""

    def __init__(self, *arguments: str, environment: dict[str, str] | None = None, cwd: Path | None = None) -> None:
        self.lines: list[str] = []
        self._news: Queue[str | None] = Queue()
        self._child = subprocess.Popen(
            [sys.executable, "-m", "penstock", *arguments],
            env=os.environ | {"PENSTOCK_LOG_FORMAT": "console"} | (environment or {}),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def alive(self) -> bool:
        return self._child.poll() is None

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def wait_for(self, pattern: str) -> re.Match[str]:
        """The first line of output that matches; fails with all of it should the process end before."""
        for line in list(self.lines):
            if found := re.search(pattern, line):
                return found
        while True:
            try:
                news = self._news.get(timeout=START_TIMEOUT)
            except Empty:
                raise AssertionError(f"no {pattern!r} in:\n{self.output}") from None
            if news is None:
                raise AssertionError(f"ended without {pattern!r}:\n{self.output}")
            if found := re.search(pattern, news):
                return found

    def send(self, number: signal.Signals) -> None:
        self._child.send_signal(number)

    def wait(self, timeout: float = START_TIMEOUT) -> int:
        status = self._child.wait(timeout)
        self._reader.join()
        return status

    def end(self) -> None:
        """Whatever is left of it goes now."""
        if self._child.poll() is None:
            self._child.kill()
            self._child.wait()
        self._reader.join()
        assert self._child.stdout is not None
        self._child.stdout.close()

    def _read(self) -> None:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            self.lines.append(line.rstrip("\n"))
            self._news.put(self.lines[-1])
        self._news.put(None)


class Start(Protocol):
    def __call__(self, *arguments: str, environment: dict[str, str] | None = None) -> Process: ...


class Served:
    """A whole `penstock serve`, ready. It is `supervised`: what dies of it starts again."""

    supervised = True

    def __init__(self, process: Process, state_dir: Path) -> None:
        self.process = process
        self.state_dir = state_dir
        self.url = process.wait_for(r"penstock ready (http://\S+)")[1]

    @property
    def nats_url(self) -> str:
        return (self.state_dir / "nats-url").read_text()

    async def broker(self) -> JetStreamBroker:
        return await JetStreamBroker.connect(self.nats_url, namespace="penstock")


Serve = Callable[..., Served]


@contextlib.contextmanager
def serving(state_dir: Path, *arguments: str) -> Iterator[Served]:
    """A `penstock serve` on a free port, for fixtures that many tests share; it is ended afterwards.

    With `--nats-permissions` it is what that runs, as parts with users of their own.
    """
    if os.environ.get(GUARDED):
        parts = importlib.import_module("guarded_parts")  # which needs this module
        with parts.guarded_parts(state_dir, *arguments) as served:
            yield served
        return
    process = Process("serve", *arguments, "--port", "0", "--state-dir", str(state_dir))
    try:
        yield Served(process, state_dir)
    finally:
        process.end()


def answers(url: str, model: str, prompts: list[str], max_tokens: int, **body: object) -> list[str]:
    """The answers to all prompts, asked at once and streamed."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as client:

        def ask(prompt: str) -> str:
            stream = client.completions.create(
                model=model, prompt=prompt, temperature=0, max_tokens=max_tokens, stream=True, extra_body=body
            )
            return "".join(chunk.choices[0].text for chunk in stream)

        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(ask, prompts))
