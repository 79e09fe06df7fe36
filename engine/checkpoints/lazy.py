"""Weights that are read when they are asked for."""

from __future__ import annotations

from collections.abc import Callable
from types import EllipsisType

from torch import Tensor


class LazyWeight:
    """Stands for a weight where transformers expects one: `weight[...]` reads and expands it."""

    def __init__(self, read: Callable[[], Tensor]) -> None:
        self._read = read

    def __getitem__(self, _: EllipsisType) -> Tensor:
        return self._read()
