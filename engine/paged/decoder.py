"""The plain decoder, written out: RMSNorm, rotary attention, gated SiLU, each layer in a handful of operations.

Llama, Mistral, Qwen 2 and 3 and many others are this. transformers' own modules say the same in four times as many
small operations, which on a CPU cost a tenth of a decoding step. Whoever builds one must compare it with the original:
`of` looks at the structure alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import SiLUActivation

from .linear import Linear

MakeLinear = Callable[[Sequence[nn.Linear]], Linear]
"""One `Linear` for modules that share their input, outputs side by side; takes over the modules' memory."""

Attention = Callable[[int, Tensor, Tensor], Tensor]
"""Layer, query [Hq, T, D], keys and then values [2 H, T, D] → [T, Hq · D]."""

_BODY = {"embed_tokens", "layers", "norm", "rotary_emb"}
_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}


class Angles(NamedTuple):
    """Cosines and sines [1, T, D]; sines of the first half are negative: x cos + (x with its halves swapped) sin."""

    cosines: Tensor
    sines: Tensor


class Norm:
    """x / sqrt(mean(x²) + ε) · w. Beside its negative a row has the mean zero, so that the fused layer norm serves."""

    def __init__(self, module: Any) -> None:
        self.weight: Tensor = module.weight
        self.epsilon: float = module.variance_epsilon

    def __call__(self, x: Tensor) -> Tensor:
        size, weight = x.shape[-1], self.weight.to(x.dtype)
        if x.is_cuda:
            return functional.rms_norm(x, (size,), weight, self.epsilon)
        both = torch.cat((x, -x), dim=-1)
        return functional.layer_norm(both, (2 * size,), None, None, self.epsilon)[..., :size] * weight


class Layer:
    """`head_norm` [Hq + H, 1, D], where queries and keys are normalised head by head, and its ε."""

    def __init__(self, module: Any, make: MakeLinear) -> None:
        attention, mlp = module.self_attn, module.mlp
        self.attention_norm = Norm(module.input_layernorm)
        self.mlp_norm = Norm(module.post_attention_layernorm)
        size = attention.head_dim
        self.num_queries = attention.q_proj.out_features // size
        self.num_keys = attention.k_proj.out_features // size
        self.head_norm: Tensor | None = None
        if hasattr(attention, "q_norm"):
            norms = [attention.q_norm.weight] * self.num_queries + [attention.k_norm.weight] * self.num_keys
            self.head_norm = torch.stack(norms)[:, None]
            self.epsilon: float = attention.q_norm.variance_epsilon
        self.qkv = make([attention.q_proj, attention.k_proj, attention.v_proj])
        self.output = make([attention.o_proj])
        self.gate, self.up, self.down = make([mlp.gate_proj]), make([mlp.up_proj]), make([mlp.down_proj])


class Decoder:
    def __init__(self, model: Any, make: MakeLinear, dtype: torch.dtype) -> None:
        """`dtype` is that of what it computes."""
        body = model.model
        self._dtype = dtype
        self.embedding: Tensor = body.embed_tokens.weight
        self._rotary: nn.Module = body.rotary_emb
        self.layers = [Layer(layer, make) for layer in body.layers]
        self.norm = Norm(body.norm)
        self.head = make([model.lm_head])

    @classmethod
    def of(cls, model: Any, make: MakeLinear, dtype: torch.dtype) -> Self | None:
        """The decoder that takes over the weights of a transformers model; None if its modules are not such a one's."""
        body = getattr(model, "model", None)
        if body is None or _children(model) != {"model", "lm_head"} or _children(body) != _BODY:
            return None
        return cls(model, make, dtype) if all(map(_is_plain, body.layers)) else None

    def __call__(self, ids: Tensor, positions: Tensor, keep: Tensor, attention: Attention) -> Tensor:
        """Logits [len(keep), V] after the packed tokens `keep` of `ids` [T] at `positions` [T]."""
        x = functional.embedding(ids, self.embedding).to(self._dtype)
        angles = self.angles(positions, self._dtype)
        for index, layer in enumerate(self.layers):
            x = advance(layer, index, x, angles, attention)
        return self.head(self.norm(x[keep]))

    def angles(self, positions: Tensor, dtype: torch.dtype) -> Angles:
        """The rotations at `positions` [T], rounded to `dtype`."""
        cos, sin = self._rotary(self.embedding[None, :1].to(dtype), positions[None])
        half = cos.shape[-1] // 2
        return Angles(cos, torch.cat((-sin[..., :half], sin[..., half:]), dim=-1))

    def linears(self) -> list[Linear]:
        """All products in the order of their use."""
        each = [(layer.qkv, layer.output, layer.gate, layer.up, layer.down) for layer in self.layers]
        return [*chain.from_iterable(each), self.head]


def advance(layer: Layer, index: int, x: Tensor, angles: Angles, attention: Attention) -> Tensor:
    """The residual stream [T, E] behind a layer."""
    cos, sin = angles
    size = cos.shape[-1]
    rotated = layer.num_queries + layer.num_keys
    heads = layer.qkv(layer.attention_norm(x)).view(len(x), -1, size).transpose(0, 1)  # [Hq + 2 H, T, D]
    query_key = heads[:rotated]
    if layer.head_norm is not None:
        query_key = functional.rms_norm(query_key, (size,), None, layer.epsilon) * layer.head_norm.to(x.dtype)
    swapped = query_key.view(rotated, len(x), 2, size // 2).flip(-2).flatten(-2)
    torch.addcmul(query_key * cos, swapped, sin, out=heads[:rotated])
    mixed = attention(index, heads[: layer.num_queries], heads[layer.num_queries :])
    x = layer.output.add(mixed, x)
    h = layer.mlp_norm(x)
    return layer.down.add(layer.up.mul(h, layer.gate.silu(h)), x)


def _is_plain(layer: Any) -> bool:
    if _children(layer) != _LAYER or _children(layer.mlp) != _MLP or not isinstance(layer.mlp.act_fn, SiLUActivation):
        return False
    attention = layer.self_attn
    extra = _children(attention) - _ATTENTION
    norms = [layer.input_layernorm, layer.post_attention_layernorm, *(getattr(attention, name) for name in extra)]
    size = attention.head_dim
    return (
        _children(attention) >= _ATTENTION
        and extra in (set(), {"q_norm", "k_norm"})
        and all(hasattr(norm, "variance_epsilon") for norm in norms)
        and all(len(getattr(attention, name).weight) == size for name in extra)
    )


def _children(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_children()}
