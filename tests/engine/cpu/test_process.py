"""Memory in large pages: what the system says of it, and that nothing in it changes."""

from __future__ import annotations

import ctypes
import mmap
import random
import re
import sys
from pathlib import Path

import pytest

from penstock.engine.cpu.process import expect_large_pages, use_large_pages

PAGE = 2 << 20
COLLAPSE = 25  # see mman.h


def mapped(size: int) -> mmap.mmap:
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def address_of(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def can_collapse() -> bool:
    """Linux can since 6.1, unless large pages are off or there is no room for one."""
    if sys.platform != "linux":
        return False
    memory = mapped(2 * PAGE)
    memory.write(b"x" * 2 * PAGE)
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return bool(madvise(-(-address_of(memory) // PAGE) * PAGE, PAGE, COLLAPSE) == 0)


def in_large_pages(address: int) -> int:
    """Bytes, of the mapping at `address`."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if span := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(span[1], 16) <= address < int(span[2], 16)
        elif inside and line.startswith("AnonHugePages"):
            return int(line.split()[1]) << 10
    raise AssertionError("no such mapping")


def test_two_spans_in_pages_of_one_run() -> None:
    if not can_collapse():
        pytest.skip("needs Linux 6.1 with transparent large pages")
    content = random.Random(0).randbytes(6 * PAGE)
    memory = mapped(6 * PAGE)
    memory.write(content)
    first = -(-address_of(memory) // PAGE) * PAGE  # four whole pages at the least
    use_large_pages([(first + PAGE + 5, PAGE), (first + 100, 1000)])
    assert in_large_pages(first) >= 3 * PAGE
    assert memory[:] == content


def test_memory_at_the_edge_of_what_is_mapped() -> None:
    """Rounded to whole pages it reaches into nothing."""
    memory = mapped(12_288)
    memory.write(b"x" * 12_288)
    use_large_pages([(address_of(memory), 12_288)])
    use_large_pages([])
    assert memory[:] == b"x" * 12_288


def test_expected_pages_are_large_when_they_are_written() -> None:
    """Within the memory alone, whose ends may lie inside of pages."""
    if not can_collapse():
        pytest.skip("needs Linux 6.1 with transparent large pages")
    memory = mapped(6 * PAGE)
    first = -(-address_of(memory) // PAGE) * PAGE
    expect_large_pages(first + 100, 3 * PAGE)
    expect_large_pages(first + 3 * PAGE, 100)
    memory.write(b"x" * 6 * PAGE)
    assert in_large_pages(first + PAGE) >= 2 * PAGE
    assert memory[:] == b"x" * 6 * PAGE
