"""Loads a plain decoder from its files: safetensors, packed or quantised checkpoints, GGUF."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...schemas.errors import ModelLoadError
from ...schemas.sources import is_gguf
from ..backend import ProgressCallback
from ..checkpoints.files import read_header, weight_files
from ..checkpoints.gguf import read_gguf
from ..checkpoints.gguf_models import rope_factors
from ..checkpoints.gguf_weights import lazy_weights, read_levels
from ..checkpoints.lazy import LazyWeight
from ..checkpoints.packed_weights import lazy_packed_weights
from ..checkpoints.rounded import attach, lazy_rounded_weights, read_rounded
from ..config import EngineConfig
from ..models import packed_files, read_config, read_quantized, read_shapes
from .model import PlainModel

Read = Callable[[str], Tensor]


def load_plain(
    config: EngineConfig, path: Path, device: torch.device, progress: ProgressCallback | None, *, keep_levels: bool
) -> PlainModel | None:
    """The model at `path` on `device`, as `load_causal_lm` would load it; None for one that is not plain.

    Raises `ModelLoadError`.
    """
    values = read_config(path)
    dtype = _dtype(config.dtype, values)
    model = PlainModel.of(values, read_shapes(path))
    quantized = read_quantized(path)
    if dtype is None or model is None or (quantized and config.quantization):
        return None
    keep_levels = keep_levels and config.quantization is None and dtype == torch.bfloat16
    try:
        if is_gguf(path):
            gguf = read_gguf(path)
            model.take(_reader(lazy_weights(gguf, dtype), dtype), device, progress)
            if factors := rope_factors(gguf):
                rotary = model.model.rotary_emb
                rotary.inv_freq = rotary.inv_freq / torch.tensor(factors, device=device)
            attach(model, dict(read_levels(gguf)) if keep_levels else {})
        elif quantized:
            found = read_rounded(path, quantized)
            model.take(_reader(lazy_rounded_weights(path, quantized, found, dtype), dtype), device, progress)
            attach(model, found)
        elif packed := packed_files(path):
            weights = lazy_packed_weights(packed.files, packed.weights, packed.packing, dtype)
            model.take(_reader(weights, dtype), device, progress)
        else:
            with _stored(path, dtype) as read:
                model.take(read, device, progress)
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise ModelLoadError(
            f"{config.model} does not fit into the memory of {device} as {config.dtype}; use a smaller model or dtype"
        ) from error
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        raise ModelLoadError(f"{config.model} cannot be loaded: {error}") from error
    return model


def _dtype(name: str, values: Mapping[str, Any]) -> torch.dtype | None:
    """The dtype of that name; "auto" is the configuration's, and None if it says nothing of it."""
    found = getattr(torch, (values.get("dtype") or values.get("torch_dtype") or "") if name == "auto" else name, None)
    return found if isinstance(found, torch.dtype) and found.is_floating_point else None


def _reader(weights: Mapping[str, LazyWeight], dtype: torch.dtype) -> Read:
    return lambda name: _own(weights[name][...], dtype)


def _own(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers in memory of their own: what is mapped would keep its whole file in memory, and the file in place."""
    found = tensor.to(dtype)
    return found if found.untyped_storage().nbytes() == found.nbytes else found.clone()


@contextmanager
def _stored(directory: Path, dtype: torch.dtype) -> Iterator[Read]:
    """Reads the tensors of a directory's weight files."""
    with ExitStack() as stack:
        files: dict[str, Any] = {}
        for path in weight_files(directory):
            file = stack.enter_context(safe_open(path, framework="pt"))
            files |= dict.fromkeys(read_header(path), file)
        yield lambda name: _own(files[name].get_tensor(name), dtype)
