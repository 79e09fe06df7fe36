"""Where a model runs: one of torch's devices."""

from __future__ import annotations

import re
from typing import Any

import torch

from ..schemas.errors import ConfigurationError


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


def described(device: torch.device) -> list[Any]:
    """What computes there."""
    if device.type != "cuda":
        return [device.type]
    return [torch.version.cuda, torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)]
