"""Loads the compiled kernels and calls them. They run on torch's threads: its OpenMP starts them."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional

from ...config.directories import user_cache
from .compiling import NATIVE, RUNS_PROGRAMS, NotCompiled, compiled, kept
from .machine import KERNEL_FLAGS, cpu_flags
from .variants import BUILT, find

MOST_ROWS = 256
"""The most rows of a product and the most tokens of a step, as in the source."""

BLOCK = 64
"""Outputs in one block of a weight, as in the source."""

GROUP = 32
"""Inputs of a quantised weight that share a scale, as in the source."""

WIDE_GROUPS = 8
"""Groups of a file's block of 256 inputs, as in the source."""

PLAIN, INT8, INT4, FINE, UNEVEN, SIX = range(6)
_SCALE_TYPES = (torch.bfloat16, torch.float16, torch.float32, torch.uint8)
_INPUT_BYTES = GROUP + 20  # of a group of quantised inputs, as in the source

TILE_ROWS = 16
"""Rows of AMX's tiles, as in the source."""

_OPENMP = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
_INT, _POINTER = ctypes.c_int64, ctypes.c_void_p


def span(weight: Tensor) -> tuple[int, int]:
    """The address and size in bytes of a tensor, in torch's or oneDNN's layout."""
    if weight.is_mkldnn:
        return torch.ops.mkldnn.data_ptr(weight), torch.ops.mkldnn._nbytes(weight)
    return weight.data_ptr(), weight.nbytes


class Product(ctypes.Structure):
    """A weight as the kernels read it; `tensors` keeps alive the memory that it points to."""

    _fields_: ClassVar = [
        *((name, _POINTER) for name in ("weight", "scales", "bias")),
        *((name, _INT) for name in ("inputs", "outputs", "kind", "scale_type", "has_zeros", "middle")),
        ("table", ctypes.c_int8 * 16),
        ("more", _POINTER),
    ]
    tensors: tuple[Tensor | None, ...]
    rest: Product | None = None  # what `more` points to

    @classmethod
    def of(
        cls,
        shape: Sequence[int],
        kind: int,
        weight: Tensor,
        scales: Tensor | None,
        bias: Tensor | None,
        middle: int = 0,
        table: Sequence[int] = (),
    ) -> Self:
        """`shape` is [O, I]; `weight` may be in oneDNN's layout; `scales` are [O / 64, G, 1 or 2, 64].

        Scales of one byte are the source's BYTES, [O / 64, I / 256, 1 or 2, 64 * (2 + 8)]. FINE and SIX have 2 G
        scales, or 64 * (2 + 16) bytes.
        `table` are the 16 numbers of UNEVEN.
        """
        bias = None if bias is None else bias.float()
        others = (None if tensor is None else tensor.data_ptr() for tensor in (scales, bias))
        about = (0, 0) if scales is None else (_SCALE_TYPES.index(scales.dtype), scales.shape[2] == 2)
        product = cls(span(weight)[0], *others, shape[1], shape[0], kind, *about, middle, (ctypes.c_int8 * 16)(*table))
        product.tensors = weight, scales, bias
        return product

    def followed_by(self, rest: Self) -> Self:
        """From now on this weight, of whole blocks of levels, has that of `rest` behind it; its bias is for both."""
        outputs: int = rest.outputs
        self.outputs += outputs
        self.rest, self.more = rest, ctypes.addressof(rest)
        return self

    @property
    def parts(self) -> list[Product]:
        """This one and those that follow, each with its own outputs and theirs."""
        return [self, *(self.rest.parts if self.rest is not None else ())]

    def room(self, rows: int) -> int:
        """The bytes that the inputs of so many rows take when they are quantised."""
        return 0 if self.kind == PLAIN else room_for(rows, self.inputs)


def room_for(rows: int, inputs: int) -> int:
    """The bytes of so many rows of quantised inputs."""
    return -(-rows // TILE_ROWS) * TILE_ROWS * -(-inputs // GROUP) * _INPUT_BYTES


class DrawParams(NamedTuple):
    """How to draw a token from one row of logits: a `top_k` of 0 excludes nothing, `uniform` is a number in [0, 1)."""

    row: int
    temperature: float
    min_p: float
    top_k: int
    top_p: float
    uniform: float


class Kernels:
    """The loaded library. Numbers are bfloat16 or float32.

    `has_tiles` says whether products in bfloat16 use AMX; then they are as fast as oneDNN's for many rows too.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        library.step.argtypes = [_POINTER, _POINTER, _INT, _POINTER, _POINTER]
        library.multiply_rows.argtypes = [_POINTER, _POINTER, _INT, _POINTER, _INT, _INT, _POINTER]
        library.draw.argtypes = [_POINTER, _INT, _POINTER, _INT, _POINTER, _POINTER, _INT]
        library.mix_rows.argtypes = [_POINTER, _POINTER, _INT, _POINTER, _POINTER, _INT, _INT]
        library.mix_rows.restype = _INT
        library.pack_blocks.argtypes = [_INT, _POINTER, _INT, _INT, _INT, _POINTER, _POINTER, _INT]
        library.read_rows.argtypes, library.read_rows.restype = [_POINTER, _POINTER, _INT, _POINTER, _POINTER], None
        library.use_tiles.argtypes, library.use_tiles.restype = [_INT], _INT
        library.step.restype, library.multiply_rows.restype = _INT, None
        library.draw.restype = library.pack_blocks.restype = None
        library.use_openmp.argtypes, library.use_openmp.restype = [_POINTER] * 3, None
        library.use_openmp(*_openmp())
        self._room = torch.empty(0)
        self.has_tiles = bool(library.use_tiles(True))

    @property
    def name(self) -> str:
        """The library's file name, which differs with its sources, compiler, flags and CPU."""
        return Path(self.library._name).name

    def use_tiles(self, wanted: bool) -> None:
        """Switch AMX on, where the CPU has it, or off."""
        self.has_tiles = bool(self.library.use_tiles(wanted))

    @staticmethod
    def take(dtype: torch.dtype, inputs: int) -> bool:
        """Whether the kernels support a weight of this dtype with so many inputs."""
        return dtype in (torch.bfloat16, torch.float32) and inputs % 2 == 0

    def multiply(self, product: Product, x: Tensor) -> Tensor:
        """Multiply `x` [T, I] by a weight: [T, O]."""
        rows, result = len(x), x.new_empty((len(x), product.outputs))
        if not rows:
            return result
        half = x.dtype == torch.bfloat16
        if half and self.has_tiles and rows > TILE_ROWS and rows % TILE_ROWS:
            x = functional.pad(x, (0, 0, 0, -rows % TILE_ROWS))
        x = x.contiguous()
        room = torch.empty(product.room(rows), dtype=torch.uint8)
        arguments = rows, result.data_ptr(), half, torch.get_num_threads(), room.data_ptr()
        self.library.multiply_rows(ctypes.byref(product), x.data_ptr(), *arguments)
        return result

    def draw(self, logits: Tensor, params: Sequence[DrawParams]) -> list[int]:
        """Draw a token from logits [R, V] for each of `params`; -1 where none is possible or the logits hold NaN."""
        logits, width = logits.float().contiguous(), logits.shape[-1]
        threads = min(torch.get_num_threads(), max(1, len(params)))
        room = 2 * threads * -(-width // BLOCK) * BLOCK
        if len(self._room) < room:
            self._room = torch.empty(room)
        packed, tokens = array("d", chain.from_iterable(params)), array("q", bytes(8 * len(params)))
        buffers = packed.buffer_info()[0], len(params), self._room.data_ptr(), tokens.buffer_info()[0]
        self.library.draw(logits.data_ptr(), width, *buffers, threads)
        return tokens.tolist()

    def agree(self, product: Product, packed: Tensor, dtype: torch.dtype, other: Callable[[Tensor], Tensor]) -> bool:
        """Whether `packed` has the kernels' layout: the expected size, and the same product as `other`, which uses it.

        oneDNN documents no layout, and it varies: a float32 weight with a single output has no blocks.
        """
        unit = 32 if dtype == torch.bfloat16 else 16  # inputs are padded to multiples of it
        room = -(-product.outputs // BLOCK) * BLOCK * -(-product.inputs // unit) * unit * dtype.itemsize
        if span(packed)[1] != room:
            return False
        x = torch.randn((1, product.inputs), generator=torch.Generator().manual_seed(0)).to(dtype)
        one, expected = self.multiply(product, x).float(), other(x).float()
        return bool((one - expected).norm() <= 0.01 * expected.norm())


class NoKernels(Exception):
    """The compiled kernels cannot be used on this machine; the message says why and what to do."""


def load_kernels(compiler: str = "cc", cache: Path | None = None, built: Path | None = None) -> Kernels:
    """Load the library: one that was compiled for this machine earlier and lies in `cache`, or the best one that the
    package brings, which is as fast; or else compile one, which takes some 10 seconds.

    Raises `NoKernels` where there is none.
    """
    flags = frozenset(cpu_flags().split())
    if not flags >= KERNEL_FLAGS:
        raise NoKernels("the compiled kernels need an x86 CPU with AVX2, FMA, F16C and BMI2, or an ARM CPU of 64 bits")
    cache = cache or user_cache()
    try:
        found = kept(compiler, cache, NATIVE) or find(flags, built or BUILT)
        path = found or compiled(compiler, cache, NATIVE)
    except NotCompiled as error:
        raise NoKernels(str(error)) from None
    try:
        return Kernels(ctypes.CDLL(str(path)))
    except OSError as error:
        raise NoKernels(f"{error}; {RUNS_PROGRAMS}") from error


def _openmp() -> list[int | None]:
    """The addresses of the functions that start torch's threads: those that torch itself, or what it loads, has."""
    library = ctypes.CDLL(torch._C.__file__)
    try:
        return [ctypes.cast(getattr(library, name), _POINTER).value for name in _OPENMP]
    except AttributeError as error:
        raise NoKernels(f"torch's threads are not those of OpenMP ({error}); install torch from PyPI") from None
