"""Mixtures of experts in the compiled kernels: one call for all experts of a step."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from .library import MOST_ROWS, PLAIN, TILE_ROWS, Kernels, Product, room_for

_INT, _POINTER = ctypes.c_int64, ctypes.c_void_p


class Mixture(ctypes.Structure):
    """A layer's experts and their router as the kernels read them; who chooses by itself needs no router."""

    _fields_: ClassVar = [
        ("router", Product),
        *((name, _POINTER) for name in ("inner", "outer")),
        *((name, _INT) for name in ("count", "used", "is_normed", "is_clamped")),
        *((name, ctypes.c_float) for name in ("alpha", "limit")),
    ]


class Clamp(NamedTuple):
    """How gpt-oss gates: gates and ups alternate, and neither is beyond `limit`."""

    alpha: float
    limit: float


class Room(ctypes.Structure):
    """Buffers for the rows of a step in any of some mixtures; each row passes `used` experts."""

    _fields_: ClassVar = [
        *((name, _POINTER) for name in ("routes", "chosen", "shares")),
        *((name, _POINTER) for name in ("inputs", "gated", "sums", "levels")),
    ]

    def __init__(self, mixtures: Sequence[Experts], rows: int, used: int, dtype: torch.dtype) -> None:
        slots = rows * used + TILE_ROWS
        inner, outer = ([one.firsts[index] for one in mixtures] for index in range(2))
        self.tensors = {  # kept alive: the structure holds their addresses
            "chosen": torch.zeros((rows, used), dtype=torch.int64),
            "shares": torch.zeros((rows, used)),
            "routes": torch.zeros((rows, max(one.count for one in mixtures))),
            "inputs": torch.zeros((slots, max(one.inputs for one in inner)), dtype=dtype),
            "gated": torch.zeros((slots, max(one.inputs for one in outer)), dtype=dtype),
            "sums": torch.zeros((slots, max(one.outputs for one in inner))),
            "levels": torch.zeros(max(room_for(slots, one.inputs) for one in (*inner, *outer)), dtype=torch.uint8),
        }
        super().__init__(**{name: tensor.data_ptr() for name, tensor in self.tensors.items()})


class Rooms:
    """The buffers that the layers of a model share."""

    def __init__(self) -> None:
        self._room: Room | None = None
        self._sizes: tuple[object, ...] = ()

    def fit(self, experts: Experts, used: int, dtype: torch.dtype) -> Room:
        """Those for MOST_ROWS rows, new ones if the last had other sizes."""
        inner, outer = experts.firsts
        sizes = inner.inputs, inner.outputs, outer.inputs, used, dtype
        if self._room is None or sizes != self._sizes:
            self._room, self._sizes = Room([experts], MOST_ROWS, used, dtype), sizes
        return self._room


class Experts:
    """The products of a mixture's experts: gates and ups side by side, and what follows their product.

    Gates are SiLU's, before the ups, unless there is a `clamp`.
    """

    def __init__(
        self,
        inner: Sequence[Product],
        outer: Sequence[Product],
        clamp: Clamp | None,
        kernels: Kernels,
        rooms: Rooms,
    ) -> None:
        """See `of`."""
        self._clamp = clamp
        self.count, self.firsts = len(inner), (inner[0], outer[0])
        self._inner, self._outer = (Product * self.count)(*inner), (Product * self.count)(*outer)
        self._tensors = [product.tensors for product in (*inner, *outer)]
        self._kernels, self._rooms = kernels, rooms

    @classmethod
    def of(
        cls,
        inner: Sequence[Product | None],
        outer: Sequence[Product | None],
        clamp: Clamp | None,
        kernels: Kernels,
        rooms: Rooms,
    ) -> Self | None:
        """None unless the kernels take them: all of a kind, and of the sizes of gated experts."""
        firsts, seconds = ([one for one in products if one is not None] for products in (inner, outer))
        if len(firsts) < len(inner) or len(seconds) < len(outer):
            return None
        if any(len({_kind(one) for one in products}) > 1 for products in (firsts, seconds)):
            return None
        first, second = firsts[0], seconds[0]
        fits = first.outputs == 2 * second.inputs and first.inputs == second.outputs
        return cls(firsts, seconds, clamp, kernels, rooms) if fits else None

    def take(self, dtype: torch.dtype) -> bool:
        """Whether inputs may have this dtype: numbers are multiplied by those of their own alone."""
        return all(one.kind != PLAIN or _dtype(one) == dtype for one in self.firsts)

    def mixture(self, router: Product, used: int, is_normed: bool) -> Mixture:
        """The caller keeps `router` alive."""
        addresses = (ctypes.addressof(products) for products in (self._inner, self._outer))
        clamp = self._clamp or Clamp(0, 0)
        return Mixture(router, *addresses, self.count, used, is_normed, self._clamp is not None, *clamp)

    def __call__(self, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """[T, E], and for each token its experts and their shares, [T, K] each → [T, E].

        Raises `IndexError` for an expert that is not there.
        """
        used, half, threads = chosen.shape[1], x.dtype == torch.bfloat16, torch.get_num_threads()
        mixture, room = self.mixture(Product(), used, False), self._rooms.fit(self, used, x.dtype)
        x, result = x.contiguous(), torch.zeros(x.shape)
        for start in range(0, len(x), MOST_ROWS):
            rows, to = x[start : start + MOST_ROWS], result[start : start + MOST_ROWS]
            room.tensors["chosen"][: len(rows)] = chosen[start : start + MOST_ROWS]
            room.tensors["shares"][: len(rows)] = shares[start : start + MOST_ROWS]
            buffers = ctypes.byref(room), to.data_ptr()
            arguments = rows.data_ptr(), len(rows), *buffers, half, threads
            if self._kernels.library.mix_rows(ctypes.byref(mixture), *arguments):
                raise IndexError(f"a token passes an expert that is none of the {self.count}")
        return result.to(x.dtype)


def _kind(product: Product) -> tuple[int, ...]:
    return (
        *(product.inputs, product.outputs, product.kind),
        *(product.scale_type, product.has_zeros, product.middle),
    )


def _dtype(product: Product) -> torch.dtype | None:
    weight = product.tensors[0]
    return None if weight is None else weight.dtype
