"""The plain decoder, written out: RMSNorm, rotary attention, gated SiLU, each layer in a handful of operations.

Llama, Mistral, Qwen 2 and 3 and many others have this structure. transformers' modules compute the same with four times
as many small operations, which on a CPU cost a tenth of a decoding step. There, a layer may have a mixture of experts
instead of the last product, which its own module computes, or be one of Gemma's, with norms also behind attention and
product. In the place of attention it may keep a running state: a gated delta net (`state/delta_net.py`), a Mamba-2
layer (`state/mamba.py`) or a short convolution (`state/short_convolution.py`). Granite's multiply what they add.
`Decoder.of` checks the structure alone: the caller must compare results with the original model's.
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
from ..state.layer import StateLayer
from ..state.step import StateStep
from .linear import Linear
from .structure import BODY, GELU, OFFSET, children, epsilon_of, has_gates, is_joined, is_plain, part, scale_of

MakeLinear = Callable[[Sequence[nn.Linear]], Linear]
"""Makes one `Linear` of modules that share their input, outputs side by side; takes over the modules' memory."""

Attention = Callable[[int, Tensor, Tensor], Tensor]
"""Number of the layer among those that attend, query [Hq, T, D], keys and then values [2 H, T, D] → [T, Hq · D]."""


class Angles(NamedTuple):
    """Cosines and sines [1, T, D], the sines of the first half negated: x cos + (x with its halves swapped) sin.

    Queries are multiplied by `scales` [1, T, 1], in models whose attention grows sharper with the position.
    """

    cosines: Tensor
    sines: Tensor
    scales: Tensor | None = None


Rotations = Mapping[str | None, Angles]
"""The angles of each kind of layer."""


class Norm:
    """RMSNorm: x / sqrt(mean(x²) + ε) · w. Concatenated with -x a row has mean zero, so layer_norm fits."""

    def __init__(self, module: Any) -> None:
        self.weight, self.epsilon = scale_of(module), epsilon_of(module)
        self._is_wide = type(module).__name__ in OFFSET

    def __call__(self, x: Tensor) -> Tensor:
        size, weight = x.shape[-1], self.weight if self._is_wide else self.weight.to(x.dtype)
        if x.is_cuda:
            return functional.rms_norm(x, (size,), weight, self.epsilon)
        both = torch.cat((x, -x), dim=-1)
        return (functional.layer_norm(both, (2 * size,), None, None, self.epsilon)[..., :size] * weight).to(x.dtype)


class Layer:
    """One layer's weights. `head_norm` [Hq + H, 1, D] if queries and keys are normalised head by head.

    A layer with a `mixture`, the model's module, has `gate`, `up` and `down` only if there is an expert that all tokens
    share, whose weight is the sigmoid of `share`. Gemma's have norms of what attention and the last product add, and
    gates with GELU; Gemma 3's are of two kinds, which rotate by different angles. With `has_gates` each head's query
    brings a gate, whose sigmoid is multiplied by what the head finds.

    A layer that keeps a running `state` does not attend: that of a delta net, whose projections are `qkv`,
    `delta_gates`, `rates` and `decays`, or that of a Mamba-2 layer or the inputs of a short convolution, whose
    projection is `qkv`.

    `gate` makes gates and ups, side by side, if the layer `is_joined`. What Granite's add is multiplied by `residual`.
    """

    gate: Linear
    up: Linear
    down: Linear
    share: Linear
    delta_gates: Linear
    rates: Linear
    decays: Linear
    attention_after: Norm | None = None
    mlp_after: Norm | None = None
    head_norm: Tensor | None = None
    epsilon = 0.0
    has_gelu = has_gates = is_joined = is_mamba = False
    residual = 1.0
    num_q_heads = num_kv_heads = head_dim = 0

    def __init__(self, module: Any, make: MakeLinear, kind: str | None = None, number: int = 0) -> None:
        """`kind` is whose rotations it uses, `number` its own among the layers that attend."""
        mlp, self.kind, self.number = part(module, "mlp") or part(module, "mixture"), kind, number
        self.residual = float(getattr(module, "residual_multiplier", 1.0))
        self.attention_norm = Norm(part(module, "input_layernorm"))
        if hasattr(module, "pre_feedforward_layernorm"):
            self.attention_after, self.mlp_after = (
                Norm(one) for one in (module.post_attention_layernorm, module.post_feedforward_layernorm)
            )
            self.mlp_norm = Norm(module.pre_feedforward_layernorm)
        else:
            self.mlp_norm = Norm(part(module, "post_attention_layernorm"))
        self.is_delta_net = hasattr(module, "linear_attn")
        self.is_mamba = getattr(module, "mamba", None) is not None
        self.state: StateLayer | None = None
        if self.is_delta_net:
            self._take_delta_net(module.linear_attn, make)
        elif hasattr(module, "conv"):
            self._take_state(module.conv, make)
        elif self.is_mamba:
            self._take_state(module.mamba, make)
        else:
            self._take_attention(module.self_attn, make)
        is_own = part(mlp, "gate_proj") is not None or is_joined(mlp)
        self.mixture: Any = part(module, "mixture") if is_own else mlp
        gated = mlp if is_own else getattr(mlp, "shared_expert", None)
        self.is_gated, self.has_share = gated is not None, hasattr(mlp, "shared_expert")
        self.is_joined = gated is not None and is_joined(gated)
        if self.is_joined:
            self.gate, self.down = make([part(gated, "gate_up_proj")]), make([part(gated, "down_proj")])
        elif gated is not None:
            self.gate, self.up, self.down = (make([part(gated, f"{name}_proj")]) for name in ("gate", "up", "down"))
            self.has_gelu = type(getattr(gated, "act_fn", None)).__name__ in GELU
        if self.has_share:
            self.share = make([mlp.shared_expert_gate])

    @property
    def names(self) -> list[str]:
        """Those of its products in the order of their use, without those of a mixture."""
        after = ["gate", "down"] if self.is_joined else ["gate", "up", "down"] if self.is_gated else []
        return [*self.projections, "output", *(["share"] if self.has_share else []), *after]

    @property
    def projections(self) -> list[str]:
        """The names of those of the normalised stream."""
        return ["qkv", "delta_gates", "rates", "decays"] if self.is_delta_net else ["qkv"]

    def linears(self) -> list[Linear]:
        """Its products in the order of their use, without those of a mixture."""
        return [getattr(self, name) for name in self.names]

    def _take_attention(self, attention: Any, make: MakeLinear) -> None:
        self.head_dim = attention.head_dim
        output = part(attention, "o_proj")
        self.num_q_heads = output.in_features // self.head_dim
        self.num_kv_heads = attention.k_proj.out_features // self.head_dim
        self.has_gates = has_gates(attention)
        norms = [part(attention, name) for name in ("q_norm", "k_norm")]
        if norms[0] is not None:
            query, key = map(scale_of, norms)
            self.head_norm = torch.stack([query] * self.num_q_heads + [key] * self.num_kv_heads)[:, None]
            self.epsilon = epsilon_of(norms[0])
        self.qkv = make([attention.q_proj, attention.k_proj, attention.v_proj])
        self.output = make([output])

    def _take_delta_net(self, delta: Any, make: MakeLinear) -> None:
        self.state = delta
        self.qkv, self.delta_gates = make([delta.in_proj_qkv]), make([delta.in_proj_z])
        self.rates, self.decays = make([delta.in_proj_b]), make([delta.in_proj_a])
        self.output = make([delta.out_proj])

    def _take_state(self, layer: Any, make: MakeLinear) -> None:
        self.state = layer
        self.qkv, self.output = make([layer.in_proj]), make([layer.out_proj])


class Decoder:
    """A transformers model of the plain structure, run without its modules' own code."""

    def __init__(self, model: Any, make: MakeLinear, dtype: torch.dtype) -> None:
        """`dtype` is that of the activations."""
        body = model.model
        self._dtype, self._through = dtype, through
        scale = getattr(body.embed_tokens, "embed_scale", None)
        self.scale: Tensor | None = None if scale is None else scale.to(dtype)
        config: Any = model.config.get_text_config()
        if (multiplier := getattr(body, "embedding_multiplier", 1.0)) != 1:
            self.scale = torch.tensor(float(multiplier))
        self.logit_scale: float = 1 / (getattr(config, "logits_scaling", None) or 1.0)
        self.softcap: float | None = getattr(config, "final_logit_softcapping", None)
        self.embedding: Tensor = body.embed_tokens.weight
        rope: Any = getattr(config, "rope_parameters", None) or {}
        self._sharpening: tuple[float, int] | None = None  # Ministral 3's: by how much, and each so many tokens
        if beta := rope.get("llama_4_scaling_beta"):
            self._sharpening = beta, rope["original_max_position_embeddings"]
        if self.embedding.is_cuda and find_spec("triton") is not None and self._sharpening is None:
            from . import cuda_layers

            self._through = cuda_layers.through
        self._rotary: nn.Module | None = part(body, "rotary_emb")
        has_kinds = hasattr(self._rotary, "layer_types")
        self.layers: list[Layer] = []
        for index, one in enumerate(body.layers):
            attending = [layer for layer in self.layers if layer.state is None]
            self.layers.append(Layer(one, make, config.layer_types[index] if has_kinds else None, len(attending)))
        self._kinds = {layer.kind for layer in self.layers}
        rotated = max(layer.head_dim for layer in self.layers) * (rope.get("partial_rotary_factor") or 1)
        self.rotated = 0 if self._rotary is None else int(rotated)
        self.norm = Norm(part(body, "norm"))
        self.head = make([model.lm_head])

    @classmethod
    def of(cls, model: Any, make: MakeLinear, dtype: torch.dtype) -> Self | None:
        """Take over the weights of a transformers model; None if its modules do not have the plain structure."""
        body = getattr(model, "model", None)
        if body is None or children(model) != {"model", "lm_head"} or children(body) | {"rotary_emb"} != BODY:
            return None
        return cls(model, make, dtype) if all(map(is_plain, body.layers)) else None

    def __call__(
        self,
        ids: Tensor,
        positions: Tensor,
        keep: Tensor,
        attention: Attention,
        seen: Seen | None = None,
        states: StateStep | None = None,
    ) -> Tensor:
        """The logits [len(keep), V] of the tokens `keep` among the packed `ids` [T] at `positions` [T], or [3, T].

        `states` says which slots of running states the step uses, if the model keeps some.
        """
        x = self.embed(ids)
        if seen is not None:
            x = x.index_copy(0, seen.rows, seen.features.to(self._dtype))
        x = self._through(self.layers, x, self.angles(positions, self._dtype), attention, seen, states)
        return self.scaled(self.head(self.norm(x[keep])))

    def scaled(self, logits: Tensor) -> Tensor:
        """The logits of what the last product made."""
        logits = logits if self.logit_scale == 1 else logits * self.logit_scale
        return logits if self.softcap is None else self.softcap * (logits / self.softcap).tanh()

    def embed(self, ids: Tensor) -> Tensor:
        """The residual stream before the first layer: [T] → [T, E]."""
        x = functional.embedding(ids, self.embedding).to(self._dtype)
        return x if self.scale is None else x * self.scale

    def angles(self, positions: Tensor, dtype: torch.dtype) -> Rotations:
        """The rotations at `positions` [T], or [3, T] in three dimensions, rounded to `dtype`."""
        return {kind: self._angles(positions, dtype, kind) for kind in self._kinds}

    def _angles(self, positions: Tensor, dtype: torch.dtype, kind: str | None) -> Angles:
        if self._rotary is None:
            none = torch.empty((1, positions.shape[-1], 0), dtype=dtype, device=positions.device)
            return Angles(none, none)
        given = self.embedding[None, :1].to(dtype), positions.unsqueeze(-2), *(() if kind is None else (kind,))
        cos, sin = self._rotary(*given)
        if cos.shape[-1] < self.rotated:  # gpt-oss's are those of one half
            cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)
        half = cos.shape[-1] // 2
        sines = torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)
        if self._sharpening is None:
            return Angles(cos, sines)
        beta, length = self._sharpening
        return Angles(cos, sines, (1 + beta * (positions // length).float().log1p()).to(dtype)[None, :, None])

    def linears(self) -> list[Linear]:
        """All products in the order of their use, without those of mixtures."""
        return [*chain.from_iterable(layer.linears() for layer in self.layers), self.head]


def through(
    layers: Sequence[Layer],
    x: Tensor,
    rotations: Rotations,
    attention: Attention,
    seen: Seen | None,
    states: StateStep | None = None,
) -> Tensor:
    """The residual stream [T, E] after all layers."""
    for index, layer in enumerate(layers):
        x = advance(layer, x, rotations[layer.kind], attention, states)
        if seen is not None and index < len(seen.deep):
            x = x.index_add(0, seen.rows, seen.deep[index].to(x.dtype))
    return x


def advance(layer: Layer, x: Tensor, angles: Angles, attention: Attention, states: StateStep | None) -> Tensor:
    """Run one layer: the residual stream [T, E] after it."""
    h = layer.attention_norm(x)
    if layer.state is None:
        found = _attend(layer, h, angles, attention)
    else:
        found = layer.state.read([getattr(layer, name)(h) for name in layer.projections], states)
    x = _add(layer, layer.output, found, x, layer.attention_after)
    h = layer.mlp_norm(x)
    if layer.mixture is not None:
        x = x.add(_mix(layer, h), alpha=layer.residual)
        if not layer.is_gated:
            return x
    if layer.is_joined:
        gate, up = layer.gate(h).chunk(2, dim=-1)
        return _add(layer, layer.down, functional.silu(gate) * up, x, None)
    gate = functional.gelu(layer.gate(h), approximate="tanh") if layer.has_gelu else layer.gate.silu(h)
    gated = layer.up.mul(h, gate)
    if layer.has_share:
        return x + layer.share(h).sigmoid() * layer.down(gated)
    return _add(layer, layer.down, gated, x, layer.mlp_after)


def _add(layer: Layer, product: Linear, given: Tensor, x: Tensor, after: Norm | None) -> Tensor:
    """The residual stream `x` with a product of what is `given`."""
    if after is not None:
        return x + after(product(given))
    return product.add(given, x) if layer.residual == 1 else x.add(product(given), alpha=layer.residual)


def _mix(layer: Layer, h: Tensor) -> Tensor:
    """What the chosen experts make of inputs [T, E]."""
    mixture = layer.mixture
    if layer.has_share and hasattr(mixture, "experts"):
        _, shares, chosen = mixture.gate(h)
        found: Tensor = mixture.experts(h, chosen, shares)
        return found
    mixed: Tensor | Sequence[Tensor] = mixture(h[None])  # [1, T, E], or a tuple that starts with it
    return (mixed if isinstance(mixed, Tensor) else mixed[0])[0]


def _attend(layer: Layer, h: Tensor, angles: Angles, attention: Attention) -> Tensor:
    """What the layer's heads find for inputs [T, E], [T, Hq · D]."""
    heads = layer.qkv(h).view(len(h), -1, layer.head_dim).transpose(0, 1)  # [Hq + 2 H, T, D]
    gates: Tensor | None = None
    if layer.has_gates:
        both = heads[: 2 * layer.num_q_heads]
        heads, gates = torch.cat((both[::2], heads[len(both) :])), both[1::2]
    query_key = heads[: layer.num_q_heads + layer.num_kv_heads]
    if layer.head_norm is not None:
        normed = functional.rms_norm(query_key, (layer.head_dim,), None, layer.epsilon) * layer.head_norm.to(h.dtype)
        query_key = normed if angles.cosines.shape[-1] == layer.head_dim else query_key.copy_(normed)
    _rotate(query_key, angles, heads)
    if angles.scales is not None:
        heads[: layer.num_q_heads] *= angles.scales
    found = attention(layer.number, heads[: layer.num_q_heads], heads[layer.num_q_heads :])
    return found if gates is None else found * gates.transpose(0, 1).flatten(1).sigmoid()


def _rotate(query_key: Tensor, angles: Angles, heads: Tensor) -> None:
    """Write the rotated numbers of each head, its first ones if not all rotate, into the first `heads`."""
    (count, num_tokens, _), size = query_key.shape, angles.cosines.shape[-1]
    if not size:
        return
    part = query_key[..., :size]
    swapped = part.reshape(count, num_tokens, 2, size // 2).flip(-2).flatten(-2)
    torch.addcmul(part * angles.cosines, swapped, angles.sines, out=heads[:count, :, :size])
