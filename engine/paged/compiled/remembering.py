"""Layers with a running state in the compiled decoder, which share their states with the modules of `state/`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ...cpu.states import Convolution, Delta, Mamba
from ..decoding.layer import Layer
from ..decoding.linear import known_product
from ..state.layer import SPARE, StateLayer
from ..state.slots import NO_STATE, StateUse


class Remembering:
    """One layer with a running state, as the kernels read it: a short convolution, or a delta net or Mamba-2 layer
    with its own."""

    def __init__(self, layer: Layer, address: Callable[[Tensor], int]) -> None:
        """`address` keeps float32 numbers alive, and tells where they are."""
        assert layer.state is not None
        self.module: StateLayer = layer.state
        taps, bias = self.module.taps, self.module.bias
        given = address(taps), None if bias is None else address(bias)
        self._convolution = Convolution(*given, None, *taps.shape)
        self.delta = self._make_delta(layer, address) if layer.is_delta_net else None
        self.mamba = self._make_mamba(address) if layer.is_mamba else None

    @property
    def convolution(self) -> Convolution:
        own = self.delta or self.mamba
        found: Convolution = self._convolution if own is None else own.convolution
        return found

    def point(self, to: Any) -> None:
        """Let a layer as the kernels read it find this one."""
        for name, own in (("delta", self.delta), ("mamba", self.mamba), ("convolution", self._convolution)):
            if own is not None:
                setattr(to, name, ctypes.addressof(own))
                return

    def attach(self) -> int:
        """Use the module's memory, which may be another one than before; returns how many slots it has."""
        inputs, *states = self.module.memory
        self.convolution.inputs = inputs.data_ptr()
        if (own := self.delta or self.mamba) is not None:
            own.states = states[0].data_ptr()
        return len(inputs) - SPARE

    def _make_delta(self, layer: Layer, address: Callable[[Tensor], int]) -> Delta:
        net: Any = self.module
        products = [known_product(linear) for linear in (layer.delta_gates, layer.rates, layer.decays)]
        numbers = [address(tensor) for tensor in (net.decay, net.dt_bias, net.norm.weight)]
        sizes = net.num_keys, net.num_values, net.key_size, net.value_size
        return Delta(*products, self._convolution, *numbers, None, *sizes, net.norm.variance_epsilon)

    def _make_mamba(self, address: Callable[[Tensor], int]) -> Mamba:
        own: Any = self.module
        numbers = [address(tensor) for tensor in (own.rate, own.dt_bias, own.direct)]
        norm, width = own.norm, own.num_heads * own.head_size
        weight, epsilon = (None, 0) if norm is None else (address(norm.weight), norm.variance_epsilon)
        sizes = own.num_heads, own.num_groups, own.key_size, own.head_size
        group = width if norm is None else norm.group_size
        return Mamba(self._convolution, *numbers, weight, None, *sizes, group, *own.dt_limit, epsilon)


def slots_of(use: StateUse | None, count: int, zero: int) -> tuple[int, Sequence[int]]:
    """For the kernels: the slot that a segment of `count` tokens reads, and those that it writes, each behind the
    number of the tokens before it. `zero` is the slot that is always zero."""
    if use is None:
        return 0, ()
    source = zero if use.source == NO_STATE else use.source
    return source, [number for pair in (*use.captures, (count, use.target)) for number in pair]
