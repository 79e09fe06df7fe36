"""What a process that computes on a CPU asks of the system."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterable
from math import ceil
from pathlib import Path

from ..weights import count_parameters

_MMAP_THRESHOLD, _TRIM_THRESHOLD, _ARENA_MAX = -3, -1, -8  # glibc's names for mallopt, see malloc.h
_PAGE, _HUGEPAGE, _COLLAPSE = 2 << 20, 14, 25  # Linux's names for madvise, see mman.h
_NICENESS = 5
_SMALL_MODEL = 30_000_000  # parameters
_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def available_cores() -> int:
    """Cores that this process may use: what it is bound to, and no more than its container's share."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):
        quota, period = _QUOTA.read_text().split()
        cores = min(cores, ceil(int(quota) / int(period)))  # "max" is no number: no limit
    return max(1, cores)


def worker_threads(directory: Path | None, workers: int) -> int:
    """Cores shared among workers; one for a model so small that threads would wait for each other, not for memory."""
    if directory is not None and count_parameters(directory) < _SMALL_MODEL:
        return 1
    return max(1, available_cores() // workers)


def stand_behind() -> None:
    """Let the processes that serve go first: a front that waits for the engine's slice would delay every token.

    The engine loses what they use, and no more.
    """
    with contextlib.suppress(OSError, AttributeError):
        os.nice(_NICENESS)


def prepare_process(threads: int) -> None:
    """Compute with so many threads and large pages, and keep freed memory.

    It changes the whole process: not for libraries. To be called before anything imports torch, which reads its
    variable once. In pages of 2 MB a product of one row reads its weights at 53 GB/s where it had 38. Activations of a
    prefill are megabytes, allocated and freed in each layer; given back to the system they would be cleared page by
    page at their next use (attention of 256 queries over 8,192 keys: 36 ms against 20).
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_THRESHOLD, 32 << 20)
        mallopt(_TRIM_THRESHOLD, 1 << 30)
        mallopt(_ARENA_MAX, 1)
    import torch

    torch.set_num_threads(threads)


def use_large_pages(spans: Iterable[tuple[int, int]]) -> None:
    """Move memory, addresses and bytes, into pages of 2 MB, with what shares them; where Linux cannot, it stays.

    By itself the system leaves each end of an allocation in small pages: of Qwen2-0.5B's weights 10 to 25 %, in which
    a step took 4 % longer; without `prepare_process` all of them, and then this takes 2 seconds a GB. MADV_COLLAPSE is
    Linux's since 6.1.
    """
    if sys.platform != "linux":
        return
    pages = {page for start, size in spans for page in range(start // _PAGE, -(-(start + size) // _PAGE))}
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for advice in (_HUGEPAGE, _COLLAPSE):  # all are asked for first: no page may lie half in memory of another kind
        for page in sorted(pages):
            madvise(page * _PAGE, _PAGE, advice)
