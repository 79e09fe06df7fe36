"""Mamba, Falcon Mamba, Mamba-2 and Jamba in GGUF, whose layers keep running states. Needs no torch.

What numbers decay by they store as it is, not its logarithm. Source: llama.cpp's `conversion/mamba.py` and
`conversion/jamba.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from .....schemas.errors import ModelLoadError
from ..file import GgufTensor, GgufWeight
from ..keys import Keys
from .architecture import Architecture, Form
from .recurrent import convolution, heads_of_states, mamba2_forms

_ALONE = {"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f", "attn_norm": "norm"}
_JAMBA = {
    "output_norm": "model.final_layernorm",
    "ffn_norm": "pre_ff_layernorm",
    "ffn_gate": "feed_forward.gate_proj",
    "ffn_up": "feed_forward.up_proj",
    "ffn_down": "feed_forward.down_proj",
    "ffn_gate_inp": "feed_forward.router",
    "ffn_gate_exps": "feed_forward.experts.{}.gate_proj",
    "ffn_up_exps": "feed_forward.experts.{}.up_proj",
    "ffn_down_exps": "feed_forward.experts.{}.down_proj",
    **{f"ssm_{part}_norm": f"mamba.{part}_layernorm" for part in ("dt", "b", "c")},
}
_STEMS = ("ssm_in", "ssm_out", "ssm_x", "ssm_dt", "ssm_conv1d", "ssm_a", "ssm_d")


def _forms(module: str) -> dict[str, Form]:
    """The tensors of Mamba's layers, which transformers calls `module`."""

    def form(tensor: GgufTensor, keys: Keys) -> Iterator[tuple[str, GgufWeight]]:
        stem, _, suffix = tensor.name.split(".", 2)[2].partition(".")
        if stem == "ssm_conv1d":
            yield convolution(tensor, f"{module}.conv1d")
        elif stem in ("ssm_a", "ssm_d"):
            name = "A_log" if stem == "ssm_a" else "D"
            yield f"{module}.{name}", GgufWeight(tensor, tensor.shape, is_decay=stem == "ssm_a")
        else:
            yield f"{module}.{stem.removeprefix('ssm_')}_proj.{suffix}", GgufWeight(tensor, tensor.shape)

    return dict.fromkeys(_STEMS, form)


def _mamba(keys: Keys) -> Architecture:
    return _FALCON if keys.find("ssm.dt_b_c_rms") else _PLAIN


def _alone(keys: Keys) -> dict[str, Any]:
    inner, width = keys.need("ssm.inner_size"), keys.need("embedding_length")
    return {
        "intermediate_size": inner,
        "num_key_value_heads": 0,
        "expand": inner // width,
        "state_size": keys.need("ssm.state_size"),
        "conv_kernel": keys.need("ssm.conv_kernel"),
        "time_step_rank": keys.need("ssm.time_step_rank"),
        "use_bias": keys.has("ssm_in.bias"),
        "use_conv_bias": keys.has("ssm_conv1d.bias"),
    }


def _alone2(keys: Keys) -> dict[str, Any]:
    heads, size = heads_of_states(keys)
    return _alone(keys) | {
        "num_heads": heads,
        "head_dim": size,
        "n_groups": keys.need("ssm.group_count"),
        "time_step_rank": "auto",
    }


def _jamba(keys: Keys) -> dict[str, Any]:
    attention, experts = (_turn(keys, name) for name in ("attn_q.weight", "ffn_gate_inp.weight"))
    return {
        "attn_layer_offset": attention[0],
        "attn_layer_period": attention[1],
        "expert_layer_offset": experts[0],
        "expert_layer_period": experts[1],
        "num_experts": keys.find("expert_count") or 1,
        "num_experts_per_tok": keys.find("expert_used_count") or 1,
        "mamba_d_state": keys.need("ssm.state_size"),
        "mamba_d_conv": keys.need("ssm.conv_kernel"),
        "mamba_expand": keys.need("ssm.inner_size") // keys.need("embedding_length"),
        "mamba_dt_rank": keys.need("ssm.time_step_rank"),
        "mamba_conv_bias": keys.has("ssm_conv1d.bias"),
        "mamba_proj_bias": keys.has("ssm_in.bias"),
    }


def _turn(keys: Keys, name: str) -> tuple[int, int]:
    """The first layer that has a tensor of that name, and after how many another one has. Raises `ModelLoadError`."""
    layers = range(keys.num_layers)
    found = [layer for layer in layers if keys.layer(layer, name) is not None]
    first, second = [*found, len(layers), 2 * len(layers)][:2]
    if found != [*layers[first :: second - first]] or (found and first >= second - first):
        raise ModelLoadError(
            f"{keys.gguf.path}: the layers {found} of {len(layers)} have {name}, which is not supported; use its "
            "safetensors files"
        )
    return (first, second - first) if found else (0, len(layers) + 1)


_PLAIN = Architecture(
    "mamba",
    "MambaForCausalLM",
    _ALONE,
    _forms("mixer"),
    epsilon="layer_norm_epsilon",
    layers="backbone.layers",
    extra=_alone,
)
_FALCON = replace(_PLAIN, model_type="falcon_mamba", class_name="FalconMambaForCausalLM")
MAMBAS: dict[str, Architecture | Callable[[Keys], Architecture]] = {
    "mamba": _mamba,
    "mamba2": replace(
        _PLAIN, model_type="mamba2", class_name="Mamba2ForCausalLM", forms=mamba2_forms("mixer"), extra=_alone2
    ),
    "jamba": Architecture("jamba", "JambaForCausalLM", _JAMBA, _forms("mamba"), extra=_jamba),
}
