"""Process control: children that die with their parent, process identity, signals, and garbage collection."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import gc
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

FAMILY = "PENSTOCK_FAMILY"  # the environment variable by which a parent names the family to its children
SERVICE_MANAGERS = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")  # variables by which one finds its process
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>

# Loaded here because `die_with_parent` runs in a forked child, which must not take the loader's locks.
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def import_structlog() -> None:
    """Import structlog without rich, which it imports where it can, for tracebacks that ours are not; that would take
    a tenth of the time in which a part of a server starts."""
    if "rich" not in sys.modules:
        sys.modules["rich"] = None  # type: ignore[assignment]  # its import fails
        try:
            import structlog  # noqa: F401
        finally:
            del sys.modules["rich"]


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process when its parent dies in any way. For use as `preexec_fn`.

    `parent` is the expected process id of the parent: if the parent has died before this call, the child exits at once.
    The kernel watches the *thread* that forked, so fork in one that lives as long as the child should. Outside Linux
    this does nothing, and the children of a killed parent must be ended by hand.
    """
    if _libc is None:
        return
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def python(module: str, *arguments: str) -> tuple[str, ...]:
    """The command that runs a module in another interpreter, which finds modules where this one does.

    By itself, `-m` looks into the working directory first, where a user's `token.py` or `logging.py` would be taken for
    the standard library's.
    """
    try:
        looks_there = not {"", os.getcwd()}.isdisjoint(sys.path)
    except FileNotFoundError:  # it has been deleted
        looks_there = False
    return (sys.executable, *(() if looks_there else ("-P",)), "-m", module, *arguments)


def directory_of_children() -> str | None:
    """The working directory for children: ours, or / once somebody has deleted it, where libraries end a process."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return "/"
    return None


@functools.cache
def host() -> str:
    """The scope of process ids: this boot of this machine and, on Linux, the container."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(
            os.readlink("/proc/self/ns/pid")
        )  # containers may share a host name, and each numbers processes from 1
    return "/".join(parts)


def family() -> str | None:
    """What the children of one `penstock serve` or `penstock agent` have in common; None for a process alone."""
    return os.environ.get(FAMILY)


@functools.cache
def started_by() -> Mapping[str, str]:
    """The variables of the service manager that has started this process, such as systemd. The first call takes them
    out of the environment, so that no child is taken for this process: make it before there are children."""
    return {name: value for name in SERVICE_MANAGERS if (value := os.environ.pop(name, None)) is not None}


def cpu_seconds(pid: int) -> float | None:
    """How long a process that runs has computed; None where the system does not tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def has_ended(where: str, pid: int) -> bool:
    """Whether process `pid` of `where`, a value of `host()`, has ended; False if that cannot be known here."""
    if where != host():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Collect no garbage while modules are imported, and exclude what they have created.

    Nearly all of it stays. The collector would traverse it again and again, for a fifth of the time that torch takes.
    """
    collects, num_modules = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > num_modules:
            gc.freeze()
        if collects:
            gc.enable()


def keep_loaded() -> None:
    """Exclude all present objects from garbage collection.

    torch and transformers create a million objects that live as long as the process. A full collection would traverse
    all of them and stop the process for some tenths of a second.
    """
    gc.freeze()


def end_quietly() -> None:
    """End this process now, if the interpreter's own end would be noisy: torch imports triton where that is installed,
    and its binding then lists "leaks" by the hundred."""
    if "triton" in sys.modules:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def spare_threads() -> None:
    """Have tokenizers start no threads. One text at a time needs none, and once it could not start them, it fails for
    as long as the process lives."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def stop_signal() -> asyncio.Event:
    """Set at the first signal to stop."""
    stopping = asyncio.Event()
    handle_stop_signals(stopping.set, stopping.set)
    return stopping


def handle_stop_signals(stop: Callable[[], None], hang_up: Callable[[], None]) -> None:
    """Call `stop` at each SIGINT and SIGTERM, and `hang_up` at SIGHUP, unless that is ignored, as under `nohup`.

    When a terminal is closed, SIGHUP comes from the kernel, and perhaps once more from the shell.
    """
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, stop)
    loop.add_signal_handler(signal.SIGTERM, stop)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        loop.add_signal_handler(signal.SIGHUP, hang_up)
