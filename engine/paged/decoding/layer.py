"""One layer of the plain decoder: its products, norms and sizes, taken from transformers' modules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..state.layer import StateLayer
from .beside import MixtureBeside
from .linear import Linear, MakeLinear
from .norm import NoNorm, Norm
from .structure import GELU, epsilon_of, has_gates, norms_rows, part, rotates, scale_of, turns_neighbours
from .turning import Orders, by_halves


class Layer:
    """One layer's weights. `head_norm` [Hq + H, 1, D] if queries and keys are normalised head by head.

    With `norms_rows` the mean square is that of all queries, and of all keys, together. A layer that does not `rotate`
    knows no positions. Values are normalised, too, where `norms_values`. With `num_parts` 1 there is no product for
    them: they are the keys before their norm and rotation; with 0 keys and values are those of the earlier layer of the
    same number.

    A layer with a `mixture`, the model's module, has `gate`, `up` and `down` only if there is an expert that all tokens
    share, whose weight is the sigmoid of `share`. Gemma's have norms of what attention and the last product add, and
    gates with GELU; Gemma 3's are of two kinds, which rotate by different angles. With `has_gates` each head's query
    brings a gate, whose sigmoid is multiplied by what the head finds. Where the model rotates neighbouring numbers of a
    head, its queries and keys have another order here (see `turning`), which their products do not depend on.

    With `input_after` a token has an input of its own for the layer, which the stream gates, behind the last product:
    `input_projection` of GELU(`input_gate`) times it, normalised. At its end a layer multiplies the stream by `scalar`.

    A layer that keeps a running `state` does not attend: that of a delta net, whose projections are `qkv`,
    `delta_gates`, `rates` and `decays`, or `qkv` alone if that `is_fused`, or that of a Mamba-2 layer or the inputs of
    a short convolution, whose projection is `qkv`.

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
    has_gelu = has_gates = norms_values = norms_rows = is_fused = False
    rotates = True
    num_q_heads = num_kv_heads = head_dim = 0
    num_parts = 2  # keys, values
    input_gate: Linear
    input_projection: Linear
    input_after: Norm | None = None

    def __init__(
        self, module: Any, make: MakeLinear, kind: str | None = None, before: Sequence[Layer] = (), share: float = 1
    ) -> None:
        """`kind` is whose rotations it uses, which turn a `share` of a head; `before` are the layers before it."""
        mlp, self.kind = part(module, "mlp") or part(module, "mixture"), kind
        self.residual: float = getattr(module, "residual_multiplier", 1.0)
        storing = [layer for layer in before if layer.state is None and layer.num_parts]
        self.index, self.number = len(before), len(storing)  # among all layers; of its keys and values
        first, second = part(module, "input_layernorm"), part(module, "post_attention_layernorm")
        if hasattr(module, "post_feedforward_layernorm"):  # the second one is behind attention, too
            self.attention_after, self.mlp_after = Norm(second), Norm(module.post_feedforward_layernorm)
            second = getattr(module, "pre_feedforward_layernorm", None)
        elif hasattr(module, "post_mlp_layernorm"):
            after = module.post_self_attn_layernorm, module.post_mlp_layernorm
            self.attention_after, self.mlp_after = map(Norm, after)
        self.attention_norm, self.mlp_norm = (NoNorm() if one is None else Norm(one) for one in (first, second))
        self.is_delta_net = hasattr(module, "linear_attn")
        self.is_mamba = getattr(module, "mamba", None) is not None
        self.state: StateLayer | None = None
        if self.is_delta_net:
            self._take_delta_net(module.linear_attn, make)
        elif hasattr(module, "conv"):
            self._take_state(module.conv, make)
        elif self.is_mamba:
            self._take_state(module.mamba, make)
        elif hasattr(module.self_attn, "k_proj"):
            self._take_attention(module.self_attn, make, share)
        else:
            self._share_attention(module.self_attn, make, [layer for layer in storing if layer.kind == kind][-1])
        is_own = any(part(mlp, name) is not None for name in ("gate_proj", "gate_up_proj"))
        self.beside = MixtureBeside(module) if hasattr(module, "router") else None
        self.mixture: Any = (part(module, "mixture") or self.beside) if is_own else mlp
        gated = mlp if is_own else getattr(mlp, "shared_expert", None)
        self.is_gated, self.has_share = gated is not None, hasattr(mlp, "shared_expert")
        self.is_joined = gated is not None and part(gated, "gate_up_proj") is not None
        if self.is_joined:
            self.gate, self.down = make([part(gated, "gate_up_proj")]), make([part(gated, "down_proj")])
        elif gated is not None:
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
        after = ["gate", "down"] if self.is_joined else ["gate", "up", "down"] if self.is_gated else []
        of_input = ["input_gate", "input_projection"] if self.input_after is not None else []
        return [*self.projections, "output", *(["share"] if self.has_share else []), *after, *of_input]

    @property
    def projections(self) -> list[str]:
        """The names of those of the normalised stream."""
        return ["qkv", "delta_gates", "rates", "decays"] if self.is_delta_net and not self.is_fused else ["qkv"]

    def mix(self, h: Tensor) -> Tensor:
        """What the chosen experts make of inputs [T, E]."""
        if self.has_share and hasattr(self.mixture, "experts"):
            _, shares, chosen = self.mixture.gate(h)
            found: Tensor = self.mixture.experts(h, chosen, shares)
            return found
        mixed: Tensor | Sequence[Tensor] = self.mixture(h[None])  # [1, T, E], or a tuple that starts with it
        return (mixed if isinstance(mixed, Tensor) else mixed[0])[0]

    def linears(self) -> list[Linear]:
        """Its products in the order of their use, without those of a mixture."""
        return [getattr(self, name) for name in self.names]

    def _take_attention(self, attention: Any, make: MakeLinear, share: float) -> None:
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
        orders: Orders = ()
        if turns_neighbours(attention):
            size = int(self.head_dim * share)
            orders = [by_halves(count, self.head_dim, size) for count in (self.num_q_heads, self.num_kv_heads)]
        self.qkv, self.output = make(parts, orders), make([output])

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
        parts = [delta.in_proj_qkv, delta.in_proj_z, delta.in_proj_b, delta.in_proj_a]
        if delta.has_kernels:  # each product more would be a launch more
            self.qkv, self.is_fused = make(parts), True
        else:
            self.qkv, self.delta_gates, self.rates, self.decays = (make([one]) for one in parts)
        self.output = make([delta.out_proj])

    def _take_state(self, layer: Any, make: MakeLinear) -> None:
        self.state = layer
        self.qkv, self.output = make([layer.in_proj]), make([layer.out_proj])
