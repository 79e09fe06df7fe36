"""The plain decoder, written out: RMSNorm, rotary attention, gated SiLU, each layer in a handful of operations.

Llama, Mistral, Qwen 2 and 3 and many others have this structure. transformers' modules compute the same with four times
as many small operations, which on a CPU cost a tenth of a decoding step. There, a layer may have a mixture of experts
instead of the last product, which its own module computes, or be one of Gemma's, with norms also behind attention and
product. In the place of attention it may keep a running state: a gated delta net (`state/delta_net.py`), or a short
convolution (`state/short_convolution.py`).
`Decoder.of` checks the structure alone: the caller must compare results with the original model's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from itertools import chain
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...vision.tower import Seen
from ..state.layer import StateLayer
from ..state.step import StateStep
from .beside import MixtureBeside
from .heads import Angles, Attention, attend
from .layer_inputs import PerLayerInputs
from .linear import Linear, MakeLinear
from .norm import NoNorm, Norm
from .structure import (
    BODY,
    GELU,
    INPUTS,
    body_of,
    children,
    epsilon_of,
    has_gates,
    is_plain,
    norms_rows,
    part,
    replaced,
    rotates,
    scale_of,
)

Rotations = Mapping[str | None, Angles]
"""The angles of each kind of layer."""


class Layer:
    """One layer's weights. `head_norm` [Hq + H, 1, D] if queries and keys are normalised head by head.

    With `norms_rows` the mean square is that of all queries, and of all keys, together. A layer that does not `rotate`
    knows no positions. Values are normalised, too, where `norms_values`. With `num_parts` 1 there is no product for
    them: they are the keys before their norm and rotation; with 0 keys and values are those of the earlier layer of the
    same number.

    A layer with a `mixture`, the model's module, has `gate`, `up` and `down` only if there is an expert that all tokens
    share, whose weight is the sigmoid of `share`. Gemma's have norms of what attention and the last product add, and
    gates with GELU; Gemma 3's are of two kinds, which rotate by different angles. With `has_gates` each head's query
    brings a gate, whose sigmoid is multiplied by what the head finds.

    With `input_after` a token has an input of its own for the layer, which the stream gates, behind the last product:
    `input_projection` of GELU(`input_gate`) times it, normalised. At its end a layer multiplies the stream by `scalar`.

    A layer that keeps a running `state` does not attend: that of a delta net, whose projections are `qkv`,
    `delta_gates`, `rates` and `decays`, or the inputs of a short convolution, whose projection is `qkv`.
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
    has_gelu = has_gates = norms_values = norms_rows = False
    rotates = True
    num_q_heads = num_kv_heads = head_dim = 0
    num_parts = 2  # keys, values
    input_gate: Linear
    input_projection: Linear
    input_after: Norm | None = None

    def __init__(self, module: Any, make: MakeLinear, kind: str | None = None, before: Sequence[Layer] = ()) -> None:
        """`kind` is whose rotations it uses, `before` are the layers before it."""
        mlp, self.kind = part(module, "mlp"), kind
        storing = [layer for layer in before if layer.state is None and layer.num_parts]
        self.index, self.number = len(before), len(storing)  # among all layers; of its keys and values
        first, second = part(module, "input_layernorm"), part(module, "post_attention_layernorm")
        if hasattr(module, "post_feedforward_layernorm"):  # the second one is behind attention, too
            self.attention_after, self.mlp_after = Norm(second), Norm(module.post_feedforward_layernorm)
            second = getattr(module, "pre_feedforward_layernorm", None)
        self.attention_norm, self.mlp_norm = (NoNorm() if one is None else Norm(one) for one in (first, second))
        self.is_delta_net = hasattr(module, "linear_attn")
        self.state: StateLayer | None = None
        if self.is_delta_net:
            self._take_delta_net(module.linear_attn, make)
        elif hasattr(module, "conv"):
            self._take_convolution(module.conv, make)
        elif hasattr(module.self_attn, "k_proj"):
            self._take_attention(module.self_attn, make)
        else:
            self._share_attention(module.self_attn, make, [layer for layer in storing if layer.kind == kind][-1])
        self.mixture: Any = mlp if part(mlp, "gate_proj") is None else None
        gated = mlp if self.mixture is None else getattr(mlp, "shared_expert", None)
        self.beside = MixtureBeside(module) if hasattr(module, "router") else None
        self.mixture = self.mixture or self.beside
        self.is_gated, self.has_share = gated is not None, hasattr(mlp, "shared_expert")
        if gated is not None:
            self.gate, self.up, self.down = (make([part(gated, f"{name}_proj")]) for name in ("gate", "up", "down"))
            self.has_gelu = type(getattr(gated, "act_fn", None)).__name__ in GELU
        if self.has_share:
            self.share = make([mlp.shared_expert_gate])
        if hasattr(module, "per_layer_input_gate"):
            self.input_gate, self.input_projection = (
                make([one]) for one in (module.per_layer_input_gate, module.per_layer_projection)
            )
            self.input_after = Norm(module.post_per_layer_input_norm)
        scalar: Tensor | None = getattr(module, "layer_scalar", None)
        self.scalar = 1.0 if scalar is None else float(scalar)  # what the stream is multiplied by at its end

    @property
    def names(self) -> list[str]:
        """Those of its products in the order of their use, without those of a mixture."""
        after = ["gate", "up", "down"] if self.is_gated else []
        of_input = ["input_gate", "input_projection"] if self.input_after is not None else []
        return [*self.projections, "output", *(["share"] if self.has_share else []), *after, *of_input]

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
            self.norms_rows = norms_rows(attention)
            if not self.norms_rows:
                query, key = query.repeat(self.num_q_heads), key.repeat(self.num_kv_heads)
            self.head_norm = torch.cat((query, key)).view(-1, 1, self.head_dim)
            self.epsilon = epsilon_of(norms[0])
        self.rotates = rotates(attention)
        self.norms_values = hasattr(attention, "v_norm")
        parts = [one for name in ("q", "k", "v") if (one := getattr(attention, f"{name}_proj")) is not None]
        self.num_parts = len(parts) - 1
        self.qkv, self.output = make(parts), make([output])

    def _share_attention(self, attention: Any, make: MakeLinear, source: Layer) -> None:
        """`source` is the layer with the keys and values."""
        self.number, self.num_parts, self.num_kv_heads = source.number, 0, source.num_kv_heads
        self.head_dim, output = attention.head_dim, part(attention, "o_proj")
        self.num_q_heads = output.in_features // self.head_dim
        self.head_norm = torch.stack([scale_of(attention.q_norm)] * self.num_q_heads)[:, None]
        self.epsilon = epsilon_of(attention.q_norm)
        self.qkv, self.output = make([attention.q_proj]), make([output])

    def _take_delta_net(self, delta: Any, make: MakeLinear) -> None:
        self.state = delta
        self.qkv, self.delta_gates = make([delta.in_proj_qkv]), make([delta.in_proj_z])
        self.rates, self.decays = make([delta.in_proj_b]), make([delta.in_proj_a])
        self.output = make([delta.out_proj])

    def _take_convolution(self, convolution: Any, make: MakeLinear) -> None:
        self.state = convolution
        self.qkv, self.output = make([convolution.in_proj]), make([convolution.out_proj])


class Decoder:
    """A transformers model of the plain structure, run without its modules' own code."""

    def __init__(self, model: Any, make: MakeLinear, dtype: torch.dtype) -> None:
        """`dtype` is that of the activations."""
        body = body_of(model)
        self.replaced = replaced(model)
        self._dtype = dtype
        self._through: Callable[..., Tensor] = through
        scale = getattr(body.embed_tokens, "embed_scale", None)
        self.scale: Tensor | None = None if scale is None else scale.to(dtype)
        config: Any = model.config.get_text_config()
        self.softcap: float | None = getattr(config, "final_logit_softcapping", None)
        self.embedding: Tensor = body.embed_tokens.weight
        rope: Any = getattr(config, "rope_parameters", None) or {}
        self._sharpening: tuple[float, int] | None = None  # Ministral 3's: by how much, and each so many tokens
        if beta := rope.get("llama_4_scaling_beta"):
            self._sharpening = beta, rope["original_max_position_embeddings"]
        if self.embedding.is_cuda and find_spec("triton") is not None and self._sharpening is None:
            from . import cuda_layers

            self._through = cuda_layers.through
        self._rotary: nn.Module = part(body, "rotary_emb")
        has_kinds = hasattr(self._rotary, "layer_types")
        self.layers: list[Layer] = []
        for index, one in enumerate(body.layers):
            self.layers.append(Layer(one, make, config.layer_types[index] if has_kinds else None, self.layers))
        factor = rope.get("partial_rotary_factor") or 1
        sizes = sorted((layer.head_dim, layer.kind) for layer in self.layers)
        self.rotated = {kind: int(size * factor) for size, kind in sizes}  # numbers of a head, the first ones
        self.inputs = PerLayerInputs(body, make, dtype) if children(body) > BODY else None
        self.norm = Norm(part(body, "norm"))
        self.head = make([model.lm_head])

    @classmethod
    def of(cls, model: Any, make: MakeLinear, dtype: torch.dtype) -> Self | None:
        """Take over the weights of a transformers model; None if its modules do not have the plain structure."""
        body = body_of(model)
        if body is None or children(model) != {"model", "lm_head"} or children(body) not in (BODY, BODY | INPUTS):
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
        given = () if self.inputs is None else (self.inputs(self.read(ids), x),)
        x = self._through(self.layers, x, self.angles(positions, self._dtype), attention, seen, states, *given)
        logits = self.head(self.norm(x[keep]))
        return logits if self.softcap is None else self.softcap * (logits / self.softcap).tanh()

    def embed(self, ids: Tensor) -> Tensor:
        """The residual stream before the first layer: [T] → [T, E]."""
        x = functional.embedding(self.read(ids), self.embedding).to(self._dtype)
        return x if self.scale is None else x * self.scale

    def read(self, ids: Tensor) -> Tensor:
        """The tokens that the model reads."""
        for id, other in self.replaced.items():
            ids = ids.where(ids != id, other)
        return ids

    def angles(self, positions: Tensor, dtype: torch.dtype) -> Rotations:
        """The rotations at `positions` [T], or [3, T] in three dimensions, rounded to `dtype`."""
        return {kind: self._angles(positions, dtype, kind) for kind in self.rotated}

    def _angles(self, positions: Tensor, dtype: torch.dtype, kind: str | None) -> Angles:
        given = self.embedding[None, :1].to(dtype), positions.unsqueeze(-2), *(() if kind is None else (kind,))
        cos, sin = self._rotary(*given)
        if cos.shape[-1] < self.rotated[kind]:  # gpt-oss's are those of one half
            cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)
        half = cos.shape[-1] // 2
        sines = torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)
        if self._sharpening is None:
            return Angles(cos, sines)
        beta, length = self._sharpening
        return Angles(cos, sines, (1 + beta * (positions // length).float().log1p()).to(dtype)[None, :, None])

    def linears(self) -> list[Linear]:
        """All products in the order of their use, without those of mixtures."""
        first = [] if self.inputs is None else [self.inputs.projection]
        return [*first, *chain.from_iterable(layer.linears() for layer in self.layers), self.head]


def through(
    layers: Sequence[Layer],
    x: Tensor,
    rotations: Rotations,
    attention: Attention,
    seen: Seen | None,
    states: StateStep | None = None,
    inputs: Tensor | None = None,
) -> Tensor:
    """The residual stream [T, E] after all layers, which may have `inputs` [T, L, P]."""
    for index, layer in enumerate(layers):
        x = advance(layer, x, rotations[layer.kind], attention, states, None if inputs is None else inputs[:, index])
        if seen is not None and index < len(seen.deep):
            x = x.index_add(0, seen.rows, seen.deep[index].to(x.dtype))
    return x


def advance(
    layer: Layer,
    x: Tensor,
    angles: Angles,
    attention: Attention,
    states: StateStep | None,
    inputs: Tensor | None = None,
) -> Tensor:
    """Run one layer: the residual stream [T, E] after it. `inputs` are the tokens' own for it [T, P]."""
    x = _compute(layer, x, angles, attention, states)
    if layer.input_after is not None and inputs is not None:
        gated = functional.gelu(layer.input_gate(x), approximate="tanh") * inputs
        x = x + layer.input_after(layer.input_projection(gated))
    return x if layer.scalar == 1 else x * layer.scalar


def _compute(layer: Layer, x: Tensor, angles: Angles, attention: Attention, states: StateStep | None) -> Tensor:
    """The same without inputs of its own."""
    h = layer.attention_norm(x)
    if layer.state is None:
        found = attend(layer, h, angles, attention)
    else:
        found = layer.state.read([getattr(layer, name)(h) for name in layer.projections], states)
    after = layer.attention_after
    x = layer.output.add(found, x) if after is None else x + after(layer.output(found))
    h = layer.mlp_norm(x)
    if layer.beside is not None and layer.mlp_after is not None:
        own = layer.down(layer.up.mul(h, functional.gelu(layer.gate(h), approximate="tanh")))
        return x + layer.mlp_after(layer.beside.product_after(own) + layer.beside.after(_mix(layer, x)))
    if layer.mixture is not None:
        x = x + _mix(layer, h)
        if not layer.is_gated:
            return x
    gate = functional.gelu(layer.gate(h), approximate="tanh") if layer.has_gelu else layer.gate.silu(h)
    gated = layer.up.mul(h, gate)
    if layer.has_share:
        return x + layer.share(h).sigmoid() * layer.down(gated)
    return layer.down.add(gated, x) if layer.mlp_after is None else x + layer.mlp_after(layer.down(gated))


def _mix(layer: Layer, h: Tensor) -> Tensor:
    """What the chosen experts make of inputs [T, E]."""
    mixture = layer.mixture
    if layer.has_share and hasattr(mixture, "experts"):
        _, shares, chosen = mixture.gate(h)
        found: Tensor = mixture.experts(h, chosen, shares)
        return found
    mixed: Tensor | Sequence[Tensor] = mixture(h[None])  # [1, T, E], or a tuple that starts with it
    return (mixed if isinstance(mixed, Tensor) else mixed[0])[0]
