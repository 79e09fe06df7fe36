"""Chooses the batch size and the memory for keys and values, where the configuration does not, to suit the machine.

It reads only the model's files, so that the choice can be made, and what a worker will take be known, before anything
is loaded.
"""

from __future__ import annotations

import contextlib
import os
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from pydantic import ByteSize

from ..schemas.errors import ConfigurationError
from .checkpoints.quantized import PRECISE
from .config import EngineConfig
from .cpu.process import available_cores
from .discovery import find_backend
from .models import read_config, read_model_info, read_quantized, read_shapes, resolve_model

if TYPE_CHECKING:
    import torch

_ECHO_ROWS = 64
_CPU_ROWS, _LARGE_CPU_ROWS, _LARGE_CPU = 32, 64, 16  # from _LARGE_CPU cores a worker on, _LARGE_CPU_ROWS
_CUDA_ROWS = 128
_LEAST_ROW = 1024  # tokens of cache for each row, if the context is that long
_LEAST_CACHE = 64 << 20  # bytes; an operator may set less
_PROCESS = 512 << 20  # bytes of a process besides weights, keys and values
_CPU_SHARE, _CUDA_SHARE = 0.5, 0.8  # of the memory left by the weights: other processes, or activations, need the rest
_LOADING = 1.5  # peak memory over the weights' size, while they are packed
_PREFIXES = 2  # times what a full batch needs, so that prefixes stay cached
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
_WIDTHS = {"int8": 1.1, "int4": 0.6}  # bytes of a packed weight, scales included
_HEADS = ("lm_head.weight", "embed_out.weight")  # the output head's names in weight files
_ECHO_PROCESS = 128 << 20  # bytes


class SizedConfig(EngineConfig):
    """An engine's configuration with both values set."""

    max_batch_size: int
    kv_cache_memory: ByteSize


class Memory(NamedTuple):
    """The memory of the machine or the container, in bytes: all of it, and what is available."""

    total: int
    available: int


def sized(config: EngineConfig, workers: int = 1, machine: Memory | None = None) -> SizedConfig:
    """Choose the values that `config` leaves open; given ones stay as they are.

    `workers` processes share the machine; `machine` is its memory, by default measured. Raises `ModelLoadError` and
    `ConfigurationError`, like a backend that loads the model.
    """
    if isinstance(config, SizedConfig):
        return config
    memory, rows = config.kv_cache_memory, config.max_batch_size
    if memory is None or rows is None:
        found = _Size(_ECHO_ROWS, 1 << 62, 1)
        manifest = find_backend(config.backend, config.allowed_backends)
        if manifest.cache:
            from .loading import resolve_device

            device = resolve_device("cpu" if manifest.devices == ("cpu",) else config.device)
            found = _choose(config, workers, device.type, _memory_of(device, machine), _Files.of(config))
        memory = memory or ByteSize(found.memory)
        if rows is None:
            rows = min(found.rows, memory // found.bytes_per_row)
            if config.prefill_chunk_size is not None:  # each decoding request, reserved rows included, takes a token
                rows = min(rows, config.prefill_chunk_size * 4 // 5)
            rows = max(1, rows)
    return SizedConfig(**dict(config) | {"max_batch_size": rows, "kv_cache_memory": memory})


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
    files = _Files.of(config)
    raw = files.parameters * files.number
    weights = raw
    packs = device == "cpu" and config.backend == "paged"
    method = config.quantization or (files.method if packs else None)
    if method in _WIDTHS:
        products = files.parameters - files.embedding - files.precise
        packed = products * _WIDTHS[method] + files.precise * _WIDTHS["int8"]
        weights = int(files.embedding * files.number + packed)
    if packs and not files.head:
        width = files.number if method is None else _WIDTHS["int8"]
        weights += int(files.embedding * width)  # the embedding is the head, whose product packs a copy of it
    cache = 0
    if manifest.cache:
        if config.kv_cache_memory is None and device == "cuda" and machine is None:
            raise ConfigurationError(
                [f"device={config.device!r}: set kv_cache_memory, which cannot be chosen before the device is opened"]
            )
        cache = config.kv_cache_memory or _choose(config, workers, device, machine or memory_of_machine(), files).memory
    loading = int(raw * _LOADING) if device == "cpu" else raw
    return Footprint(weights, cache, _PROCESS + max(0, loading - weights - cache))  # the cache fills after the load


class _Files(NamedTuple):
    """What a model's files say: how many numbers they have, and of these the embedding and the output head."""

    settings: dict[str, Any]  # those of the language model in config.json
    context: int
    parameters: int
    embedding: int
    head: int  # 0 if it is the embedding
    precise: int  # the head's and those of other weights that int4 leaves at int8
    method: str | None  # if the checkpoint is quantised
    number: int  # bytes of each number as it is loaded

    @classmethod
    def of(cls, config: EngineConfig) -> Self:
        path = resolve_model(config.model)
        info = read_model_info(path, config.model, config.max_sequence_length)
        whole = read_config(path)
        settings = whole.get("text_config", whole)
        name = config.dtype if config.dtype != "auto" else str(settings.get("dtype") or settings.get("torch_dtype"))
        width = settings.get("hidden_size") or settings.get("n_embd") or 0
        shapes, quantized = read_shapes(path), read_quantized(path)
        head = sum(prod(shape) for name, shape in shapes.items() if name.endswith(_HEADS))
        inputs = [prod(shape) for name, shape in shapes.items() if {*name.split(".")} & PRECISE]
        return cls(
            settings=settings,
            context=info.context_length,
            parameters=sum(map(prod, shapes.values())),
            embedding=info.vocabulary_size * width,
            head=head,
            precise=head + sum(inputs),
            method=quantized.method if quantized else None,
            number=_BYTES.get(name, 4),
        )


class _Size(NamedTuple):
    rows: int  # at most
    memory: int
    bytes_per_row: int


def _choose(config: EngineConfig, workers: int, device: str, found: Memory, files: _Files) -> _Size:
    """`device` is the type of the device, whose memory is `found`."""
    if device == "cuda":
        share, loading, rows = _CUDA_SHARE, 1.0, _CUDA_ROWS
    else:
        share, loading = _CPU_SHARE, _LOADING
        rows = _LARGE_CPU_ROWS if available_cores() // workers >= _LARGE_CPU else _CPU_ROWS
    weights = int(files.parameters * files.number * loading)
    room = int(share * (found.available / workers - weights - _PROCESS))
    token = _bytes_per_token(files.settings, files.number)
    useful = _PREFIXES * rows * files.context * token
    least = min(useful, _LEAST_CACHE)
    return _Size(rows, max(least, min(useful, room)), min(files.context, _LEAST_ROW) * token)


def _memory_of(device: torch.device, machine: Memory | None) -> Memory:
    """The memory of the device: of the machine, unless it is a CUDA device."""
    if device.type != "cuda":
        return machine or memory_of_machine()
    import torch

    free, total = torch.cuda.mem_get_info(device)
    return Memory(total, free)


def _bytes_per_token(settings: dict[str, Any], number: int) -> int:
    """Bytes of one token's keys and values in all layers; for some architectures an overestimate, which is harmless."""
    heads = settings.get("num_attention_heads") or settings.get("n_head") or 1
    width = settings.get("hidden_size") or settings.get("n_embd") or 1
    layers = settings.get("num_hidden_layers") or settings.get("n_layer") or 1
    pairs = settings.get("num_key_value_heads") or heads
    return int(2 * layers * pairs * (settings.get("head_dim") or width // heads) * number)


def memory_of_machine(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> Memory:
    """The machine's memory within the limits of this process's control groups."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    available = total // 2  # where /proc/meminfo does not say
    with contextlib.suppress(OSError, KeyError, ValueError):
        lines = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
        total, available = (int(lines[name].split()[0]) << 10 for name in ("MemTotal", "MemAvailable"))
    for limit, used in _limits(proc, cgroups):
        total, available = min(total, limit), min(available, limit - used)
    return Memory(total, max(0, available))


def _limits(proc: Path, cgroups: Path) -> list[tuple[int, int]]:
    """The limit and the use of each control group, of version 2 or 1, from this process's own to the outermost."""
    found = []
    with contextlib.suppress(OSError):
        for line in (proc / "self" / "cgroup").read_text().splitlines():
            _, kinds, path = line.split(":", 2)
            if kinds not in ("", "memory"):
                continue
            root, most, now = (
                (cgroups / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes")
                if kinds
                else (cgroups, "memory.max", "memory.current")
            )
            group = root / path.strip("/")
            for level in (group, *group.parents):
                if level.is_relative_to(root):
                    # Inside a container the path may be the host's: then only the root exists. "max" is no number.
                    with contextlib.suppress(OSError, ValueError):
                        found.append((int((level / most).read_text()), _used(level, now)))
    return found


def _used(group: Path, name: str) -> int:
    """The memory in use, without cached file pages, which Linux reclaims when memory is short."""
    used = int((group / name).read_text())
    with contextlib.suppress(OSError, ValueError, KeyError):
        pages = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        used -= int(pages["inactive_file"])
    return max(0, used)


def human(size: int) -> str:
    """Format a size in bytes: `1.5 GiB`."""
    return ByteSize(size).human_readable(separator=" ")
