"""What this process may use: cores, memory and instructions, of the machine or of the container that it runs in."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import re
import resource
import sys
from collections.abc import Iterator
from math import ceil
from pathlib import Path
from typing import NamedTuple

from pydantic import ByteSize

_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
ARCHITECTURE = {"AMD64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())
"""The processor's, by Linux's name."""

_NEEDED = {"x86_64": {"avx2", "bmi2", "f16c", "fma"}, "aarch64": {"asimd"}}
KERNEL_FLAGS = frozenset(_NEEDED.get(ARCHITECTURE, {f"kernels for {ARCHITECTURE}"}))
"""The instructions that the compiled kernels need on this architecture, by Linux's names."""

_BFLOAT16 = {"x86_64": {"avx512f", "avx512bw", "avx512vl", "avx512dq"}, "aarch64": {"bf16"}}
_APPLE = {"asimd": "AdvSIMD", "asimddp": "arm.FEAT_DotProd", "atomics": "arm.FEAT_LSE"}


class Memory(NamedTuple):
    """The memory of the machine or the container, in bytes: all of it, and what is available."""

    total: int
    available: int


def computes_bfloat16() -> bool:
    """Whether torch multiplies in bfloat16 at least as fast as in float32: without these instructions it takes five
    times as long. oneDNN decides alike (`decoding.linear.packs_bfloat16`); this needs no torch."""
    return _BFLOAT16.get(ARCHITECTURE, {"unknown"}) <= {*cpu_flags().split()}


def memory_of_machine(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> Memory:
    """The machine's memory within the limits of this process's control groups, and of its addresses (`ulimit -v`)."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    available = total // 2  # where /proc/meminfo does not say
    with contextlib.suppress(OSError, KeyError, ValueError):
        lines = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
        total, available = (int(lines[name].split()[0]) << 10 for name in ("MemTotal", "MemAvailable"))
    for group, version in _groups("memory", proc, cgroups):
        names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        with contextlib.suppress(OSError, ValueError):  # "max" is no number
            limit, used = int((group / names[0]).read_text()), _used(group, names[1])
            total, available = min(total, limit), min(available, limit - used)
    if (addresses := resource.getrlimit(resource.RLIMIT_AS)[0]) != resource.RLIM_INFINITY:
        total = min(total, addresses)
        with contextlib.suppress(OSError, ValueError):
            used = int((proc / "self" / "statm").read_text().split()[0]) * resource.getpagesize()
            available = min(available, addresses - used)
    return Memory(total, max(0, available))


def memory_kills(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int:
    """How many processes Linux has killed because memory ran out: of this process's control group, or else of the
    machine. 0 where the system does not say."""
    counts = [
        group / ("memory.events" if version == 2 else "memory.oom_control")
        for group, version in _groups("memory", proc, cgroups)
    ]
    for path in (*counts, proc / "vmstat"):
        with contextlib.suppress(OSError, KeyError, ValueError):
            return int(dict(line.split() for line in path.read_text().splitlines())["oom_kill"])
    return 0


def available_cores(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int:
    """The number of cores that this process may use: its CPU affinity, limited by the quotas of its control groups."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for group, version in _groups("cpu", proc, cgroups):
        names = ("cpu.max",) if version == 2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        with contextlib.suppress(OSError, ValueError):  # without a limit the quota is "max", or -1
            quota, period = (int(part) for name in names for part in (group / name).read_text().split())
            cores = min(cores, ceil(quota / period)) if quota > 0 else cores
    return max(1, cores)


def cpu_flags(proc: Path = _PROC) -> str:
    """The instructions of the CPU, by Linux's names; empty where the operating system does not say."""
    if sys.platform == "darwin":
        return " ".join(flag for flag, name in _APPLE.items() if _system_value(f"hw.optional.{name}"))
    with contextlib.suppress(OSError):
        name = "Features" if ARCHITECTURE == "aarch64" else "flags"
        if match := re.search(rf"^{name}\s*:(.*)", (proc / "cpuinfo").read_text(), re.MULTILINE):
            return match[1]
    return ""


def _system_value(name: str) -> int:
    """A number that macOS knows; 0 where it does not."""
    value, size = ctypes.c_int64(0), ctypes.c_size_t(8)
    unknown = ctypes.CDLL(None).sysctlbyname(name.encode(), ctypes.byref(value), ctypes.byref(size), None, 0)
    return 0 if unknown else value.value


def _groups(kind: str, proc: Path, cgroups: Path) -> Iterator[tuple[Path, int]]:
    """The control groups of a kind, from this process's own to the outermost, each with its version, 2 or 1.

    Inside a container the path may be the host's; then only the root exists.
    """
    with contextlib.suppress(OSError):
        for line in (proc / "self" / "cgroup").read_text().splitlines():
            _, kinds, path = line.split(":", 2)
            if kinds and kind not in kinds.split(","):
                continue
            root = cgroups / kind if kinds else cgroups
            group = root / path.strip("/")
            for level in (group, *group.parents):
                if level.is_relative_to(root):
                    yield level, 1 if kinds else 2


def _used(group: Path, name: str) -> int:
    """The memory in use, without cached file pages, which Linux reclaims when memory is short."""
    used = int((group / name).read_text())
    with contextlib.suppress(OSError, ValueError, KeyError):
        pages = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        used -= int(pages.get("total_inactive_file", pages["inactive_file"]))  # version 1 counts groups below apart
    return max(0, used)


def human(size: int) -> str:
    """Format a size in bytes: `1.5 GiB`."""
    return ByteSize(size).human_readable(separator=" ")
