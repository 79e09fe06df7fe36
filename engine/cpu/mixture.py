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
        *((name, _INT) for name in ("count", "used", "is_normed", "is_clamped", "has_sigmoids", "has_gelu")),
        *((name, _POINTER) for name in ("preferences", "factors")),
        *((name, ctypes.c_float) for name in ("alpha", "limit", "scale", "least", "factor")),
    ]


class Clamp(NamedTuple):
    """How gpt-oss gates: gates and ups alternate, and neither is beyond `limit`."""

    alpha: float
    limit: float


class Choosing(NamedTuple):
    """How a router chooses the `used` experts of a row, and what their shares are.

    With `is_normed` they are divided by their sum and `least`. `preferences` [experts], float32, count in the choice
    alone; each expert's share is multiplied by its own of the `factors` [experts], float32.
    """

    used: int
    is_normed: bool
    has_sigmoids: bool = False
    preferences: Tensor | None = None
    scale: float = 1.0
    least: float = 0.0
    factors: Tensor | None = None


class Sizes(NamedTuple):
    """The experts of a mixture, the size of a row, and that of what is between an expert's products."""

    experts: int
    outer: int
    inner: int


class Room(ctypes.Structure):
    """Buffers for MOST_ROWS rows in mixtures of the same sizes, where each row passes `used` experts."""

    _fields_: ClassVar = [
        *((name, _POINTER) for name in ("routes", "chosen", "shares")),
        *((name, _POINTER) for name in ("inputs", "gated", "sums", "levels")),
    ]

    def __init__(self, sizes: Sizes, used: int, dtype: torch.dtype) -> None:
        slots = MOST_ROWS * used + TILE_ROWS
        self.tensors = {  # kept alive: the structure holds their addresses
            "chosen": torch.zeros((MOST_ROWS, used), dtype=torch.int64),
            "shares": torch.zeros((MOST_ROWS, used)),
            "routes": torch.zeros((MOST_ROWS, sizes.experts)),
            "inputs": torch.zeros((slots, sizes.outer), dtype=dtype),
            "gated": torch.zeros((slots, sizes.inner), dtype=dtype),
            "sums": torch.zeros((slots, 2 * sizes.inner)),
            "levels": torch.zeros(max(room_for(slots, size) for size in sizes[1:]), dtype=torch.uint8),
        }
        super().__init__(**{name: tensor.data_ptr() for name, tensor in self.tensors.items()})


class Rooms:
    """The buffers that the layers of a model share."""

    def __init__(self) -> None:
        self._room: Room | None = None
        self._made_for: tuple[object, ...] = ()

    def fit(self, sizes: Sizes, used: int, dtype: torch.dtype) -> Room:
        """The last ones, or new ones if those are for something else."""
        if self._room is None or self._made_for != (sizes, used, dtype):
            self._room, self._made_for = Room(sizes, used, dtype), (sizes, used, dtype)
        return self._room


class Experts:
    """The products of a mixture's experts: gates and ups side by side, and what follows their product.

    Gates are SiLU's, or with `has_gelu` GELU's, before the ups, unless there is a `clamp`.
    """

    def __init__(
        self,
        inner: Sequence[Product],
        outer: Sequence[Product],
        clamp: Clamp | None,
        kernels: Kernels,
        rooms: Rooms,
        has_gelu: bool,
    ) -> None:
        """See `of`."""
        self._clamp, self._has_gelu = clamp, has_gelu
        self.sizes, self._firsts = Sizes(len(inner), inner[0].inputs, outer[0].inputs), (inner[0], outer[0])
        self._inner, self._outer = ((Product * len(inner))(*products) for products in (inner, outer))
        self._kept_alive = (*inner, *outer)  # the arrays hold addresses of what these have
        self._kernels, self._rooms = kernels, rooms

    @classmethod
    def of(
        cls,
        inner: Sequence[Product | None],
        outer: Sequence[Product | None],
        clamp: Clamp | None,
        kernels: Kernels,
        rooms: Rooms,
        has_gelu: bool = False,
    ) -> Self | None:
        """None unless the kernels take them: all of a kind, and of the sizes of gated experts."""
        firsts, seconds = ([one for one in products if one is not None] for products in (inner, outer))
        if len(firsts) < len(inner) or len(seconds) < len(outer):
            return None
        if any(len({_kind(one) for one in products}) > 1 for products in (firsts, seconds)):
            return None
        first, second = firsts[0], seconds[0]
        fits = first.outputs == 2 * second.inputs and first.inputs == second.outputs
        return cls(firsts, seconds, clamp, kernels, rooms, has_gelu) if fits else None

    def take(self, dtype: torch.dtype) -> bool:
        """Whether inputs may have this dtype: numbers are multiplied by those of their own alone."""
        return all(one.kind != PLAIN or _dtype(one) == dtype for one in self._firsts)

    def room(self, used: int, dtype: torch.dtype) -> Room:
        """The buffers for rows of so many experts each, which all layers share."""
        return self._rooms.fit(self.sizes, used, dtype)

    def mixture(self, router: Product, choosing: Choosing, factor: float = 1.0) -> Mixture:
        """What it adds is multiplied by `factor`. The caller keeps `router` and what belongs to each expert alive."""
        used, is_normed, has_sigmoids, preferences, scale, least, factors = choosing
        addresses = (ctypes.addressof(products) for products in (self._inner, self._outer))
        kind = used, is_normed, self._clamp is not None, has_sigmoids, self._has_gelu
        each = (None if one is None else one.data_ptr() for one in (preferences, factors))
        clamp = self._clamp or Clamp(0, 0)
        return Mixture(router, *addresses, self.sizes.experts, *kind, *each, *clamp, scale, least, factor)

    def __call__(self, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """[T, E], and for each token its experts and their shares, [T, K] each → [T, E].

        Raises `IndexError` for an expert that is not there.
        """
        used, half, threads = chosen.shape[1], x.dtype == torch.bfloat16, torch.get_num_threads()
        mixture, room = self.mixture(Product(), Choosing(used, False)), self.room(used, x.dtype)
        x, result = x.contiguous(), torch.zeros(x.shape)
        for start in range(0, len(x), MOST_ROWS):
            rows, to = x[start : start + MOST_ROWS], result[start : start + MOST_ROWS]
            room.tensors["chosen"][: len(rows)] = chosen[start : start + MOST_ROWS]
            room.tensors["shares"][: len(rows)] = shares[start : start + MOST_ROWS]
            buffers = ctypes.byref(room), to.data_ptr()
            arguments = rows.data_ptr(), len(rows), *buffers, half, threads
            if self._kernels.library.mix_rows(ctypes.byref(mixture), *arguments):
                raise IndexError(f"a token passes an expert that is none of the {self.sizes.experts}")
        return result.to(x.dtype)


def _kind(product: Product) -> tuple[tuple[int, ...], ...]:
    parts = product.parts
    return tuple((one.inputs, one.outputs, one.kind, one.scale_type, one.has_zeros, one.middle) for one in parts)


def _dtype(product: Product) -> torch.dtype | None:
    weight = product.tensors[0]
    return None if weight is None else weight.dtype
