"""What the settings of a language model, those of its config.json, say of layers that keep a running state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Settings = Mapping[str, Any]

_ATTENDING = {"full_attention", "sliding_attention", "attention", "*"}  # of which Nemotron-H has letters
_KEEPING = {"linear_attention", "mamba", "conv", "M"}
_ALONE = {"mamba", "falcon_mamba", "mamba2"}  # models of which no layer attends


def remembered(given: Settings) -> tuple[int, int]:
    """What a layer with a running state keeps: inputs of its convolution, and numbers in float32."""
    for name, found in _KINDS.items():
        if name == given.get("model_type") or name in given:
            return found(given)
    return 0, 0


def kinds_of_layers(given: Settings) -> tuple[int, int]:
    """How many layers attend to tokens, and how many keep a running state instead, or besides."""
    layers = given.get("num_hidden_layers") or given.get("n_layer") or given.get("n_layers") or 1
    kind = given.get("model_type")
    if crossing := given.get("cross_attention_layers"):  # to images, and not to tokens
        return layers - len(crossing), 0
    if kind in _ALONE:
        return 0, layers
    if not any(name == kind or name in given for name in _KINDS):
        return layers, 0
    linear = given.get("linear_attn_config") or {}
    if "kda_layers" in linear:
        return len(linear["full_attn_layers"]), len(linear["kda_layers"])
    kinds = given.get("layer_types") or given.get("layers_block_type") or given.get("hybrid_override_pattern")
    if kinds:
        return sum(kind in _ATTENDING for kind in kinds), sum(kind in _KEEPING for kind in kinds)
    if kind == "jamba":
        attending = len(range(given.get("attn_layer_offset", 4), layers, given.get("attn_layer_period", 8)))
        return attending, layers - attending
    if "linear_num_value_heads" in given or kind == "bailing_hybrid":  # each so many-th layer attends
        attending = layers // (given.get("full_attention_interval") or given.get("layer_group_size") or 4)
        return attending, layers - attending
    chosen = given.get("attn_layer_indices") or given.get("full_attn_idxs")
    return (layers, layers) if chosen is None else (len(chosen), layers - len(chosen))


def _delta_net(given: Settings) -> tuple[int, int]:
    size = given.get("linear_key_head_dim", 0)
    keys = given.get("linear_num_key_heads", 0) * size
    values = given["linear_num_value_heads"] * given.get("linear_value_head_dim", 0)
    return (given.get("linear_conv_kernel_dim", 1) - 1) * (2 * keys + values), size * values


def _kimi_delta_net(given: Settings) -> tuple[int, int]:
    linear = given.get("linear_attn_config") or {}
    heads = linear.get("num_heads") or given.get("linear_num_heads") or given.get("num_attention_heads") or 0
    size = linear.get("head_dim") or given.get("linear_head_dim") or given.get("head_dim") or 0
    taps = linear.get("short_conv_kernel_size") or given.get("linear_conv_kernel_dim")
    return ((taps or given.get("short_conv_kernel_size") or 4) - 1) * 3 * heads * size, heads * size * size


def _selective(given: Settings) -> tuple[int, int]:
    width = given.get("intermediate_size") if given["model_type"] != "jamba" else None
    width = width or (given.get("mamba_expand") or given.get("expand") or 2) * given.get("hidden_size", 0)
    taps = given.get("mamba_d_conv") or given.get("conv_kernel") or 4
    return (taps - 1) * width, width * (given.get("mamba_d_state") or given.get("state_size") or 16)


def _mamba2(given: Settings) -> tuple[int, int]:
    own = given.get("num_heads") if given.get("model_type") == "mamba2" else None
    heads = own or given.get("mamba_n_heads") or given.get("mamba_num_heads") or 0
    head = given.get("mamba_d_head") or given.get("mamba_head_dim") or (given.get("head_dim") if own else 0) or 0
    if not isinstance(head, int):  # "auto"
        head = given.get("mamba_expand", 2) * given.get("hidden_size", 0) // heads
    size = given.get("mamba_d_state") or given.get("ssm_state_size") or given.get("state_size") or 0
    groups = given.get("mamba_n_groups") or given.get("n_groups") or 1
    taps = given.get("mamba_d_conv") or given.get("conv_kernel") or 4
    return (taps - 1) * (heads * head + 2 * groups * size), heads * head * size


def _short_convolution(given: Settings) -> tuple[int, int]:
    return (given.get("conv_L_cache", 1) - 1) * given.get("hidden_size", 0), 0


_KINDS: dict[str, Callable[[Settings], tuple[int, int]]] = {  # by a type of model, or a setting that only it has
    "linear_num_value_heads": _delta_net,
    "kimi_linear": _kimi_delta_net,
    "bailing_hybrid": _kimi_delta_net,
    "jamba": _selective,
    "mamba": _selective,
    "falcon_mamba": _selective,
    "mamba2": _mamba2,
    "mamba_n_heads": _mamba2,
    "mamba_num_heads": _mamba2,
    "conv_L_cache": _short_convolution,
}
