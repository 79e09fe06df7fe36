"""Gemma in GGUF. Needs no torch.

Source: llama.cpp's `conversion/gemma.py`. Of Gemma 3n and 4 converters add nothing to the weights of norms. Where full
attention rotates a part of a head, Gemma 4's file says so by a tensor of factors, which is huge for the others.
"""

from __future__ import annotations

from statistics import NormalDist
from typing import Any

from .....schemas.errors import ModelLoadError
from ..keys import HEADS, KV_HEADS, Keys
from .architecture import AROUND, Architecture, layer_types, local_rope, rope_of

ROPE_FACTORS = "rope_freqs.weight"
_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}  # Gemma's largest scale their attention differently; see llama.cpp
_SLIDING, _FULL = "sliding_attention", "full_attention"
_UNROTATED = 1e20  # factors above this stop a rotation
_BY_LAYER_INPUTS = {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
_GEMMA3N = {
    "altup_proj": "model.altup_projections.{}",
    "altup_unembd_proj": "model.altup_unembed_projections.{}",
    "altup_correct_scale": "altup.correct_output_scale.",
    "altup_correct_coef": "altup.correction_coefs",
    "altup_predict_coef": "altup.prediction_coefs",
    "altup_router": "altup.modality_router",
    "altup_router_norm": "altup.router_norm",
    "laurel_l": "laurel.linear_left",
    "laurel_r": "laurel.linear_right",
    "laurel_post_norm": "laurel.post_laurel_norm",
}
_EXPERTS = {
    "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale.",
    "ffn_down_exps.scale": "router.per_expert_scale.",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "ffn_down_exps": "experts.{}.down_proj",
    "ffn_gate_exps": "experts.{}.gate_proj",
    "ffn_up_exps": "experts.{}.up_proj",
    "ffn_gate_up_exps": "experts.{}.gate_up_proj",
}


def _gemma2(keys: Keys) -> dict[str, Any]:
    return _scaling(keys, "gemma2") | {
        "sliding_window": keys.find("attention.sliding_window", 4096),
        "layer_types": layer_types(keys, 2),
        "attn_logit_softcapping": keys.find("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.find("final_logit_softcapping", 30.0),
    }


def _gemma3(keys: Keys) -> dict[str, Any]:
    return _scaling(keys, "gemma3") | {
        "sliding_window": keys.find("attention.sliding_window", 4096),
        "layer_types": layer_types(keys, 6) if keys.find("attention.sliding_window") else layer_types(keys, 1),
        "rope_parameters": {_FULL: rope_of(keys), _SLIDING: local_rope(keys, 10000.0)},
        "final_logit_softcapping": keys.find("final_logit_softcapping"),
    }


def _scaling(keys: Keys, name: str) -> dict[str, Any]:
    largest = keys.need("block_count") == _LAYERS_OF_27B[name]
    return {"query_pre_attn_scalar": keys.need("embedding_length") // keys.need(HEADS) if largest else keys.head_dim}


def _gemma3n(keys: Keys) -> dict[str, Any]:
    scales = keys.by_layer("activation_sparsity_scale")
    return _inputs_by_layer(keys) | {
        "intermediate_size": keys.by_layer("feed_forward_length"),
        "sliding_window": keys.need("attention.sliding_window"),
        "layer_types": layer_types(keys, 5),
        "rope_parameters": {_FULL: rope_of(keys), _SLIDING: local_rope(keys, 10000.0)},
        "final_logit_softcapping": keys.find("final_logit_softcapping", 30.0),
        "altup_num_inputs": keys.find("altup.num_inputs", 4),
        "altup_active_idx": keys.find("altup.active_idx", 0),
        "activation_sparsity_pattern": [_share(scale) for scale in scales],
        "laurel_rank": _rows(keys, "laurel_l.weight"),
    }


def _share(scale: float) -> float:
    """The part of numbers that lie below so many standard deviations, which is a round one."""
    return round(NormalDist().cdf(scale), 6)


def _rows(keys: Keys, name: str) -> int:
    if (found := keys.first(name)) is None:
        raise ModelLoadError(f"{keys.gguf.path} has no tensor {name}: it is incomplete; download it again")
    return found.shape[0]


def _inputs_by_layer(keys: Keys) -> dict[str, Any]:
    embedding = keys.gguf.tensors.get("per_layer_token_embd.weight")
    return {
        "hidden_size_per_layer_input": keys.find("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": embedding.shape[0] if embedding else 0,
        "num_kv_shared_layers": keys.find("attention.shared_kv_layers", 0),
    }


def _gemma4(keys: Keys) -> dict[str, Any]:
    kinds, sizes = layer_types(keys, 6), keys.by_layer("feed_forward_length")
    kv_heads = keys.by_layer(KV_HEADS)
    heads = {kind: {count for own, count in zip(kinds, kv_heads, strict=True) if own == kind} for kind in kinds}
    if any(len(counts) > 1 for counts in heads.values()):
        raise ModelLoadError(f"{keys.gguf.path}: layers of one kind differ in their heads; choose another model")
    few = min(sizes)
    shared = _inputs_by_layer(keys)
    wide = [layer >= len(sizes) - shared["num_kv_shared_layers"] for layer in range(len(sizes))]
    if sizes not in ([few] * len(sizes), [few * 2 if one else few for one in wide]):
        raise ModelLoadError(f"{keys.gguf.path}: its layers differ in feed_forward_length; choose another model")
    whole, local = min(heads.get(_FULL, {0})), min(heads.get(_SLIDING, heads.get(_FULL, {0})))
    full = [number for number, kind in enumerate(kinds) if kind == _FULL]
    router = keys.first("ffn_gate_inp.weight")
    return shared | {
        "intermediate_size": few,
        "use_double_wide_mlp": few != max(sizes),
        "num_key_value_heads": local,
        "num_global_key_value_heads": whole if whole != local else None,
        "head_dim": keys.find("attention.key_length_swa", keys.head_dim),
        "global_head_dim": keys.head_dim,
        "attention_k_eq_v": any(keys.layer(number, "attn_v.weight") is None for number in full if not wide[number]),
        "sliding_window": keys.need("attention.sliding_window"),
        "layer_types": kinds,
        "rope_parameters": {_FULL: _proportional(keys), _SLIDING: local_rope(keys, 10000.0)},
        "final_logit_softcapping": keys.find("final_logit_softcapping"),
        "pad_token_id": keys.gguf.metadata.get("tokenizer.ggml.padding_token_id", 0),
        # The file does not say it; of the published models those whose layers have no inputs of their own see so.
        "use_bidirectional_attention": None if shared["hidden_size_per_layer_input"] else "vision",
        "enable_moe_block": router is not None,
        "num_experts": router.shape[0] if router else None,
        "top_k_experts": keys.find("expert_used_count") or None,
        "moe_intermediate_size": keys.find("expert_feed_forward_length") or None,
    }


def _proportional(keys: Keys) -> dict[str, Any]:
    factors = keys.gguf.floats(ROPE_FACTORS) if ROPE_FACTORS in keys.gguf.tensors else [1.0]
    if any(factor != 1.0 and factor < _UNROTATED for factor in factors):
        raise ModelLoadError(f"{keys.gguf.path}: the factors of {ROPE_FACTORS} are not Gemma's; choose another model")
    rotated = sum(factor == 1.0 for factor in factors) / len(factors)
    theta = keys.find("rope.freq_base", 1000000.0)
    return {"rope_type": "proportional", "rope_theta": theta, "partial_rotary_factor": rotated}


GEMMAS = {
    "gemma": Architecture("gemma", "GemmaForCausalLM", norm_offset=1),
    "gemma2": Architecture("gemma2", "Gemma2ForCausalLM", AROUND, norm_offset=1, extra=_gemma2),
    "gemma3": Architecture("gemma3_text", "Gemma3ForCausalLM", AROUND, norm_offset=1, extra=_gemma3),
    "gemma3n": Architecture("gemma3n_text", "Gemma3nForCausalLM", AROUND | _BY_LAYER_INPUTS | _GEMMA3N, extra=_gemma3n),
    "gemma4": Architecture(
        "gemma4_text",
        "Gemma4ForCausalLM",
        AROUND | _BY_LAYER_INPUTS | _EXPERTS | {"layer_output_scale": "layer_scalar."},
        has_factors=False,  # the configuration says it
        extra=_gemma4,
    ),
}
