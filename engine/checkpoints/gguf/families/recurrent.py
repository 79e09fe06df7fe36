"""Hybrids in GGUF whose layers keep short convolutions or Mamba-2's states: LFM2, Granite 4, Falcon-H1, Nemotron-H.

Source: llama.cpp's converters of that name, and `conversion/mamba.py`. What a head decays by they store as it is, not
its logarithm; Falcon-H1's multipliers are in its weights. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .....schemas.errors import ModelLoadError
from ..file import GgufTensor, GgufWeight
from ..keys import Keys
from .architecture import Architecture, Form, rope_of
from .experts import WITH_SHARED, dense_layers, routed_config
from .granite import FORMS as GRANITE_FORMS
from .granite import NAMES as GRANITE_NAMES
from .granite import granite_config

_SPARSE_LFM = {
    "ffn_gate_inp": "feed_forward.gate",
    "ffn_gate_exps": "feed_forward.experts.{}.w1",
    "ffn_up_exps": "feed_forward.experts.{}.w3",
    "ffn_down_exps": "feed_forward.experts.{}.w2",
    "exp_probs_b": "feed_forward.expert_bias.",
}
_LFM = {
    "token_embd_norm": "model.embedding_norm",
    "output_norm": "model.embedding_norm",
    "attn_norm": "operator_norm",
    "ffn_norm": "ffn_norm",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
}
_MAMBA = ("ssm_in", "ssm_out", "ssm_conv1d", "ssm_a", "ssm_d", "ssm_dt", "ssm_norm")


def _lfm(keys: Keys) -> dict[str, Any]:
    return _lfm_layers(keys) | {"block_auto_adjust_ff_dim": False}


def _lfm_with_experts(keys: Keys) -> dict[str, Any]:
    return _lfm_layers(keys) | {
        "num_experts": keys.need("expert_count"),
        "num_experts_per_tok": keys.need("expert_used_count"),
        "moe_intermediate_size": keys.need("expert_feed_forward_length"),
        "num_dense_layers": dense_layers(keys),
        "use_expert_bias": keys.has("exp_probs_b.bias"),
        "norm_topk_prob": keys.find("expert_weights_norm", True),
        "routed_scaling_factor": keys.find("expert_weights_scale", 1.0),
    }


def _lfm_layers(keys: Keys) -> dict[str, Any]:
    return {
        "conv_L_cache": keys.need("shortconv.l_cache"),
        "conv_bias": keys.has("shortconv.conv.bias"),
        "layer_types": _layer_types(keys, "shortconv.conv.weight", ("conv", "full_attention")),
    }


def _layer_types(keys: Keys, name: str, kinds: tuple[str, str]) -> list[str]:
    """The first kind for layers that have a tensor of that name, and the second for others."""
    return [kinds[keys.layer(layer, name) is None] for layer in range(keys.num_layers)]


def convolution(tensor: GgufTensor, name: str) -> tuple[str, GgufWeight]:
    suffix = ".bias" if tensor.name.endswith(".bias") else ".weight"
    shape = (tensor.shape[0], 1, tensor.shape[-1]) if suffix == ".weight" else tensor.shape
    return f"{name}{suffix}", GgufWeight(tensor, shape)


def _short_convolution(tensor: GgufTensor, keys: Keys) -> Iterator[tuple[str, GgufWeight]]:
    yield convolution(tensor, "conv.conv")


def mamba2_forms(module: str) -> dict[str, Form]:
    """The tensors of Mamba-2 layers, which transformers calls `module`."""

    def form(tensor: GgufTensor, keys: Keys) -> Iterator[tuple[str, GgufWeight]]:
        stem, _, suffix = tensor.name.split(".", 2)[2].partition(".")
        if stem == "ssm_conv1d":
            yield convolution(tensor, f"{module}.conv1d")
        elif stem in ("ssm_in", "ssm_out"):
            yield f"{module}.{stem.removeprefix('ssm_')}_proj.{suffix}", GgufWeight(tensor, tensor.shape)
        else:
            name = {"ssm_a": "A_log", "ssm_d": "D", "ssm_dt": "dt_bias", "ssm_norm": "norm.weight"}[stem]
            count = tensor.shape[0] * (tensor.shape[1] if len(tensor.shape) > 1 else 1)
            yield f"{module}.{name}", GgufWeight(tensor, (count,), is_decay=stem == "ssm_a")

    return dict.fromkeys(_MAMBA, form)


def heads_of_states(keys: Keys) -> tuple[int, int]:
    """The heads of a Mamba-2 layer, and the numbers of each. Raises `ModelLoadError`."""
    heads, inner = keys.need("ssm.time_step_rank"), keys.need("ssm.inner_size")
    if not heads or inner % heads:
        raise ModelLoadError(
            f"{keys.gguf.path}: {inner} numbers of a Mamba-2 layer do not go with {heads} heads; convert it again"
        )
    return heads, inner // heads


def _mamba_config(keys: Keys) -> dict[str, Any]:
    heads, size = heads_of_states(keys)
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": size,
        "mamba_n_groups": keys.need("ssm.group_count"),
        "mamba_d_state": keys.need("ssm.state_size"),
        "mamba_d_conv": keys.need("ssm.conv_kernel"),
        "mamba_conv_bias": keys.has("ssm_conv1d.bias"),
        "mamba_proj_bias": keys.has("ssm_in.bias"),
    }


def _granite(keys: Keys) -> dict[str, Any]:
    inner, width = keys.need("ssm.inner_size"), keys.need("embedding_length")
    if inner % width:
        raise ModelLoadError(
            f"{keys.gguf.path}: ssm.inner_size is no multiple of embedding_length; choose another model"
        )
    if keys.find("rope.scaling.finetuned"):
        raise ModelLoadError(f"{keys.gguf.path} is a Bamba, which is not supported in GGUF; use its safetensors files")
    return (
        granite_config(keys)
        | _mamba_config(keys)
        | {
            "layer_types": _layer_types(keys, "ssm_in.weight", ("mamba", "attention")),
            "mamba_expand": inner // width,
            "position_embedding_type": None,
        }
    )


def _falcon(keys: Keys) -> dict[str, Any]:
    return _mamba_config(keys) | {
        "mamba_d_ssm": keys.need("ssm.inner_size"),
        "mamba_rms_norm": keys.has("ssm_norm.weight"),
        "mamba_norm_before_gate": False,  # as llama.cpp computes it, for no key says
        "rope_parameters": rope_of(keys),
        "mlp_bias": keys.has("ffn_gate.bias"),
    }


def _nemotron(keys: Keys) -> dict[str, Any]:
    heads, size = heads_of_states(keys)
    kinds = [_kind(keys, layer) for layer in range(keys.num_layers)]
    shared = keys.first("ffn_up_shexp.weight")
    dense = keys.first("ffn_up.weight")
    found = {
        "layers_block_type": kinds,
        "hybrid_override_pattern": None,
        "intermediate_size": dense.shape[0] if dense else keys.find("feed_forward_length", 0),
        "mamba_num_heads": heads,
        "mamba_head_dim": size,
        "n_groups": keys.need("ssm.group_count"),
        "ssm_state_size": keys.need("ssm.state_size"),
        "conv_kernel": keys.need("ssm.conv_kernel"),
        "use_conv_bias": keys.has("ssm_conv1d.bias"),
        "use_bias": keys.has("ssm_in.bias"),
        "mlp_bias": keys.has("ffn_up.bias"),
        "mlp_hidden_act": "relu2",
        "moe_latent_size": keys.find("moe_latent_size"),
        "time_step_min": 1e-12,  # steps have no least size: transformers takes this one for that
    }
    if not keys.find("expert_count"):
        return found
    return found | routed_config(keys) | {"moe_shared_expert_intermediate_size": shared.shape[0] if shared else 0}


def _kind(keys: Keys, layer: int) -> str:
    for name, kind in (("ssm_in", "mamba"), ("attn_q", "attention"), ("ffn_gate_inp", "moe"), ("ffn_up", "mlp")):
        if keys.layer(layer, f"{name}.weight") is not None:
            return kind
    raise ModelLoadError(f"{keys.gguf.path}: layer {layer} is of an unknown kind; use the model's safetensors files")


_LATENT_EXPERTS = {"ffn_latent_down": "mixer.fc1_latent_proj", "ffn_latent_up": "mixer.fc2_latent_proj"}
_NEMOTRON = {name: own.replace("mlp.", "mixer.") for name, own in (WITH_SHARED | _LATENT_EXPERTS).items()} | {
    "token_embd": "model.embeddings",
    "output_norm": "model.norm_f",
    "attn_norm": "norm",
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
    "attn_q": "mixer.q_proj",
    "attn_k": "mixer.k_proj",
    "attn_v": "mixer.v_proj",
    "attn_output": "mixer.o_proj",
}
_FALCON = {
    "output_norm": "model.final_layernorm",
    "ffn_norm": "pre_ff_layernorm",
    "ffn_gate": "feed_forward.gate_proj",
    "ffn_up": "feed_forward.up_proj",
    "ffn_down": "feed_forward.down_proj",
}
_NEMOTRON_H = Architecture(
    "nemotron_h",
    "NemotronHForCausalLM",
    _NEMOTRON,
    mamba2_forms("mixer"),
    interleaved=True,
    epsilon="layer_norm_epsilon",
    extra=_nemotron,
)
HYBRIDS = {
    "lfm2": Architecture(
        "lfm2", "Lfm2ForCausalLM", _LFM, {"shortconv.conv": _short_convolution}, epsilon="norm_eps", extra=_lfm
    ),
    "lfm2moe": Architecture(
        "lfm2_moe",
        "Lfm2MoeForCausalLM",
        _LFM | _SPARSE_LFM,
        {"shortconv.conv": _short_convolution},
        epsilon="norm_eps",
        extra=_lfm_with_experts,
    ),
    "granitehybrid": Architecture(
        "granitemoehybrid",
        "GraniteMoeHybridForCausalLM",
        GRANITE_NAMES,
        GRANITE_FORMS | mamba2_forms("mamba"),
        interleaved=True,
        extra=_granite,
    ),
    "falcon-h1": Architecture("falcon_h1", "FalconH1ForCausalLM", _FALCON, mamba2_forms("mamba"), extra=_falcon),
    "nemotron_h": _NEMOTRON_H,
    "nemotron_h_moe": _NEMOTRON_H,
}
