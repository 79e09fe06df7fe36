"""Inputs of a token's own for each layer in the compiled kernels."""

from __future__ import annotations

import ctypes
from typing import ClassVar

from .library import Product
from .rows import Table

_INT, _POINTER, _FLOAT = ctypes.c_int64, ctypes.c_void_p, ctypes.c_float


class LayerInputs(ctypes.Structure):
    """Where the inputs of all layers come from, as the kernels read it."""

    _fields_: ClassVar = [
        ("projection", Product),
        ("embeddings", Table),
        *((name, _POINTER) for name in ("found", "norm")),
        *((name, _INT) for name in ("size", "are_given")),
        ("made", _POINTER),
        *((name, _FLOAT) for name in ("epsilon", "scale", "projection_scale", "sum_scale")),
    ]


class LayerInput(ctypes.Structure):
    """What one layer makes of its own inputs."""

    _fields_: ClassVar = [
        *((name, Product) for name in ("gate", "projection")),
        ("norm", _POINTER),
        ("start", _INT),
        ("epsilon", _FLOAT),
    ]
