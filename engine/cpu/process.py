"""What a process that computes on a CPU sets up: threads, priority, memory pages."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from ..models import count_parameters
from .machine import available_cores

_MMAP_THRESHOLD, _TRIM_THRESHOLD, _ARENA_MAX = -3, -1, -8  # glibc's names for mallopt, see malloc.h
_PAGE, _HUGEPAGE, _POPULATE, _COLLAPSE = 2 << 20, 14, 23, 25  # Linux's names for madvise, see mman.h
_NICENESS = 5
_SMALL_MODEL = 30_000_000  # parameters


def worker_threads(directory: Path | None, workers: int) -> int:
    """How many threads each of `workers` should use; one for a model so small that synchronising threads costs more."""
    if directory is not None and count_parameters(directory) < _SMALL_MODEL:
        return 1
    return max(1, available_cores() // workers)


def lower_priority() -> None:
    """Lower this process's CPU priority below that of the processes that serve requests.

    A bridge that waits for the engine's time slice delays every token; the engine loses only what the bridge uses.
    """
    with contextlib.suppress(OSError, AttributeError):
        os.nice(_NICENESS)


def prepare_process(threads: int) -> None:
    """Compute with `threads` threads, and with memory as `prepare_memory` has it."""
    prepare_memory()
    import torch

    torch.set_num_threads(threads)


def prepare_memory() -> None:
    """Compute with large pages, and keep freed memory.

    This changes the whole process: call it from an application, not from a library, and before anything imports torch,
    which reads its variable once. With pages of 2 MB a product of one row reads its weights faster. A prefill allocates
    and frees megabytes of activations in each layer; if the allocator returned them to the system, Linux would clear
    them page by page at their next use.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_THRESHOLD, 32 << 20)
        mallopt(_TRIM_THRESHOLD, 1 << 30)
        mallopt(_ARENA_MAX, 1)


def return_memory() -> None:
    """Give what has been freed back to the system; after a model was loaded the allocator would keep a gigabyte."""
    with contextlib.suppress(OSError, AttributeError):  # another library than glibc
        ctypes.CDLL(None).malloc_trim(0)


def use_large_pages(spans: Iterable[tuple[int, int]]) -> None:
    """Move the memory at `spans`, addresses and bytes, into pages of 2 MB; where Linux cannot, it stays as it is.

    By itself Linux leaves both ends of an allocation in small pages, and without `prepare_process` all of it, unless
    `expect_large_pages` was told before; then this takes about 2 seconds a GB. MADV_COLLAPSE needs Linux 6.1.
    """
    if sys.platform != "linux":
        return
    pages = {page for start, size in spans for page in range(start // _PAGE, -(-(start + size) // _PAGE))}
    madvise = _madvise()
    for advice in (_HUGEPAGE, _COLLAPSE):  # all advice first: a page must not straddle memory with other advice
        for page in sorted(pages):
            madvise(page * _PAGE, _PAGE, advice)


def expect_large_pages(start: int, size: int) -> None:
    """Let memory that is not written yet, at an address and of so many bytes, come in pages of 2 MB; see above."""
    if sys.platform == "linux" and (whole := (start + size) // _PAGE - (first := -(-start // _PAGE))) > 0:
        _madvise()(first * _PAGE, whole * _PAGE, _HUGEPAGE)


def populate(spans: Iterable[tuple[int, int]]) -> None:
    """Have Linux allocate the pages at `spans`, addresses and bytes, whose contents stay as they are; it then need not
    do so, and clear them, when they are first written. MADV_POPULATE_WRITE needs Linux 5.14."""
    if sys.platform == "linux":
        madvise = _madvise()
        for start, size in spans:
            first = start // mmap.PAGESIZE * mmap.PAGESIZE
            madvise(first, start + size - first, _POPULATE)


def _madvise() -> Callable[[int, int, int], int]:
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return madvise
