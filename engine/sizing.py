"""Chooses the batch size and the memory for keys and values, where the configuration does not, to suit the machine.

It reads only the model's files, so that the choice, and what a worker will take, are known before anything is loaded.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from pydantic import ByteSize

from ..schemas.errors import ConfigurationError
from ..schemas.sources import is_gguf
from .checkpoints.gguf.file import read_gguf
from .checkpoints.quantized import PRECISE
from .checkpoints.widths import WIDTHS, gguf_widths, packed_widths
from .config import EngineConfig
from .cpu.machine import KERNEL_FLAGS, Memory, available_cores, computes_bfloat16, cpu_flags, human, memory_of_machine
from .discovery import files_for, find_backend
from .models import packed_files, read_config, read_model_info, read_quantized, read_shapes
from .vision.families import family_of, is_of_tower

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
_LOADING = 1.5  # peak memory over the weights' size, while they are packed
STATES, LEAST_STATES = 4, 2  # running states for each row: two while a step computes it, the others are checkpoints
_PREFIXES = 2  # times what a full batch needs, so that prefixes stay cached
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
_PACKING = 4  # bytes of a number of the weight that is being packed
_HEADS = ("lm_head.weight", "embed_out.weight")  # the output head's names in weight files
_EMBEDDING = "embed_tokens.weight"  # how its name in a GGUF file ends, translated


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
            found = _choose(config, workers, device.type, _memory_of(device, machine), _Files.of(config))
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
    files = _Files.of(config)
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


class Weights(NamedTuple):
    """Bytes of a model's weights: all that are read before any is packed, as they are kept, and the most at a time."""

    read: int
    kept: int
    loading: int


def weights_of_model(config: EngineConfig, device: str) -> Weights:
    """What the weights take on a device of this type. Raises `ModelLoadError`."""
    return _Files.of(config).weights(config, device)


def cache_of_model(config: EngineConfig, lengths: Sequence[int], step: int) -> list[int]:
    """The bytes of keys and values of sequences of these lengths, computed `step` tokens at a time.

    Raises `ModelLoadError`.
    """
    files = _Files.of(config)
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
    widths: Mapping[str, float]  # bytes of a number of the weights whose levels are kept, by their names
    sizes: Mapping[str, int]  # numbers of each weight
    stored: int  # bytes of all tensors of a GGUF file; 0 of another
    mutual: int  # tokens of an image that one step computes, however few it computes of text

    @classmethod
    def of(cls, config: EngineConfig) -> Self:
        path = files_for(find_backend(config.backend, config.allowed_backends), config.model)
        info = read_model_info(path, config.model, config.max_sequence_length)
        whole = read_config(path)
        settings = whole.get("text_config", whole)
        name = config.dtype if config.dtype != "auto" else str(settings.get("dtype") or settings.get("torch_dtype"))
        width = settings.get("hidden_size") or settings.get("n_embd") or 0
        sizes, quantized = {own: prod(shape) for own, shape in read_shapes(path).items()}, read_quantized(path)
        head = sum(size for name, size in sizes.items() if name.endswith(_HEADS))
        inputs = [size for name, size in sizes.items() if {*name.split(".")} & PRECISE and not is_of_tower(name)]
        gguf, family = read_gguf(path) if is_gguf(path) else None, family_of(whole)
        packed = None if gguf else packed_files(path)
        widths = gguf_widths(gguf) if gguf else packed_widths(packed.weights, packed.packing) if packed else {}
        return cls(
            settings=settings,
            context=info.context_length,
            parameters=sum(sizes.values()),
            embedding=info.vocabulary_size * width,
            head=head,
            precise=head + sum(inputs),
            method=quantized.method if quantized else None,
            number=_BYTES.get(name, 4),
            widths={name: width for name, width in widths.items() if not is_of_tower(name)},
            sizes=sizes,
            stored=sum(tensor.nbytes for tensor in gguf.tensors.values()) if gguf else 0,
            mutual=family.mutual(whole) if family else 0,
        )

    def weights(self, config: EngineConfig, device: str) -> Weights:
        """`device` is the type of the device."""
        if self.stored and not find_backend(config.backend, config.allowed_backends).expands:
            return Weights(self.stored, self.stored, self.stored)
        packs = device == "cpu" and config.backend == "paged"
        tower = sum(size for name, size in self.sizes.items() if is_of_tower(name))
        seeing = tower * max(self.number, 4 if packs and not computes_bfloat16() else 0)  # the tower's bytes
        expanded = (self.parameters - tower) * self.number + seeing
        method = config.quantization or (self.method if packs else None)
        tied: float = self.number  # bytes of a number in a head that is the embedding
        if method in WIDTHS:
            products = self.parameters - self.embedding - self.precise - tower
            packed = products * WIDTHS[method] + self.precise * WIDTHS["int8"]
            kept = int(self.embedding * self.number + seeing + packed)
            tied = WIDTHS["int8"]
        elif packs and self.widths and self._keeps_levels(config):
            embedding = next((name for name in self.widths if name.endswith(_EMBEDDING)), "")  # looked up in the dtype
            saved = sum(self.sizes[name] * (self.number - width) for name, width in self.widths.items())
            kept = int(expanded - saved + self.sizes.get(embedding, 0) * (self.number - self.widths.get(embedding, 0)))
            tied = self.widths.get(embedding, tied)
        else:
            kept = expanded
        if packs and not self.head:  # the embedding is the head, whose product packs a copy of it
            kept += int(self.embedding * tied)
        if packs and config.quantization is None and (self.method or self.widths) and self._keeps_levels(config):
            most = kept + _PACKING * max(self.sizes.values())  # each weight is packed as it is read
            return Weights(most, kept, most)
        return Weights(expanded, kept, int(expanded * _LOADING) if device == "cpu" else expanded)

    def _keeps_levels(self, config: EngineConfig) -> bool:
        """Whether products keep the levels that the files have."""
        in_bfloat16 = self.number == _BYTES["bfloat16"] and config.dtype != "float16"
        fits = in_bfloat16 or (self.method and self.number == _BYTES["float32"])
        return bool(fits and config.compile_kernels) and {*cpu_flags().split()} >= KERNEL_FLAGS

    def cache(self, tokens: int, step: int) -> int:
        """Bytes of the keys and values of a sequence of so many tokens, computed `step` at a time, in all layers.

        For some architectures an overestimate, which is harmless.
        """
        given = self.settings
        heads = given.get("num_attention_heads") or given.get("n_head") or 1
        width = given.get("hidden_size") or given.get("n_embd") or 1
        layers = given.get("num_hidden_layers") or given.get("n_layer") or 1
        pairs = given.get("num_key_value_heads") or given.get("num_kv_heads") or heads
        if given.get("multi_query") and not given.get("new_decoder_architecture"):
            pairs = 1
        head = given.get("head_dim") or width // heads
        if given.get("kv_lora_rank"):  # latent attention: what is cached is expanded for each head
            pairs = heads
            head = max(given.get("qk_nope_head_dim", 0) + given.get("qk_rope_head_dim", 0), given.get("v_head_dim", 0))
        kinds, window = given.get("layer_types") or (), given.get("sliding_window")
        slides = sum(kind == "sliding_attention" for kind in kinds) if window else 0
        stateful = self._stateful_layers()
        seen = (layers - slides - stateful) * tokens + slides * min(tokens, (window or 0) + max(step, self.mutual))
        return int(2 * pairs * head * self.number * seen)

    def states(self) -> int:
        """Bytes of the running states that are kept for one sequence, in all layers; 0 if the model keeps none."""
        given, count = self.settings, self._stateful_layers()
        if not count:
            return 0
        keys = given.get("linear_num_key_heads", 0) * given.get("linear_key_head_dim", 0)
        heads, width = given.get("linear_num_value_heads", 0), given.get("linear_value_head_dim", 0)
        inputs = (given.get("linear_conv_kernel_dim", 1) - 1) * (2 * keys + heads * width) * self.number
        return int(STATES * count * (inputs + heads * given.get("linear_key_head_dim", 0) * width * _BYTES["float32"]))

    def _stateful_layers(self) -> int:
        """How many layers keep a running state instead of keys and values."""
        given = self.settings
        if "linear_num_value_heads" not in given:
            return 0
        layers = given.get("num_hidden_layers") or 0
        kinds = given.get("layer_types")
        if not kinds:  # each so many-th layer attends
            return int(layers - layers // given.get("full_attention_interval", 4))
        return sum(kind == "linear_attention" for kind in kinds)


class _Size(NamedTuple):
    rows: int  # at most
    memory: int
    bytes_per_row: int
    basis: Basis | None = None


def _choose(config: EngineConfig, workers: int, device: str, found: Memory, files: _Files) -> _Size:
    """`device` is the type of the device, whose memory is `found`."""
    if device == "cuda":
        share, rows, step = _CUDA_SHARE, _CUDA_ROWS, _CUDA_STEP
    else:
        share, step = _CPU_SHARE, _CPU_STEP
        rows = _LARGE_CPU_ROWS if available_cores() // workers >= _LARGE_CPU else _CPU_ROWS
    step = config.prefill_chunk_size or step
    free, weights = found.available // workers, files.weights(config, device).kept
    room = int(share * (free - weights - _PROCESS))
    most, states = config.max_batch_size or rows, files.states()
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
