"""Compiles CUDA's sources at the first start with NVRTC, which torch brings along, and keeps the programs."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from ..models import keep

_SUFFIX = ".cubin"
_MOST = 64  # programs that are kept; those that were not used for longest go first


class NotCompiled(Exception):
    """The message says why, and what to do."""


def program(source: Path, options: Sequence[str], capability: tuple[int, int], cache: Path) -> bytes:
    """The source compiled for GPUs of this capability, from `cache` if it is there. Raises `NotCompiled`."""
    text = source.read_bytes()
    given = [f"--gpu-architecture=sm_{capability[0]}{capability[1]}", "--std=c++17", *options]
    about = (str(torch.version.cuda), hashlib.sha256(text).hexdigest(), *given)
    start = f"cuda-{hashlib.sha256(chr(10).join(about).encode()).hexdigest()[:16]}-"
    for path in sorted(cache.glob(f"{start}*{_SUFFIX}")):
        with suppress(OSError):  # another process may clear the cache
            found = path.read_bytes()
            if path.name == start + _end(found):
                with suppress(OSError):  # a cache that may only be read
                    os.utime(path)
                return found
    made = _compiled(_nvrtc(), text, given)
    with suppress(OSError):  # a cache that cannot be written costs the next start a few seconds
        keep(cache / (start + _end(made)), made, _MOST)
    return made


def is_there() -> bool:
    """Whether NVRTC can be loaded."""
    try:
        _nvrtc()
    except NotCompiled:
        return False
    return True


def _end(content: bytes) -> str:
    """A program's name ends with its checksum, for one that was cut off."""
    return hashlib.sha256(content).hexdigest()[:16] + _SUFFIX


def _nvrtc() -> ctypes.CDLL:
    if torch.version.cuda is None:
        raise NotCompiled("this build of torch has no CUDA; install torch's build for it")
    major = torch.version.cuda.partition(".")[0]
    for path in (*_in_packages(f"libnvrtc.so.{major}*"), Path(f"libnvrtc.so.{major}")):
        try:
            for other in path.parent.glob("libnvrtc-builtins.so*"):  # NVRTC looks for it by its name alone
                ctypes.CDLL(os.fspath(other), ctypes.RTLD_GLOBAL)
            return ctypes.CDLL(os.fspath(path))
        except OSError:
            continue
    raise NotCompiled(f"libnvrtc.so.{major} is missing; install NVIDIA's package nvidia-cuda-nvrtc of torch's CUDA")


def _in_packages(pattern: str) -> Iterator[Path]:
    """Files of that name in NVIDIA's packages."""
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        yield from sorted(Path(folder).glob(f"*/lib/{pattern}"))


def _compiled(nvrtc: ctypes.CDLL, source: bytes, options: Sequence[str]) -> bytes:
    handle = ctypes.c_void_p()
    _check(nvrtc.nvrtcCreateProgram(ctypes.byref(handle), source, None, 0, None, None))
    try:
        given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if nvrtc.nvrtcCompileProgram(handle, len(options), given):
            log = _read(nvrtc, "ProgramLog", handle).decode(errors="replace").strip()
            raise NotCompiled(f"NVRTC failed ({log.splitlines()[0] if log else 'it says nothing'}); update torch")
        return _read(nvrtc, "CUBIN", handle)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(handle))


def _read(nvrtc: ctypes.CDLL, what: str, handle: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    _check(getattr(nvrtc, f"nvrtcGet{what}Size")(handle, ctypes.byref(size)))
    content = ctypes.create_string_buffer(size.value)
    _check(getattr(nvrtc, f"nvrtcGet{what}")(handle, content))
    return content.raw.rstrip(b"\0") if what == "ProgramLog" else content.raw


def _check(code: int) -> None:
    if code:
        raise NotCompiled(f"NVRTC failed with its error {code}; update torch")
