"""A GGUF file's model in transformers' terms: its configuration, and the name and layout of each weight there.

Source of the differences: llama.cpp's converters (its folder `conversion`), each of which is undone here. Needs no
torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ....schemas.errors import ModelLoadError
from .experts import (
    EXPERTS,
    GPT_OSS,
    MIXTRAL,
    experts_config,
    local_experts_config,
    shared_experts_config,
    shared_size,
    whole_experts,
)
from .file import Gguf, GgufTensor, GgufWeight
from .hybrids import DELTA_NETS, NEXT, by_key_heads, hybrid_config, untiled
from .keys import HEADS, KV_HEADS, Keys
from .scales import with_scales
from .tokens import end_ids

_NAMES = {
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
_AROUND = {  # of layers with norms on both sides of a part
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
ROPE_FACTORS = "rope_freqs.weight"
"""The tensor whose numbers divide the frequencies of rotations, in files of the architecture llama."""

_FACTORS = (ROPE_FACTORS, "rope_factors_long.weight", "rope_factors_short.weight")
_YARN = {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow", "attention_factor": "yarn_attn_factor"}
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)(\.weight|\.bias|)")
_NUMBER = re.compile(r"blk\.(\d+)\.")
_OUTSIDE = re.compile(r"(\w+)(\.weight|\.bias)")
_ALONE = ("A_log", "dt_bias", "sinks")  # what transformers' names have no suffix behind
_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}  # Gemma's largest scale their attention differently; see llama.cpp

Extra = Callable[[Keys], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class _Architecture:
    """`names` are those that differ; `interleaved`: converters permute the rows of queries and keys."""

    model_type: str
    class_name: str
    names: dict[str, str] = field(default_factory=dict)
    interleaved: bool = False
    norm_offset: int = 0  # what converters add to the weights of norms
    epsilon: str = "rms_norm_eps"
    extra: Extra = lambda keys: {}


def config_of(gguf: Gguf) -> dict[str, Any]:
    """The content that the model's config.json would have. Raises `ModelLoadError`."""
    architecture, keys = _architecture(gguf), Keys(gguf)
    embedding = gguf.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelLoadError(f"{gguf.path} has no token_embd.weight: it is not a language model; choose one that is")
    kinds = {one.type for one in gguf.tensors.values() if len(one.shape) > 1 and not one.name.endswith(".bias")}
    norm = "attention.layer_norm_rms_epsilon" if architecture.epsilon == "rms_norm_eps" else _LAYER_NORM
    ends = end_ids(gguf)
    return {
        "model_type": architecture.model_type,
        "architectures": [architecture.class_name],
        "dtype": "float32" if kinds == {"F32"} else "float16" if kinds == {"F16"} else "bfloat16",
        "vocab_size": embedding.shape[0],
        "hidden_size": keys.need("embedding_length"),
        "intermediate_size": keys.find("feed_forward_length")
        or keys.find("expert_feed_forward_length")
        or keys.need("feed_forward_length"),
        "num_hidden_layers": keys.num_layers,
        "num_attention_heads": keys.need(HEADS),
        "num_key_value_heads": keys.find(KV_HEADS) or keys.need(HEADS),
        "head_dim": keys.head_dim,
        "max_position_embeddings": keys.need("context_length"),
        architecture.epsilon: keys.need(norm),
        "rope_parameters": _rope(keys),
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "attention_bias": keys.has("attn_q.bias"),
        "bos_token_id": gguf.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": list(ends) or None,
        "pad_token_id": gguf.metadata.get("tokenizer.ggml.padding_token_id"),
    } | architecture.extra(keys)


def weights_of(gguf: Gguf) -> dict[str, GgufWeight]:
    """All weights by transformers' names. Raises `ModelLoadError` naming a tensor that has none."""
    gguf = with_scales(gguf)
    architecture, keys = _architecture(gguf), Keys(gguf)
    found: dict[str, GgufWeight] = {}
    for tensor in gguf.tensors.values():
        layer = _NUMBER.match(tensor.name)
        if tensor.name not in _FACTORS and not (layer and int(layer[1]) >= keys.num_layers):
            found.update(_weights(gguf, tensor, architecture, keys))
    return found


def rope_factors(gguf: Gguf) -> list[float] | None:
    """What divides the frequencies of rotations, if the file says that in a tensor."""
    return gguf.floats(ROPE_FACTORS) if ROPE_FACTORS in gguf.tensors else None


def _architecture(gguf: Gguf) -> _Architecture:
    name = gguf.metadata.get("general.architecture")
    if name == "llama" and gguf.metadata.get("llama.expert_count"):
        name = "llama with experts"
    if name not in _ARCHITECTURES:
        raise ModelLoadError(
            f"{gguf.path} has the architecture {name!r}, which is not supported in GGUF files; supported: "
            f"{', '.join(_ARCHITECTURES)}. Use the model's safetensors files instead"
        )
    return _ARCHITECTURES[name]


def _weights(
    gguf: Gguf, tensor: GgufTensor, architecture: _Architecture, keys: Keys
) -> Iterator[tuple[str, GgufWeight]]:
    match = _LAYER.fullmatch(tensor.name)
    stem, suffix = match.groups()[1:] if match else _split(tensor.name)
    name = (_NAMES | architecture.names).get(stem)
    if name is None:
        raise ModelLoadError(
            f"{gguf.path}: the tensor {tensor.name} is unknown in a model of the architecture "
            f"{gguf.metadata['general.architecture']}; use the model's safetensors files instead"
        )
    place = f"model.layers.{match[1]}." if match else ""
    if architecture.names is GPT_OSS and stem.endswith("_exps"):
        if (experts := whole_experts(gguf, tensor, stem)) is not None:
            yield f"{place}{name}{'_bias' if suffix == '.bias' else ''}", experts
        return
    if name == NEXT["attn_qkv"] and stem != "ssm_in":
        if (weight := by_key_heads(tensor, stem, keys)) is not None:
            yield f"{place}{name}{suffix}", weight
        return
    if "{}" in name:
        for expert in range(tensor.shape[0]):
            yield f"{place}{name.format(expert)}{suffix}", GgufWeight(tensor, tensor.shape[1:], expert=expert)
        return
    shape = (1, *tensor.shape) if stem == "ffn_gate_inp_shexp" and len(tensor.shape) == 1 else tensor.shape
    heads = None
    if architecture.interleaved and stem in ("attn_q", "attn_k"):
        heads = keys.need(HEADS) if stem == "attn_q" else keys.find(KV_HEADS) or keys.need(HEADS)
        if shape[0] % (2 * heads):
            raise ModelLoadError(f"{gguf.path}: {tensor.name} has {shape[0]} rows for {heads} heads; convert it again")
    is_norm = stem.endswith("norm") and stem != "ssm_norm" and suffix == ".weight"
    weight = GgufWeight(tensor, shape, heads, -architecture.norm_offset if is_norm else 0)
    whole = f"{place}{name}" if name.endswith(_ALONE) else f"{place}{name}{suffix}"
    has_states, is_tiled = "ssm_out" in architecture.names, "ssm_ba" not in architecture.names
    yield whole, untiled(weight, stem, keys, is_tiled) if has_states else weight


def _split(name: str) -> tuple[str, str]:
    match = _OUTSIDE.fullmatch(name)
    return (match[1], match[2]) if match else (name, "")


def _rope(keys: Keys) -> dict[str, Any]:
    """The parameters of rotations. Raises `ModelLoadError` for a scaling that is not supported."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": keys.find("rope.freq_base", 10000.0)}
    rotated = keys.find("rope.dimension_count", keys.head_dim)
    if rotated != keys.head_dim:
        rope["partial_rotary_factor"] = rotated / keys.head_dim
    original = keys.find("rope.scaling.original_context_length")
    kind, factor = keys.find("rope.scaling.type", "none"), keys.find("rope.scaling.factor")
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


def _layer_types(keys: Keys, period: int) -> list[str]:
    """Which layers have a window: by default all but each `period`-th."""
    pattern = keys.find("attention.sliding_window_pattern", period)
    layers = range(keys.need("block_count"))
    slides = pattern if isinstance(pattern, list) else [bool((layer + 1) % pattern) for layer in layers]
    return ["sliding_attention" if slides[layer] else "full_attention" for layer in layers]


def _gemma2(keys: Keys) -> dict[str, Any]:
    return _gemma(keys, "gemma2") | {
        "sliding_window": keys.find("attention.sliding_window", 4096),
        "layer_types": _layer_types(keys, 2),
        "attn_logit_softcapping": keys.find("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.find("final_logit_softcapping", 30.0),
    }


def _gemma3(keys: Keys) -> dict[str, Any]:
    local = {"rope_type": "default", "rope_theta": keys.find("rope.freq_base_swa", 10000.0)}
    return _gemma(keys, "gemma3") | {
        "sliding_window": keys.find("attention.sliding_window", 4096),
        "layer_types": _layer_types(keys, 6) if keys.find("attention.sliding_window") else _layer_types(keys, 1),
        "rope_parameters": {"full_attention": _rope(keys), "sliding_attention": local},
        "final_logit_softcapping": keys.find("final_logit_softcapping"),
    }


def _gemma(keys: Keys, name: str) -> dict[str, Any]:
    largest = keys.need("block_count") == _LAYERS_OF_27B[name]
    return {"query_pre_attn_scalar": keys.need("embedding_length") // keys.need(HEADS) if largest else keys.head_dim}


def _granite(keys: Keys) -> dict[str, Any]:
    names = {
        "attention_multiplier": keys.find("attention.scale", keys.head_dim**-0.5),
        "embedding_multiplier": keys.find("embedding_scale", 1.0),
        "residual_multiplier": keys.find("residual_scale", 1.0),
        "logits_scaling": keys.find("logit_scale", 1.0),
    }
    return names | {"mlp_bias": keys.has("ffn_gate.bias")}


def _olmo2(keys: Keys) -> dict[str, Any]:
    if keys.find("attention.sliding_window"):
        raise ModelLoadError(
            f"{keys.gguf.path} is an OLMo 3, which is not supported in GGUF; use its safetensors files"
        )
    return {}


def _mistral3(keys: Keys) -> dict[str, Any]:
    if keys.find("attention.temperature_scale"):
        raise ModelLoadError(f"{keys.gguf.path} is a Ministral 3, which is not supported in GGUF; use another model")
    return {}


def _hybrid(keys: Keys) -> dict[str, Any]:
    rope = _rope(keys) | {"mrope_interleaved": True}
    return hybrid_config(keys) | {"rope_parameters": rope | ({"mrope_section": keys.sections} if keys.sections else {})}


def _hybrid_with_experts(keys: Keys) -> dict[str, Any]:
    return _hybrid(keys) | experts_config(keys) | {"shared_expert_intermediate_size": shared_size(keys)}


def _next(keys: Keys) -> dict[str, Any]:
    rope = {"partial_rotary_factor": 1.0} | _rope(keys)  # else transformers' own of this model
    experts = experts_config(keys) | {"shared_expert_intermediate_size": shared_size(keys), "norm_topk_prob": True}
    return hybrid_config(keys) | {"rope_parameters": rope} | experts


def _gpt_oss(keys: Keys) -> dict[str, Any]:
    rope = _rope(keys)
    if rope["rope_type"] == "yarn":
        rope["truncate"] = False  # which no key says
    return local_experts_config(keys) | {
        "intermediate_size": keys.need("expert_feed_forward_length"),
        "sliding_window": keys.need("attention.sliding_window"),
        "layer_types": _layer_types(keys, 2),
        "rope_parameters": rope,
    }


_LAYER_NORM = "attention.layer_norm_epsilon"
_QWEN3_MOE = _Architecture(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    EXPERTS,
    extra=lambda keys: experts_config(keys) | {"norm_topk_prob": True},
)
_ARCHITECTURES: dict[str, _Architecture] = {
    "llama": _Architecture(
        "llama",
        "LlamaForCausalLM",
        interleaved=True,
        extra=lambda keys: {"mlp_bias": keys.has("ffn_gate.bias")},
    ),
    "llama with experts": _Architecture(
        "mixtral",
        "MixtralForCausalLM",
        MIXTRAL,
        interleaved=True,
        extra=lambda keys: local_experts_config(keys) | {"sliding_window": None},
    ),
    "mistral3": _Architecture("llama", "LlamaForCausalLM", interleaved=True, extra=_mistral3),
    "qwen2": _Architecture("qwen2", "Qwen2ForCausalLM"),
    "qwen2vl": _Architecture("qwen2", "Qwen2ForCausalLM"),  # text has the same position in all three dimensions
    "qwen2moe": _Architecture("qwen2_moe", "Qwen2MoeForCausalLM", EXPERTS, extra=shared_experts_config),
    "qwen3": _Architecture("qwen3", "Qwen3ForCausalLM"),
    "qwen3vl": _Architecture("qwen3", "Qwen3ForCausalLM"),  # as above
    "qwen3moe": _QWEN3_MOE,
    "qwen3vlmoe": _QWEN3_MOE,
    "qwen3next": _Architecture("qwen3_next", "Qwen3NextForCausalLM", NEXT | EXPERTS, norm_offset=1, extra=_next),
    "qwen35": _Architecture("qwen3_5_text", "Qwen3_5ForCausalLM", DELTA_NETS, norm_offset=1, extra=_hybrid),
    "qwen35moe": _Architecture(
        "qwen3_5_moe_text",
        "Qwen3_5MoeForCausalLM",
        DELTA_NETS | EXPERTS,
        norm_offset=1,
        extra=_hybrid_with_experts,
    ),
    "gpt-oss": _Architecture("gpt_oss", "GptOssForCausalLM", GPT_OSS, extra=_gpt_oss),
    "gemma": _Architecture("gemma", "GemmaForCausalLM", norm_offset=1),
    "gemma2": _Architecture("gemma2", "Gemma2ForCausalLM", _AROUND, norm_offset=1, extra=_gemma2),
    "gemma3": _Architecture("gemma3_text", "Gemma3ForCausalLM", _AROUND, norm_offset=1, extra=_gemma3),
    "phi3": _Architecture(
        "phi3",
        "Phi3ForCausalLM",
        {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        extra=lambda keys: {"sliding_window": keys.find("attention.sliding_window") or None},
    ),
    "granite": _Architecture("granite", "GraniteForCausalLM", interleaved=True, extra=_granite),
    "olmo2": _Architecture("olmo2", "Olmo2ForCausalLM", _AROUND, extra=_olmo2),
    "smollm3": _Architecture("smollm3", "SmolLM3ForCausalLM", interleaved=True),
    "starcoder2": _Architecture(
        "starcoder2",
        "Starcoder2ForCausalLM",
        {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        epsilon="norm_epsilon",
        extra=lambda keys: {"use_bias": keys.has("attn_q.bias"), "sliding_window": None},
    ),
}
