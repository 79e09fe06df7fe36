"""Load a transformers model, and say exactly what is wrong where that fails."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as transformers_logging

from ..schemas.errors import ConfigurationError, ModelLoadError
from .backend import ProgressCallback
from .config import EngineConfig


def resolve_device(name: str) -> torch.device:
    """The device that `name` means: "auto" is the first of CUDA, MPS and CPU that is there.

    Raises `ConfigurationError` for one that is not.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    match = re.fullmatch(r"(cpu|mps|cuda)(?::(\d+))?", name)
    if match is None or (match[1] != "cuda" and match[2]):
        raise ConfigurationError([f"device={name!r}: must be auto, cpu, cuda, cuda:N or mps"])
    if match[1] == "cuda" and int(match[2] or 0) >= torch.cuda.device_count():
        raise ConfigurationError(
            [f"device={name!r}: not there; this machine shows {torch.cuda.device_count()} CUDA devices to torch"]
        )
    if match[1] == "mps" and not torch.backends.mps.is_available():
        raise ConfigurationError([f"device={name!r}: not there; this machine or this build of torch has no MPS"])
    return torch.device(name)


def load_causal_lm(
    config: EngineConfig,
    directory: Path,
    architecture: str,
    device: torch.device,
    progress: ProgressCallback | None,
    attention: str | None,
) -> PreTrainedModel:
    """Load the weights in `directory` onto `device`, ready for inference; `attention` None is transformers' choice.

    The files have been looked at before (`count_parameters`). Raises `ModelLoadError` and `ConfigurationError`.
    """
    if architecture != "unknown" and architecture not in _causal_architectures():
        raise ModelLoadError(
            f"{config.model} is a {architecture}, which transformers does not know as a causal language model; one "
            "that embeds texts is served by the backend sentence_transformers"
        )
    try:
        with counting_weights(progress):
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                directory,
                dtype=config.dtype,
                local_files_only=True,
                output_loading_info=True,
                **({} if attention is None else {"attn_implementation": attention}),
            )
        model: PreTrainedModel = loaded[0].to(device)
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise ModelLoadError(f"{config.model} does not fit into the memory of {device} as {config.dtype}") from error
    except (OSError, ValueError, ImportError, RuntimeError, KeyError, SafetensorError) as error:
        raise ModelLoadError(f"{config.model} cannot be loaded: {error}") from error
    if missing := sorted(loaded[1]["missing_keys"]):
        raise ModelLoadError(
            f"the weight files in {directory} lack {len(missing)} tensors, {missing[0]} first: "
            "they belong to another model, or not all of them were downloaded"
        )
    return model


@contextmanager
def counting_weights(progress: ProgressCallback | None) -> Iterator[None]:
    """Tell `progress`, in place of transformers' own bars, how many of the weights have been loaded."""
    previous = transformers_logging.set_tqdm_hook(
        lambda factory, args, kwargs: _Counted(args[0] if args else kwargs.get("iterable", ()), progress)
    )
    try:
        yield
    finally:
        transformers_logging.set_tqdm_hook(previous)


def _causal_architectures() -> frozenset[str]:
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    return frozenset(name for entry in names for name in ([entry] if isinstance(entry, str) else entry))


class _Counted:
    """Stands in for the tqdm bars of transformers and reports to us instead."""

    def __init__(self, iterable: Iterable[Any], progress: ProgressCallback | None) -> None:
        self._iterable = list(iterable)
        self._progress = progress

    def __iter__(self) -> Iterator[Any]:
        for done, item in enumerate(self._iterable, start=1):
            yield item
            if self._progress is not None:
                self._progress(done, len(self._iterable))

    def __enter__(self) -> _Counted:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Nothing is held."""
