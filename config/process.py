"""What the operating system is asked to do for our child processes."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

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
