"""Layers with a running state in the compiled kernels."""

from __future__ import annotations

import ctypes
from typing import ClassVar

from .library import Product

_INT, _POINTER = ctypes.c_int64, ctypes.c_void_p


class Convolution(ctypes.Structure):
    """A causal convolution, and the last inputs of each sequence, as the kernels read them."""

    _fields_: ClassVar = [
        *((name, _POINTER) for name in ("taps", "bias", "inputs")),
        *((name, _INT) for name in ("num_taps", "num_channels")),
    ]


class Mamba(ctypes.Structure):
    """A Mamba-2 layer as the kernels read it."""

    _fields_: ClassVar = [
        ("convolution", Convolution),
        *((name, _POINTER) for name in ("rates", "shift", "direct", "norm", "states")),
        *((name, _INT) for name in ("num_heads", "num_groups", "key_size", "head_size", "norm_size")),
        *((name, ctypes.c_float) for name in ("least", "most", "epsilon")),
    ]


class Delta(ctypes.Structure):
    """A gated delta net as the kernels read it."""

    _fields_: ClassVar = [
        *((name, Product) for name in ("gates", "rates", "decays")),
        ("convolution", Convolution),
        *((name, _POINTER) for name in ("fading", "shift", "norm", "states")),
        *((name, _INT) for name in ("num_keys", "num_values", "key_size", "value_size")),
        ("epsilon", ctypes.c_float),
    ]
