"""The processes of `walk_models.py`: a whole server, and the agent of another host beside it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil

NAMES = ("a", "b", "c", "d", "e")  # of models
HOSTS = {"serve-host": 2.5, "second": 1.5}  # agents, and the models for which they have memory
LIMIT = 120.0  # seconds for a request, or until everything rests


class Deployment:
    """`penstock serve` and the agent of another host. Their output is in `folder`."""

    def __init__(self, folder: Path, need: int, sources: list[str]) -> None:
        self._folder, self._need, self._sources = folder, need, sources
        self.agent: asyncio.subprocess.Process | None = None

    @property
    def broken(self) -> str:
        """A model that cannot be loaded."""
        return str(self._folder / "broken")

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        """Both; the URL of the server."""
        (self._folder / "broken").mkdir()
        (self._folder / "broken" / "config.json").write_text("no JSON")
        file = self._folder / "models.toml"
        file.write_text("\n".join(f"[models.{name}]\n{_toml(self.table(name))}" for name in NAMES))
        own = ("--models", str(file), "--state-dir", str(self._folder / "state"), "--port", "0", "--echo-rate", "100")
        serve = await self._start("serve", "serve", *own, *self._memory("serve-host"))
        try:
            assert serve.stdout is not None
            async with asyncio.timeout(LIMIT):
                line = (await serve.stdout.readline()).decode()
            if not line.startswith("penstock ready "):
                raise SystemExit(f"the server does not run; see {self._folder}")
            self._serve = serve
            await self.start_agent()
            yield line.split()[-1]
        finally:
            for process in (self.agent, serve):
                if process is not None and process.returncode is None:
                    process.terminate()
                    await process.wait()

    def table(self, name: str, *, pin: bool = False, source: str | None = None) -> dict[str, Any]:
        source = source or self._sources[NAMES.index(name) % len(self._sources)]
        values = {"source": source, "backend": "echo", "wait_limit": LIMIT, "queue_limit": 1000, "pin": pin}
        return values | {"aliases": [f"{name}-too"]}

    @property
    def nats_url(self) -> str:
        return (self._folder / "state" / "nats-url").read_text()

    @property
    def processes(self) -> list[psutil.Process]:
        """Those that last: of the server and of the agent, without their workers."""
        serve, agent = psutil.Process(self._serve.pid), self.agent
        own = [serve, *(child for child in serve.children() if "worker" not in child.cmdline())]
        return own + ([psutil.Process(agent.pid)] if agent else [])

    def workers(self) -> list[tuple[str, psutil.Process]]:
        """The worker processes, each with the name of its agent."""
        found = []
        for agent, process in (("serve-host", self._serve), ("second", self.agent)):
            with contextlib.suppress(psutil.NoSuchProcess):
                for child in psutil.Process(process.pid).children() if process else ():
                    with contextlib.suppress(psutil.NoSuchProcess):
                        if "worker" in child.cmdline() and child.status() != psutil.STATUS_ZOMBIE:
                            found.append((agent, child))
        return found

    async def start_agent(self) -> None:
        environment = {"PENSTOCK_NATS_URL": self.nats_url}
        own = ("--id", "second", "--state-dir", str(self._folder / "second"), "--echo-rate", "100")
        self.agent = await self._start("second", "agent", *own, *self._memory("second"), environment=environment)

    async def _start(
        self, name: str, *arguments: str, environment: dict[str, str] | None = None
    ) -> asyncio.subprocess.Process:
        with (self._folder / f"{name}.log").open("ab") as output:
            return await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "penstock", *arguments),
                env=os.environ | (environment or {}),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=output,
            )

    def _memory(self, host: str) -> tuple[str, ...]:
        memory = str(int(HOSTS[host] * self._need))
        return ("--models-memory", memory, "--least-residency", "1", "--longest-wait", "4")


def _toml(values: dict[str, Any]) -> str:
    return "\n".join(f"{key} = {json.dumps(value)}" for key, value in values.items())
