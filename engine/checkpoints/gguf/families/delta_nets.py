"""Qwen3-Next and Qwen 3.5 in GGUF: three of four layers are gated delta nets. Needs no torch.

Of Qwen 3.5 llama.cpp's converter puts the value heads of such a layer in another order, the first of each key head's
before the second ones, in every tensor that has rows or columns by value head. Of Qwen3-Next it keeps their order, but
takes the gates out of the tensor that has queries, keys, values and gates by key head. Of both it stores what a head
decays by, not its logarithm. Source: `_LinearAttentionVReorderBase` and `Qwen3NextModel` in llama.cpp's
`conversion/qwen.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .....schemas.errors import ModelLoadError
from ..file import GgufTensor, GgufWeight, Groups, Tiles
from ..keys import Keys
from .architecture import Architecture, Form, partial_rope
from .experts import EXPERTS, experts_config, shared_size

_NAMES = {"ssm_norm": "linear_attn.norm", "post_attention_norm": "post_attention_layernorm"}
_NEXT = _NAMES | {"ssm_in": "linear_attn.in_proj_qkvz", "ssm_ba": "linear_attn.in_proj_ba"}
_WITH_GATES = "linear_attn.in_proj_qkvz"
_OF_VALUE_HEADS = {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt": "linear_attn.dt_bias",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_out": "linear_attn.out_proj",
}
_KEYS_AND_VALUES, _GATES = "attn_qkv", "attn_gate"
_BEHIND_KEYS = ("attn_qkv", "ssm_conv1d")  # rows by value head follow those of queries and keys
_BY_HEADS = ("ssm_beta", "ssm_alpha", "ssm_a", "ssm_dt")  # one number or row for each value head


class _Sizes:
    """Of a delta net: key heads and value heads, and the numbers of each."""

    def __init__(self, keys: Keys) -> None:
        self.key_heads, self.value_heads = keys.need("ssm.group_count"), keys.need("ssm.time_step_rank")
        self.key, inner = keys.need("ssm.state_size"), keys.need("ssm.inner_size")
        if not self.key_heads or not self.value_heads or self.value_heads % self.key_heads or inner % self.value_heads:
            raise ModelLoadError(
                f"{keys.gguf.path}: {self.value_heads} value heads of {inner} numbers do not go with {self.key_heads} "
                "key heads; convert the model again"
            )
        self.value = inner // self.value_heads
        self.repeats = self.value_heads // self.key_heads


def _config(keys: Keys) -> dict[str, Any]:
    """What config.json would say of the delta nets."""
    sizes, layers = _Sizes(keys), range(keys.num_layers)
    interval = keys.find("full_attention_interval", 4)
    recurrent = keys.find("attention.recurrent_layers") or [bool((layer + 1) % interval) for layer in layers]
    return {
        "layer_types": ["linear_attention" if recurrent[layer] else "full_attention" for layer in layers],
        "linear_conv_kernel_dim": keys.need("ssm.conv_kernel"),
        "linear_num_key_heads": sizes.key_heads,
        "linear_num_value_heads": sizes.value_heads,
        "linear_key_head_dim": sizes.key,
        "linear_value_head_dim": sizes.value,
    }


def _by_key_heads(tensor: GgufTensor, keys: Keys) -> Iterator[tuple[str, GgufWeight]]:
    """Qwen3-Next's queries, keys, values and gates by key head; none for the gates' tensor, which belongs to the other.

    Raises `ModelLoadError` for one without the other, and for another number of rows.
    """
    sizes, stem = _Sizes(keys), _GATES if f".{_GATES}." in tensor.name else _KEYS_AND_VALUES
    name = tensor.name.replace(stem, _GATES if stem == _KEYS_AND_VALUES else _KEYS_AND_VALUES)
    if (more := keys.gguf.tensors.get(name)) is None:
        raise ModelLoadError(f"{keys.gguf.path} has {tensor.name} without {name}; convert the model again")
    if stem == _GATES:
        return
    values = sizes.repeats * sizes.value
    groups = Groups(sizes.key_heads, (sizes.key, sizes.key, values, values))
    rows = [sizes.key_heads * (2 * sizes.key + values), sizes.key_heads * values]
    for one, count in zip((tensor, more), rows, strict=True):
        if len(one.shape) != 2 or one.shape[0] != count:
            raise ModelLoadError(
                f"{keys.gguf.path}: {one.name} has the shape {list(one.shape)}, and {count} rows go with "
                f"{sizes.key_heads} key heads and {sizes.value_heads} value heads; convert the model again"
            )
    weight = GgufWeight(tensor, (sum(rows), tensor.shape[1]), more=(more,), groups=groups)
    yield f"{_WITH_GATES}.weight", weight


def _by_value_heads(stem: str, name: str, is_tiled: bool) -> Form:
    """A tensor with rows or columns by value head, which may be in another order than transformers' (`is_tiled`)."""

    def form(tensor: GgufTensor, keys: Keys) -> Iterator[tuple[str, GgufWeight]]:
        suffix = "" if name.endswith(("A_log", "dt_bias")) else ".weight"
        yield f"{name}{suffix}", _untiled(GgufWeight(tensor, tensor.shape), stem, keys, is_tiled)

    return form


def _untiled(weight: GgufWeight, stem: str, keys: Keys, is_tiled: bool) -> GgufWeight:
    """The weight with its value heads in transformers' order, if the file has another one (`is_tiled`).

    Raises `ModelLoadError` for another number of rows.
    """
    sizes = _Sizes(keys)
    if stem == "ssm_conv1d":
        weight = weight._replace(shape=(weight.shape[0], 1, weight.shape[-1]))
    by_columns = stem == "ssm_out"
    start = 2 * sizes.key_heads * sizes.key if stem in _BEHIND_KEYS else 0
    size = 1 if stem in _BY_HEADS else sizes.value
    count = weight.shape[1 if by_columns else 0]
    if count != start + sizes.value_heads * size:
        raise ModelLoadError(
            f"{keys.gguf.path}: {weight.tensor.name} has {count} {'columns' if by_columns else 'rows'} for "
            f"{sizes.value_heads} value heads; convert the model again"
        )
    tiles = Tiles(start, sizes.repeats, sizes.key_heads, size, by_columns)
    return weight._replace(tiles=tiles if is_tiled and sizes.repeats > 1 else None, is_decay=stem == "ssm_a")


_PARTS = ("ssm_a", "ssm_dt", "ssm_conv1d", "ssm_out")  # what Qwen3-Next has as transformers does
_TILED = {stem: _by_value_heads(stem, name, True) for stem, name in _OF_VALUE_HEADS.items()}
"""Qwen 3.5's forms."""

_GROUPED = {stem: _by_value_heads(stem, _OF_VALUE_HEADS[stem], False) for stem in _PARTS} | {
    _KEYS_AND_VALUES: _by_key_heads,
    _GATES: _by_key_heads,
}
"""Qwen3-Next's; a tensor with all of them in one lies as transformers has it."""


def _hybrid(keys: Keys) -> dict[str, Any]:
    rope = partial_rope(keys) | {"mrope_interleaved": True}
    return _config(keys) | {"rope_parameters": rope | ({"mrope_section": keys.sections} if keys.sections else {})}


def _hybrid_with_experts(keys: Keys) -> dict[str, Any]:
    return _hybrid(keys) | experts_config(keys) | {"shared_expert_intermediate_size": shared_size(keys)}


def _next(keys: Keys) -> dict[str, Any]:
    experts = experts_config(keys) | {"shared_expert_intermediate_size": shared_size(keys), "norm_topk_prob": True}
    return _config(keys) | {"rope_parameters": partial_rope(keys)} | experts


DELTA_NETS = {
    "qwen3next": Architecture(
        "qwen3_next", "Qwen3NextForCausalLM", _NEXT | EXPERTS, _GROUPED, norm_offset=1, extra=_next
    ),
    "qwen35": Architecture("qwen3_5_text", "Qwen3_5ForCausalLM", _NAMES, _TILED, norm_offset=1, extra=_hybrid),
    "qwen35moe": Architecture(
        "qwen3_5_moe_text",
        "Qwen3_5MoeForCausalLM",
        _NAMES | EXPERTS,
        _TILED,
        norm_offset=1,
        extra=_hybrid_with_experts,
    ),
}
