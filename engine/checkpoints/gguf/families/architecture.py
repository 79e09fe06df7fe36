"""What there is to say of an architecture in GGUF, and what most of them have in common. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from .....schemas.errors import ModelLoadError
from ..file import GgufTensor, GgufWeight
from ..keys import Keys

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
AROUND = {  # of layers with norms on both sides of a part
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
LAYER_NORM, RMS_NORM = "attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon"
_YARN = {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow", "attention_factor": "yarn_attn_factor"}

Extra = Callable[[Keys], dict[str, Any]]
Constants = Callable[[Keys], dict[str, Any]]
"""Weights that the metadata has, by their whole names: a number, or a list of them."""

Form = Callable[[GgufTensor, Keys], Iterator[tuple[str, GgufWeight]]]
"""The weights that a tensor has, by their names in the layer; none if it belongs to those of another tensor."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """`names` are those that differ, `forms` say it of tensors that are laid out in another way than transformers' are.

    In a name `{}` is an index into the tensor's first dimension, such as an expert's number; a name that ends in a dot
    gets no suffix. `interleaved`: converters permute the rows of queries and keys; `apart`: in the other direction, and
    those alone that rotate. The names of transformers' weights of a layer begin with `layers`, and its configuration
    computes itself what is `left_out`.
    """

    model_type: str
    class_name: str
    names: Mapping[str, str] = field(default_factory=dict)
    forms: Mapping[str, Form] = field(default_factory=dict)
    interleaved: bool = False
    apart: bool = False
    norm_offset: int = 0  # what converters add to the weights of norms
    epsilon: str = "rms_norm_eps"
    layers: str = "model.layers"
    left_out: tuple[str, ...] = ()
    has_factors: bool = True  # whether the factors of rotations are to be applied, if there are any
    extra: Extra = lambda keys: {}
    constants: Constants = lambda keys: {}


def rope_of(keys: Keys, size: int | None = None) -> dict[str, Any]:
    """The parameters of rotations, of heads that have `size` numbers to rotate or, by default, `head_dim`.

    Raises `ModelLoadError` for a scaling that is not supported.
    """
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": keys.find("rope.freq_base", 10000.0)}
    size = keys.head_dim if size is None else size
    rotated = keys.find("rope.dimension_count", size)
    if rotated != size:
        rope["partial_rotary_factor"] = rotated / size
    original = keys.find("rope.scaling.original_context_length", keys.need("context_length"))
    kind, factor = keys.find("rope.scaling.type", "linear"), keys.find("rope.scaling.factor")
    if "rope_factors_long.weight" in keys.gguf.tensors:
        lists = {f"{name}_factor": keys.gguf.floats(f"rope_factors_{name}.weight") for name in ("long", "short")}
        return rope | lists | {"rope_type": "longrope", "original_max_position_embeddings": original}
    if kind == "yarn" and factor:
        more = {name: keys.find(f"rope.scaling.{key}") for name, key in _YARN.items()}
        rope |= {name: value for name, value in more.items() if value is not None}
        return rope | {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    if kind == "linear" and factor:
        return rope | {"rope_type": "linear", "factor": factor}
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise ModelLoadError(f"{keys.gguf.path}: rotations with the scaling {kind!r} are not supported")
    return rope


def partial_rope(keys: Keys) -> dict[str, Any]:
    """Those of models of which transformers rotates a part of each head, unless it is told that all rotate."""
    return {"partial_rotary_factor": 1.0} | rope_of(keys)


def local_rope(keys: Keys, theta: float | None = None) -> dict[str, Any]:
    """Those of layers with a window, where they differ from the others'."""
    return {"rope_type": "default", "rope_theta": keys.find("rope.freq_base_swa", theta or rope_of(keys)["rope_theta"])}


def layer_types(keys: Keys, period: int) -> list[str]:
    """Which layers have a window: by default all but each `period`-th."""
    pattern = keys.find("attention.sliding_window_pattern", period)
    layers = range(keys.num_layers)
    slides = pattern if isinstance(pattern, list) else [bool((layer + 1) % pattern) for layer in layers]
    return ["sliding_attention" if slides[layer] else "full_attention" for layer in layers]


def windows(keys: Keys, period: int) -> dict[str, Any]:
    """The window, and the layers that have one; none of them where the file has no window."""
    window = keys.find("attention.sliding_window") or None
    return {"sliding_window": window, "layer_types": layer_types(keys, period if window else 1)}
