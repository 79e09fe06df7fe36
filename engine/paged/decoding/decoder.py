"""The plain decoder, written out: RMSNorm, rotary attention, gated SiLU, each layer in a handful of operations.

Llama, Mistral, Qwen 2 and 3 and many others have this structure. transformers' modules compute the same with four times
as many small operations, which on a CPU cost a tenth of a decoding step. There, a layer may have a mixture of experts
instead of the last product, which its own module computes, or be one of Gemma's, with norms also behind attention and
product. `Decoder.of` checks the structure alone: the caller must compare results with the original model's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from itertools import chain
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...vision.tower import Seen
from .linear import SILU, Linear

MakeLinear = Callable[[Sequence[nn.Linear]], Linear]
"""Makes one `Linear` of modules that share their input, outputs side by side; takes over the modules' memory."""

Attention = Callable[[int, Tensor, Tensor], Tensor]
"""Layer, query [Hq, T, D], keys and then values [2 H, T, D] → [T, Hq · D]."""

_BODY = {"embed_tokens", "layers", "norm", "rotary_emb"}
_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_AROUND = {"pre_feedforward_layernorm", "post_feedforward_layernorm"}  # and another meaning of the one above
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}
_GELU = {"GELUTanh"}  # the name of transformers' class
_OFFSET = {"GemmaRMSNorm", "Gemma2RMSNorm", "Gemma3RMSNorm"}  # their weights are to be added to 1
_MIXTURES = {"gate", "experts"}, {"router", "experts"}


class Angles(NamedTuple):
    """Cosines and sines [1, T, D], the sines of the first half negated: x cos + (x with its halves swapped) sin."""

    cosines: Tensor
    sines: Tensor


Rotations = Mapping[str | None, Angles]
"""The angles of each kind of layer."""


class Norm:
    """RMSNorm: x / sqrt(mean(x²) + ε) · w. Concatenated with -x a row has mean zero, so layer_norm fits."""

    def __init__(self, module: Any) -> None:
        self.weight, self.epsilon = _scale_of(module), _epsilon_of(module)
        self._is_wide = type(module).__name__ in _OFFSET

    def __call__(self, x: Tensor) -> Tensor:
        size, weight = x.shape[-1], self.weight if self._is_wide else self.weight.to(x.dtype)
        if x.is_cuda:
            return functional.rms_norm(x, (size,), weight, self.epsilon)
        both = torch.cat((x, -x), dim=-1)
        return (functional.layer_norm(both, (2 * size,), None, None, self.epsilon)[..., :size] * weight).to(x.dtype)


class Layer:
    """One layer's weights. `head_norm` [Hq + H, 1, D] if queries and keys are normalised head by head.

    A layer with a `mixture`, the model's module, has no `gate`, `up` and `down`. Gemma's have norms of what attention
    and the last product add, and gates with GELU; Gemma 3's are of two kinds, which rotate by different angles.
    """

    gate: Linear
    up: Linear
    down: Linear
    attention_after: Norm | None = None
    mlp_after: Norm | None = None
    has_gelu = False

    def __init__(self, module: Any, make: MakeLinear, kind: str | None = None) -> None:
        """`kind` is whose rotations it uses."""
        attention, mlp, self.kind = module.self_attn, module.mlp, kind
        self.attention_norm = Norm(module.input_layernorm)
        if hasattr(module, "pre_feedforward_layernorm"):
            self.attention_after, self.mlp_after = (
                Norm(one) for one in (module.post_attention_layernorm, module.post_feedforward_layernorm)
            )
            self.mlp_norm = Norm(module.pre_feedforward_layernorm)
        else:
            self.mlp_norm = Norm(module.post_attention_layernorm)
        head_dim = attention.head_dim
        self.num_q_heads = attention.q_proj.out_features // head_dim
        self.num_kv_heads = attention.k_proj.out_features // head_dim
        self.head_norm: Tensor | None = None
        self.epsilon = 0.0
        if hasattr(attention, "q_norm"):
            query, key = _scale_of(attention.q_norm), _scale_of(attention.k_norm)
            self.head_norm = torch.stack([query] * self.num_q_heads + [key] * self.num_kv_heads)[:, None]
            self.epsilon = _epsilon_of(attention.q_norm)
        self.qkv = make([attention.q_proj, attention.k_proj, attention.v_proj])
        self.output = make([attention.o_proj])
        self.mixture: Any = None if hasattr(mlp, "gate_proj") else mlp
        if self.mixture is None:
            self.gate, self.up, self.down = make([mlp.gate_proj]), make([mlp.up_proj]), make([mlp.down_proj])
            self.has_gelu = type(mlp.act_fn).__name__ in _GELU

    def linears(self) -> list[Linear]:
        """Its products in the order of their use, without those of a mixture."""
        after = [self.gate, self.up, self.down] if self.mixture is None else []
        return [self.qkv, self.output, *after]


class Decoder:
    """A transformers model of the plain structure, run without its modules' own code."""

    def __init__(self, model: Any, make: MakeLinear, dtype: torch.dtype) -> None:
        """`dtype` is that of the activations."""
        body = model.model
        self._dtype, self._through = dtype, through
        scale = getattr(body.embed_tokens, "embed_scale", None)
        self.scale: Tensor | None = None if scale is None else scale.to(dtype)
        config: Any = model.config.get_text_config()
        self.softcap: float | None = getattr(config, "final_logit_softcapping", None)
        self.embedding: Tensor = body.embed_tokens.weight
        if self.embedding.is_cuda and find_spec("triton") is not None:
            from . import cuda_layers

            self._through = cuda_layers.through
        self._rotary: nn.Module = body.rotary_emb
        has_kinds = hasattr(body.rotary_emb, "layer_types")
        self.layers = [Layer(one, make, one.self_attn.layer_type if has_kinds else None) for one in body.layers]
        self._kinds = {layer.kind for layer in self.layers}
        self._head_dim: int = body.layers[0].self_attn.head_dim
        self.norm = Norm(body.norm)
        self.head = make([model.lm_head])

    @classmethod
    def of(cls, model: Any, make: MakeLinear, dtype: torch.dtype) -> Self | None:
        """Take over the weights of a transformers model; None if its modules do not have the plain structure."""
        body = getattr(model, "model", None)
        if body is None or _children(model) != {"model", "lm_head"} or _children(body) != _BODY:
            return None
        return cls(model, make, dtype) if all(map(_is_plain, body.layers)) else None

    def __call__(
        self, ids: Tensor, positions: Tensor, keep: Tensor, attention: Attention, seen: Seen | None = None
    ) -> Tensor:
        """The logits [len(keep), V] of the tokens `keep` among the packed `ids` [T] at `positions` [T], or [3, T]."""
        x = self.embed(ids)
        if seen is not None:
            x = x.index_copy(0, seen.rows, seen.features.to(self._dtype))
        x = self._through(self.layers, x, self.angles(positions, self._dtype), attention, seen)
        logits = self.head(self.norm(x[keep]))
        return logits if self.softcap is None else self.softcap * (logits / self.softcap).tanh()

    def embed(self, ids: Tensor) -> Tensor:
        """The residual stream before the first layer: [T] → [T, E]."""
        x = functional.embedding(ids, self.embedding).to(self._dtype)
        return x if self.scale is None else x * self.scale

    def angles(self, positions: Tensor, dtype: torch.dtype) -> Rotations:
        """The rotations at `positions` [T], or [3, T] in three dimensions, rounded to `dtype`."""
        return {kind: self._angles(positions, dtype, kind) for kind in self._kinds}

    def _angles(self, positions: Tensor, dtype: torch.dtype, kind: str | None) -> Angles:
        given = self.embedding[None, :1].to(dtype), positions.unsqueeze(-2), *(() if kind is None else (kind,))
        cos, sin = self._rotary(*given)
        if cos.shape[-1] < self._head_dim:  # gpt-oss's are those of one half
            cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)
        half = cos.shape[-1] // 2
        return Angles(cos, torch.cat((-sin[..., :half], sin[..., half:]), dim=-1))

    def linears(self) -> list[Linear]:
        """All products in the order of their use, without those of mixtures."""
        return [*chain.from_iterable(layer.linears() for layer in self.layers), self.head]


def through(
    layers: Sequence[Layer], x: Tensor, rotations: Rotations, attention: Attention, seen: Seen | None
) -> Tensor:
    """The residual stream [T, E] after all layers."""
    for index, layer in enumerate(layers):
        x = advance(layer, index, x, rotations[layer.kind], attention)
        if seen is not None and index < len(seen.deep):
            x = x.index_add(0, seen.rows, seen.deep[index].to(x.dtype))
    return x


def advance(layer: Layer, index: int, x: Tensor, angles: Angles, attention: Attention) -> Tensor:
    """Run one layer: the residual stream [T, E] after it."""
    cos, sin = angles
    head_dim = cos.shape[-1]
    rotated = layer.num_q_heads + layer.num_kv_heads
    heads = layer.qkv(layer.attention_norm(x)).view(len(x), -1, head_dim).transpose(0, 1)  # [Hq + 2 H, T, D]
    query_key = heads[:rotated]
    if layer.head_norm is not None:
        query_key = functional.rms_norm(query_key, (head_dim,), None, layer.epsilon) * layer.head_norm.to(x.dtype)
    swapped = query_key.view(rotated, len(x), 2, head_dim // 2).flip(-2).flatten(-2)
    torch.addcmul(query_key * cos, swapped, sin, out=heads[:rotated])
    attended = attention(index, heads[: layer.num_q_heads], heads[layer.num_q_heads :])
    after = layer.attention_after
    x = layer.output.add(attended, x) if after is None else x + after(layer.output(attended))
    h = layer.mlp_norm(x)
    if layer.mixture is not None:
        found = layer.mixture(h[None])  # [1, T, E], or a tuple that starts with it
        mixed: Tensor = found if isinstance(found, Tensor) else found[0]
        return x + mixed[0]
    gate = functional.gelu(layer.gate(h), approximate="tanh") if layer.has_gelu else layer.gate.silu(h)
    gated = layer.up.mul(h, gate)
    return layer.down.add(gated, x) if layer.mlp_after is None else x + layer.mlp_after(layer.down(gated))


def _scale_of(norm: Any) -> Tensor:
    """What a norm multiplies by."""
    weight: Tensor = norm.weight
    return 1 + weight.float() if type(norm).__name__ in _OFFSET else weight


def _epsilon_of(norm: Any) -> float:
    epsilon: float = norm.eps if type(norm).__name__ in _OFFSET else norm.variance_epsilon
    return epsilon


def _is_plain(layer: Any) -> bool:
    children = _children(layer)
    around = _AROUND if children == _LAYER | _AROUND and _is_on_cpu(layer) and _is_gated(layer.mlp) else set[str]()
    if children - around != _LAYER or not (_is_gated(layer.mlp) or _is_mixture(layer.mlp)):
        return False
    attention = layer.self_attn
    extra = _children(attention) - _ATTENTION
    norms = [
        *(layer.input_layernorm, layer.post_attention_layernorm),
        *(getattr(layer, name) for name in around),
        *(getattr(attention, name) for name in extra),
    ]
    head_dim = attention.head_dim
    return (
        _children(attention) >= _ATTENTION
        and extra in (set(), {"q_norm", "k_norm"})
        and all(hasattr(norm, "variance_epsilon") or _is_offset(norm) for norm in norms)
        and all(len(getattr(attention, name).weight) == head_dim for name in extra)
    )


def _is_gated(mlp: nn.Module) -> bool:
    if _children(mlp) != _MLP:
        return False
    name = type(mlp.act_fn).__name__
    return name in SILU or (name in _GELU and _is_on_cpu(mlp))


def _is_mixture(mlp: nn.Module) -> bool:
    return _children(mlp) in _MIXTURES and _is_on_cpu(mlp)


def _is_offset(norm: nn.Module) -> bool:
    return type(norm).__name__ in _OFFSET and _is_on_cpu(norm)


def _is_on_cpu(module: nn.Module) -> bool:
    """On a GPU the kernels know plain layers alone; transformers' own are recorded for others."""
    return all(weight.device.type == "cpu" for weight in module.parameters())


def _children(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_children()}
