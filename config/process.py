"""What a process asks of its interpreter and of the operating system, for itself and its children."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import os
import signal
import socket
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>

# Loaded here because a forked child, which is what calls `die_with_parent`, must not take the loader's locks.
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process when its parent dies, however it dies. Made for `preexec_fn`.

    `parent` is the process id that the parent must still have: one that died before this call leaves no child behind.
    The kernel means the parent's *thread* that forked, so fork in one that lives as long as the child should.
    Does nothing where the system offers no such thing; there a killed parent leaves its children to be ended by hand.
    """
    if _libc is None:
        return
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


@functools.cache
def host() -> str:
    """Where this process's id counts: the machine since it was started, and on Linux the container in it."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))  # containers may share a host's name, and count from 1 each
    return "/".join(parts)


def has_ended(where: str, pid: int) -> bool:
    """Whether a process, of which `host` said `where`, is known to have ended; False where nobody here can know."""
    if where != host():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False


def keep_loaded() -> None:
    """Keep the garbage collector away from everything that exists by now.

    torch and transformers leave a million objects that live as long as the process. A full collection would look
    through all of them, which takes 0.2 to 0.6 s, and nothing else in the process runs meanwhile.
    """
    gc.freeze()
