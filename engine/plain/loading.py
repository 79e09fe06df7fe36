"""Loads a plain decoder from its files: safetensors, packed or quantised checkpoints, GGUF."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from ...schemas.sources import is_gguf
from ..backend import ProgressCallback
from ..checkpoints.experts import Readers, fold_experts, whole_shapes, whole_weights
from ..checkpoints.files import read_header, weight_files
from ..checkpoints.gguf.file import read_gguf
from ..checkpoints.gguf.models import rope_factors
from ..checkpoints.gguf.weights import lazy_weights, level_readers
from ..checkpoints.lazy import LazyWeight, reading
from ..checkpoints.packed_weights import byte_readers, lazy_packed_weights, packed_level_readers
from ..checkpoints.quantized import GROUP_SIZE
from ..checkpoints.rounded import (
    ReadRounded,
    TakesLevels,
    attach,
    is_absent,
    lazy_rounded_weights,
    rounded_readers,
    without_numbers,
)
from ..config import EngineConfig
from ..models import packed_files, read_config, read_quantized, read_shapes
from .model import PlainModel

Read = Callable[[str], Tensor]


def load_plain(
    config: EngineConfig,
    path: Path,
    device: torch.device,
    progress: ProgressCallback | None,
    *,
    keep_levels: TakesLevels | None,
) -> PlainModel | None:
    """The model at `path` on `device`, as `load_causal_lm` would load it; None for one that is not plain.

    `progress` is not told of weights that get no numbers. Mixtures of experts are plain on a CPU alone.

    Raises `ModelLoadError`.
    """
    values = read_config(path)
    dtype = _dtype(config.dtype, values)
    shapes = read_shapes(path)
    model = PlainModel.of(values, whole_shapes(shapes))
    quantized = read_quantized(path)
    if dtype is None or model is None or (quantized and config.quantization):
        return None
    if model.config.mixture is not None and device.type != "cpu":
        return None
    if config.quantization is not None or (keep_levels is not None and not keep_levels(dtype, GROUP_SIZE)):
        keep_levels = None
    keeps_foreign = keep_levels is not None and dtype == torch.bfloat16
    found: dict[str, ReadRounded] = {}
    experts: Readers = {}
    with reading(config.model, config.dtype, device), ExitStack() as files:
        gguf = read_gguf(path) if is_gguf(path) else None
        if gguf:
            weights = lazy_weights(gguf, dtype)
            found = level_readers(gguf) if keeps_foreign else {}
        elif quantized:
            found = rounded_readers(path, quantized)
            weights = lazy_rounded_weights(path, quantized, found, dtype)
        elif packed := packed_files(path):
            weights = lazy_packed_weights(packed.files, packed.weights, packed.packing, dtype)
            found = packed_level_readers(packed.files, packed.weights, packed.packing) if keeps_foreign else {}
            if keeps_foreign and device.type == "cuda":
                found |= byte_readers(packed.files, packed.weights, packed.packing)
        else:
            weights = _stored(path, files)
        if keep_levels is not None:
            weights, found, experts = fold_experts(weights, found, shapes, dtype, keep_levels)
            weights = without_numbers(weights, found, shapes, dtype, keep_levels, device.type == "cpu")
        weights = whole_weights(weights, shapes, dtype)
        model.take(_reader(weights, dtype), device, None if keep_levels and found else progress)
        if gguf and (factors := rope_factors(gguf)):
            rotary = model.model.rotary_emb
            rotary.inv_freq = rotary.inv_freq / torch.tensor(factors, device=device)
        attach(model, found, experts)
    return model


def _dtype(name: str, values: Mapping[str, Any]) -> torch.dtype | None:
    """The dtype of that name; "auto" is the configuration's, and None if it says nothing of it."""
    found = getattr(torch, (values.get("dtype") or values.get("torch_dtype") or "") if name == "auto" else name, None)
    return found if isinstance(found, torch.dtype) and found.is_floating_point else None


def _reader(weights: Mapping[str, LazyWeight], dtype: torch.dtype) -> Read:
    return lambda name: _own(weights[name][...], dtype)


def _own(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers in memory of their own: what is mapped would keep its whole file in memory, and the file in place."""
    if is_absent(tensor):
        return tensor
    found = tensor.to(dtype)
    return found if found.untyped_storage().nbytes() == found.nbytes else found.clone()


def _stored(directory: Path, files: ExitStack) -> dict[str, LazyWeight]:
    """The tensors of a directory's weight files, as long as `files` are open."""
    found: dict[str, LazyWeight] = {}
    for path in weight_files(directory):
        file = files.enter_context(safe_open(path, framework="pt"))
        found |= {name: LazyWeight(partial(file.get_tensor, name)) for name in read_header(path)}
    return found
