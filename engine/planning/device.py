"""Where a model runs: one of torch's devices."""

from __future__ import annotations

import platform
import re
from functools import cache
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Any

import torch

from ...schemas.errors import ConfigurationError
from ...schemas.version import __version__
from ..cpu.machine import cpu_flags

_version = cache(metadata.version)  # which reads and parses a file at each call


def resolve_device(name: str) -> torch.device:
    """The device called `name`: "auto" is the first available of CUDA, MPS and CPU.

    Raises `ConfigurationError` for an unknown or unavailable one.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    match = re.fullmatch(r"(cpu|mps|cuda)(?::(\d+))?", name)
    if match is None or (match[1] != "cuda" and match[2]):
        raise ConfigurationError([f"device={name!r}: must be auto, cpu, cuda, cuda:N or mps"])
    if match[1] == "cuda" and int(match[2] or 0) >= torch.cuda.device_count():
        raise ConfigurationError(
            [f"device={name!r}: not available, torch finds {torch.cuda.device_count()} CUDA devices; choose another"]
        )
    if match[1] == "mps" and not torch.backends.mps.is_available():
        raise ConfigurationError(
            [f"device={name!r}: not available, this machine or this build of torch has no MPS; choose another"]
        )
    return torch.device(name)


def has_triton(device: torch.device) -> bool:
    """Whether kernels in Triton can run there."""
    return device.type == "cuda" and find_spec("triton") is not None


def surroundings(device: torch.device) -> dict[str, Any]:
    """What may change a number besides a model and its settings: versions, the machine, and what computes."""
    computes: list[Any] = [device.type]
    if device.type == "cuda":
        triton = import_module("triton").__version__ if has_triton(device) else None
        card = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
        computes = [torch.version.cuda, *card, triton]
    return {
        "penstock": __version__,
        "torch": [torch.__version__, _version("transformers"), torch.__config__.show()],
        "machine": [platform.machine(), cpu_flags(), torch.get_num_threads(), torch.get_float32_matmul_precision()],
        "device": computes,
    }
