"""Products of bfloat16 activations and weights that stay levels in a GPU's memory (`source/levels.cu`).

Few rows read the levels and need no other memory. More rows are computed faster by cuBLAS, from the weight expanded to
bfloat16 into a buffer that all products share.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional

from ...config.directories import user_cache
from ..checkpoints.rounded import Rounded, looked_up
from .compiling import NotCompiled, is_there, program

GROUP, TILE = 32, 16
"""Inputs that share a scale, and outputs that lie together, as in the source."""

MOST_ROWS = 128
"""The most rows for which the levels are read; more are multiplied faster by the expanded weight."""

_SOURCE = Path(__file__).with_name("source") / "levels.cu"
_LEAST = (8, 0)  # the oldest GPUs whose matrix instructions take bfloat16
_SCALE_TYPES = (torch.bfloat16, torch.float16, torch.float32)
_EXPANDED = 1 << 26  # numbers of a weight that are expanded at a time
_ARRANGED = 1 << 24  # levels that are arranged at a time
_WARPS = 8  # of `arrange` and `expand`, as in the source
_EXPAND_GROUPS = 4  # of a warp of `expand`, as in the source


class _Shape(NamedTuple):
    """How a product is divided, as in the source: tiles of 8 rows and of 16 outputs of a warp, bundles of warps in a
    block, warps that share the groups, groups that a warp reads at a time, and whether numbers are rounded first."""

    rows: int
    tiles: int
    bundles: int
    turns: int
    ahead: int
    is_rounded: bool = False

    @property
    def name(self) -> str:
        return "product_" + "_".join(map(str, self[:5]))


# By the most rows: for weights of up to 256 tiles (4,096 outputs), of up to 512, and of more. The fewer there are, the
# more warps share each. Measured on an H100 with the products of an 8B model.
_FEW_TILES, _SOME_TILES = 256, 512
_SHAPES = {
    8: (_Shape(1, 1, 1, 16, 4), _Shape(1, 1, 1, 8, 4), _Shape(1, 1, 1, 4, 4)),
    16: (_Shape(2, 1, 1, 16, 2), _Shape(2, 1, 1, 8, 4), _Shape(2, 2, 1, 4, 4)),
    32: (_Shape(4, 1, 1, 16, 2, True), _Shape(4, 1, 1, 8, 4, True), _Shape(4, 2, 2, 4, 2, True)),
    MOST_ROWS: (_Shape(8, 1, 1, 8, 2, True), _Shape(8, 1, 1, 4, 4, True), _Shape(8, 2, 2, 2, 2, True)),
}
_ALL_SHAPES = tuple(chain.from_iterable(_SHAPES.values()))
_PRODUCTS = " ".join(f"PRODUCT({shape.name},{','.join(str(int(each)) for each in shape)})" for shape in _ALL_SHAPES)


class Form(NamedTuple):
    """What the source is compiled for."""

    bits: int
    middle: int
    is_float: bool  # 8 bits are E4M3
    is_fine: bool
    has_zeros: bool
    scale_type: torch.dtype

    @classmethod
    def of(cls, rounded: Rounded) -> Self:
        is_float, is_fine = rounded.levels.dtype == torch.float8_e4m3fn, rounded.size < GROUP
        return cls(rounded.bits, rounded.middle, is_float, is_fine, rounded.zeros is not None, rounded.scales.dtype)

    @property
    def options(self) -> list[str]:
        values = {
            "BITS": self.bits,
            "MIDDLE": self.middle,
            "FLOATS": int(self.is_float),
            "FINE": int(self.is_fine),
            "ZEROS": int(self.has_zeros),
            "SCALE": _SCALE_TYPES.index(self.scale_type),
            "PRODUCTS": _PRODUCTS,
        }
        return [f"-D{name}={value}" for name, value in values.items()]


class LevelWeight(NamedTuple):
    """A weight [O, I] as the source describes it: `levels` uint8 [O / 16, I / 32, 32, 8 or 16], `factors` [O / 16,
    I / 32, 1 or 2, 8, 2, 1 or 2]."""

    levels: Tensor
    factors: Tensor
    form: Form
    outputs: int
    inputs: int

    @classmethod
    def of(cls, rounded: Rounded, device: torch.device) -> Self:
        """Arrange a weight, wherever it is; what a table says of its levels becomes levels of 8 bits."""
        rounded = _moved(rounded, device)
        if rounded.table:
            whole = looked_up(rounded.levels, rounded.table)
            rounded = rounded._replace(levels=whole, bits=8, middle=0, table=())
        elif rounded.bits == 8 and rounded.middle:
            rounded = rounded._replace(levels=rounded.levels - rounded.middle, middle=0)
        form = Form.of(rounded)
        rounded = rounded._replace(levels=rounded.levels.view(torch.int8))
        rows = max(TILE, _ARRANGED // rounded.levels.shape[1] // TILE * TILE)
        levels = torch.cat([_arranged(part, form.bits) for part in rounded.levels.split(rows)])  # type: ignore[no-untyped-call]
        return cls(levels, _arranged_factors(rounded, form), form, *rounded.levels.shape)

    @property
    def nbytes(self) -> int:
        return self.levels.nbytes + self.factors.nbytes


class LevelKernels:
    """The compiled products for one GPU."""

    def __init__(self, device: torch.device, cache: Path | None = None) -> None:
        """Raises `NotCompiled` for a GPU that cannot run them, and where they cannot be compiled."""
        if reason := unsupported(device):
            raise NotCompiled(reason)
        self.device = device
        self._cache = cache or user_cache()
        self._functions: dict[tuple[Form, str], ctypes.c_void_p] = {}
        self._buffer = torch.empty(0, dtype=torch.bfloat16, device=device)

    @staticmethod
    def take(dtype: torch.dtype, inputs: int) -> bool:
        """Whether there are products for activations of this dtype, and so many inputs."""
        return dtype == torch.bfloat16 and inputs % GROUP == 0

    def prepare(self, weight: LevelWeight) -> None:
        """Compile what this weight needs, if nobody did, and make room to expand it: neither can happen while a CUDA
        graph is recorded. Raises `NotCompiled`."""
        room = min(_EXPANDED, weight.outputs * weight.inputs)
        if len(self._buffer) < room:
            self._buffer = torch.empty(room, dtype=torch.bfloat16, device=self.device)
        if (weight.form, "expand") in self._functions:
            return
        code = program(_SOURCE, weight.form.options, torch.cuda.get_device_capability(self.device), self._cache)
        module = ctypes.c_void_p()
        with torch.cuda.device(self.device):
            _check(self._driver.cuModuleLoadData(ctypes.byref(module), code))
        for name in ("expand", "arrange", *(shape.name for shape in _ALL_SHAPES)):
            function = ctypes.c_void_p()
            _check(self._driver.cuModuleGetFunction(ctypes.byref(function), module, name.encode()))
            self._functions[weight.form, name] = function

    def multiply(self, weight: LevelWeight, x: Tensor, bias: Tensor | None) -> Tensor:
        """x W' + b: [T, I] → [T, O]. In another dtype than bfloat16, which only checks of models use, it expands."""
        if len(x) > MOST_ROWS or x.dtype != torch.bfloat16:
            return self._multiply_expanded(weight, x, None if bias is None else bias.to(x.dtype))
        result = x.new_empty((len(x), weight.outputs))
        if not len(x):
            return result
        if x.stride(1) != 1 or x.stride(0) % 4 or x.data_ptr() % 8:  # the source reads four numbers at a time
            x = x.clone(memory_format=torch.contiguous_format)
        tiles, row_tiles, groups = len(weight.levels), -(-len(x) // 8), weight.inputs // GROUP
        shapes = next(shapes for most, shapes in _SHAPES.items() if len(x) <= most)
        shape = shapes[0 if tiles <= _FEW_TILES else 1 if tiles <= _SOME_TILES else 2]
        given: list[Tensor | int | None] = [x, x.stride(0), len(x)]
        if shape.rows == 1:
            given += [None, None]
        else:
            arranged = x.new_empty((groups, row_tiles, 32, 8))
            totals = x.new_empty((groups, 1 + weight.form.is_fine, 8 * row_tiles), dtype=torch.float32)
            grid = -(-groups // _WARPS), row_tiles
            self._launch(weight, "arrange", grid, 32 * _WARPS, [*given, arranged, totals, groups])
            given += [arranged, totals]
        given += [weight.levels, weight.factors, bias, result, weight.outputs, groups]
        grid = -(-tiles // (shape.tiles * shape.bundles)), -(-row_tiles // shape.rows)
        self._launch(weight, shape.name, grid, 32 * shape.bundles * shape.turns, given)
        return result

    def expanded(self, weight: LevelWeight, start: int = 0, stop: int | None = None) -> Tensor:
        """The outputs from `start` on, a multiple of 16, in bfloat16 [stop - start, I]; valid until the next call. They
        must fit into the buffer, which holds those of a whole weight or 2^26 numbers."""
        count = (weight.outputs if stop is None else min(stop, weight.outputs)) - start
        part, first = self._buffer[: count * weight.inputs].view(count, weight.inputs), start // TILE
        own = weight._replace(levels=weight.levels[first:], factors=weight.factors[first:], outputs=count)
        groups = weight.inputs // GROUP
        grid = -(-groups // (_WARPS * _EXPAND_GROUPS)), -(-count // TILE)
        self._launch(own, "expand", grid, 32 * _WARPS, [own.levels, own.factors, part, count, groups])
        return part

    def _multiply_expanded(self, weight: LevelWeight, x: Tensor, bias: Tensor | None) -> Tensor:
        rows = max(TILE, _EXPANDED // weight.inputs // TILE * TILE)
        if rows >= weight.outputs:
            return functional.linear(x, self.expanded(weight).to(x.dtype), bias)
        parts = (self.expanded(weight, at, at + rows).to(x.dtype) for at in range(0, weight.outputs, rows))
        result = torch.cat([functional.linear(x, part) for part in parts], dim=1)
        return result if bias is None else result.add_(bias)

    @cached_property
    def _driver(self) -> ctypes.CDLL:
        return ctypes.CDLL("libcuda.so.1")

    def _launch(
        self,
        weight: LevelWeight,
        name: str,
        grid: tuple[int, int],
        threads: int,
        given: Sequence[Tensor | int | None],
    ) -> None:
        """Call a kernel of the source; numbers are passed in 64 bits, of which it may read the first 32 alone."""
        arguments: list[ctypes.c_int64 | ctypes.c_void_p] = []
        for one in given:
            if isinstance(one, int):
                arguments.append(ctypes.c_int64(one))
            else:
                arguments.append(ctypes.c_void_p(None if one is None else one.data_ptr()))
        addresses = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        stream = ctypes.c_void_p(torch.cuda.current_stream(self.device).cuda_stream)
        function = self._functions[weight.form, name]
        _check(self._driver.cuLaunchKernel(function, *grid, 1, threads, 1, 1, 0, stream, addresses, None))


def _moved(rounded: Rounded, device: torch.device) -> Rounded:
    """On a device, with scales and zeros of one type that the source knows."""
    levels, scales, zeros = rounded.levels.to(device), rounded.scales.to(device), rounded.zeros
    zeros = None if zeros is None else zeros.to(device)
    if scales.dtype not in _SCALE_TYPES or (zeros is not None and zeros.dtype != scales.dtype):
        scales, zeros = scales.float(), None if zeros is None else zeros.float()
    return rounded._replace(levels=levels, scales=scales, zeros=zeros)


def unsupported(device: torch.device) -> str:
    """Why a GPU has no products of levels; empty if it has them."""
    if device.type != "cuda" or torch.version.cuda is None or not torch.cuda.is_available():  # AMD's are "cuda", too
        return f"{device} has no products of levels; use an NVIDIA GPU or a CPU"
    capability = torch.cuda.get_device_capability(device)
    if capability < _LEAST:
        return f"{device} has compute capability {capability[0]}.{capability[1]}, and products of levels need 8.0"
    if not is_there():
        return f"NVRTC is missing, which compiles products of levels for {device}; install nvidia-cuda-nvrtc"
    return ""


def _arranged(levels: Tensor, bits: int) -> Tensor:
    """Levels [O, I] in the order of the source, uint8 [⌈O / 16⌉, I / 32, 32, bytes]."""
    levels = functional.pad(levels, (0, 0, 0, -len(levels) % TILE))
    parts = levels.view(-1, 2, 8, levels.shape[1] // GROUP, 2, 4, 4)  # tile, side, row, group, half, t, number
    lanes = parts.permute(0, 3, 2, 5, 1, 4, 6).reshape(len(parts), -1, GROUP, 2, 8)  # tile, group, lane, side, number
    if bits == 8:
        return lanes.flatten(3).view(torch.uint8)
    pairs = lanes.view(*lanes.shape[:-1], 4, 2).int()
    shifts = torch.tensor([[4 * pair, 16 + 4 * pair] for pair in range(4)], device=levels.device, dtype=torch.int32)
    words = (pairs << shifts).sum((-1, -2)).to(torch.int32)  # bits of their own: the sum is their union
    return words.view(torch.uint8)


def _arranged_factors(rounded: Rounded, form: Form) -> Tensor:
    """Scales, and zeros, in the order of the source."""
    both = torch.stack((rounded.scales,) if rounded.zeros is None else (rounded.scales, rounded.zeros), dim=-1)
    both = functional.pad(both, (0, 0, 0, 0, 0, -len(both) % TILE))
    parts = both.view(-1, 2, 8, rounded.levels.shape[1] // GROUP, 1 + form.is_fine, both.shape[-1])
    return parts.permute(0, 3, 4, 2, 1, 5).contiguous()  # tile, group, part, row, side, factor


def _check(code: int) -> None:
    if code:
        raise RuntimeError(f"CUDA's driver failed with its error {code}")
