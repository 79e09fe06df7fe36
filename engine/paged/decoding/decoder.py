"""The plain decoder, written out: RMSNorm, rotary attention, gated SiLU, each layer in a handful of operations.

Llama, Mistral, Qwen 2 and 3 and many others have this structure. transformers' modules compute the same with four times
as many small operations, which on a CPU cost a tenth of a decoding step, and on a GPU may cost most of it. A layer may
have a mixture of experts instead of the last product, which its own module computes, or be one of Gemma's, with norms
also behind attention and product. In the place of attention it may keep a running state: a gated delta net
(`state/delta_net.py`), a Mamba-2 layer (`state/mamba.py`) or a short convolution (`state/short_convolution.py`).
Granite's multiply what they add. `Decoder.of` checks the structure alone: the caller must compare results with the
original model's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...planning.device import has_triton
from ...vision.seen import Seen
from ...vision.tower import LanguageModel
from ..state.step import StateStep
from .heads import Angles, Attention, Rotations, attend
from .layer import Layer
from .layer_inputs import PerLayerInputs
from .linear import Linear, MakeLinear
from .norm import Norm
from .rows import look_up, rows_of
from .structure import BODY, INPUTS, PAIRED, body_of, children, is_plain, part, replaced


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
        self.feature_scale = float(getattr(body, "embedding_multiplier", 1.0))  # of images' features, too
        if self.feature_scale != 1:
            self.scale = torch.tensor(self.feature_scale)
        self.logit_scale: float = 1 / (getattr(config, "logits_scaling", None) or 1.0)
        if isinstance(model, LanguageModel):  # whose heads mostly leave logits as they are
            self.logit_scale = model.logit_scale
        self.softcap: float | None = getattr(config, "final_logit_softcapping", None)
        self.embedding: Tensor = body.embed_tokens.weight
        self.rows = rows_of(body.embed_tokens)
        rope: Any = getattr(config, "rope_parameters", None) or {}
        self._sharpening: tuple[float, int] | None = None  # Ministral 3's: by how much, and each so many tokens
        if beta := rope.get("llama_4_scaling_beta"):
            self._sharpening = beta, rope["original_max_position_embeddings"]
        if has_triton(self.embedding.device):
            from . import cuda_layers

            self._through = cuda_layers.through
        self._rotary: nn.Module | None = part(body, "rotary_emb")
        has_kinds = hasattr(self._rotary, "layer_types")
        factor: float = 0 if self._rotary is None else rope.get("partial_rotary_factor") or 1
        self.layers: list[Layer] = []
        for index, one in enumerate(body.layers):
            self.layers.append(Layer(one, make, config.layer_types[index] if has_kinds else None, self.layers, factor))
        sizes = sorted((layer.head_dim, layer.kind) for layer in self.layers)
        self.rotated = {kind: int(size * factor) for size, kind in sizes}  # numbers of a head, the first ones
        self.inputs = PerLayerInputs(body, make, dtype) if children(body) > BODY else None
        self.norm = Norm(part(body, "norm"))
        self.head = make([model.lm_head])

    @classmethod
    def of(cls, model: Any, make: MakeLinear, dtype: torch.dtype) -> Self | None:
        """Take over the weights of a transformers model; None if its modules do not have the plain structure."""
        body = body_of(model)
        if body is None or children(model) != {"model", "lm_head"}:
            return None
        if children(body) | {"rotary_emb"} not in (BODY, BODY | INPUTS):
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
        """The logits [len(keep), V] of the tokens `keep` among the packed `ids` [T] at `positions` [T], or [D, T].

        `states` says which slots of running states the step uses, if the model keeps some.
        """
        x = self.embed(ids)
        if seen is not None:
            x = x.index_copy(0, seen.rows, seen.features.to(self._dtype) * self.feature_scale)
            if 0 in seen.deep:
                x = x.index_add(0, seen.rows, seen.deep[0].to(x.dtype))
        given = () if self.inputs is None else (self.inputs(self.read(ids), x),)
        x = self._through(self.layers, x, self.angles(positions, self._dtype), attention, seen, states, *given)
        return self.scaled(self.head(self.norm(x[keep])))

    def scaled(self, logits: Tensor) -> Tensor:
        """The logits of what the last product made."""
        logits = logits if self.logit_scale == 1 else logits * self.logit_scale
        return logits if self.softcap is None else self.softcap * (logits / self.softcap).tanh()

    def embed(self, ids: Tensor) -> Tensor:
        """The residual stream before the first layer: [T] → [T, E]."""
        x = look_up(self.read(ids), self.embedding, self.rows).to(self._dtype)
        return x if self.scale is None else x * self.scale

    def read(self, ids: Tensor) -> Tensor:
        """The tokens that the model reads."""
        for id, other in self.replaced.items():
            ids = ids.where(ids != id, other)
        return ids

    def angles(self, positions: Tensor, dtype: torch.dtype) -> Rotations:
        """The rotations at `positions` [T], or [D, T] in D dimensions, rounded to `dtype`."""
        return {kind: self._angles(positions, dtype, kind) for kind in self.rotated}

    def _angles(self, positions: Tensor, dtype: torch.dtype, kind: str | None) -> Angles:
        if self._rotary is None:
            none = torch.empty((1, positions.shape[-1], 0), dtype=dtype, device=positions.device)
            return Angles(none, none)
        given = self.embedding[None, :1].to(dtype), positions.unsqueeze(-2), *(() if kind is None else (kind,))
        cos, sin = self._rotary(*given)
        if type(self._rotary).__name__ in PAIRED:
            cos, sin = (torch.cat((one[..., ::2], one[..., 1::2]), dim=-1) for one in (cos, sin))
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
        if seen is not None and index + 1 in seen.deep:
            x = x.index_add(0, seen.rows, seen.deep[index + 1].to(x.dtype))
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
    x = _add(layer, layer.output, found, x, layer.attention_after)
    h = layer.mlp_norm(x)
    if layer.beside is not None and layer.mlp_after is not None:
        own = layer.down(layer.up.mul(h, functional.gelu(layer.gate(h), approximate="tanh")))
        return x + layer.mlp_after(layer.beside.product_after(own) + layer.beside.after(layer.mix(x)))
    if layer.mixture is not None:
        x = x.add(layer.mix(h), alpha=layer.residual)
        if not layer.is_gated:
            return x
    if layer.is_joined:
        gate, up = layer.gate(h).chunk(2, dim=-1)
        return _add(layer, layer.down, functional.silu(gate) * up, x, layer.mlp_after)
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
