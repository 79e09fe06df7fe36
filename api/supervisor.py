"""`penstock serve`: the broker, a front process and the workers as children, restarted when they die, ended together.

The listening socket is the supervisor's own: while a front process restarts, connections wait instead of failing.
Children get their settings through the environment, where a broker's token is not for every eye.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

import httpx
import structlog
from rich.console import Console

from ..config.process import die_with_parent
from ..config.settings import Settings
from ..config.sources import variable
from ..schemas.errors import Fatal, StartupError
from ..streams.server import EmbeddedServer

log = structlog.get_logger(__name__)

FATAL_EXIT = 2
LEAST_DELAY, MOST_DELAY = 0.5, 15.0  # seconds before a dead child is started again
STEADY = 30.0  # seconds of life after which a death is news, not a pattern
URL_FILE = "nats-url"  # in the state directory: how parts and clients on this machine find the broker


@dataclass(frozen=True, slots=True)
class Part:
    """A child process: its name in the log and its arguments after `penstock`."""

    name: str
    arguments: tuple[str, ...]


def listen(host: str, port: int) -> socket.socket:
    """A listening TCP socket. Raises `StartupError` where the address cannot be had."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
    except OSError as error:
        raise StartupError(f"cannot listen on {host} port {port}: {error.strerror}; choose another --port") from None
    return listener


def base_url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Supervisor:
    """Runs until a signal, or until a child says that a person must mend something first."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._stopping = asyncio.Event()
        self._kill = asyncio.Event()
        self._fatal: Fatal | None = None

    async def run(self) -> None:
        settings = self._settings
        listener = listen(settings.host, settings.port)
        self._on_signals()
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(listener.close)
            url = settings.nats_url or await self._embedded(stack)
            environment = _environment(settings, url)
            front = Part("front", ("front", "--fd", str(listener.fileno())))
            workers = [Part(f"worker w{place}", ("worker", "--id", f"w{place}")) for place in range(settings.workers)]
            # Workers outlive the front, which drains what clients still wait for.
            front_gone = asyncio.Event()
            async with asyncio.TaskGroup() as group:
                for worker in workers:
                    group.create_task(self._keep(worker, environment, listener, front_gone))
                announcing = group.create_task(announce(base_url(listener)))
                await self._keep(front, environment, listener, self._stopping)
                front_gone.set()
                announcing.cancel()
        if self._fatal is not None:
            raise self._fatal

    def _on_signals(self) -> None:
        def stop() -> None:
            if self._stopping.is_set():
                self._kill.set()
            else:
                Console(stderr=True).print("stopping: running requests finish; once more to stop at once")
                self._stopping.set()

        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop)

    async def _embedded(self, stack: contextlib.AsyncExitStack) -> str:
        settings = self._settings
        server = await EmbeddedServer.start(settings.state_dir, settings.nats_server, settings.nats_sync_interval)
        stack.push_async_callback(server.stop)
        watching = asyncio.create_task(self._watch(server))
        stack.callback(watching.cancel)
        path = settings.state_dir / URL_FILE
        path.unlink(missing_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(server.url)
        stack.callback(path.unlink, missing_ok=True)
        return server.url

    async def _watch(self, server: EmbeddedServer) -> None:
        while True:
            status = await server.wait()
            log.error("the broker died and is started again", status=status)
            try:
                await server.restart()
            except StartupError as error:
                log.error("the broker cannot be started", reason=str(error), delay=MOST_DELAY)
                await asyncio.sleep(MOST_DELAY)

    async def _keep(
        self, part: Part, environment: dict[str, str], listener: socket.socket, until: asyncio.Event
    ) -> None:
        """Run a child until `until` is set, starting it again when it dies; then end it."""
        delay = LEAST_DELAY
        is_first = True
        while not until.is_set() and self._fatal is None:
            born = asyncio.get_running_loop().time()
            child = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "penstock",
                *part.arguments,
                env=environment,
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(listener.fileno(),),
                start_new_session=True,  # Ctrl-C reaches the supervisor alone, which knows the order
                preexec_fn=functools.partial(die_with_parent, os.getpid()),
            )
            status = await self._until(child, until)
            if until.is_set():
                return
            if status == FATAL_EXIT and is_first:
                # The child has said why.
                self._fatal = StartupError(f"{part.name} cannot run")
                self._stopping.set()
                return
            is_first = False
            if status == 0:
                log.info("ended as it was told to, and is started again", process=part.name)
                continue
            lived = asyncio.get_running_loop().time() - born
            delay = LEAST_DELAY if lived > STEADY else min(2 * delay, MOST_DELAY)
            log.error("died and will be started again", process=part.name, status=status, delay=delay)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(until.wait(), delay)

    async def _until(self, child: asyncio.subprocess.Process, until: asyncio.Event) -> int:
        """Wait for the child's end; once `until` is set, ask for it, and insist when the drain took too long."""
        exited = asyncio.create_task(child.wait())
        asked = asyncio.create_task(until.wait())
        try:
            await asyncio.wait({exited, asked}, return_when=asyncio.FIRST_COMPLETED)
            if not exited.done():
                child.terminate()
                killed = asyncio.create_task(self._kill.wait())
                limit = self._settings.drain_timeout + 10.0
                await asyncio.wait({exited, killed}, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
                killed.cancel()
            if not exited.done():
                child.kill()
            return await exited
        finally:
            asked.cancel()
            if child.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    child.kill()


async def ready(url: str) -> None:
    """Return when a first request to `url` would be answered."""
    async with httpx.AsyncClient(base_url=url, timeout=5.0, trust_env=False) as client:
        while True:
            with contextlib.suppress(httpx.TransportError):
                if (await client.get("/health/ready")).status_code == 200:
                    return
            await asyncio.sleep(0.1)


async def announce(url: str) -> None:
    """Print the one line that says so, once it is true."""
    await ready(url)
    print(f"penstock ready {url}", flush=True)


def broker_url(settings: Settings) -> str:
    """The broker to connect to: the one named, or that of the `penstock serve` which holds the state directory.

    Raises `StartupError` where there is neither.
    """
    if settings.nats_url is not None:
        return settings.nats_url
    path: Path = settings.state_dir / URL_FILE
    try:
        return path.read_text()
    except OSError:
        raise StartupError(
            f"no broker: no `penstock serve` runs with the state directory {settings.state_dir}; "
            "name a NATS server with --nats-url, or that directory with --state-dir"
        ) from None


def _environment(settings: Settings, url: str) -> dict[str, str]:
    values = settings.model_dump(exclude_none=True) | {"nats_url": url}
    texts = {
        variable(name): ",".join(value) if isinstance(value, tuple) else str(value) for name, value in values.items()
    }
    return os.environ | texts | {"PENSTOCK_CONFIG": os.devnull}  # what a file said is among the values
