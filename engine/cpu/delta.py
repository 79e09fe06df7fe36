"""Gated delta nets in the compiled kernels."""

from __future__ import annotations

import ctypes
from typing import ClassVar

from .library import Product

_INT, _POINTER = ctypes.c_int64, ctypes.c_void_p


class Delta(ctypes.Structure):
    """A layer with a running state as the kernels read it."""

    _fields_: ClassVar = [
        *((name, Product) for name in ("gates", "rates", "decays")),
        *((name, _POINTER) for name in ("taps", "bias", "fading", "shift", "norm", "inputs", "states")),
        *((name, _INT) for name in ("num_taps", "num_keys", "num_values", "key_size", "value_size")),
        ("epsilon", ctypes.c_float),
    ]
