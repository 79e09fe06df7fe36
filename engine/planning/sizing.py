"""Chooses the batch size and the memory for keys and values, where the configuration does not, to suit the machine.

It reads only the model's files, so that the choice, and what a worker will take, are known before anything is loaded.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from pydantic import ByteSize

from ...schemas.errors import ConfigurationError
from ..config import EngineConfig
from ..cpu.machine import Memory, available_cores, human, memory_of_machine
from .discovery import find_backend
from .model_files import ModelFiles, Weights

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(__name__)

_ECHO_ROWS, _ECHO_PROCESS = 64, 128 << 20  # the latter in bytes
_CPU_ROWS, _LARGE_CPU_ROWS, _LARGE_CPU = 32, 64, 16  # from _LARGE_CPU cores a worker on, _LARGE_CPU_ROWS
_CUDA_ROWS = 128
_CPU_STEP, _CUDA_STEP = 256, 2048  # tokens of a step, unless prefill_chunk_size says otherwise
_LEAST_ROW = 1024  # tokens of cache for each row, if the context is that long
_LEAST_CACHE = 64 << 20  # bytes; an operator may set less
_PROCESS = 512 << 20  # bytes of a process besides weights, keys and values
_CPU_SHARE, _CUDA_SHARE = 0.5, 0.8  # of the memory left by the weights: other processes, or activations, need the rest
_PREFIXES = 2  # times what a full batch needs, so that prefixes stay cached


class SizedConfig(EngineConfig):
    """An engine's configuration with both values set."""

    max_batch_size: int
    kv_cache_memory: ByteSize


class Basis(NamedTuple):
    """What values were chosen from, in bytes; `context` is in tokens."""

    free: int  # the worker's share of the device's memory
    weights: int
    token: int  # keys and values of a token
    context: int

    @property
    def text(self) -> str:
        parts = f"{human(self.free)} free", f"{human(self.weights)} of weights", f"{human(self.token)} a token"
        return f"{', '.join(parts)}, a context of {self.context} tokens"


class Sizing(NamedTuple):
    """A configuration with both values, and what they were chosen from; None if that was nothing of the machine."""

    config: SizedConfig
    basis: Basis | None = None


def sized(config: EngineConfig, workers: int = 1, machine: Memory | None = None) -> SizedConfig:
    """Choose the values that `config` leaves open; given ones stay as they are. See `size`."""
    return size(config, workers, machine).config


def size(config: EngineConfig, workers: int = 1, machine: Memory | None = None) -> Sizing:
    """Choose the values that `config` leaves open, and say from what; given ones stay as they are.

    `workers` processes share the machine; `machine` is its memory, by default measured. Raises `ModelLoadError` and
    `ConfigurationError`, like a backend that loads the model.
    """
    if isinstance(config, SizedConfig):
        return Sizing(config)
    memory, rows, basis = config.kv_cache_memory, config.max_batch_size, None
    if memory is None or rows is None:
        found = _Size(_ECHO_ROWS, 1 << 62, 1)
        manifest = find_backend(config.backend, config.allowed_backends)
        if manifest.cache:
            from .device import resolve_device

            device = resolve_device("cpu" if manifest.devices == ("cpu",) else config.device)
            found = _choose(config, workers, device.type, _memory_of(device, machine), ModelFiles.of(config))
        basis = found.basis
        memory = memory or ByteSize(found.memory)
        if rows is None:
            rows = min(found.rows, memory // found.bytes_per_row)
            if config.prefill_chunk_size is not None:  # each decoding request, reserved rows included, takes a token
                rows = min(rows, config.prefill_chunk_size * 4 // 5)
            rows = max(1, rows)
    return Sizing(SizedConfig(**dict(config) | {"max_batch_size": rows, "kv_cache_memory": memory}), basis)


class Footprint(NamedTuple):
    """Bytes that one worker takes on its device, at most: `overhead` is the process and what loading takes besides."""

    weights: int
    cache: int
    overhead: int

    @property
    def total(self) -> int:
        return sum(self)


def footprint(config: EngineConfig, workers: int = 1, machine: Memory | None = None) -> Footprint:
    """What a worker will take, from the model's files alone, and without importing torch.

    `workers` processes share the device, whose memory is `machine`; left out, it is measured, which only works for a
    CPU. The cache is the one that `sized` would choose. Raises `ModelLoadError`, and `ConfigurationError` for a device
    "auto", which needs torch to be resolved.
    """
    if config.fallback_backend is not None:
        change: dict[str, object] = {"fallback_backend": None}
        both = [footprint(config.model_copy(update=change), 2 * workers, machine)]
        change["backend"] = config.fallback_backend
        both.append(footprint(config.model_copy(update=change), 2 * workers, machine))
        return Footprint(*map(sum, zip(*both, strict=True)))
    manifest = find_backend(config.backend, config.allowed_backends)
    if not manifest.formats:
        return Footprint(0, 0, _ECHO_PROCESS)
    device = config.device.partition(":")[0]
    if device == "auto":
        raise ConfigurationError(["device='auto': the memory of a model depends on the device; name it"])
    files = ModelFiles.of(config)
    weights = files.weights(config, device)
    cache = 0
    if manifest.cache:
        if config.kv_cache_memory is None and device == "cuda" and machine is None:
            raise ConfigurationError(
                [f"device={config.device!r}: set kv_cache_memory, which cannot be chosen before the device is opened"]
            )
        cache = config.kv_cache_memory or _choose(config, workers, device, machine or memory_of_machine(), files).memory
    overhead = _PROCESS + max(0, weights.loading - weights.kept - cache)  # the cache fills after the load
    return Footprint(weights.kept, cache, overhead)


def weights_of_model(config: EngineConfig, device: str) -> Weights:
    """What the weights take on a device of this type. Raises `ModelLoadError`."""
    return ModelFiles.of(config).weights(config, device)


def cache_of_model(config: EngineConfig, lengths: Sequence[int], step: int) -> list[int]:
    """The bytes of keys and values of sequences of these lengths, computed `step` tokens at a time.

    Raises `ModelLoadError`.
    """
    files = ModelFiles.of(config)
    return [files.cache(length, step) for length in lengths]


def fitting_length(config: SizedConfig, length: int, capacity: int) -> int:
    """The model's context length, or as much of it as one request can have within `kv_cache_memory`.

    `capacity` is in tokens. Raises `ConfigurationError` if the configuration asks for more.
    """
    if length <= capacity:
        return length
    if config.max_sequence_length is not None:
        raise ConfigurationError(
            [
                f"kv_cache_memory={config.kv_cache_memory}: holds {capacity} tokens of one request, fewer than "
                f"max_sequence_length={length}; set about {config.kv_cache_memory * length // capacity}"
            ]
        )
    _log.warning("context cut from %d to %d tokens by kv_cache_memory", length, capacity)
    return capacity


class _Size(NamedTuple):
    rows: int  # at most
    memory: int
    bytes_per_row: int
    basis: Basis | None = None


def _choose(config: EngineConfig, workers: int, device: str, found: Memory, files: ModelFiles) -> _Size:
    """`device` is the type of the device, whose memory is `found`."""
    if device == "cuda":
        share, rows, step = _CUDA_SHARE, _CUDA_ROWS, _CUDA_STEP
    else:
        share, step = _CPU_SHARE, _CPU_STEP
        rows = _LARGE_CPU_ROWS if available_cores() // workers >= _LARGE_CPU else _CPU_ROWS
    step = config.prefill_chunk_size or step
    free, weights = found.available // workers, files.weights(config, device).kept
    room = int(share * (free - weights - _PROCESS))
    most, states = config.max_batch_size or rows, files.states() + files.image()
    useful = most * (_PREFIXES * files.cache(files.context, step) + states)
    least = min(useful, max(_LEAST_CACHE, states))
    basis = Basis(free, weights, files.cache(1, step), files.context)
    row = files.cache(min(files.context, _LEAST_ROW), step) + states
    return _Size(rows, max(least, min(useful, room)), row, basis)


def _memory_of(device: torch.device, machine: Memory | None) -> Memory:
    """The memory of the device: of the machine, unless it is a CUDA device."""
    if device.type != "cuda":
        return machine or memory_of_machine()
    import torch

    free, total = torch.cuda.mem_get_info(device)
    return Memory(total, free)
