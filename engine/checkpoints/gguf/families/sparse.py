"""Mixtures of experts in GGUF: which layers have them, how many, and how they are chosen. Needs no torch.

Source: llama.cpp's converters (its folder `conversion`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .....schemas.errors import ModelLoadError
from ..keys import HEADS, Keys
from .architecture import Architecture, layer_types, local_rope, partial_rope, rope_of, windows
from .experts import (
    EXPERTS,
    GPT_OSS_EXPERTS,
    LLAMA4_EXPERTS,
    WITH_SHARED,
    dense_layers,
    experts_config,
    local_experts_config,
    routed_config,
    shared_experts_config,
    shared_size,
    sparse_layers,
)
from .latent import V2, V3, is_sigmoid

_MIXTRAL = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
_GPT_OSS = {
    "attn_sinks": "self_attn.sinks.",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.router",
}
_LLAMA4 = {
    "ffn_gate": "feed_forward.gate_proj",
    "ffn_up": "feed_forward.up_proj",
    "ffn_down": "feed_forward.down_proj",
    "ffn_gate_inp": "feed_forward.router",
    "ffn_gate_shexp": "feed_forward.shared_expert.gate_proj",
    "ffn_up_shexp": "feed_forward.shared_expert.up_proj",
    "ffn_down_shexp": "feed_forward.shared_expert.down_proj",
}
_MAVERICK = 128  # experts, of the one whose queries and keys have no norms
_PHI_MOE = {
    "ffn_gate_inp": "mlp.router",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_HUNYUAN = EXPERTS | {
    "ffn_gate_inp": "mlp.gate.wg",
    "ffn_gate_shexp": "mlp.shared_mlp.gate_proj",
    "ffn_up_shexp": "mlp.shared_mlp.up_proj",
    "ffn_down_shexp": "mlp.shared_mlp.down_proj",
    "attn_q_norm": "self_attn.query_layernorm",
    "attn_k_norm": "self_attn.key_layernorm",
}
_ERNIE = WITH_SHARED | {"exp_probs_b": "mlp.gate.moe_statics.e_score_correction_bias."}
_AFMOE = WITH_SHARED | {
    "ffn_gate_inp": "mlp.router.gate",
    "exp_probs_b": "mlp.expert_bias.",
    "attn_gate": "self_attn.gate_proj",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_mlp_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
}


def _llama(keys: Keys) -> Architecture:
    return _WITH_EXPERTS if keys.find("expert_count") else _LLAMA


def _gpt_oss(keys: Keys) -> dict[str, Any]:
    rope = rope_of(keys)
    if rope["rope_type"] == "yarn":
        rope["truncate"] = False  # which no key says
    return local_experts_config(keys) | {
        "intermediate_size": keys.need("expert_feed_forward_length"),
        "sliding_window": keys.need("attention.sliding_window"),
        "layer_types": layer_types(keys, 2),
        "rope_parameters": rope,
    }


def _llama4(keys: Keys) -> dict[str, Any]:
    found = local_experts_config(keys) | {
        "intermediate_size": keys.need("expert_feed_forward_length"),
        "intermediate_size_mlp": keys.need("feed_forward_length"),
        "interleave_moe_layer_step": keys.need("interleave_moe_layer_step"),
        "use_qk_norm": keys.need("expert_count") != _MAVERICK,
    }
    if keys.find("attention.sliding_window") != 0:
        return found
    layers = keys.num_layers  # of which all attend to all
    everywhere = {"no_rope_layers": [1] * layers, "layer_types": ["full_attention"] * layers}
    return found | everywhere | {"attn_temperature_tuning": False}


def _phi_moe(keys: Keys) -> dict[str, Any]:
    return local_experts_config(keys) | {
        "sliding_window": keys.find("attention.sliding_window") or None,
        "lm_head_bias": "output.bias" in keys.gguf.tensors,
    }


def _laguna(keys: Keys) -> dict[str, Any]:
    """Layers with a window, all but the first of each four, may have other numbers of heads, and rotate in another way;
    gates are by head or number."""
    heads, local = keys.by_layer(HEADS), local_rope(keys)
    gate = keys.layer(0, "attn_gate.weight")
    rotated = keys.find("rope.dimension_count_swa", keys.head_dim)
    found, window = experts_config(keys), keys.find("attention.sliding_window")
    pattern, layers = keys.find("attention.sliding_window_pattern", 4), range(keys.num_layers)
    slides = pattern if isinstance(pattern, list) else [bool(layer % pattern) for layer in layers]
    kinds = ["sliding_attention" if window and slides[layer] else "full_attention" for layer in layers]
    return (
        found
        | ({"sliding_window": window} if window else {})
        | {
            "layer_types": kinds,
            "num_attention_heads": heads[0],
            "num_attention_heads_per_layer": heads,
            "mlp_layer_types": sparse_layers(keys),
            "shared_expert_intermediate_size": shared_size(keys),
            "moe_routed_scaling_factor": keys.find("expert_weights_scale", 1.0),
            "gating": True if gate is None or gate.shape[0] == heads[0] else "per-element",
            "rope_parameters": {
                "full_attention": partial_rope(keys),
                "sliding_attention": local | {"partial_rotary_factor": rotated / keys.head_dim},
            },
        }
    )


def _cohere2(keys: Keys) -> dict[str, Any]:
    """Shared experts and chosen ones are averaged; layers before the first with experts may have their own width."""
    return (
        experts_config(keys)
        | windows(keys, 4)
        | {
            "logit_scale": keys.need("logit_scale"),
            "intermediate_size": keys.need("expert_feed_forward_length"),
            "prefix_dense_intermediate_size": keys.need("feed_forward_length"),
            "mlp_layer_types": sparse_layers(keys),
            "num_shared_experts": keys.find("expert_shared_count", 0),
            "norm_topk_prob": keys.find("expert_weights_norm", False),
            "expert_selection_fn": "softmax" if keys.find("expert_gating_func") == 1 else "sigmoid",
        }
    )


def _hunyuan_moe(keys: Keys) -> dict[str, Any]:
    return {
        "num_experts": keys.need("expert_count"),
        "moe_topk": keys.need("expert_used_count"),
        "intermediate_size": keys.need("expert_feed_forward_length"),
    }


def _deepseek(keys: Keys) -> Architecture:
    """Raises `ModelLoadError` for Mistral Large 3, whose file is called the same."""
    if keys.find("attention.temperature_scale") or (keys.find("expert_weights_norm") and not is_sigmoid(keys)):
        raise ModelLoadError(f"{keys.gguf.path} is a Mistral Large 3, which is not supported in GGUF")
    return V3 if is_sigmoid(keys) else V2


def _glm4(keys: Keys) -> dict[str, Any]:
    return routed_config(keys) | {
        "use_qk_norm": keys.has("attn_q_norm.weight"),
        "rope_parameters": partial_rope(keys),
    }


def _ernie(keys: Keys) -> dict[str, Any]:
    return {
        "moe_num_experts": keys.need("expert_count"),
        "moe_k": keys.need("expert_used_count"),
        "moe_intermediate_size": keys.need("expert_feed_forward_length"),
        "moe_num_shared_experts": keys.find("expert_shared_count", 0),
        "moe_layer_start_index": dense_layers(keys),
        "moe_layer_end_index": keys.num_layers - 1,
        "moe_layer_interval": keys.find("interleave_moe_layer_step", 1),
        "use_bias": keys.has("attn_q.bias"),
    }


def _exaone(keys: Keys) -> dict[str, Any]:
    return (
        routed_config(keys)
        | windows(keys, 4)
        | {
            "num_experts": keys.need("expert_count"),
            "num_shared_experts": keys.find("expert_shared_count", 0),
            "mlp_layer_types": sparse_layers(keys),
            "sliding_window_pattern": 4,
        }
    )


def _afmoe(keys: Keys) -> dict[str, Any]:
    return (
        experts_config(keys)
        | windows(keys, 4)
        | {
            "num_shared_experts": keys.find("expert_shared_count", 0),
            "num_dense_layers": dense_layers(keys),
            "route_scale": keys.find("expert_weights_scale", 1.0),
            "mup_enabled": True,
        }
    )


def _hunyuan(keys: Keys) -> dict[str, Any]:
    return experts_config(keys) | {
        "num_shared_experts": keys.find("expert_shared_count", 1),
        "mlp_layer_types": sparse_layers(keys),
        "router_scaling_factor": keys.find("expert_weights_scale", 1.0),
    }


def _mellum(keys: Keys) -> dict[str, Any]:
    return (
        windows(keys, 4)
        | local_experts_config(keys)
        | {
            "moe_intermediate_size": keys.need("expert_feed_forward_length"),
            "mlp_layer_types": sparse_layers(keys),
            "norm_topk_prob": True,
            "rope_parameters": {"full_attention": rope_of(keys), "sliding_attention": local_rope(keys)},
        }
    )


_QWEN3 = Architecture(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    EXPERTS,
    extra=lambda keys: experts_config(keys) | {"norm_topk_prob": True},
)
_LLAMA = Architecture(
    "llama", "LlamaForCausalLM", interleaved=True, extra=lambda keys: {"mlp_bias": keys.has("ffn_gate.bias")}
)
_WITH_EXPERTS = Architecture(
    "mixtral",
    "MixtralForCausalLM",
    _MIXTRAL,
    interleaved=True,
    extra=lambda keys: local_experts_config(keys) | {"sliding_window": None},
)
SPARSE: dict[str, Architecture | Callable[[Keys], Architecture]] = {
    "llama": _llama,
    "qwen2moe": Architecture("qwen2_moe", "Qwen2MoeForCausalLM", EXPERTS, extra=shared_experts_config),
    "qwen3moe": _QWEN3,
    "qwen3vlmoe": _QWEN3,
    "gpt-oss": Architecture("gpt_oss", "GptOssForCausalLM", _GPT_OSS, GPT_OSS_EXPERTS, extra=_gpt_oss),
    "llama4": Architecture("llama4_text", "Llama4ForCausalLM", _LLAMA4, LLAMA4_EXPERTS, extra=_llama4),
    "phimoe": Architecture("phimoe", "PhimoeForCausalLM", _PHI_MOE, extra=_phi_moe),
    "hunyuan-moe": Architecture("hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM", _HUNYUAN, extra=_hunyuan_moe),
    "laguna": Architecture(
        "laguna", "LagunaForCausalLM", WITH_SHARED | {"attn_gate": "self_attn.g_proj"}, extra=_laguna
    ),
    "cohere2moe": Architecture(
        "cohere2_moe", "Cohere2MoeForCausalLM", WITH_SHARED, epsilon="layer_norm_eps", extra=_cohere2
    ),
    "deepseek2": _deepseek,
    "glm4moe": Architecture(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        WITH_SHARED | {"post_attention_norm": "post_attention_layernorm"},
        extra=_glm4,
    ),
    "olmoe": Architecture(
        "olmoe",
        "OlmoeForCausalLM",
        EXPERTS,
        extra=lambda keys: {
            "num_experts": keys.need("expert_count"),
            "num_experts_per_tok": keys.need("expert_used_count"),
            "norm_topk_prob": keys.find("expert_weights_norm", False),
        },
    ),
    "minimax-m2": Architecture(
        "minimax_m2",
        "MiniMaxM2ForCausalLM",
        EXPERTS | {"exp_probs_b": "mlp.e_score_correction_bias."},
        extra=lambda keys: (
            local_experts_config(keys) | {"rotary_dim": keys.find("rope.dimension_count", keys.head_dim)}
        ),
    ),
    "ernie4_5-moe": Architecture("ernie4_5_moe", "Ernie4_5_MoeForCausalLM", _ERNIE, extra=_ernie),
    "dots1": Architecture(
        "dots1",
        "Dots1ForCausalLM",
        WITH_SHARED,
        extra=lambda keys: (
            routed_config(keys) | {"layer_types": ["full_attention"] * keys.num_layers, "sliding_window": None}
        ),
    ),
    "exaone-moe": Architecture(
        "exaone_moe",
        "ExaoneMoeForCausalLM",
        WITH_SHARED,
        extra=_exaone,
    ),
    "afmoe": Architecture("afmoe", "AfmoeForCausalLM", _AFMOE, extra=_afmoe),
    "hy_v3": Architecture(
        "hy_v3",
        "HYV3ForCausalLM",
        WITH_SHARED | {"exp_probs_b": "mlp.e_score_correction_bias."},
        extra=_hunyuan,
    ),
    "mellum": Architecture("mellum", "MellumForCausalLM", EXPERTS, extra=_mellum),
}
