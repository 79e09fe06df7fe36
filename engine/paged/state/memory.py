"""The memory of running states: a room for each slot in every layer that keeps one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..kv.kv_cache import Pool, zeros

if TYPE_CHECKING:  # its room imports transformers
    from .layer import StateLayer
    from .step import StateStep


class States:
    """Of one model; without `layers` it keeps none. `num_slots` slots are numbered from 0; the next one stays zero, and
    nobody reads the one behind it."""

    def __init__(self, layers: Sequence[StateLayer] = ()) -> None:
        self._layers = layers
        self.num_slots = 0  # set by `allocate`

    def __bool__(self) -> bool:
        """Whether the model keeps running states, so that each segment needs slots."""
        return bool(self._layers)

    @torch.inference_mode()
    def allocate(self, num_slots: int, max_batch_size: int, dtype: torch.dtype) -> None:
        """Make room for `num_slots` states; earlier ones are lost. A step may have `max_batch_size` rows."""
        self.num_slots = num_slots
        if self._layers:
            size = max(1, *(layer.state_size for layer in self._layers))
            buffer = zeros((max_batch_size, size), torch.float32, self._layers[0].device)
        for layer in self._layers:
            layer.allocate(num_slots, dtype, buffer)

    def begin(self, step: StateStep | None) -> None:
        """Tell the layers which slots the next pass through the model uses."""
        for layer in self._layers:
            layer.step = step

    @property
    def pools(self) -> list[Pool]:
        """The memory of all layers, whose blocks are the slots."""
        return [Pool(memory, axis=0) for layer in self._layers for memory in layer.memory]

    def nbytes(self, dtype: torch.dtype) -> int:
        """The size of one state, in all layers."""
        return sum(layer.state_bytes(dtype) for layer in self._layers)

    @property
    def flops(self) -> int:
        """The floating-point operations for a token in the states of all layers."""
        return sum(layer.flops for layer in self._layers)
