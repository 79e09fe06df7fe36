"""What this machine can do at most at this moment: bytes read a second, operations of matrix products a second.

Memory bandwidth of shared machines moves by tens of per cent within seconds: measure it before and after what is to be
judged by it. A limit is the best of several ways, so that nothing looks good beside a way that happens to be slow here.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch
from torch import Tensor

from ..engine.linear import PackedLinear

_MEMORY = 512 << 20  # bytes read, or more: at most a quarter of them may lie in the last cache
_COLUMNS = 4096
_SHAPES = ((512, 4096, 4096), (1024, 1024, 1024))  # [M, K] x [K, N]
_REPEATS = 2  # of each way, each time

_Way = tuple[int, Callable[[], Tensor]]  # how much it reads or computes, and what does it


class Machine:
    """Measures with torch's own number of threads. Holds about 1 GiB, twice what it reads."""

    @torch.inference_mode()
    def __init__(self, dtype: torch.dtype) -> None:
        cache = os.sysconf("SC_LEVEL3_CACHE_SIZE") if "SC_LEVEL3_CACHE_SIZE" in os.sysconf_names else 0
        numbers = torch.ones(max(_MEMORY, 4 * cache) // (4 * _COLUMNS), _COLUMNS)
        size, integers, row = numbers.nbytes, numbers.view(torch.int64), torch.ones(1, _COLUMNS, dtype=dtype)
        packed = PackedLinear(torch.ones(size // row.nbytes, _COLUMNS, dtype=dtype), None)
        self._reads: list[_Way] = [(size, numbers.sum), (size, integers.sum), (size, lambda: packed(row))]
        self._products = [way for shape in _SHAPES for way in _products(*shape, dtype)]

    @torch.inference_mode()
    def measure(self) -> dict[str, float]:
        """The most of both a second; [M, K] x [K, N] takes 2 M K N `flops`."""
        return {"read_bytes": _best(self._reads), "flops": _best(self._products)}


def _products(m: int, k: int, n: int, dtype: torch.dtype) -> list[_Way]:
    x, weight, count = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype), 2 * m * k * n
    packed, plain = PackedLinear(weight, None), weight.t().contiguous()
    return [(count, lambda: packed(x)), (count, lambda: torch.mm(x, plain))]


def _best(ways: list[_Way]) -> float:
    rates = []
    for amount, way in ways * _REPEATS:
        start = time.perf_counter()
        way()
        rates.append(amount / (time.perf_counter() - start))
    return max(rates)
