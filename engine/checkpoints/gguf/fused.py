"""Queries, keys and values of a layer in one tensor, which some converters write for any model. Needs no torch.

Source: llama.cpp's `--fuse-qkv` (`prepare_qkv_fusion` in `conversion/base.py`), and its older converters.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace

from ....schemas.errors import ModelLoadError
from .file import Gguf, GgufTensor
from .keys import HEADS, Keys

FUSED = "attn_qkv"
_PARTS = ("attn_q", "attn_k", "attn_v")


def with_parts(gguf: Gguf, own: Container[str]) -> Gguf:
    """The file with three tensors in the place of each such one, unless those are the architecture's `own` names.

    Raises `ModelLoadError` for one whose rows are not those of all heads.
    """
    if FUSED in own or not any(f".{FUSED}." in name for name in gguf.tensors):
        return gguf
    keys, found = Keys(gguf), dict[str, GgufTensor]()
    for name, tensor in gguf.tensors.items():
        found |= _parts(tensor, keys) if f".{FUSED}." in name else {name: tensor}
    return replace(gguf, tensors=found)


def _parts(tensor: GgufTensor, keys: Keys) -> dict[str, GgufTensor]:
    size = keys.find("attention.value_length", keys.head_dim)
    rows = keys.need(HEADS) * keys.head_dim, keys.kv_heads * keys.head_dim, keys.kv_heads * size
    if sum(rows) != tensor.shape[0]:
        raise ModelLoadError(
            f"{keys.gguf.path}: {tensor.name} has {tensor.shape[0]} rows, and not {sum(rows)}, for {keys.need(HEADS)} "
            f"heads of queries and {keys.kv_heads} of keys and values; convert the model again"
        )
    found, start, each = dict[str, GgufTensor](), tensor.start, tensor.nbytes // tensor.shape[0]
    for part, count in zip(_PARTS, rows, strict=True):
        name = tensor.name.replace(FUSED, part)
        found[name] = tensor._replace(name=name, shape=(count, *tensor.shape[1:]), start=start, nbytes=count * each)
        start += count * each
    return found
