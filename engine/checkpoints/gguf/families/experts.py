"""Mixtures of experts in GGUF: what config.json would say of them, and their tensors' names. Needs no torch.

Of gpt-oss and Llama 4 transformers has all experts of a layer as one tensor, inputs by outputs, with gates and ups in
turns or one behind the other; the file has outputs by inputs, and gates and ups apart. Source: llama.cpp's
`conversion/gpt_oss.py` and `conversion/llama.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .....schemas.errors import ModelLoadError
from ..file import Gguf, GgufTensor, GgufWeight
from ..keys import Keys
from .architecture import Form

EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
    "ffn_gate_up_exps": "mlp.experts.{}.gate_up_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
WITH_SHARED = EXPERTS | {  # of models whose shared experts have no gate of their own
    "exp_probs_b": "mlp.gate.e_score_correction_bias.",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
_GATE, _UP, _DOWN = "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"


def experts_config(keys: Keys) -> dict[str, Any]:
    return {
        "num_experts": keys.need("expert_count"),
        "num_experts_per_tok": keys.need("expert_used_count"),
        "moe_intermediate_size": keys.need("expert_feed_forward_length"),
    }


def shared_size(keys: Keys) -> int:
    shared = keys.first("ffn_gate_shexp.weight")
    return shared.shape[0] if shared else int(keys.find("expert_shared_feed_forward_length", 0))


def shared_experts_config(keys: Keys) -> dict[str, Any]:
    # Experts of this family are not normalised, in llama.cpp neither; queries, keys and values have biases.
    return experts_config(keys) | {
        "shared_expert_intermediate_size": shared_size(keys),
        "norm_topk_prob": False,
        "qkv_bias": True,
    }


def local_experts_config(keys: Keys) -> dict[str, Any]:
    return {
        "num_local_experts": keys.need("expert_count"),
        "num_experts_per_tok": keys.need("expert_used_count"),
    }


def routed_config(keys: Keys) -> dict[str, Any]:
    """Of models in DeepSeek V3's manner: the first layers have no experts, and the others shared ones beside theirs.

    Routes are sigmoids, and their sum is one where the file says so.
    """
    return {
        "n_routed_experts": keys.need("expert_count"),
        "n_shared_experts": keys.find("expert_shared_count", 0),
        "num_experts_per_tok": keys.need("expert_used_count"),
        "moe_intermediate_size": keys.need("expert_feed_forward_length"),
        "first_k_dense_replace": dense_layers(keys),
        "n_group": keys.find("expert_group_count", 1),
        "topk_group": keys.find("expert_group_used_count", 1),
        "norm_topk_prob": keys.find("expert_weights_norm", False),
        "routed_scaling_factor": keys.find("expert_weights_scale", 1.0),
    }


def dense_layers(keys: Keys) -> int:
    """How many layers come before the first one with experts."""
    layers = range(keys.num_layers)
    return next((layer for layer in layers if keys.layer(layer, "ffn_gate_inp.weight") is not None), len(layers))


def sparse_layers(keys: Keys) -> list[str]:
    """Which layers have experts, in transformers' words."""
    dense = dense_layers(keys)
    return ["dense" if layer < dense else "sparse" for layer in range(keys.num_layers)]


def _whole(module: str, in_turns: bool) -> dict[str, Form]:
    """Tensors of all experts of a layer, which transformers calls `module`."""

    def form(tensor: GgufTensor, keys: Keys) -> Iterator[tuple[str, GgufWeight]]:
        stem = next(stem for stem in (_GATE, _UP, _DOWN) if f".{stem}." in tensor.name)
        if (experts := whole_experts(keys.gguf, tensor, stem, in_turns=in_turns)) is not None:
            name = "down_proj" if stem == _DOWN else "gate_up_proj"
            yield f"{module}.{name}{'_bias' if tensor.name.endswith('.bias') else ''}", experts

    return dict.fromkeys((_GATE, _UP, _DOWN), form)


GPT_OSS_EXPERTS = _whole("mlp.experts", in_turns=True)
LLAMA4_EXPERTS = _whole("feed_forward.experts", in_turns=False)


def whole_experts(gguf: Gguf, tensor: GgufTensor, stem: str, *, in_turns: bool = True) -> GgufWeight | None:
    """All experts of a layer, or their biases; None for the ups, which belong to the gates.

    `in_turns`: a gate, an up, and again; otherwise all gates come first. Raises `ModelLoadError` for one without the
    other, and for a tensor of another rank.
    """
    is_bias = tensor.name.endswith(".bias")
    if len(tensor.shape) != (2 if is_bias else 3):
        raise ModelLoadError(
            f"{gguf.path}: {tensor.name} has the shape {list(tensor.shape)}, which is not that of all experts; convert "
            "the model again"
        )
    more: tuple[GgufTensor, ...] = ()
    if stem in (_GATE, _UP):
        name = tensor.name.replace(stem, _UP if stem == _GATE else _GATE)
        other = gguf.tensors.get(name)
        if other is None or other.shape != tensor.shape:
            found = "is missing" if other is None else f"has the shape {list(other.shape)}"
            raise ModelLoadError(
                f"{gguf.path}: {tensor.name} has the shape {list(tensor.shape)}, and {name} {found}; convert the model "
                "again"
            )
        if stem == _UP:
            return None
        more = (other,)
    outputs = tensor.shape[1] * (1 + len(more))
    shape = (tensor.shape[0], *tensor.shape[2:], outputs)
    return GgufWeight(tensor, shape, more=more, is_transposed=not is_bias, in_turns=in_turns and bool(more))
