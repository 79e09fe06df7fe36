"""Compiles `kernels.c` and `sampling.c` for this machine at first use, caches the library and calls it.

The compiled code runs on torch's threads: it must use the OpenMP library that torch has loaded.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import subprocess
import tempfile
from array import array
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional

from ..models import user_cache
from .machine import KERNEL_FLAGS, cpu_flags

MOST_ROWS = 256
"""The most rows of a product and the most tokens of a step, as in the source."""

BLOCK = 64
"""Outputs in one block of a weight, as in the source."""

GROUP = 32
"""Inputs of a quantised weight that share a scale, as in the source."""

PLAIN, INT8, INT4, FINE = range(4)
_SCALE_TYPES = (torch.bfloat16, torch.float16, torch.float32)
_INPUT_BYTES = GROUP + 20  # of a group of quantised inputs, as in the source

_SOURCES = tuple(
    Path(__file__).with_name(name)
    for name in ("narrow.h", "vectors.h", "product.h", "tiles.h", "levels.h", "kernels.c", "sampling.c")
)
_FLAGS = ("-O3", "-fopenmp", "-shared", "-fPIC")
_TILE = 16  # rows of AMX's tiles, as in the source
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
    ]
    tensors: tuple[Tensor | None, ...]

    @classmethod
    def of(
        cls,
        shape: Sequence[int],
        kind: int,
        weight: Tensor,
        scales: Tensor | None,
        bias: Tensor | None,
        middle: int = 0,
    ) -> Self:
        """`shape` is [O, I]; `weight` may be in oneDNN's layout; `scales` are [O / 64, G, 1 or 2, 64], 2 G for FINE."""
        bias = None if bias is None else bias.float()
        others = (None if tensor is None else tensor.data_ptr() for tensor in (scales, bias))
        about = (0, 0) if scales is None else (_SCALE_TYPES.index(scales.dtype), scales.shape[2] == 2)
        product = cls(span(weight)[0], *others, shape[1], shape[0], kind, *about, middle)
        product.tensors = weight, scales, bias
        return product

    def room(self, rows: int) -> int:
        """The bytes that the inputs of so many rows take when they are quantised."""
        return 0 if self.kind == PLAIN else -(-rows // _TILE) * _TILE * -(-self.inputs // GROUP) * _INPUT_BYTES


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
        library.use_tiles.argtypes, library.use_tiles.restype = [_INT], _INT
        library.step.restype, library.multiply_rows.restype = _INT, None
        library.draw.restype = None
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
        if half and self.has_tiles and rows > _TILE and rows % _TILE:
            x = functional.pad(x, (0, 0, 0, -rows % _TILE))
        x = x.contiguous()
        room = torch.empty(product.room(rows), dtype=torch.uint8)
        arguments = rows, result.data_ptr(), half, torch.get_num_threads(), room.data_ptr()
        self.library.multiply_rows(ctypes.byref(product), x.data_ptr(), *arguments)
        return result

    def draw(self, logits: Tensor, params: Sequence[DrawParams]) -> list[int]:
        """Draw a token from logits [R, V] for each of `params`; -1 where none is possible or the logits hold NaN."""
        logits, width, threads = logits.float().contiguous(), logits.shape[-1], torch.get_num_threads()
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


def load_kernels(compiler: str = "cc", cache: Path | None = None, architecture: str = "native") -> Kernels:
    """Load the library from `cache`, compiling it first if need be, for an `architecture` as gcc names it.

    Raises `NoKernels` where that fails.
    """
    flags = cpu_flags()
    if not set(flags.split()) >= KERNEL_FLAGS:
        raise NoKernels("the compiled kernels need an x86 CPU with AVX2, FMA, F16C and BMI2")
    try:
        return Kernels(_load(compiler, cache or user_cache(), flags, architecture))
    except FileNotFoundError as error:
        reason = f"{error.filename} does not exist"
        remedy = "install a C compiler, such as gcc" if error.filename == compiler else "reinstall Penstock"
    except subprocess.SubprocessError as error:
        lines = str(getattr(error, "stderr", None) or error).strip().splitlines()
        reason, remedy = f"{compiler} failed ({lines[0] if lines else error})", "install gcc 11 or newer"
    except OSError as error:
        reason, remedy = str(error), "set XDG_CACHE_HOME to a writable directory"
    raise NoKernels(f"{reason}; {remedy}")


def _load(compiler: str, cache: Path, flags: str, architecture: str) -> ctypes.CDLL:
    version = _run([compiler, "--version"])
    parts = (version, flags, architecture, *_FLAGS, torch.__version__)
    sources = b"".join(source.read_bytes() for source in _SOURCES)
    name = hashlib.sha256(sources + "\n".join(parts).encode()).hexdigest()[:16]
    path = cache / f"kernels-{name}.so"
    if not _is_whole(path):
        _compile(compiler, path, architecture)
    before = _openmp_libraries()
    library = ctypes.CDLL(str(path))
    if own := _openmp_libraries() - before:
        raise OSError(f"the kernels loaded a second OpenMP beside torch's: {', '.join(sorted(own))}")
    return library


def _compile(compiler: str, path: Path, architecture: str) -> None:
    """Compile to `path`, atomically: concurrent processes write identical files. A checksum follows the library."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as directory:
        built = Path(directory) / path.name
        sources = [str(one) for one in _SOURCES if one.suffix == ".c"]
        _run([compiler, f"-march={architecture}", *_FLAGS, "-o", str(built), *sources, "-lm"])
        with built.open("ab") as file:  # the loader ignores trailing bytes
            file.write(hashlib.sha256(built.read_bytes()).digest())
        built.replace(path)


def _is_whole(path: Path) -> bool:
    """Whether the file's checksum is right: loading a truncated library may kill the process."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return False
    return hashlib.sha256(content[:-32]).digest() == content[-32:]


def _run(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout


def _openmp_libraries() -> set[str]:
    """The OpenMP libraries that this process has loaded."""
    return set(re.findall(r"/\S*lib(?:g|i)?omp\S*", Path("/proc/self/maps").read_text()))
