"""Keeps child processes running: whatever dies is started again, with growing pauses, until it is told to end."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Collection
from dataclasses import dataclass
from typing import IO

import structlog

from ...config.process import die_with_parent
from ...config.settings import Settings
from ...config.sources import variable
from ...schemas.errors import Fatal, StartupError
from ...streams.nats.server import EmbeddedServer

log = structlog.get_logger(__name__)

FATAL_EXIT = 2
LEAST_DELAY, MOST_DELAY = 0.5, 15.0  # seconds before a dead child is started again
STEADY = 30.0  # seconds of life after which a death is news, not a pattern


@dataclass(frozen=True, slots=True)
class Part:
    """A child process: its name in the log, its arguments after `penstock`, and the files that it inherits."""

    name: str
    arguments: tuple[str, ...]
    files: tuple[int, ...] = ()


class Keeper:
    """`drain` is how long a child may take to end, `most_delay` the longest pause before a new start, in seconds.

    `output` gets what the children write; by default it goes where ours goes.
    """

    def __init__(self, drain: float, *, most_delay: float = MOST_DELAY, output: IO[bytes] | None = None) -> None:
        self.stopping = asyncio.Event()  # set by `keep` where no start would help, and by whoever wants the end
        self.at_once = asyncio.Event()  # set by whoever will not wait for the drain
        self.may_start = asyncio.Event()  # cleared while what has died is to stay dead
        self.may_start.set()
        self.fatal: Fatal | None = None  # why no start would help; set by `keep`
        self.running: dict[str, Process] = {}  # by part, the dead too until their successors start; set by `keep`
        self._drain, self._most_delay, self._output = drain, most_delay, output

    async def keep(self, part: Part, environment: dict[str, str], until: asyncio.Event) -> None:
        """Run a child until `until` is set, starting it again when it dies; then end it."""
        delay = LEAST_DELAY
        is_first = True
        while not until.is_set() and self.fatal is None:
            await self.may_start.wait()
            born = asyncio.get_running_loop().time()
            child = self.running[part.name] = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "penstock", *part.arguments),
                env=environment,
                stdin=DEVNULL,
                stdout=self._output,
                stderr=self._output,
                pass_fds=part.files,
                start_new_session=True,  # Ctrl-C reaches the parent alone, which knows the order
                preexec_fn=functools.partial(die_with_parent, os.getpid()),
            )
            status = await self._until(child, until)
            if until.is_set():
                return
            if status != FATAL_EXIT:
                is_first = False
            elif is_first:
                # The child has said why.
                self.fatal = StartupError(f"{part.name} cannot run")
                self.stopping.set()
                return
            if status == 0:
                log.info("ended as it was told to, and is started again", process=part.name)
                continue
            lived = asyncio.get_running_loop().time() - born
            delay = LEAST_DELAY if lived > STEADY else min(2 * delay, self._most_delay)
            log.error("died and will be started again", process=part.name, status=status, delay=delay)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay):
                    await until.wait()

    async def _until(self, child: Process, until: asyncio.Event) -> int:
        """Wait for the child's end; once `until` is set, ask for it, and insist when the drain took too long."""
        exited = asyncio.create_task(child.wait())
        asked = asyncio.create_task(until.wait())
        try:
            await asyncio.wait({exited, asked}, return_when=asyncio.FIRST_COMPLETED)
            if not exited.done():
                child.terminate()
                killed = asyncio.create_task(self.at_once.wait())
                await asyncio.wait({exited, killed}, timeout=self._drain + 10.0, return_when=asyncio.FIRST_COMPLETED)
                killed.cancel()
            if not exited.done():
                child.kill()
            return await exited
        finally:
            asked.cancel()
            if child.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    child.kill()


async def keep_broker(server: EmbeddedServer) -> None:
    """Start the broker again whenever it dies, until cancelled."""
    while True:
        status = await server.wait()
        log.error("the broker died and is started again", status=status)
        try:
            await server.restart()
        except StartupError as error:
            log.error("the broker cannot be started", reason=str(error), delay=MOST_DELAY)
            await asyncio.sleep(MOST_DELAY)


def child_environment(settings: Settings, url: str, *, without: Collection[str] = ()) -> dict[str, str]:
    """What gives a child the parent's settings but for those named, with the broker at `url`, whose token is not for
    every eye. What a child is not given, it takes from its deployment."""
    values = settings.model_dump(exclude_none=True, exclude=set(without)) | {"nats_url": url}
    texts = {
        variable(name): ",".join(value) if isinstance(value, tuple) else str(value) for name, value in values.items()
    }
    inherited = {name: value for name, value in os.environ.items() if name not in map(variable, without)}
    return inherited | texts | {"PENSTOCK_CONFIG": os.devnull}  # what a file said is among the values
