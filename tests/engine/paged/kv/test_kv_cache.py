"""The memory of the key-value cache: what is allocated before the first request comes."""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading

import pytest
import torch

from penstock.engine.cpu.process import populate
from penstock.engine.paged.kv.kv_cache import LayerSpec, SlicedPool, populated

LARGE = 2 << 20  # bytes of a large page
HEAD = 8 << 20  # bytes of one head's keys
HEADS = 16  # keys and values: so much memory at once never comes from what was freed before
POPULATE_WRITE = 23  # see mman.h


def madvise(address: int, size: int, advice: int) -> int:
    call = ctypes.CDLL(None).madvise
    call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return int(call(address, size, advice))


def is_allocated(address: int) -> bool:
    """Whether Linux has memory for the page of this address."""
    mincore = ctypes.CDLL(None).mincore
    mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    found = ctypes.create_string_buffer(1)
    assert mincore(address // mmap.PAGESIZE * mmap.PAGESIZE, 1, found) == 0
    return bool(found.raw[0] & 1)


def can_populate() -> bool:
    if sys.platform != "linux":
        return False
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    return madvise(ctypes.addressof(ctypes.c_char.from_buffer(memory)), mmap.PAGESIZE, POPULATE_WRITE) == 0


def test_what_the_first_blocks_take_is_allocated_before_a_request_comes() -> None:
    if not can_populate():
        pytest.skip("needs Linux 5.14")
    spec, cpu = LayerSpec(None, HEADS // 2, 64, 64), torch.device("cpu")
    pools = [SlicedPool(spec, HEAD // (16 * 64 * 2), 16, torch.bfloat16, cpu) for _ in range(3)]
    heads = [pool.memory.data_ptr() + head * HEAD for pool in pools for head in range(HEADS)]
    assert not any(is_allocated(head + HEAD // 2) for head in heads)
    assert populated([*pools]) == pools
    for thread in threading.enumerate():
        if thread.name == "penstock-populate":
            thread.join()
    assert all(is_allocated(head + offset) for head in heads for offset in (0, 100_000, 500_000))
    assert not any(is_allocated(head + HEAD * 3 // 4) for head in heads)
    assert all(pool.memory.count_nonzero() == 0 for pool in pools)


def test_memory_behind_a_gap_is_allocated() -> None:
    """As at the beginning of a mapping, which need not be that of a large page."""
    if not can_populate():
        pytest.skip("needs Linux 5.14")
    memory = mmap.mmap(-1, 4 * LARGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    gap = -(-begin // LARGE) * LARGE
    protect = ctypes.CDLL(None).mprotect
    protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    assert protect(gap, LARGE // 2, 0) == 0, "no one may write there"
    start = gap + LARGE // 2 + 64
    populate([(start, 500_000)])
    assert all(is_allocated(start + offset) for offset in (0, 250_000, 499_999))
    assert protect(gap, LARGE // 2, mmap.PROT_READ | mmap.PROT_WRITE) == 0


def test_small_pools_are_left_alone() -> None:
    spec, cpu = LayerSpec(None, 2, 64, 64), torch.device("cpu")
    pools = [SlicedPool(spec, 3, 16, torch.float32, cpu)]
    running = threading.active_count()
    assert populated([*pools]) == pools
    assert threading.active_count() == running
    assert pools[0].memory.count_nonzero() == 0
