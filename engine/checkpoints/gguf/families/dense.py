"""Architectures in GGUF whose layers are a plain decoder's, give or take a norm. Needs no torch.

Source: llama.cpp's converters (its folder `conversion`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from .....schemas.errors import ModelLoadError
from ..keys import Keys
from .architecture import AROUND, Architecture, layer_types, local_rope, partial_rope, rope_of, windows

_PHI3 = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_PHI = {
    "output_norm": "model.final_layernorm",
    "attn_output": "self_attn.dense",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}
_GLM4 = {
    "ffn_up": "mlp.gate_up_proj",
    "post_attention_norm": "post_self_attn_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
}
_HUNYUAN = {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}
_APERTUS = {"attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"}
_STABLELM = {"attn_q_norm": "self_attn.q_layernorm.norms.{}", "attn_k_norm": "self_attn.k_layernorm.norms.{}"}


def _with_alpha(keys: Keys) -> dict[str, Any]:
    """HunyuanVL's, whose converters leave the base as it is."""
    rope = {"rope_type": "dynamic", "rope_theta": keys.find("rope.freq_base", 10_000.0)}
    own = {"alpha": keys.need("rope.scaling.alpha"), "factor": keys.find("rope.scaling.factor", 1.0)}
    return {"rope_parameters": rope | own}


def _mlp_bias(keys: Keys) -> dict[str, Any]:
    return {"mlp_bias": keys.has("ffn_up.bias")}


def _bias(keys: Keys) -> dict[str, Any]:
    return {"use_bias": keys.has("attn_q.bias")}


def _partial(keys: Keys) -> dict[str, Any]:
    return {"rope_parameters": partial_rope(keys)}


def _ministral(keys: Keys) -> Architecture:
    """Ministral 3's attention grows sharper with the text, or has YaRN's own factor at least."""
    names = ("attention.temperature_scale", "rope.scaling.yarn_log_multiplier")
    return _PLAIN_IN_PAIRS if all(keys.find(name) is None for name in names) else _MINISTRAL


def _with_temperature(keys: Keys) -> dict[str, Any]:
    rope, scale = rope_of(keys), keys.find("rope.scaling.yarn_log_multiplier")
    more = {} if scale is None else {"mscale": 1.0, "mscale_all_dim": scale}
    length = keys.find("attention.temperature_length", rope.get("original_max_position_embeddings"))
    if length != rope.get("original_max_position_embeddings"):
        raise ModelLoadError(f"{keys.gguf.path}: its temperature has a length of its own; use its safetensors files")
    beta = keys.find("attention.temperature_scale", 0.0)
    return {"rope_parameters": rope | more | {"llama_4_scaling_beta": beta}, "sliding_window": None}


def _glm4(keys: Keys) -> Architecture:
    """GLM-4.1V's, 4.6V's and GLM-OCR's converter has another order of queries and keys."""
    return _GLM_SEEING if keys.sections else _GLM


def _nemotron(keys: Keys) -> dict[str, Any]:
    return {"rope_parameters": partial_rope(keys)} | _mlp_bias(keys)


def _olmo(keys: Keys) -> Architecture:
    return _OLMO3 if keys.find("attention.sliding_window") else _OLMO2


def _olmo3(keys: Keys) -> dict[str, Any]:
    return windows(keys, 4) | {
        "rope_parameters": {"full_attention": rope_of(keys), "sliding_attention": local_rope(keys)}
    }


def _exaone4(keys: Keys) -> dict[str, Any]:
    return windows(keys, 4) | {"sliding_window_pattern": 4}


def _stablelm(keys: Keys) -> dict[str, Any]:
    return {
        "use_qkv_bias": keys.has("attn_q.bias"),
        "qk_layernorm": keys.has("attn_q_norm.weight"),
        "use_parallel_residual": not keys.has("ffn_norm.weight"),
        "rope_parameters": partial_rope(keys),
    }


def _cohere(keys: Keys) -> dict[str, Any]:
    return {"logit_scale": keys.need("logit_scale"), "use_qk_norm": keys.has("attn_q_norm.weight")}


def _cohere2(keys: Keys) -> dict[str, Any]:
    return {"logit_scale": keys.need("logit_scale")} | windows(keys, 4) | {"layer_types": layer_types(keys, 4)}


def _activations(keys: Keys) -> dict[str, Any]:
    """The numbers of each layer's activation, xIELU. Raises `ModelLoadError` for fewer of them."""
    found: dict[str, Any] = {}
    for name in ("alpha_p", "alpha_n", "beta", "eps"):
        numbers = keys.gguf.metadata.get(f"xielu.{name}")
        if not isinstance(numbers, list) or len(numbers) < keys.num_layers:
            raise ModelLoadError(f"{keys.gguf.path} has no xielu.{name} for each layer; convert the model again")
        for layer, number in enumerate(numbers[: keys.num_layers]):
            found[f"model.layers.{layer}.mlp.act_fn.{name}"] = [number] if name.startswith("alpha") else number
    return found


_PLAIN = Architecture("llama", "LlamaForCausalLM")
_PLAIN_IN_PAIRS = replace(_PLAIN, interleaved=True)
_MINISTRAL = Architecture("ministral3", "Ministral3ForCausalLM", interleaved=True, extra=_with_temperature)
_GLM_4_9B = Architecture("glm", "GlmForCausalLM", {"ffn_up": "mlp.gate_up_proj"}, extra=_partial)
_GLM = Architecture("glm4", "Glm4ForCausalLM", _GLM4, extra=_partial)
_GLM_SEEING = replace(_GLM, apart=True)
_OLMO2 = Architecture("olmo2", "Olmo2ForCausalLM", AROUND)
_OLMO3 = Architecture("olmo3", "Olmo3ForCausalLM", AROUND, extra=_olmo3)
DENSE: dict[str, Architecture | Callable[[Keys], Architecture]] = {
    "mistral3": _ministral,
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM"),
    "qwen2vl": Architecture("qwen2", "Qwen2ForCausalLM"),  # text has the same position in all three dimensions
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM"),
    "qwen3vl": Architecture("qwen3", "Qwen3ForCausalLM"),  # as above
    "phi2": Architecture("phi", "PhiForCausalLM", _PHI, epsilon="layer_norm_eps", extra=_partial),
    "phi3": Architecture(
        "phi3",
        "Phi3ForCausalLM",
        _PHI3,
        extra=lambda keys: {"sliding_window": keys.find("attention.sliding_window") or None},
    ),
    "glm4": _glm4,
    "chatglm": _GLM_4_9B,
    "olmo": Architecture(
        "olmo",
        "OlmoForCausalLM",
        interleaved=True,
        epsilon="layer_norm_eps",
        extra=lambda keys: {"clip_qkv": keys.find("attention.clamp_kqv")},
    ),
    "nemotron": Architecture("nemotron", "NemotronForCausalLM", norm_offset=1, epsilon="norm_eps", extra=_nemotron),
    "jais2": Architecture("jais2", "Jais2ForCausalLM", epsilon="layer_norm_eps", extra=_mlp_bias),
    "exaone": _PLAIN,
    "internlm2": _PLAIN_IN_PAIRS,
    "olmo2": _olmo,
    "smollm3": Architecture("smollm3", "SmolLM3ForCausalLM", interleaved=True),
    "starcoder2": Architecture(
        "starcoder2",
        "Starcoder2ForCausalLM",
        {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        epsilon="norm_epsilon",
        extra=lambda keys: {"use_bias": keys.has("attn_q.bias"), "sliding_window": None},
    ),
    "command-r": Architecture("cohere", "CohereForCausalLM", epsilon="layer_norm_eps", extra=_cohere),
    "cohere2": Architecture("cohere2", "Cohere2ForCausalLM", epsilon="layer_norm_eps", extra=_cohere2),
    "exaone4": Architecture("exaone4", "Exaone4ForCausalLM", AROUND, extra=_exaone4),
    "seed_oss": Architecture(
        "seed_oss",
        "SeedOssForCausalLM",
        {"post_attention_norm": "post_attention_layernorm"},
        extra=lambda keys: {"attention_out_bias": keys.has("attn_output.bias")} | _mlp_bias(keys),
    ),
    "hunyuan-dense": Architecture("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", _HUNYUAN),
    "hunyuan_vl": Architecture("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", _HUNYUAN, extra=_with_alpha),
    "paddleocr": Architecture("llama", "LlamaForCausalLM", extra=_bias),  # text has the same position in all three
    "ernie4_5": Architecture("ernie4_5", "Ernie4_5ForCausalLM", extra=_bias),
    "apertus": Architecture("apertus", "ApertusForCausalLM", _APERTUS, constants=_activations),
    "arcee": Architecture("arcee", "ArceeForCausalLM", interleaved=True, extra=_mlp_bias),
    "stablelm": Architecture("stablelm", "StableLmForCausalLM", _STABLELM, epsilon="layer_norm_eps", extra=_stablelm),
}
