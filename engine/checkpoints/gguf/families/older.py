"""Older architectures in GGUF, whose queries, keys and values are one product. Needs no torch.

transformers has them by groups of heads, converters all queries before all keys. GPT-2's products are inputs by outputs
in transformers. Source: llama.cpp's converters (its folder `conversion`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ..file import GgufTensor, GgufWeight, Groups
from ..keys import HEADS, Keys
from .architecture import Architecture, Form, partial_rope

_FUSED = "attn_qkv"
_TRANSFORMER = {
    "token_embd": "transformer.word_embeddings",
    "token_embd_norm": "transformer.word_embeddings_layernorm",
    "output_norm": "transformer.ln_f",
    "attn_output": "self_attention.dense",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}
_GPT2 = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "attn_norm": "ln_1",
    "ffn_norm": "ln_2",
    _FUSED: "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
_NEOX = {
    "token_embd": "gpt_neox.embed_in",
    "output_norm": "gpt_neox.final_layer_norm",
    "attn_output": "attention.dense",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}
_FALCON_40B = {"attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"}


def _by_heads(name: str) -> dict[str, Form]:
    """The product of queries, keys and values, which transformers calls `name`: by heads of keys, first the queries
    that go with it."""

    def form(tensor: GgufTensor, keys: Keys) -> Iterator[tuple[str, GgufWeight]]:
        size = keys.head_dim
        groups = Groups(keys.kv_heads, (keys.need(HEADS) // keys.kv_heads * size, size, size))
        yield f"{name}.{tensor.name.rpartition('.')[2]}", GgufWeight(tensor, tensor.shape, groups=groups)

    return {_FUSED: form}


def _turned(stem: str) -> Form:
    """A product of GPT-2."""

    def form(tensor: GgufTensor, keys: Keys) -> Iterator[tuple[str, GgufWeight]]:
        turns = len(tensor.shape) == 2
        shape = tensor.shape[::-1]
        yield f"{_GPT2[stem]}.{tensor.name.rpartition('.')[2]}", GgufWeight(tensor, shape, is_by_axis=turns)

    return form


def _multi_query(keys: Keys) -> dict[str, Any]:
    return {"multi_query": keys.kv_heads == 1}


def _bloom(keys: Keys) -> dict[str, Any]:
    return {"seq_length": keys.need("context_length")}


def _neox(keys: Keys) -> dict[str, Any]:
    return {
        "use_parallel_residual": keys.find("use_parallel_residual", True),
        "rope_parameters": partial_rope(keys),
        "attention_bias": keys.has(f"{_FUSED}.bias"),
    }


def _falcon(keys: Keys) -> Architecture:
    """Falcon 40B and 180B have two norms before each layer, and Falcon 7B and 11B one."""
    is_large = keys.has("attn_norm_2.weight")
    is_newer = is_large or keys.kv_heads > 1
    own = {
        "new_decoder_architecture": is_newer,
        "num_kv_heads": keys.kv_heads,
        "multi_query": not is_newer,
        "parallel_attn": True,
        "num_ln_in_parallel_attn": 2 if is_large else 1,
        "bias": keys.has(f"{_FUSED}.bias"),
        "alibi": False,
    }
    return Architecture(
        "falcon",
        "FalconForCausalLM",
        _TRANSFORMER | (_FALCON_40B if is_large else {}),
        _by_heads("self_attention.query_key_value"),
        epsilon="layer_norm_epsilon",
        layers="transformer.h",
        left_out=("head_dim",),
        extra=lambda keys: own,
    )


OLDER: dict[str, Architecture | Callable[[Keys], Architecture]] = {
    "gpt2": Architecture(
        "gpt2",
        "GPT2LMHeadModel",
        _GPT2,
        {stem: _turned(stem) for stem in (_FUSED, "attn_output", "ffn_up", "ffn_down")},
        epsilon="layer_norm_epsilon",
        layers="transformer.h",
    ),
    "starcoder": Architecture(
        "gpt_bigcode",
        "GPTBigCodeForCausalLM",
        _GPT2,
        epsilon="layer_norm_epsilon",
        layers="transformer.h",
        extra=_multi_query,
    ),
    "gptneox": Architecture(
        "gpt_neox",
        "GPTNeoXForCausalLM",
        _NEOX,
        _by_heads("attention.query_key_value"),
        epsilon="layer_norm_eps",
        layers="gpt_neox.layers",
        extra=_neox,
    ),
    "bloom": Architecture(
        "bloom",
        "BloomForCausalLM",
        _TRANSFORMER | {"ffn_norm": "post_attention_layernorm"},
        _by_heads("self_attention.query_key_value"),
        epsilon="layer_norm_epsilon",
        layers="transformer.h",
        extra=_bloom,
    ),
    "falcon": _falcon,
}
