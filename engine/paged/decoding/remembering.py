"""Gated delta nets in the compiled decoder, which share their states with the modules of `state/delta_net.py`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from ...cpu.delta import Delta
from ..state.slots import NO_STATE, StateUse
from .decoder import Layer
from .linear import known_product

if TYPE_CHECKING:  # it imports transformers
    from ..state.delta_net import SplitDeltaNet


class Remembering:
    """One layer with a running state, as the kernels read it."""

    def __init__(self, layer: Layer, address: Callable[[Tensor], int]) -> None:
        """`address` keeps float32 numbers alive, and tells where they are."""
        assert layer.delta is not None
        self.module: SplitDeltaNet = layer.delta
        self.width, self.num_values = self.module.taps.shape[1], self.module.num_values
        given = [self.module.taps, self.module.bias, self.module.decay, self.module.dt_bias, self.module.norm.weight]
        products = [known_product(linear) for linear in (layer.delta_gates, layer.rates, layer.decays)]
        sizes = self.module.num_keys, self.module.num_values, self.module.key_size, self.module.value_size
        self.delta = Delta(
            *products,
            *(None if tensor is None else address(tensor) for tensor in given),
            0,
            0,
            len(self.module.taps),
            *sizes,
            self.module.norm.variance_epsilon,
        )

    @property
    def address(self) -> int:
        """Where the kernels find it."""
        return ctypes.addressof(self.delta)

    def attach(self) -> int:
        """Use the module's memory, which may be another one than before; returns how many slots it has."""
        inputs, states = self.module.memory
        self.delta.inputs, self.delta.states = inputs.data_ptr(), states.data_ptr()
        return len(states) - 1


def slots_of(use: StateUse | None, count: int, zero: int) -> tuple[int, Sequence[int]]:
    """For the kernels: the slot that a segment of `count` tokens reads, and those that it writes, each behind the
    number of the tokens before it. `zero` is the slot that is always zero."""
    if use is None:
        return 0, ()
    source = zero if use.source == NO_STATE else use.source
    return source, [number for pair in (*use.captures, (count, use.target)) for number in pair]
