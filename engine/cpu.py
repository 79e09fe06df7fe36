"""What a process that computes on a CPU asks of the system. It changes the whole process: not for libraries."""

from __future__ import annotations

import contextlib
import ctypes
import os
from math import ceil
from pathlib import Path

_MMAP_THRESHOLD, _TRIM_THRESHOLD, _ARENA_MAX = -3, -1, -8  # glibc's names for mallopt, see malloc.h
_NICENESS = 5
_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def available_cores() -> int:
    """Cores that this process may use: what it is bound to, and no more than its container's share."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):
        quota, period = _QUOTA.read_text().split()
        cores = min(cores, ceil(int(quota) / int(period)))  # "max" is no number: no limit
    return max(1, cores)


def prepare_worker(threads: int) -> None:
    """Compute with so many threads, behind the processes that serve, with large pages, and keep freed memory.

    To be called before anything imports torch, which reads its variable once. In pages of 2 MB a product of one row
    reads its weights at 53 GB/s where it had 38. Activations of a prefill are megabytes, allocated and freed in each
    layer; given back to the system they would be cleared page by page at their next use (attention of 256 queries over
    8,192 keys: 36 ms against 20).
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_THRESHOLD, 32 << 20)
        mallopt(_TRIM_THRESHOLD, 1 << 30)
        mallopt(_ARENA_MAX, 1)
    # A front that waits for the engine's slice would delay every token; the engine loses what the front uses, no more.
    with contextlib.suppress(OSError, AttributeError):
        os.nice(_NICENESS)
    import torch

    torch.set_num_threads(threads)
