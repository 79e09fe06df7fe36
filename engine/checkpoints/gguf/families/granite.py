"""Granite in GGUF, with experts and without. Needs no torch.

transformers has the gate and the up of shared experts as one product. Source: llama.cpp's `conversion/granite.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from .....schemas.errors import ModelLoadError
from ..file import GgufTensor, GgufWeight, Groups
from ..keys import Keys
from .architecture import Architecture, Form

_SHARED = "shared_mlp.input_linear.weight"
NAMES = {
    "ffn_gate_inp": "block_sparse_moe.router",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.gate_proj",
    "ffn_up_exps": "block_sparse_moe.experts.{}.up_proj",
    "ffn_down_exps": "block_sparse_moe.experts.{}.down_proj",
    "ffn_down_shexp": "shared_mlp.output_linear",
    "ffn_down": "shared_mlp.output_linear",
}


def granite_config(keys: Keys) -> dict[str, Any]:
    """What Granites have in common, experts included."""
    shared = keys.first("ffn_gate_shexp.weight") or keys.first("ffn_gate.weight")
    return _multipliers(keys) | {
        "num_local_experts": keys.find("expert_count", 0),
        "num_experts_per_tok": keys.find("expert_used_count", 0),
        "shared_intermediate_size": shared.shape[0] if shared else 0,
    }


def _multipliers(keys: Keys) -> dict[str, Any]:
    return {
        "attention_multiplier": keys.find("attention.scale", keys.head_dim**-0.5),
        "embedding_multiplier": keys.find("embedding_scale", 1.0),
        "residual_multiplier": keys.find("residual_scale", 1.0),
        "logits_scaling": keys.find("logit_scale", 1.0),
        "mlp_bias": keys.has("ffn_gate.bias"),
    }


def _minicpm(keys: Keys) -> dict[str, Any]:
    """Older files do not say by what MiniCPM 1 and 2 multiply."""
    width, layers = keys.need("embedding_length"), keys.num_layers
    return _multipliers(keys) | {
        "embedding_multiplier": keys.find("embedding_scale", 12.0),
        "residual_multiplier": keys.find("residual_scale", 1.4 / layers**0.5),
        "logits_scaling": keys.find("logit_scale", width / 256),
    }


def _gates_and_ups(gate: str, up: str) -> dict[str, Form]:
    """Two products of a layer as one."""

    def joined(tensor: GgufTensor, keys: Keys) -> Iterator[tuple[str, GgufWeight]]:
        name = tensor.name.replace(f".{gate}.", f".{up}.")
        other = keys.gguf.tensors.get(name)
        if other is None or other.shape != tensor.shape:
            raise ModelLoadError(
                f"{keys.gguf.path} has {tensor.name} without {name} of its shape; convert the model again"
            )
        rows = tensor.shape[0]
        yield _SHARED, GgufWeight(tensor, (2 * rows, *tensor.shape[1:]), more=(other,), groups=Groups(1, (rows, rows)))

    def second(tensor: GgufTensor, keys: Keys) -> Iterator[tuple[str, GgufWeight]]:
        name = tensor.name.replace(f".{up}.", f".{gate}.")
        if name not in keys.gguf.tensors:
            raise ModelLoadError(f"{keys.gguf.path} has {tensor.name} without {name}; convert the model again")
        yield from ()

    return {gate: joined, up: second}


FORMS = _gates_and_ups("ffn_gate_shexp", "ffn_up_shexp") | _gates_and_ups("ffn_gate", "ffn_up")
_DENSE = Architecture("granite", "GraniteForCausalLM", interleaved=True, extra=_multipliers)
_WITH_EXPERTS = Architecture(
    "granitemoe", "GraniteMoeForCausalLM", NAMES, FORMS, interleaved=True, extra=granite_config
)
_WITH_SHARED = Architecture(
    "granitemoeshared", "GraniteMoeSharedForCausalLM", NAMES, FORMS, interleaved=True, extra=granite_config
)


def _sparse(keys: Keys) -> Architecture:
    """Granite 4 without Mamba-2 is called one with experts, whether it has any or not."""
    if not keys.find("expert_count"):
        return _DENSE
    return _WITH_SHARED if keys.has("ffn_gate_shexp.weight") else _WITH_EXPERTS


GRANITES: dict[str, Architecture | Callable[[Keys], Architecture]] = {
    "granite": _DENSE,
    "granitemoe": _sparse,
    "minicpm": replace(_DENSE, extra=_minicpm),  # which transformers does not have; it computes as Granite does
}
