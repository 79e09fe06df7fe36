"""Adapters in the compiled kernels."""

from __future__ import annotations

import ctypes
from typing import ClassVar

_INT, _POINTER, _FLOAT = ctypes.c_int64, ctypes.c_void_p, ctypes.c_float


class LowRankAddition(ctypes.Structure):
    """What an adapter adds to one layer, as the kernels read it; a rank of 0 adds nothing."""

    _fields_: ClassVar = [
        *((name, _POINTER) for name in ("a", "b")),
        *((name, _INT) for name in ("rank", "start", "end")),
        ("scale", _FLOAT),
    ]
