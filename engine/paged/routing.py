"""Models of transformers whose layers do not pass keywords on, or attend in their own code: made to call the runner.

A table says for each architecture which modules attend, and how they are changed: some only lack the runner's
function, some attend in a method, `_attn`, Falcon's do all in one, as do those that add biases or choose what they
attend to.
Source: the modules of these names in transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .attention import Rules
from .biases import biased, biased_by
from .choosing import Choice, with_parts


class Route:
    """Where a layer finds the runner's attention function, which its model was given for this pass."""

    def __init__(self, model: nn.Module) -> None:
        self.attention: Callable[..., Tensor] | None = None
        self.mask: Tensor | None = None  # that the model is to be given, since it needs some
        self.positions: Tensor | None = None  # of this pass, [1, T]
        self.chosen: tuple[Tensor, Choice] | None = None  # by the last layer that has an indexer
        model.register_forward_pre_hook(self._take, with_kwargs=True)
        model.register_forward_hook(self._drop, always_call=True)

    def attend(self, index: int, query: Tensor, key: Tensor, value: Tensor, rules: Rules, window: int | None) -> Tensor:
        """[1, Hq, T, D], twice [1, H, T, D] → [1, T, Hq · D]."""
        assert self.attention is not None
        return self.attention(index, query[0], key[0], value[0], rules, window)[None]

    @property
    def places(self) -> Tensor:
        """The positions of this pass's tokens, [T]."""
        assert self.positions is not None
        return self.positions[0]

    def _take(self, _: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
        self.attention, self.positions = given.pop("penstock", None), given.get("position_ids")
        return args, given if self.mask is None else given | {"attention_mask": self.mask}

    def _drop(self, *_: Any) -> None:
        self.attention = self.positions = self.chosen = None


def _pass_on(module: Any, route: Route) -> None:
    """It calls the attention function, and its layer drops the runner's."""
    forward = module.forward
    module.forward = lambda *args, **given: forward(*args, **given, penstock=route.attention)


def _attend(module: Any, route: Route) -> None:
    """It has rotated queries and keys, which may have become float32, when it calls `_attn`."""
    is_neo = hasattr(module, "layer_id")
    index = module.layer_id if is_neo else module.layer_idx
    rules = Rules(1.0 if is_neo else module.head_dim**-0.5)
    window = module.config.window_size if is_neo and module.attention_type == "local" else None

    def attn(query: Tensor, key: Tensor, value: Tensor, _: None) -> tuple[Tensor, None]:
        query, key = query.to(value.dtype), key.to(value.dtype)
        mixed = route.attend(index, query, key, value, rules, window)
        return mixed.view(*mixed.shape[:2], query.shape[1], -1).transpose(1, 2), None

    module._attn = attn


def _falcon(module: Any, route: Route) -> None:
    from transformers.models.falcon import modeling_falcon

    library: Any = modeling_falcon  # it is not typed
    rotate, rules = library.apply_rotary_pos_emb, Rules(module.head_dim**-0.5)
    has_biases, two = module.config.alibi, torch.ones((1, 2), dtype=torch.long)
    slopes = library.build_alibi_tensor(two, module.num_heads, torch.bfloat16)[:, 0, 1]

    def forward(hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **_: object) -> tuple[Tensor, None]:
        query, key, value = module._split_heads(module.query_key_value(hidden_states))  # [1, T, H, D] each
        if module.new_decoder_architecture:  # keys and values are there for each query
            step = module.num_heads // module.num_kv_heads
            key, value = key[:, :, ::step], value[:, :, ::step]
        query, key, value = (each.transpose(1, 2) for each in (query, key, value))
        if has_biases:  # which transformers rounds, and scales like scores
            biases = slopes.to(query.device)[:, None] * route.places
            query, key = biased_by(query, key, biases)
        else:
            query, key = rotate(query, key, *position_embeddings)
        return module.dense(route.attend(module.layer_idx, query, key, value, rules, None)), None

    module.forward = forward


def _bloom(module: Any, route: Route) -> None:
    from transformers.models.bloom import modeling_bloom

    library: Any = modeling_bloom  # it is not typed
    rules, slopes = Rules(module.inv_norm_factor), library._get_alibi_slopes(module.num_heads, torch.device("cpu"))

    def forward(hidden_states: Tensor, residual: Tensor, **_: object) -> tuple[Tensor, None]:
        query, key, value = module._reshape(module.query_key_value(hidden_states))  # [1, H, T, D] each
        query, key = biased(query, key, route.places, slopes.to(query.device), rules.scaling)
        return residual + module.dense(route.attend(module.layer_idx, query, key, value, rules, None)), None

    module.forward = forward


def _mpt(module: Any, route: Route) -> None:
    from transformers.models.mpt import modeling_mpt

    library: Any = modeling_mpt  # it is not typed
    route.mask = torch.zeros((1, 1, 1, 1), dtype=torch.bool, device=module.out_proj.weight.device)
    rules, slopes = Rules(module.softmax_scale), -library.build_mpt_alibi_tensor(module.n_heads, 2)[:, 0, 0]

    def forward(hidden_states: Tensor, **_: object) -> tuple[Tensor, None]:
        mixed = module.Wqkv(hidden_states)
        if module.clip_qkv:
            mixed = mixed.clamp(min=-module.clip_qkv, max=module.clip_qkv)
        shape = 3, module.n_heads, module.head_dim
        query, key, value = mixed.view(*mixed.shape[:2], *shape).permute(2, 0, 3, 1, 4)  # [1, H, T, D] each
        query, key = biased(query, key, route.places, slopes.to(query.device), rules.scaling)
        return module.out_proj(route.attend(module.layer_idx, query, key, value, rules, None)), None

    module.forward = forward


def _choosing(module: Any, route: Route) -> None:
    """Layers without an indexer attend to what the last one with one has chosen, by the same keys, which they keep."""
    from transformers.models.deepseek_v32 import modeling_deepseek_v32

    library: Any = modeling_deepseek_v32  # it is not typed
    in_turns, by_halves = library.apply_rotary_pos_emb_interleave, library.apply_rotary_pos_emb
    is_glm, own = type(module).__name__ == "GlmMoeDsaAttention", module.indexer
    module.config.layer_types = ["full_attention"] * module.config.num_hidden_layers  # as the runner sees them
    rope = module.qk_rope_head_dim
    if own is not None:
        own.weights_proj.to(module.q_a_layernorm.weight.dtype)  # transformers keeps it in float32 beside float16

    def choose(x: Tensor, queries: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Choice]:
        """The key of each token [1, T, D], and how it chooses."""
        query = own.wq_b(queries).view(*x.shape[:2], own.n_heads, own.head_dim)
        key = own.k_norm(own.wk(x))[:, :, None]
        rotate = in_turns if is_glm else by_halves
        turned = rotate(query[..., :rope], key[..., :rope], *angles, unsqueeze_dim=2)
        query, key = (torch.cat((new, old[..., rope:]), dim=-1) for new, old in zip(turned, (query, key), strict=True))
        weights = own.weights_proj(x).float() * own.n_heads**-0.5
        return key[:, :, 0], Choice(query[0], weights[0], own.softmax_scale, own.index_topk, module.qk_head_dim)

    def forward(hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **_: object) -> tuple[Any, ...]:
        x, angles = hidden_states, position_embeddings
        queries = module.q_a_layernorm(module.q_a_proj(x))
        query = module.q_b_proj(queries).view(*x.shape[:2], -1, module.qk_head_dim).transpose(1, 2)
        latent, key = module.kv_a_proj_with_mqa(x).split((module.kv_lora_rank, rope), dim=-1)
        passed = query.shape[-1] - rope
        turned, key = in_turns(query[..., passed:], key[:, None], *angles)
        key, value = module.expand_kv(module.kv_a_layernorm(latent)[:, None], key)
        if own is not None:
            route.chosen = choose(x, queries, angles)
        assert route.chosen is not None  # the first layer has an indexer
        rules = Rules(module.scaling, choice=route.chosen[1])
        query, key = torch.cat((query[..., :passed], turned), dim=-1), with_parts(key, route.chosen[0])
        mixed = module.o_proj(route.attend(module.layer_idx, query, key, value, rules, None))
        return (mixed, None, None) if is_glm else (mixed, None)

    module.forward = forward


class _Attending(NamedTuple):
    kind: str
    change: Callable[[Any, Route], None]


_ROUTED: Mapping[str, _Attending] = {
    "BloomForCausalLM": _Attending("BloomAttention", _bloom),
    "CodeGenForCausalLM": _Attending("CodeGenAttention", _attend),
    "DeepseekV32ForCausalLM": _Attending("DeepseekV32Attention", _choosing),
    "FalconForCausalLM": _Attending("FalconAttention", _falcon),
    "GPTJForCausalLM": _Attending("GPTJAttention", _attend),
    "GPTNeoForCausalLM": _Attending("GPTNeoSelfAttention", _attend),
    "GlmMoeDsaForCausalLM": _Attending("GlmMoeDsaAttention", _choosing),
    "MptForCausalLM": _Attending("MptAttention", _mpt),
    "NemotronForCausalLM": _Attending("NemotronAttention", _pass_on),
    "StableLmForCausalLM": _Attending("StableLmAttention", _pass_on),
}


def is_routed(architecture: str) -> bool:
    """Whether a model is loaded with transformers' own attention, for `route` to replace."""
    return architecture in _ROUTED


def route(model: Any, attention: str) -> None:
    """Let its layers call what the runner gives to its forward; `attention` is the name in transformers."""
    kind, change = _ROUTED[type(model).__name__]
    through = Route(model)
    for module in model.modules():
        if type(module).__name__ == kind:
            change(module, through)
    model.config._attn_implementation = attention  # which masks are made, and what is called, are looked up in a pass
    model._supports_attention_backend = True
