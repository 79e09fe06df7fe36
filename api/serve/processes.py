"""Keeps child processes running: restarts those that die, with growing delays, until they should end."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import secrets
import signal
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Collection
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, NamedTuple

import structlog

from ...config.process import FAMILY, die_with_parent, directory_of_children, python
from ...config.settings import Settings
from ...config.sources import variable
from ...schemas.errors import Fatal, StartupError
from .ahead import WORKER, AheadWorker

if TYPE_CHECKING:
    from ...streams.nats.servers.server import EmbeddedServer

log = structlog.get_logger(__name__)

FATAL_EXIT = 2
LEAST_DELAY, MOST_DELAY = 0.5, 15.0  # seconds before a child that dies again and again is restarted
OUR_FAMILY = secrets.token_hex(8)  # by which children of this process know each other
END_TIMEOUT = 10.0  # seconds that a child may take to end, beside its drain
STEADY = 30.0  # seconds of life after which a child is restarted at once


@dataclass(frozen=True, slots=True)
class Part:
    """A child process: its name in the log, its arguments after `penstock`, and the file descriptors it inherits."""

    name: str
    arguments: tuple[str, ...]
    files: tuple[int, ...] = ()


class Ending(NamedTuple):
    """How a child has ended: `status` is below 0 for a signal; `ran_out` says that the kernel killed processes lately
    for want of memory."""

    status: int
    ran_out: bool = False

    @property
    def text(self) -> str:
        """For people."""
        if self.status >= 0:
            return f"ended with status {self.status}"
        try:
            name = signal.Signals(-self.status).name
        except ValueError:  # of real time
            name = f"signal {-self.status}"
        if -self.status != signal.SIGKILL:
            return f"was killed by {name}"
        if self.ran_out:
            return f"was killed by {name}: the memory of the machine or its container ran out"
        return f"was killed by {name}, as the system does when its memory runs out"


class ProcessKeeper:
    """A child may take `drain` seconds to end; `most_delay` is the longest delay of a restart, in seconds.

    `output` receives the output of the children; by default they inherit ours.
    """

    def __init__(self, drain: float, *, most_delay: float = MOST_DELAY, output: IO[bytes] | None = None) -> None:
        self.stopping = asyncio.Event()  # set by `keep` if a restart is pointless, and by the owner to stop
        self.at_once = asyncio.Event()  # set by the owner to skip the drain
        self.may_start = asyncio.Event()  # cleared while dead children should stay dead
        self.may_start.set()
        self.fatal: Fatal | None = None  # why a restart is pointless; set by `keep`
        self.ahead: AheadWorker | None = None  # runs the part with its arguments; set by the owner, and by `run`
        self.running: dict[str, Process | AheadWorker] = {}  # by part, dead ones until they are restarted; set by `run`
        self._drain, self._most_delay, self._output = drain, most_delay, output
        self._memory_kills = _memory_kills()  # as of the last child that ended; set by `run`

    async def keep(self, part: Part, environment: dict[str, str], until: asyncio.Event) -> None:
        """Run a child until `until` is set, restarting it when it dies; then end it.

        The first death is followed by a restart at once, since clients wait.
        """
        delay = 0.0
        is_first = True
        while not until.is_set() and self.fatal is None:
            await self.may_start.wait()
            born = asyncio.get_running_loop().time()
            ending = await self.run(part, environment, until)
            status = ending.status
            if until.is_set():
                return
            if status != FATAL_EXIT:
                is_first = False
            elif is_first:
                # The child has logged the reason.
                self.fatal = StartupError(f"{part.name} cannot run; its messages above say why")
                self.stopping.set()
                return
            if status == 0:
                log.info("process ended itself, restarting", process=part.name)
                continue
            lived = asyncio.get_running_loop().time() - born
            delay = 0.0 if lived > STEADY else delay
            log.error("process died, restarting", process=part.name, status=status, reason=ending.text, delay=delay)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay):
                    await until.wait()
            delay = min(max(2 * delay, LEAST_DELAY), self._most_delay)

    async def run(self, part: Part, environment: dict[str, str], until: asyncio.Event) -> Ending:
        """Run a child once, and end it when `until` is set."""
        child = self.running[part.name] = await self._start(part, environment)
        status = await self._until(child, until)
        before, self._memory_kills = self._memory_kills, _memory_kills()
        return Ending(status, self._memory_kills > before)

    async def _start(self, part: Part, environment: dict[str, str]) -> Process | AheadWorker:
        if self.ahead is not None and part.arguments == WORKER:
            child, self.ahead = self.ahead, None
            await child.go(environment)
            return child
        return await asyncio.create_subprocess_exec(
            *python("penstock", *part.arguments),
            env=environment,
            stdin=DEVNULL,
            stdout=self._output,
            stderr=self._output,
            pass_fds=part.files,
            cwd=directory_of_children(),
            start_new_session=True,  # Ctrl-C reaches only the parent, which ends the children in order
            preexec_fn=functools.partial(die_with_parent, os.getpid()),
        )

    async def _until(self, child: Process | AheadWorker, until: asyncio.Event) -> int:
        """Wait for the child's end; once `until` is set, terminate it, and kill it if the drain takes too long."""
        exited = asyncio.create_task(child.wait())
        asked = asyncio.create_task(until.wait())
        try:
            await asyncio.wait({exited, asked}, return_when=asyncio.FIRST_COMPLETED)
            if not exited.done():
                child.terminate()
                killed = asyncio.create_task(self.at_once.wait())
                await asyncio.wait(
                    {exited, killed}, timeout=self._drain + END_TIMEOUT, return_when=asyncio.FIRST_COMPLETED
                )
                killed.cancel()
            if not exited.done():
                child.kill()
            return await exited
        finally:
            asked.cancel()
            if child.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    child.kill()


def _memory_kills() -> int:
    from ...engine.cpu.machine import memory_kills  # a stage's process needs nothing of the engine

    return memory_kills()


async def keep_broker(server: EmbeddedServer) -> None:
    """Restart the broker whenever it dies, or could not write and could now, until cancelled."""
    mending = asyncio.create_task(_mend_broker(server))
    try:
        while True:
            status = await server.wait()
            log.error("broker died, restarting", status=status)
            while not server.alive:
                try:
                    await server.restart()
                except StartupError as error:
                    log.error("broker cannot be started", reason=str(error), delay=MOST_DELAY)
                    await asyncio.sleep(MOST_DELAY)
    finally:
        mending.cancel()


async def _mend_broker(server: EmbeddedServer) -> None:
    delay = LEAST_DELAY
    while True:
        await asyncio.sleep(delay)
        delay = max(LEAST_DELAY, delay / 2)
        if server.alive and server.is_stuck():
            log.error("the broker could not write, restarting it as there is room again")
            server.signal(signal.SIGTERM)
            delay = min(4 * delay, MOST_DELAY)


def child_environment(settings: Settings, url: str, *, without: Collection[str] = ()) -> dict[str, str]:
    """Environment variables that give a child the parent's settings except `without`, and the broker at `url`.

    A child takes the settings it is not given from its deployment. In the environment, the token in `url` stays
    hidden from other users.
    """
    values = settings.model_dump(exclude_none=True, exclude=set(without)) | {"nats_url": url}
    texts = {
        variable(name): ",".join(value) if isinstance(value, tuple) else str(value) for name, value in values.items()
    }
    hidden = {variable(name) for name in type(settings).model_fields if name not in values}
    inherited = {name: value for name, value in os.environ.items() if name not in hidden}
    # The values include those of a configuration file.
    return inherited | texts | {"PENSTOCK_CONFIG": os.devnull, FAMILY: OUR_FAMILY}
