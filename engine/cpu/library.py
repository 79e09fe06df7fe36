"""`kernels.c` and `sampling.c`, compiled for this machine at the first use and kept.

The compiled code computes with the threads that torch has: its OpenMP must be the library that torch loaded.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
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

MOST_ROWS = 256
"""Rows of a product, and tokens of a step: as in the source."""

BLOCK = 64
"""Outputs that lie together in a weight."""

PLAIN, INT8, INT4 = range(3)

_SOURCES = tuple(Path(__file__).with_name(name) for name in ("vectors.h", "tiles.h", "kernels.c", "sampling.c"))
_FLAGS = ("-O3", "-march=native", "-fopenmp", "-shared", "-fPIC")
_TILE = 16  # rows of AMX's tiles, as in the source
_NEEDED = {"avx512_bf16", "avx512vbmi", "avx512vl", "avx512bw"}
_INT, _POINTER = ctypes.c_int64, ctypes.c_void_p


def span(weight: Tensor) -> tuple[int, int]:
    """Address and bytes of a tensor, be it oneDNN's."""
    if weight.is_mkldnn:
        return torch.ops.mkldnn.data_ptr(weight), torch.ops.mkldnn._nbytes(weight)
    return weight.data_ptr(), weight.nbytes


class Product(ctypes.Structure):
    """A weight as the kernels read it; `tensors` are those that its addresses lie in."""

    _fields_: ClassVar = [
        *((name, _POINTER) for name in ("weight", "scales", "bias")),
        *((name, _INT) for name in ("inputs", "outputs", "kind")),
    ]
    tensors: tuple[Tensor | None, ...]

    @classmethod
    def of(cls, shape: Sequence[int], kind: int, weight: Tensor, scales: Tensor | None, bias: Tensor | None) -> Self:
        """`shape` [O, I]; `weight` may be oneDNN's."""
        bias = None if bias is None else bias.float()
        others = (None if tensor is None else tensor.data_ptr() for tensor in (scales, bias))
        product = cls(span(weight)[0], *others, shape[1], shape[0], kind)
        product.tensors = weight, scales, bias
        return product


class Wish(NamedTuple):
    """How to draw from a row, by its number; a `top_k` of 0 is none; `place` on the distribution is below 1."""

    row: int
    temperature: float
    min_p: float
    top_k: int
    top_p: float
    place: float


class Kernels:
    """The loaded library. Numbers are bfloat16 or float32.

    `has_tiles`: products in bfloat16 are by AMX, which is as fast as oneDNN is for many rows, too.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        library.step.argtypes = [_POINTER, _POINTER, _INT, _POINTER, _POINTER]
        library.multiply_rows.argtypes = [_POINTER, _POINTER, _INT, _POINTER, _INT, _INT]
        library.expand.argtypes = [_POINTER, _POINTER, _INT, _INT]
        library.draw.argtypes = [_POINTER, _INT, _POINTER, _INT, _POINTER, _POINTER, _INT]
        library.use_tiles.argtypes, library.use_tiles.restype = [_INT], _INT
        library.step.restype, library.multiply_rows.restype = _INT, None
        library.expand.restype, library.draw.restype = None, None
        self._room = torch.empty(0)
        self.has_tiles = bool(library.use_tiles(True))

    def use_tiles(self, wanted: bool) -> None:
        """Multiply with AMX or without, as a CPU that has none."""
        self.has_tiles = bool(self.library.use_tiles(wanted))

    @staticmethod
    def take(weight: Tensor) -> bool:
        """Whether the kernels multiply by such a weight."""
        return weight.dtype in (torch.bfloat16, torch.float32) and weight.shape[1] % 2 == 0

    def multiply(self, product: Product, x: Tensor) -> Tensor:
        """[T, I] → [T, O]"""
        rows, result = len(x), x.new_empty((len(x), product.outputs))
        if not rows:
            return result
        half = x.dtype == torch.bfloat16
        if half and self.has_tiles and rows > _TILE and rows % _TILE:
            x = functional.pad(x, (0, 0, 0, -rows % _TILE))
        x = x.contiguous()
        arguments = rows, result.data_ptr(), half, torch.get_num_threads()
        self.library.multiply_rows(ctypes.byref(product), x.data_ptr(), *arguments)
        return result

    def expand(self, product: Product, packed: Tensor, dtype: torch.dtype) -> None:
        """Fill oneDNN's weight `packed` of the same shape with the numbers, int8 without their scales."""
        self.library.expand(ctypes.byref(product), span(packed)[0], dtype == torch.bfloat16, torch.get_num_threads())

    def draw(self, logits: Tensor, wishes: Sequence[Wish]) -> list[int]:
        """A token for each wish from logits [R, V]; -1 where they allow none, or are not numbers."""
        logits, width, threads = logits.float().contiguous(), logits.shape[-1], torch.get_num_threads()
        room = 2 * threads * -(-width // BLOCK) * BLOCK
        if len(self._room) < room:
            self._room = torch.empty(room)
        asked, tokens = array("d", chain.from_iterable(wishes)), array("q", bytes(8 * len(wishes)))
        places = asked.buffer_info()[0], len(wishes), self._room.data_ptr(), tokens.buffer_info()[0]
        self.library.draw(logits.data_ptr(), width, *places, threads)
        return tokens.tolist()

    def agree(self, product: Product, packed: Tensor, dtype: torch.dtype, other: Callable[[Tensor], Tensor]) -> bool:
        """Whether `packed` has the room of the layout that we know, and `other`, which multiplies by it, says the same.

        Nobody promises oneDNN's layout to us, and it differs: a single output's weight in float32 has no blocks.
        """
        unit = 32 if dtype == torch.bfloat16 else 16  # inputs are padded to
        room = -(-product.outputs // BLOCK) * BLOCK * -(-product.inputs // unit) * unit * dtype.itemsize
        if span(packed)[1] != room:
            return False
        x = torch.randn((1, product.inputs), generator=torch.Generator().manual_seed(0)).to(dtype)
        one, expected = self.multiply(product, x).float(), other(x).float()
        return bool((one - expected).norm() <= 0.01 * expected.norm())


class NoKernels(Exception):
    """Why this machine computes without compiled kernels, and what would change that."""


def load_kernels(compiler: str = "cc", cache: Path | None = None) -> Kernels:
    """Compile unless the cache has it, and load. Raises `NoKernels` where that fails."""
    flags = _cpu_flags()
    if not set(flags.split()) >= _NEEDED:
        raise NoKernels("the kernels are for CPUs with AVX512-BF16")
    try:
        return Kernels(_load(compiler, cache or _cache(), flags))
    except FileNotFoundError as error:
        reason = f"{error.filename} is not there"
        remedy = "install a C compiler, such as gcc" if error.filename == compiler else "install Penstock again, whole"
    except subprocess.SubprocessError as error:
        lines = str(getattr(error, "stderr", None) or error).strip().splitlines()
        reason, remedy = f"{compiler} failed ({lines[0] if lines else error})", "install gcc 11 or newer"
    except OSError as error:
        reason, remedy = str(error), "let XDG_CACHE_HOME name a directory that can be written"
    raise NoKernels(f"{reason}; {remedy}")


def _cpu_flags() -> str:
    try:
        match = re.search(r"^flags\s*:(.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        return ""
    return match[1] if match else ""


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock"


def _load(compiler: str, cache: Path, flags: str) -> ctypes.CDLL:
    version = _run([compiler, "--version"])
    parts = (version, flags, *_FLAGS, torch.__version__)
    sources = b"".join(source.read_bytes() for source in _SOURCES)
    name = hashlib.sha256(sources + "\n".join(parts).encode()).hexdigest()[:16]
    path = cache / f"kernels-{name}.so"
    if not _is_whole(path):
        _compile(compiler, path)
    runtimes = _runtimes()
    library = ctypes.CDLL(str(path))
    if own := _runtimes() - runtimes:
        raise OSError(f"{', '.join(sorted(own))} stands beside torch's OpenMP")
    return library


def _compile(compiler: str, path: Path) -> None:
    """Whoever else does the same at the same time writes the same."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as directory:
        built = Path(directory) / path.name
        _run([compiler, *_FLAGS, "-o", str(built), *(str(one) for one in _SOURCES if one.suffix == ".c"), "-lm"])
        with built.open("ab") as file:  # loaders ignore what follows
            file.write(hashlib.sha256(built.read_bytes()).digest())
        built.replace(path)


def _is_whole(path: Path) -> bool:
    """To load a library that was cut off may end the process."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return False
    return hashlib.sha256(content[:-32]).digest() == content[-32:]


def _run(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout


def _runtimes() -> set[str]:
    """The OpenMP libraries in this process."""
    return set(re.findall(r"/\S*lib(?:g|i)?omp\S*", Path("/proc/self/maps").read_text()))
