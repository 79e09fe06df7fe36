"""What this machine can do at most at this moment: bytes read a second, operations of matrix products a second.

Memory bandwidth of shared machines jumps by tens of per cent from one second to the next: measure it again and again
beside what is to be judged by it. A limit is the best of several ways, so that nothing looks good beside a way that
happens to be slow here; each way is taken by all of its work in all of its time, as the judged work is.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from statistics import harmonic_mean

import torch
from torch import Tensor
from torch.nn import functional

from ...engine.paged.decoding.linear import make_packed, packs_bfloat16

_COLUMNS = 4096
SHAPES = ((512, 4096, 4096), (1024, 1024, 1024))  # [M, K] x [K, N]
_CUDA_MEMORY = 2 << 30  # so much that a launch does not count
_CUDA_SIDE = 8192

Ways = list[tuple[int, Callable[[], Tensor]]]  # how much each reads or computes, and what does it
Sample = dict[str, list[float]]


def read_size() -> int:
    """How many bytes each way reads on a CPU: at most a quarter of them may lie in the last cache."""
    cache = os.sysconf("SC_LEVEL3_CACHE_SIZE") if "SC_LEVEL3_CACHE_SIZE" in os.sysconf_names else 0
    return max(512 << 20, 4 * cache)


@torch.inference_mode()
def prepare(dtype: torch.dtype, device: torch.device) -> dict[str, Ways]:
    """Ways to read memory (`read_bytes`), and to compute (`flops`); they hold about 1 GiB, twice what is read; on CUDA
    4 GiB."""
    if device.type == "cuda":
        return _prepare_cuda(dtype, device)
    if dtype == torch.bfloat16 and not packs_bfloat16():
        dtype = torch.float32  # in which such a CPU computes bfloat16, at best
    numbers = torch.ones(read_size() // (4 * _COLUMNS), _COLUMNS)
    size, row = numbers.nbytes, torch.ones(1, _COLUMNS, dtype=dtype)
    packed = make_packed(torch.ones(size // row.nbytes, _COLUMNS, dtype=dtype), None, None)
    reads: Ways = [(size, numbers.sum), (size, numbers.view(torch.int64).sum), (size, lambda: packed(row))]
    return {"read_bytes": reads, "flops": [way for shape in SHAPES for way in _products(*shape, dtype)]}


def _prepare_cuda(dtype: torch.dtype, device: torch.device) -> dict[str, Ways]:
    weight = torch.ones(_CUDA_MEMORY // dtype.itemsize // _COLUMNS, _COLUMNS, dtype=dtype, device=device)
    row, copy = weight[:1].clone(), torch.empty_like(weight)
    size = weight.nbytes
    reads: Ways = [
        (size, weight.sum),
        (size, weight.view(torch.float32).sum),
        (size, lambda: functional.linear(row, weight)),
        (2 * size, lambda: copy.copy_(weight)),  # reads and writes as much
    ]
    x, flops = torch.randn(_CUDA_SIDE, _CUDA_SIDE, device=device).to(dtype), 2 * _CUDA_SIDE**3
    return {"read_bytes": reads, "flops": [(flops, lambda: torch.mm(x, x)), (flops, lambda: functional.linear(x, x))]}


@torch.inference_mode()
def measure(ways: dict[str, Ways]) -> Sample:
    """How much of each a second in each way, with torch's own number of threads."""
    return {name: [_rate(*way) for way in those] for name, those in ways.items()}


def limit(samples: Sequence[Sample], name: str) -> float:
    """The most of it a second: of the best way over all samples."""
    return float(max(map(harmonic_mean, zip(*(sample[name] for sample in samples), strict=True))))


def _products(m: int, k: int, n: int, dtype: torch.dtype) -> Ways:
    x, weight, count = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype), 2 * m * k * n
    packed, plain = make_packed(weight, None, None), weight.t().contiguous()
    return [(count, lambda: packed(x)), (count, lambda: torch.mm(x, plain))]


def _rate(amount: int, way: Callable[[], Tensor]) -> float:
    start = time.perf_counter()
    if way().is_cuda:
        torch.cuda.synchronize()
    return amount / (time.perf_counter() - start)
