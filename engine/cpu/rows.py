"""Tables of embeddings that stay in the blocks of their file: a row becomes numbers when it is looked up."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

if TYPE_CHECKING:  # it calls the function here
    from .library import Kernels

TYPES = {"Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14}
TYPES |= {"IQ4_NL": 20, "MXFP4": 39, "MXFP4_PAIRS": 40}
"""The types of blocks that the kernels read, by ggml's names, as in the source."""

_INT, _POINTER = ctypes.c_int64, ctypes.c_void_p


class Table(ctypes.Structure):
    """Embeddings as the kernels read them: `numbers`, or the other fields."""

    _fields_: ClassVar = [
        ("numbers", _POINTER),
        *((name, _INT) for name in ("type", "row_bytes", "size")),
        *((name, _POINTER) for name in ("data", "levels")),
    ]


class Rows:
    """Embeddings [V, E] in blocks, as bfloat16."""

    def __init__(self, kernels: Kernels, kind: str, data: Tensor, size: int, levels: Sequence[int] = ()) -> None:
        """`data` uint8 [V, bytes of a row] has a type of `TYPES`, `size` is E. `levels` are the 16 numbers that levels
        stand for, if the type has them."""
        self._kernels, self._data, self._room = kernels, data.contiguous(), torch.empty(size)
        self._levels = (ctypes.c_int8 * 16)(*levels)
        given = TYPES[kind], self._data.shape[1], size, self._data.data_ptr(), ctypes.addressof(self._levels)
        self.compiled = Table(None, *given)

    def __len__(self) -> int:
        return len(self._data)

    @property
    def size(self) -> int:
        """E."""
        return len(self._room)

    @property
    def nbytes(self) -> int:
        return self._data.nbytes

    def __call__(self, ids: Tensor) -> Tensor:
        """The rows `ids` [...], as [..., E]. Raises `IndexError` for one that there is not."""
        wanted = ids.to(torch.int64).contiguous()
        if wanted.numel() and not 0 <= int(wanted.min()) <= int(wanted.max()) < len(self):
            raise IndexError(f"a token has no place in the vocabulary of {len(self)}")
        found = torch.empty((*ids.shape, self.size), dtype=torch.bfloat16)
        given = ctypes.byref(self.compiled), wanted.data_ptr(), wanted.numel()
        self._kernels.library.read_rows(*given, self._room.data_ptr(), found.data_ptr())
        return found
