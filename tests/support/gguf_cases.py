"""Tiny random models of each architecture that GGUF files may hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

AutoConfig: Any = transformers.AutoConfig
AutoModelForCausalLM: Any = transformers.AutoModelForCausalLM
PROMPTS = [[7, 90, 301, 45, 12], [5 + 3 * index % 400 for index in range(40)]]
SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_MIXED = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 32}
_TIED = {"head_dim": 32, "tie_word_embeddings": True}
_LINEAR = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_EXPERT_KEYS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32}
_DELTA_NETS = {
    **{"layer_types": ["linear_attention", "full_attention"], "head_dim": 32, "linear_conv_kernel_dim": 4},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 16, "linear_value_head_dim": 32},
    "rope_parameters": {
        **{"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        **{"mrope_section": [3, 3, 2], "mrope_interleaved": True},
    },
}
_NEXT = _DELTA_NETS | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}
_DELTA_NET_KEYS = {
    **{
        "ssm.conv_kernel": 4,
        "ssm.state_size": 16,
        "ssm.group_count": 2,
        "ssm.time_step_rank": 6,
        "ssm.inner_size": 192,
    },
    **{"full_attention_interval": 2, "rope.dimension_count": 16, "rope.dimension_sections": [3, 3, 2, 0]},
}


class Case(NamedTuple):
    """An architecture of GGUF, the model type, its own settings, and what the file says of them."""

    architecture: str
    model_type: str
    settings: dict[str, Any]
    metadata: dict[str, Any]


CASES = [
    Case("llama", "llama", {}, {}),
    Case("llama", "llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 32}, {}),
    Case("llama", "llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}}, _LINEAR),
    Case(
        "llama",
        "mixtral",
        {"num_local_experts": 4, "num_experts_per_tok": 2},
        {"expert_count": 4, "expert_used_count": 2},
    ),
    Case(
        "gpt-oss",
        "gpt_oss",
        {
            **{"num_local_experts": 4, "num_experts_per_tok": 3, "head_dim": 32, "sliding_window": 16},
            "rope_parameters": {
                **{"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 32},
                **{"beta_fast": 4.0, "beta_slow": 0.5, "attention_factor": 1.125, "truncate": False},
            },
        },
        {
            **{"expert_count": 4, "expert_used_count": 3, "expert_feed_forward_length": 128},
            **{"attention.sliding_window": 16, "rope.scaling.type": "yarn", "rope.scaling.factor": 8.0},
            **{"rope.scaling.original_context_length": 32, "rope.scaling.yarn_beta_fast": 4.0},
            **{"rope.scaling.yarn_beta_slow": 0.5, "rope.scaling.yarn_attn_factor": 1.125},
        },
    ),
    Case("qwen2", "qwen2", {"tie_word_embeddings": True}, {}),
    Case("qwen2moe", "qwen2_moe", _EXPERTS | {"shared_expert_intermediate_size": 96}, _EXPERT_KEYS),
    Case("qwen3", "qwen3", {"head_dim": 32}, {}),
    Case("qwen3moe", "qwen3_moe", _EXPERTS | {"head_dim": 32, "norm_topk_prob": True}, _EXPERT_KEYS),
    Case("qwen35", "qwen3_5_text", _DELTA_NETS, _DELTA_NET_KEYS),
    Case(
        "qwen35moe",
        "qwen3_5_moe_text",
        _DELTA_NETS | _EXPERTS | {"shared_expert_intermediate_size": 96},
        _DELTA_NET_KEYS | _EXPERT_KEYS,
    ),
    Case(
        "qwen3next",
        "qwen3_next",
        _NEXT | _EXPERTS | {"shared_expert_intermediate_size": 96},
        {name: value for name, value in _DELTA_NET_KEYS.items() if "sections" not in name} | _EXPERT_KEYS,
    ),
    Case("gemma", "gemma", _TIED, {}),
    Case(
        "gemma2",
        "gemma2",
        _MIXED | _TIED | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
        {"attention.sliding_window": 16, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    Case(
        "gemma3",
        "gemma3_text",
        _MIXED | _TIED,
        {"attention.sliding_window": 16, "attention.sliding_window_pattern": [True, False]},
    ),
    Case(
        "phi3",
        "phi3",
        {"sliding_window": 16, "partial_rotary_factor": 0.5},
        {"attention.sliding_window": 16, "rope.dimension_count": 8},
    ),
    Case(
        "gptneox",
        "gpt_neox",
        {"num_key_value_heads": 4}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        {"attention.layer_norm_epsilon": 1e-5, "rope.dimension_count": 8, "use_parallel_residual": True},
    ),
    Case(
        "granite",
        "granite",
        {"embedding_multiplier": 6.0, "attention_multiplier": 0.4, "residual_multiplier": 0.7, "logits_scaling": 0.5},
        {"embedding_scale": 6.0, "attention.scale": 0.4, "residual_scale": 0.7, "logit_scale": 0.5},
    ),
    Case(
        "minicpm",  # by what its older files multiply, which do not say it
        "granite",
        {"embedding_multiplier": 12.0, "residual_multiplier": 1.4 / 2**0.5, "logits_scaling": 0.25}
        | {"attention_multiplier": 0.25},
        {},
    ),
    Case("exaone", "llama", {}, {}),
    Case("internlm2", "llama", {}, {}),
    Case("olmo2", "olmo2", {}, {}),
    Case("smollm3", "smollm3", {"num_hidden_layers": 4}, {}),
    Case("starcoder2", "starcoder2", {"use_bias": True}, {"attention.layer_norm_epsilon": 1e-5}),
    Case(
        "stablelm",
        "stablelm",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}},
        {"attention.layer_norm_epsilon": 1e-5, "rope.dimension_count": 4},
    ),
]


def save_model(case: Case, directory: Path) -> None:
    """A random model of a case, without a tokenizer."""
    config = AutoConfig.for_model(case.model_type, **SIZES | case.settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():  # biases and norms, too: as they begin they would hide faults
            if parameter.ndim == 1:
                parameter.data += 0.2 * torch.randn_like(parameter)
    model.save_pretrained(directory)
