"""Which modules of transformers' models have the structure of the plain decoder, and what their norms multiply by.

The structure says less than the results: who takes a model for plain must compare them.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ...vision.embeddings import replaced_tokens
from ...vision.tower import LanguageModel
from ..state.layer import is_silu

_NAMES = {  # of LFM2's modules; others have these
    "embedding_norm": "norm",
    "pos_emb": "rotary_emb",
    "operator_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward": "mlp",
    "w1": "gate_proj",
    "w3": "up_proj",
    "w2": "down_proj",
    "q_layernorm": "q_norm",
    "k_layernorm": "k_norm",
    "out_proj": "o_proj",
    "final_layernorm": "norm",  # of Bamba's
    "pre_ff_layernorm": "post_attention_layernorm",
    "shared_mlp": "mlp",  # of Granite's, which have experts beside it, or without it
    "block_sparse_moe": "mixture",
    "input_linear": "gate_up_proj",
    "output_linear": "down_proj",
    "activation_fn": "activation",  # of GLM 4's
}
BODY = {"embed_tokens", "layers", "norm", "rotary_emb"}
INPUTS = {"embed_tokens_per_layer", "per_layer_model_projection", "per_layer_projection_norm"}
"""What the body of a model has besides whose layers get inputs of their own."""
_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_AROUND = {"pre_feedforward_layernorm", "post_feedforward_layernorm"}  # and another meaning of the one above
_AFTER = {"post_self_attn_layernorm", "post_mlp_layernorm"}  # GLM 4's, of what is added
_BEHIND = {"self_attn", "mlp", "post_attention_layernorm", "post_feedforward_layernorm"}  # norms of what is added
_LAYER_INPUT = {"per_layer_input_gate", "per_layer_projection", "post_per_layer_input_norm", "act_fn"}
_BESIDE = {"router", "experts", "pre_feedforward_layernorm_2"}
_BESIDE |= {"post_feedforward_layernorm_1", "post_feedforward_layernorm_2"}  # a mixture beside the layer's own product
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_SHARING = {"q_proj", "o_proj", "q_norm"}  # of a layer that attends to an earlier one's keys and values
_WITH_VALUE_NORM = _ATTENTION | _HEAD_NORMS | {"v_norm"}
_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}
_DELTA_NET = {"in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "o_proj", "norm"}
_SHORT_CONVOLUTION = {"in_proj", "o_proj"}
_MAMBA = {"in_proj", "o_proj", "activation"}
_JOINED = {"gate_up_proj", "down_proj", "activation"}
GELU = {"GELUTanh"}  # the name of transformers' class
OFFSET = {"GemmaRMSNorm", "Gemma2RMSNorm", "Gemma3RMSNorm", "Qwen3_5RMSNorm", "Qwen3_5MoeRMSNorm"}
"""The names of norms whose weights are to be added to 1."""
WIDE = OFFSET | {"Gemma4RMSNorm", "Gemma4UnifiedRMSNorm"}
"""The names of norms that multiply in float32."""
_TURNING_NEIGHBOURS = {
    *("GlmAttention", "Glm4Attention", "Glm4vTextAttention", "GlmOcrTextAttention"),
    *("Ernie4_5Attention", "HeliumAttention"),
}
"""The names of attention that rotates neighbouring numbers of a head together, and not those of its halves."""
PAIRED = {"Glm4vTextRotaryEmbedding", "GlmOcrTextRotaryEmbedding"}
"""The names of rotations whose angles lie as neighbours, and not by halves."""
_SEEING = {"Gemma4Model"}
"""The names of bodies with a language model that computes text as it does alone."""
_MIXTURES = {"gate", "experts"}, {"router", "experts"}
_SHARED = {"gate", "experts", "shared_expert", "shared_expert_gate"}


def body_of(model: Any) -> Any:
    """What of a model has the layers of text; None where it is built otherwise."""
    body: Any = getattr(model, "model", None)
    return body.language_model if type(body).__name__ in _SEEING else body


def replaced(model: Any) -> dict[int, int]:
    """Tokens that stand for what a text has not, and those that take their place in the model."""
    if isinstance(model, LanguageModel):
        return model.replaced
    return replaced_tokens(model.config) if type(model.model).__name__ in _SEEING else {}


def scale_of(norm: Any) -> Tensor:
    """What a norm multiplies by."""
    weight: Tensor = norm.weight
    if type(norm).__name__ in OFFSET:
        return 1 + weight.float()
    return weight.float() if type(norm).__name__ in WIDE else weight


def epsilon_of(norm: Any) -> float:
    epsilon: float = norm.eps if type(norm).__name__ in WIDE else norm.variance_epsilon
    return epsilon


def has_gates(attention: Any) -> bool:
    """Whether the product that makes the queries makes as many numbers once more."""
    return bool(attention.q_proj.out_features == 2 * part(attention, "o_proj").in_features)


def norms_rows(attention: Any) -> bool:
    """Whether queries are normalised together, and not head by head; so are the keys."""
    norm = part(attention, "q_norm")
    return norm is not None and len(norm.weight) == part(attention, "o_proj").in_features != attention.head_dim


def rotates(attention: Any) -> bool:
    """Whether queries and keys are rotated: some layers know no positions."""
    if type(attention).__name__ == "Exaone4Attention":
        return attention.sliding_window is None or bool(attention.is_sliding)
    return bool(getattr(attention, "use_rope", True))


def turns_neighbours(attention: Any) -> bool:
    """Whether each number of a head is rotated with the next one, and not with that of the other half."""
    return type(attention).__name__ in _TURNING_NEIGHBOURS


def is_plain(layer: Any) -> bool:
    own = children(layer)
    if own == _BEHIND and _is_gated(layer.mlp):
        norms = [layer.post_attention_layernorm, layer.post_feedforward_layernorm]
        return all(map(_is_norm, norms)) and _attends_plainly(layer.self_attn)
    if "mixture" in own:
        if not (_is_mixture(layer.block_sparse_moe) and ("mlp" not in own or _is_gated(part(layer, "mlp")))):
            return False
        own = own - {"mixture"} | {"mlp"}
    if not {"mlp", "input_layernorm", "post_attention_layernorm"} <= own:
        return False
    mlp = part(layer, "mlp") or part(layer, "mixture")
    norms = [part(layer, "input_layernorm"), part(layer, "post_attention_layernorm")]
    if "linear_attn" in own:
        return (
            own - {"linear_attn"} == _LAYER - {"self_attn"}
            and _is_delta_net(layer.linear_attn)
            and (_is_gated(mlp) or _is_mixture(mlp))
            and all(_is_wide(norm) for norm in norms)
        )
    if "conv" in own:
        return (
            own - {"conv"} == _LAYER - {"self_attn"}
            and children(layer.conv) == _SHORT_CONVOLUTION
            and (_is_gated(mlp) or _is_mixture(mlp))
            and all(hasattr(norm, "variance_epsilon") for norm in norms)
        )
    if own >= _LAYER_INPUT and type(layer.act_fn).__name__ in GELU:
        norms.append(layer.post_per_layer_input_norm)
        own -= _LAYER_INPUT
    if own == _LAYER | _AROUND | _BESIDE:
        norms += [getattr(layer, name) for name in sorted(_BESIDE) if "layernorm" in name]
        own -= _BESIDE
    if "mamba" in own:
        return (
            own - {"mamba"} == _LAYER - {"self_attn"}
            and _is_mamba(layer.mamba)
            and (_is_gated(mlp) or _is_mixture(mlp))
            and all(hasattr(norm, "variance_epsilon") for norm in norms)
        )
    added = own - _LAYER
    around = added if added in (_AROUND, _AFTER) and _is_gated(mlp) else set[str]()
    if own - around != _LAYER or not (_is_gated(mlp) or _is_mixture(mlp)):
        return False
    norms += [part(layer, name) for name in around]
    return all(map(_is_norm, norms)) and _attends_plainly(layer.self_attn)


def _attends_plainly(attention: Any) -> bool:
    own = children(attention)
    if own in (_SHARING, _WITH_VALUE_NORM, _WITH_VALUE_NORM - {"v_proj"}):
        if "v_norm" in own and attention.v_norm.with_scale:
            return False
    elif own not in (_ATTENTION, _ATTENTION | _HEAD_NORMS):  # latent attention, for example
        return False
    if turns_neighbours(attention) and own != _ATTENTION:
        return False
    is_wide = norms_rows(attention)
    for name in own & _HEAD_NORMS:
        size = part(attention, f"{name[0]}_proj").out_features if is_wide else attention.head_dim
        if not _is_norm(norm := part(attention, name)) or len(norm.weight) != size:
            return False
    return True


def _is_delta_net(module: Any) -> bool:
    return children(module) - {"activation"} == _DELTA_NET and is_silu(module.activation)


def _is_mamba(module: Any) -> bool:
    """Whether it is one whose norm, if it has any, comes after its gates, and whose projection nothing multiplies."""
    return (
        children(module) - {"norm"} == _MAMBA
        and is_silu(module.activation)
        and (module.norm is None or hasattr(module.norm, "group_size"))
        and module.multipliers is None
        and module.in_multiplier == 1
    )


def _is_joined(mlp: nn.Module) -> bool:
    """Whether one product makes gates and ups, gates first."""
    return children(mlp) == _JOINED


def _is_gated(mlp: Any) -> bool:
    if _is_joined(mlp):
        return is_silu(part(mlp, "activation"))
    if children(mlp) == _MLP - {"act_fn"}:  # LFM2's, which are SiLU's
        return True
    if children(mlp) != _MLP:
        return False
    name = type(mlp.act_fn).__name__
    return is_silu(mlp.act_fn) or name in GELU


def _is_mixture(mlp: Any) -> bool:
    own = children(mlp)
    return own in _MIXTURES or (own == _SHARED and _is_gated(mlp.shared_expert))


def _is_wide(norm: nn.Module) -> bool:
    return type(norm).__name__ in WIDE


def _is_norm(norm: nn.Module) -> bool:
    return hasattr(norm, "variance_epsilon") or _is_wide(norm)


def children(module: nn.Module) -> set[str]:
    """Their names, or those that other families have for them."""
    return {_NAMES.get(name, name) for name, _ in module.named_children()}


def part(module: Any, name: str) -> Any:
    """The one of its `children` with this name; None without."""
    names = name, *(own for own, other in _NAMES.items() if other == name)
    return next((found for own in names if (found := getattr(module, own, None)) is not None), None)
