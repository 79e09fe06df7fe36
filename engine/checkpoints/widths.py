"""How much memory the weights take whose levels are kept. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from .gguf.file import Gguf
from .gguf.pairs import weights_of
from .gguf.types import BLOCKS
from .packed import PackedWeight, Packing
from .quantized import GROUP_SIZE

TABLES = ("embed_tokens", "embed_tokens_per_layer")
"""How the names of modules of embeddings end: of the first, and of one that makes inputs for layers."""

LARGE_TABLE = 200_000_000
"""Embeddings of so many numbers stay in the blocks of a GGUF file: only in small models it is seen in a step that rows
are read from blocks."""

READABLE_ROWS = frozenset({"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "MXFP4"})
"""The types of these blocks."""


WIDTHS = {"int8": 1.1, "int4": 0.6}
"""Bytes of a number in our own forms, scales included."""

_WIDTHS = {
    **{"Q4_0": 0.6, "Q4_1": 0.65, "Q2_K": 1.5, "Q3_K": 1.3, "Q4_K": 0.6, "Q5_K": 1.1, "Q6_K": 0.85},
    **{"IQ4_NL": 0.6, "IQ4_XS": 0.65, "MXFP4": 0.6, "IQ1_S": 0.65, "IQ2_XXS": 0.65, "IQ3_XXS": 0.65, "IQ3_S": 0.65},
    **{"TQ1_0": 0.6, "TQ2_0": 0.6, "NVFP4": 1.3, "IQ1_M": 1.3, "IQ2_XS": 1.3, "IQ2_S": 1.3},
}
"""The same in GGUF's; others are like int8."""

_WITH_FLOATS = {"Q4_K": 0.77, "Q5_K": 1.3, "Q6_K": 1.3}
"""Of those whose scales are float32: on a GPU, and where levels are not packed from blocks."""

_BYTES = 1.15  # with a float32 scale for each 32

_UNLIKE = 1.5
"""The same of one weight of tensors that differ in type."""


def gguf_widths(gguf: Gguf, on_gpu: bool = False) -> dict[str, float]:
    """Bytes of a number, by the names of the weights that keep their levels."""
    found: dict[str, float] = {}
    for name, weight in weights_of(gguf).items():
        if not weight.keeps_levels or any(BLOCKS[kind][0] == 1 for kind in weight.types):
            continue
        has_blocks = weight.tensor.scale is None and (weight.tiles is None or not weight.tiles.by_columns)
        widths = _WIDTHS if has_blocks and not on_gpu else _WIDTHS | _WITH_FLOATS
        both = [widths.get(kind, WIDTHS["int8"]) for kind in weight.types]
        found[name] = both[0] if len(both) == 1 else _UNLIKE
    return found


def tables_in_rows(gguf: Gguf) -> set[str]:
    """The embeddings whose rows stay in blocks, by the names of their weights."""
    return {
        name
        for name, weight in weights_of(gguf).items()
        if name.removesuffix(".weight").endswith(TABLES) and stays_in_rows(weight.shape, next(iter(weight.types)))
    }


def stays_in_rows(shape: Sequence[int], kind: str) -> bool:
    """Whether the rows of embeddings [V, E] stay in blocks of a type."""
    return len(shape) == 2 and prod(shape) >= LARGE_TABLE and kind in READABLE_ROWS


def packed_widths(weights: Mapping[str, PackedWeight | str], packing: Packing) -> dict[str, float]:
    """The same of safetensors with packed weights."""
    packed = {name: weight for name, weight in weights.items() if isinstance(weight, PackedWeight)}
    widths = _WIDTHS | _WITH_FLOATS
    return {name: widths[_kind(weight, packing)] for name, weight in packed.items() if weight.keeps_levels(packing)}


def byte_widths(weights: Mapping[str, PackedWeight | str], packing: Packing) -> dict[str, float]:
    """The same of weights in bytes, which a GPU keeps."""
    packed = {name: weight for name, weight in weights.items() if isinstance(weight, PackedWeight)}
    return {name: _BYTES for name, weight in packed.items() if weight.keeps_bytes(packing)}


def _kind(weight: PackedWeight, packing: Packing) -> str:
    """GGUF's type that takes as much."""
    if weight.of_experts or weight.float_group(packing) == GROUP_SIZE:
        return "MXFP4"
    return "Q6_K" if weight.float_group(packing) else "Q4_K" if packing.bits <= 4 else "Q5_K"
