"""The compiled kernels that a package can bring: one library for each set of instructions.

`deploy/build_kernels.py` builds them; `library.py` takes the best one.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Set
from pathlib import Path
from typing import NamedTuple

from .machine import ARCHITECTURE

BUILT = Path(__file__).with_name("built")
"""Where the package has them."""

SOURCE = Path(__file__).with_name("source")
"""Below it are all sources."""

SOURCES = tuple(
    SOURCE / room / name
    for room, names in {
        "machine": "names.h narrow.h neon.h vectors.h threads.h tiles.h",
        "products": "product.h products.h levels.h mixture.h rows.h levels.c packing.c",
        "attention": "attention.h attention_vectors.h attention_tiles.h",
        "states": "convolution.h delta.h mamba.h",
        "decoder": "model.h layer_inputs.h adapters.h adapted_products.h attending.h passes.h layers.h forward.h",
        "": "kernels.c sampling.c",
    }.items()
    for name in names.split()
)
OPTIONS = ("-O3", "-std=gnu11", "-ffp-contract=off", "-fno-math-errno", "-shared", "-fPIC")
"""The compiler's for all variants. Without contraction the source alone says where numbers are rounded."""


class Variant(NamedTuple):
    """Kernels for processors with the instructions `needs`, by Linux's names; `options` are gcc's and clang's."""

    architecture: str
    name: str
    needs: frozenset[str]
    options: tuple[str, ...]


def _x86(name: str, *extensions: str) -> Variant:
    """`extensions` are Linux's names, which without their underscores are the compilers'."""
    return Variant("x86_64", name, frozenset(extensions), tuple(f"-m{_OTHERWISE.get(one, one)}" for one in extensions))


_OTHERWISE = {
    "avx_vnni": "avxvnni",
    "avx512_vnni": "avx512vnni",
    "avx512_bf16": "avx512bf16",
    "amx_tile": "amx-tile",
    "amx_int8": "amx-int8",
    "amx_bf16": "amx-bf16",
}
_AVX2 = ("avx2", "bmi2", "f16c", "fma")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl")
_ZEN4 = (*_AVX512, "avx512_vnni", "avx512_bf16")

VARIANTS = (
    _x86("amx", *_ZEN4, "amx_tile", "amx_int8", "amx_bf16"),
    _x86("avx512bf16", *_ZEN4),
    _x86("avx512vnni", *_AVX512, "avx512_vnni"),
    _x86("avx512", *_AVX512),
    _x86("avxvnni", *_AVX2, "avx_vnni"),
    _x86("avx2", *_AVX2),
    Variant("aarch64", "dotprod", frozenset({"asimd", "asimddp", "atomics"}), ("-march=armv8.2-a+dotprod",)),
    Variant("aarch64", "neon", frozenset({"asimd"}), ("-march=armv8-a",)),
)
"""Of each architecture the best one first."""


def sources_hash() -> str:
    """Raises `FileNotFoundError` if a source is missing."""
    return hashlib.sha256(b"".join(source.read_bytes() for source in SOURCES)).hexdigest()[:12]


def file_name(variant: Variant, system: str = sys.platform) -> str:
    """With the sources in its name: kernels of others do not fit this code. `system` is `sys.platform` there."""
    return f"{system}-{variant.architecture}-{variant.name}-{sources_hash()}.{'dylib' if system == 'darwin' else 'so'}"


def find(flags: Set[str], built: Path) -> Path | None:
    """The best library in `built` for a processor with these instructions; None where there is none."""
    if not built.is_dir():
        return None
    own = (one for one in VARIANTS if one.architecture == ARCHITECTURE and one.needs <= flags)
    return next((path for one in own if (path := built / file_name(one)).is_file()), None)
