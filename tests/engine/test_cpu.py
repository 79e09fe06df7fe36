"""Memory in large pages: what the system says of it, and that nothing in it changes."""

from __future__ import annotations

import ctypes
import mmap
import platform
import random
import re
from pathlib import Path

import pytest

from penstock.engine.cpu import use_large_pages

PAGE = 2 << 20
SWITCH = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def can_collapse() -> bool:
    version = re.match(r"(\d+)\.(\d+)", platform.release())
    is_new = version is not None and (int(version[1]), int(version[2])) >= (6, 1)
    return is_new and SWITCH.exists() and "[never]" not in SWITCH.read_text()


def in_large_pages(address: int) -> int:
    """Bytes, of the mapping at `address`."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if span := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(span[1], 16) <= address < int(span[2], 16)
        elif inside and line.startswith("AnonHugePages"):
            return int(line.split()[1]) << 10
    raise AssertionError("no such mapping")


@pytest.mark.skipif(not can_collapse(), reason="needs Linux 6.1 with transparent large pages")
def test_two_spans_in_pages_of_one_run() -> None:
    content = random.Random(0).randbytes(6 * PAGE)
    memory = mmap.mmap(-1, 6 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.write(content)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    first = -(-address // PAGE) * PAGE  # four whole pages at the least
    before = in_large_pages(address)
    use_large_pages([(first + PAGE + 5, PAGE), (first + 100, 1000)])
    assert in_large_pages(first) >= before + 3 * PAGE
    assert memory[:] == content


def test_memory_at_the_edge_of_what_is_mapped() -> None:
    """Rounded to whole pages it reaches into nothing."""
    memory = mmap.mmap(-1, 12_288, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.write(b"x" * 12_288)
    use_large_pages([(ctypes.addressof(ctypes.c_char.from_buffer(memory)), 12_288)])
    use_large_pages([])
    assert memory[:] == b"x" * 12_288
