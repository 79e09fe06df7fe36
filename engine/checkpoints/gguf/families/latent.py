"""DeepSeek's latent attention in GGUF: DeepSeek V2 to V3.2, Kimi K2, GLM-4.7-Flash, GLM-5, MiniCPM 3, Kimi Linear.

Of the product that expands the latent, newer files have the rows for keys, transposed, and those for values apart, by
head. Source: llama.cpp's `conversion/deepseek.py` and `conversion/kimi_linear.py`. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

from .....schemas.errors import ModelLoadError
from ..file import GgufTensor, GgufWeight
from ..keys import HEADS, Keys
from .architecture import Architecture, rope_of
from .experts import WITH_SHARED, routed_config, sparse_layers

_NAMES = WITH_SHARED | {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
}
_CHOOSING = _NAMES | {  # of models whose indexers choose what is attended to
    "indexer.attn_q_b": "self_attn.indexer.wq_b",
    "indexer.attn_k": "self_attn.indexer.wk",
    "indexer.k_norm": "self_attn.indexer.k_norm",
    "indexer.proj": "self_attn.indexer.weights_proj",
}
_KIMI = _NAMES | {  # the layers that keep states, too
    "ssm_f_a": "self_attn.forget_gate.f_a_proj",
    "ssm_f_b": "self_attn.forget_gate.f_b_proj",
    "ssm_dt": "self_attn.forget_gate.dt_bias.",
    "ssm_beta": "self_attn.b_proj",
    "ssm_g_a": "self_attn.g_a_proj",
    "ssm_g_b": "self_attn.g_b_proj",
    "ssm_norm": "self_attn.o_norm",
}
_SIGMOID = 2  # how routes are weighed
_MSCALE = 0.1  # what converters multiply it by


def is_sigmoid(keys: Keys) -> bool:
    """Whether routes to experts are weighed by sigmoids, as from V3 on."""
    return bool(keys.find("expert_gating_func") == _SIGMOID or keys.has("exp_probs_b.bias"))


def _latent(keys: Keys) -> dict[str, Any]:
    rotated = keys.need("rope.dimension_count")
    length, values = (
        keys.find(f"attention.{one}_length_mla", keys.find(f"attention.{one}_length")) for one in ("key", "value")
    )
    rope = rope_of(keys, rotated)
    if (scale := keys.find("rope.scaling.yarn_log_multiplier")) is not None:
        rope |= dict.fromkeys(("mscale", "mscale_all_dim"), round(scale / _MSCALE, 6))
    return {
        "num_key_value_heads": keys.need(HEADS),
        "head_dim": rotated,
        "q_lora_rank": keys.find("attention.q_lora_rank"),
        "kv_lora_rank": keys.need("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": length - rotated,
        "qk_head_dim": length,
        "v_head_dim": values,
        "rope_parameters": rope,
    }


def _v2(keys: Keys) -> dict[str, Any]:
    found = _latent(keys) | routed_config(keys)
    return found | {"topk_method": "group_limited_greedy" if found["n_group"] > 1 else "greedy"}


def _v3(keys: Keys) -> dict[str, Any]:
    return _latent(keys) | routed_config(keys)


def _choosing(keys: Keys) -> dict[str, Any]:
    return _v3(keys) | {
        "index_n_heads": keys.need("attention.indexer.head_count"),
        "index_head_dim": keys.need("attention.indexer.key_length"),
        "index_topk": keys.need("attention.indexer.top_k"),
    }


def _glm5(keys: Keys) -> dict[str, Any]:
    """Layers without an indexer choose what the last one with an indexer has chosen."""
    layers = range(keys.num_layers)
    kinds = ["full" if keys.layer(layer, "indexer.proj.weight") else "shared" for layer in layers]
    return _choosing(keys) | {"indexer_types": kinds, "mlp_layer_types": sparse_layers(keys)}


def _minicpm3(keys: Keys) -> dict[str, Any]:
    """The length of values is in no key."""
    found, whole = _latent(keys), keys.first("attn_kv_b.weight")
    heads = keys.need(HEADS)
    if whole is None or whole.shape[0] % heads:
        raise ModelLoadError(f"{keys.gguf.path} has no attn_kv_b.weight for {heads} heads; convert the model again")
    return found | {"v_head_dim": whole.shape[0] // heads - found["qk_nope_head_dim"]}


def _kimi(keys: Keys) -> dict[str, Any]:
    found, heads = _latent(keys) | routed_config(keys), keys.need(HEADS)
    states = [keys.layer(layer, "ssm_f_a.weight") is not None for layer in range(keys.num_layers)]
    return found | {
        "layer_types": ["linear_attention" if one else "full_attention" for one in states],
        "linear_conv_kernel_dim": keys.need("ssm.conv_kernel"),
        "linear_head_dim": keys.need("kda.head_dim"),
        "linear_num_heads": heads,
        "mlp_layer_types": sparse_layers(keys),
        "num_local_experts": found["n_routed_experts"],
        "norm_topk_prob": True,
    }


def _decay(tensor: GgufTensor, keys: Keys) -> Iterator[tuple[str, GgufWeight]]:
    shape = (1, 1, keys.need(HEADS), 1)
    yield "self_attn.forget_gate.A_log", GgufWeight(tensor, shape, is_decay=True)


def _convolution(tensor: GgufTensor, keys: Keys) -> Iterator[tuple[str, GgufWeight]]:
    """The one of queries, keys and values; none for those of the latter two. Raises `ModelLoadError` if one lacks."""
    if "conv1d_q" not in tensor.name:
        return
    parts = []
    for part in "qkv":
        name = tensor.name.replace("conv1d_q", f"conv1d_{part}")
        if (own := keys.gguf.tensors.get(name)) is None:
            raise ModelLoadError(f"{keys.gguf.path} has {tensor.name} without {name}; convert the model again")
        parts.append(own._replace(shape=(prod(own.shape[:-1]), 1, own.shape[-1])))
    first, *more = parts
    rows = sum(one.shape[0] for one in parts)
    yield "self_attn.conv1d.weight", GgufWeight(first, (rows, *first.shape[1:]), more=tuple(more))


def _keys_and_values(tensor: GgufTensor, keys: Keys) -> Iterator[tuple[str, GgufWeight]]:
    """Raises `ModelLoadError` for one without the other, and for other shapes."""
    name = tensor.name.replace("attn_k_b", "attn_v_b")
    if (more := keys.gguf.tensors.get(name)) is None:
        raise ModelLoadError(f"{keys.gguf.path} has {tensor.name} without {name}; convert the model again")
    heads, rank = keys.need(HEADS), keys.need("attention.kv_lora_rank")
    if [*tensor.shape[:2], *more.shape[::2]] != [heads, rank, heads, rank]:
        raise ModelLoadError(
            f"{keys.gguf.path}: {tensor.name} and {name} have the shapes {list(tensor.shape)} and {list(more.shape)}, "
            f"which do not go with {heads} heads and a latent of {rank} numbers; convert the model again"
        )
    shape = (heads * (tensor.shape[2] + more.shape[1]), rank)
    yield "self_attn.kv_b_proj.weight", GgufWeight(tensor, shape, more=(more,), is_latent=True)


def _no_more(tensor: GgufTensor, keys: Keys) -> Iterator[tuple[str, GgufWeight]]:
    """The values', which belong to the keys'."""
    name = tensor.name.replace("attn_v_b", "attn_k_b")
    if name not in keys.gguf.tensors:
        raise ModelLoadError(f"{keys.gguf.path} has {tensor.name} without {name}; convert the model again")
    yield from ()


_DELTA = {"ssm_a": _decay} | {f"ssm_conv1d_{part}": _convolution for part in "qkv"}
_FORMS = {"attn_k_b": _keys_and_values, "attn_v_b": _no_more}
V2 = Architecture("deepseek_v2", "DeepseekV2ForCausalLM", _NAMES, _FORMS, extra=_v2)
V3 = Architecture("deepseek_v3", "DeepseekV3ForCausalLM", _NAMES, _FORMS, extra=_v3)
LATENTS = {
    "kimi-linear": Architecture("kimi_linear", "KimiLinearForCausalLM", _KIMI, _FORMS | _DELTA, extra=_kimi),
    "deepseek32": Architecture("deepseek_v32", "DeepseekV32ForCausalLM", _CHOOSING, _FORMS, extra=_choosing),
    "glm-dsa": Architecture("glm_moe_dsa", "GlmMoeDsaForCausalLM", _CHOOSING, _FORMS, extra=_glm5),
    "minicpm3": Architecture("minicpm3", "MiniCPM3ForCausalLM", _NAMES, extra=_minicpm3),
}
