"""Compiles the kernels for this machine at the first start, where the package brings none, and keeps the library."""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

from . import variants
from .machine import ARCHITECTURE, cpu_flags
from .variants import OPTIONS, sources_hash

_log = logging.getLogger(__name__)

_APPLE, _NATIVE = ("-mcpu=apple-m1",), ("-mcpu=native" if ARCHITECTURE == "aarch64" else "-march=native",)
NATIVE = _APPLE if sys.platform == "darwin" else _NATIVE
"""The compiler's options for this machine. Apple's compiler knows no `native`."""

_PATIENCE = 300.0  # seconds for which a process waits while another one compiles
_NO_CACHE = "set XDG_CACHE_HOME to a writable directory"
RUNS_PROGRAMS = "set XDG_CACHE_HOME to a directory from which programs may run"
_SUFFIX = ".dylib" if sys.platform == "darwin" else ".so"


class NotCompiled(Exception):
    """The message says why, and what to do."""


def compiled(compiler: str, cache: Path, options: Sequence[str]) -> Path:
    """The library, from `cache` if it is there. Raises `NotCompiled`."""
    try:
        start = _start(compiler, options)
        return _kept(cache, start) or _compile(compiler, cache, options, start)
    except FileNotFoundError as error:
        reason = f"{error.filename} does not exist"
        is_ours = error.filename in map(str, variants.SOURCES)
        remedy = "install a C compiler, such as gcc" if error.filename == compiler else _NO_CACHE
        remedy = "reinstall Penstock" if is_ours else remedy
    except subprocess.SubprocessError as error:
        lines = str(getattr(error, "stderr", None) or error).strip().splitlines()
        reason, remedy = f"{compiler} failed ({lines[0] if lines else error})", "install gcc 11 or clang 14, or newer"
    except OSError as error:
        reason, remedy = str(error), _NO_CACHE
    raise NotCompiled(f"{reason}; {remedy}")


def kept(compiler: str, cache: Path, options: Sequence[str]) -> Path | None:
    """The library that an earlier start has compiled, if there is one."""
    try:
        return _kept(cache, _start(compiler, options))
    except (OSError, subprocess.SubprocessError):
        return None


def compile_to(compiler: Sequence[str], options: Sequence[str], to: Path, timeout: float = 300) -> None:
    """Compile all sources at once, each within `timeout` seconds.

    Raises `subprocess.SubprocessError`, or `OSError` where there is no such compiler.
    """
    sources = [source for source in variants.SOURCES if source.suffix == ".c"]
    command = [*compiler, *options, *(option for option in OPTIONS if option != "-shared"), "-c", "-o"]
    with tempfile.TemporaryDirectory(dir=to.parent) as directory, ThreadPoolExecutor(len(sources)) as pool:
        objects = [f"{directory}/{source.stem}.o" for source in sources]
        both = zip(objects, map(str, sources), strict=True)
        list(pool.map(lambda pair: _run([*command, *pair], timeout), both))
        _run([*compiler, *options, *OPTIONS, "-o", str(to), *objects, "-lm"], timeout)


def _start(compiler: str, options: Sequence[str]) -> str:
    """With what a library's name begins: all that it depends on."""
    parts = (sources_hash(), _version(compiler), cpu_flags(), *OPTIONS, *options)
    return f"kernels-{hashlib.sha256(chr(10).join(parts).encode()).hexdigest()[:16]}-"


def _version(compiler: str) -> str:
    """What the compiler says of itself. Each is asked once in a process."""
    path = shutil.which(compiler)
    if path is None:
        return _run([compiler, "--version"])
    state = os.stat(path)
    return _ask(path, state.st_mtime_ns, state.st_size)


@functools.cache
def _ask(compiler: str, *_state: int) -> str:
    return _run([compiler, "--version"])


def _kept(cache: Path, start: str) -> Path | None:
    whole = (path for path in sorted(cache.glob(f"{start}*{_SUFFIX}")) if path.name == start + _end(path))
    return next(whole, None)


def _compile(compiler: str, cache: Path, options: Sequence[str], start: str) -> Path:
    """One of several processes compiles, and the others wait for it. What has its name is whole, even so: some file
    systems have no locks, and who has waited for long compiles too."""
    from filelock import FileLock  # most starts compile nothing

    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    if os.statvfs(cache).f_flag & getattr(os, "ST_NOEXEC", 0):  # what could not be loaded would be compiled in vain
        raise NotCompiled(f"{cache} is on a file system from which no program may run (noexec); {RUNS_PROGRAMS}")
    with ExitStack() as stack:
        with suppress(OSError, NotImplementedError):  # a timeout is an OSError as well
            stack.enter_context(FileLock(cache / "compiling.lock", timeout=_PATIENCE))
        return _kept(cache, start) or _compile_alone(compiler, cache, options, start)


def _compile_alone(compiler: str, cache: Path, options: Sequence[str], start: str) -> Path:
    _log.info("compiling the kernels for this CPU, once: that takes some 10 seconds, more on a busy machine")
    with tempfile.TemporaryDirectory(dir=cache) as directory:
        compile_to([compiler], options, built := Path(directory) / f"kernels{_SUFFIX}")
        return built.replace(cache / (start + _end(built)))


def _end(path: Path) -> str:
    """A library's name ends with its checksum: loading a truncated one may kill the process."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] + _SUFFIX


def _run(command: list[str], timeout: float = 60) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=timeout).stdout
