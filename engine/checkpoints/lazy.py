"""Weights that are read when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import EllipsisType

import torch
from safetensors import SafetensorError
from torch import Tensor

from ...schemas.errors import ModelLoadError


class LazyWeight:
    """Stands for a weight where transformers expects one: `weight[...]` reads and expands it."""

    def __init__(self, read: Callable[[], Tensor]) -> None:
        self._read = read

    def __getitem__(self, _: EllipsisType) -> Tensor:
        return self._read()


@contextmanager
def reading(model: str, dtype: str, device: torch.device) -> Iterator[None]:
    """Inside, what goes wrong while the weights of `model` are read is a `ModelLoadError`."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise ModelLoadError(
            f"{model} does not fit into the memory of {device} as {dtype}; use a smaller model or dtype"
        ) from error
    except (OSError, ValueError, ImportError, RuntimeError, KeyError, SafetensorError) as error:
        raise ModelLoadError(f"{model} cannot be loaded: {error}") from error
