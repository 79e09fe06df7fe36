"""The compiled decoder as its kernels read it; the fields are explained in `decoder/model.h`."""

from __future__ import annotations

import ctypes
from typing import ClassVar

from ...cpu.layer_inputs import LayerInput
from ...cpu.library import Product
from ...cpu.rows import Table

_INT, _POINTER, _FLOAT = ctypes.c_int64, ctypes.c_void_p, ctypes.c_float


class LayerFields(ctypes.Structure):
    """One layer: what it multiplies by, and what it is."""

    _fields_: ClassVar = [
        *((name, _POINTER) for name in ("attention_norm", "mlp_norm", "head_norm")),
        *((name, _POINTER) for name in ("attention_after", "mlp_after", "cosines", "sines", "scales")),
        *((name, Product) for name in ("qkv", "output", "gate", "up", "down", "share")),
        *((name, _POINTER) for name in ("mixture", "beside", "delta", "convolution", "mamba", "sinks", "pool")),
        *((name, _INT) for name in ("num_blocks", "window", "group", "has_gelu", "has_gates")),
        *((name, _INT) for name in ("num_q_heads", "num_kv_heads", "head_dim", "rotated")),
        *((name, _INT) for name in ("num_parts", "norms_values", "norms_rows")),
        ("input", LayerInput),
        *((name, _FLOAT) for name in ("scalar", "epsilon", "mlp_epsilon", "head_epsilon")),
        *((name, _FLOAT) for name in ("scaling", "softcap", "residual")),
    ]


class ModelFields(ctypes.Structure):
    """The model, and the memory that a step computes in."""

    _fields_: ClassVar = [
        *((name, _INT) for name in ("half", "threads", "num_layers", "vocabulary", "embedding")),
        *((name, _INT) for name in ("num_groups", "block_size", "reading", "num_slots")),
        ("embeddings", Table),
        *((name, _POINTER) for name in ("layers", "norm")),
        ("head", Product),
        *((name, _POINTER) for name in ("input", "mixed", "gated", "stream", "qkv", "gates")),
        *((name, _POINTER) for name in ("convolved", "rates", "decays", "shares")),
        *((name, _POINTER) for name in ("levels", "room", "low", "after", "beside", "layer_inputs")),
        *((name, _POINTER) for name in ("features", "deep")),
        *((name, _INT) for name in ("num_features", "reach", "most_rank")),
        *((name, _FLOAT) for name in ("epsilon", "scale", "softcap", "logit_scale")),
        ("slept", _INT),
    ]
