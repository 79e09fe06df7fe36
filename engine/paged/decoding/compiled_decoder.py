"""Runs the plain decoder in one compiled call, for steps of few tokens; it shares weights and pools with `Decoder`.

When decoding one row, reading the weights takes most of the time, and torch's operations between the products a quarter
of it. One call runs all layers, with no Python in between.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Mapping, Sequence
from typing import ClassVar, Self

import torch
from torch import Tensor

from ...adapters.loaded import LowRank
from ...adapters.low_rank import Part
from ...cpu.library import MOST_ROWS, PLAIN, Kernels, Product
from ...cpu.mixture import Room
from ..attention import Rules
from ..kv.kv_cache import Pool
from ..packing import Computed, LayerGroup, Segment
from .decoder import Decoder, Layer
from .linear import Adaptable, Linear, known_product
from .mixtures import Routed, router_of
from .remembering import Remembering, slots_of

_MOST_KEYS = 1024
"""The longest context of a prefill in the compiled code: it attends token by token, and over more keys matrix products
are faster."""

RANK_UNIT = 16
"""The kernels compute so many columns of an adapter's first matrix together."""

_FIRST_POSITIONS = 1024  # rotations computed at first; doubled whenever a step goes beyond

_PARTS = {"qkv": 0, "delta_gates": 1, "rates": 2, "decays": 3, "output": 4, "gate": 5, "up": 6, "down": 7}
_PARTS["share"] = 8
_NUM_PARTS = 9  # of a layer that adapters may change, as in the source: those of `qkv` are up to three

_INT, _POINTER, _FLOAT = ctypes.c_int64, ctypes.c_void_p, ctypes.c_float


class _LowRank(ctypes.Structure):
    _fields_: ClassVar = [
        *((name, _POINTER) for name in ("a", "b")),
        *((name, _INT) for name in ("rank", "start", "end")),
        ("scale", _FLOAT),
    ]


class _Layer(ctypes.Structure):
    _fields_: ClassVar = [
        *((name, _POINTER) for name in ("attention_norm", "mlp_norm", "head_norm")),
        *((name, _POINTER) for name in ("attention_after", "mlp_after", "cosines", "sines", "scales")),
        *((name, Product) for name in ("qkv", "output", "gate", "up", "down", "share")),
        *((name, _POINTER) for name in ("mixture", "delta", "convolution", "mamba", "sinks", "pool")),
        *((name, _INT) for name in ("num_blocks", "window", "group", "has_gelu", "has_gates")),
        *((name, _FLOAT) for name in ("epsilon", "mlp_epsilon", "head_epsilon", "scaling", "softcap", "residual")),
    ]


class _Model(ctypes.Structure):
    _fields_: ClassVar = [
        *((name, _INT) for name in ("half", "threads", "num_layers", "vocabulary")),
        *((name, _INT) for name in ("embedding", "num_q_heads", "num_kv_heads", "head_dim")),
        *((name, _INT) for name in ("rotated", "num_groups", "block_size", "num_slots")),
        *((name, _POINTER) for name in ("embeddings", "layers", "norm")),
        ("head", Product),
        *((name, _POINTER) for name in ("input", "mixed", "gated", "stream", "qkv", "gates")),
        *((name, _POINTER) for name in ("convolved", "rates", "decays", "shares")),
        *((name, _POINTER) for name in ("levels", "room", "low", "after")),
        ("most_rank", _INT),
        *((name, _FLOAT) for name in ("epsilon", "scale", "softcap", "logit_scale")),
    ]


class CompiledDecoder:
    """A `Decoder` for the compiled kernels. Call `attach` before the first step."""

    def __init__(self, decoder: Decoder, kernels: Kernels, dtype: torch.dtype, context_length: int) -> None:
        """One that `of` has found to fit."""
        self._decoder, self._kernels, self._dtype = decoder, kernels, dtype
        self._tensors: list[Tensor] = []  # kept alive: the structures hold their addresses
        self._pools: Sequence[Pool] = ()
        self._context_length = context_length
        self._angles: dict[str | None, Tensor] = {}  # cosines and sines [2, P, D] of each kind; grown by `_reach`
        self._num_angles = 0  # P
        self._scales: list[Tensor] = []  # of queries, [P], if the model has any; set by `_reach`
        self._low = torch.empty(0)  # what adapters' first matrices make of the inputs; grown by `table`
        first = next(layer for layer in decoder.layers if layer.state is None)
        head = known_product(decoder.head)
        self._products = known_products(decoder.linears())
        self._logits = torch.empty((MOST_ROWS, head.outputs))  # reused: allocating would cost each step 0.1 ms
        self._rows = [self._logits[:count] for count in range(MOST_ROWS + 1)]
        self._parts: list[Part | None] = []  # by layer, so many each; None where no adapter can change anything
        self.routed = [self._route(layer) for layer in decoder.layers]
        self.remembering: list[Remembering] = []  # of the layers that keep running states
        self._states: Tensor | None = None  # the first memory of the first of these; set by `_attach_states`
        self._layers = (_Layer * len(decoder.layers))()
        self._attending: list[_Layer] = []
        for layer, routed, to in zip(decoder.layers, self.routed, self._layers, strict=True):
            self._fill(layer, routed, to)
        embedding = decoder.embedding.shape[1]
        self._model = model = _Model(
            half=dtype == torch.bfloat16,
            threads=torch.get_num_threads(),
            num_layers=len(self._layers),
            vocabulary=len(decoder.embedding),
            embedding=embedding,
            num_q_heads=first.num_q_heads,
            num_kv_heads=first.num_kv_heads,
            head_dim=first.head_dim,
            rotated=decoder.rotated,
            embeddings=self._address(decoder.embedding.contiguous()),
            layers=ctypes.addressof(self._layers),
            norm=self._numbers(decoder.norm.weight),
            head=head,
            epsilon=decoder.norm.epsilon,
            scale=1 if decoder.scale is None else float(decoder.scale),
            softcap=decoder.softcap or 0,
            logit_scale=decoder.logit_scale,
        )
        wide = max(known_product(layer.qkv).outputs for layer in decoder.layers)
        found = max(known_product(layer.output).inputs for layer in decoder.layers)
        gated = [layer for layer in decoder.layers if layer.is_gated]
        inner = max((known_product(layer.down).inputs for layer in gated), default=0)
        gates = max((known_product(layer.gate).outputs for layer in gated), default=0)
        model.input, model.mixed, model.gated = (
            self._address(torch.zeros((MOST_ROWS, size), dtype=dtype)) for size in (embedding, found, inner)
        )
        levels = max(product.room(MOST_ROWS) for product in self._products)
        model.levels = self._address(torch.zeros(levels, dtype=torch.uint8))
        self._stream = torch.zeros((MOST_ROWS, embedding))
        model.stream, model.after = self._address(self._stream), self._address(torch.zeros_like(self._stream))
        model.qkv, model.gates = (self._address(torch.zeros((MOST_ROWS, size))) for size in (wide, max(gates, found)))
        model.shares = self._address(torch.zeros((MOST_ROWS, 1)))
        for one in self.remembering[:1]:
            heads = 0 if one.delta is None else one.delta.num_values
            model.convolved, model.rates, model.decays = (
                self._address(torch.zeros((MOST_ROWS, size))) for size in (one.convolution.num_channels, heads, heads)
            )
        self.room: Room | None = None  # of all mixtures, if there are any
        for routed in filter(None, self.routed):
            self.room = routed.experts.room(routed.used, dtype)
            model.room = ctypes.addressof(self.room)

    @classmethod
    def of(
        cls, decoder: Decoder, kernels: Kernels, rules: Sequence[Rules], dtype: torch.dtype, context_length: int
    ) -> Self | None:
        """The compiled form of `decoder`; None if the kernels do not support its shapes, weights or attention."""
        products = [linear.product for linear in decoder.linears()]
        if None in products:
            return None
        attending = [layer for layer in decoder.layers if layer.state is None]
        shapes = {(layer.num_q_heads, layer.num_kv_heads, layer.head_dim, *_sizes(layer)[:2]) for layer in attending}
        states = {
            (one.memory[0].shape[1:], one.state_shape) for layer in decoder.layers if (one := layer.state) is not None
        }
        gated = {_sizes(layer)[-2:] for layer in decoder.layers if layer.is_gated}
        mixtures = [layer.mixture for layer in decoder.layers if layer.mixture is not None]
        if not all(Routed.is_known(one, dtype, kernels) for one in mixtures):
            return None
        mixed = {(router_of(one).top_k, one.experts.compiled.sizes) for one in mixtures}
        if max(len(shapes), len(states), len(gated), len(mixed)) > 1:
            return None
        compiled = cls(decoder, kernels, dtype, context_length)
        for rule, layer in zip(rules, compiled._attending, strict=True):
            layer.scaling, layer.softcap = rule.scaling, rule.softcap or 0
            if rule.sinks is not None:
                layer.sinks = compiled._numbers(rule.sinks)
        return compiled

    @property
    def rounds_inputs(self) -> bool:
        """Whether products round what they multiply to levels."""
        return any(product.kind != PLAIN for product in self._products)

    def attach(self, pools: Sequence[Pool], groups: Sequence[LayerGroup], group_of: Sequence[int], block: int) -> None:
        """Use `pools`, one a layer that attends, from now on; `group_of` is each one's index in `groups`, `block` is in
        tokens."""
        self._pools, self._model.num_groups, self._model.block_size = pools, len(groups), block
        for pool, layer, index in zip(pools, self._attending, group_of, strict=True):
            layer.pool, layer.group, layer.num_blocks = pool.memory.data_ptr(), index, groups[index].num_blocks
            layer.window = groups[index].window or 1 << 62

    def table(self, pairs: Mapping[str, LowRank]) -> ctypes.Array[_LowRank]:
        """What an adapter adds to each layer, as the kernels read it; valid as long as `pairs` exist.

        The columns of every `a` must be a multiple of `RANK_UNIT`.
        """
        table = (_LowRank * len(self._parts))()
        for part, to in zip(self._parts, table, strict=True):
            if part is None:
                continue
            to.start, to.end = part.start, part.end
            if part.name in pairs:
                a, b, to.scale = pairs[part.name]
                to.a, to.b, to.rank = a.data_ptr(), b.data_ptr(), len(b)
        most = max(pair.a.shape[1] for pair in pairs.values())
        if most > self._model.most_rank:
            self._low = torch.empty((MOST_ROWS, 3, most))
            self._model.low, self._model.most_rank = self._low.data_ptr(), most
        return table

    @staticmethod
    def takes(segments: Sequence[Segment]) -> bool:
        """Whether the kernels take this step: few tokens, no scored prompt or image, no prefill over a long context."""
        few = sum(len(segment.tokens) for segment in segments) <= MOST_ROWS
        return few and all(
            (len(segment.tokens) == 1 or segment.end <= _MOST_KEYS)
            and not (segment.scores or segment.images or segment.positions is not None or segment.ends is not None)
            for segment in segments
        )

    def __call__(self, segments: Sequence[Segment], chosen: Tensor | None = None) -> Computed:
        """Compute a step that `takes` accepts; see `pack` for `chosen`. The logits, float32, last until the next call.

        Raises `IndexError` for a token without an embedding or a block, or a segment without slots for its state.
        """
        self._attach_states()
        numbers, sampled = array("q"), []
        known = [] if chosen is None else chosen.tolist()
        order: Sequence[int] = range(len(segments))
        if any(segment.adapter for segment in segments):  # rows of one adapter are computed together if adjacent
            order = sorted(order, key=lambda index: id(segments[index].adapter))
        for index in order:
            ids, start, tables, samples, _, adapter, state, shift, *_ = segments[index]
            address = ctypes.addressof(adapter.compiled) if adapter else 0
            source, targets = slots_of(state, len(ids), self._model.num_slots)
            numbers.extend((len(ids), start, samples, len(tables[0]), address, shift, source, len(targets) // 2))
            numbers.extend(ids if chosen is None else [id if id >= 0 else max(known[~id], 0) for id in ids])
            for table in tables:
                numbers.extend(table)
            numbers.extend(targets)
            if samples:
                sampled.append(index)
        self._reach(max(segment.end + segment.shift for segment in segments))
        best, (address, _) = array("q", bytes(8 * len(sampled))), numbers.buffer_info()
        buffers = address, len(segments), self._logits.data_ptr(), best.buffer_info()[0]
        if self._kernels.library.step(ctypes.byref(self._model), *buffers):
            raise IndexError(f"a token has no block, slot or place in the vocabulary of {self._model.vocabulary}")
        return Computed(self._rows[len(sampled)], sampled, best)

    def part(self, segments: Sequence[Segment], inputs: Tensor, layers: range) -> tuple[Tensor, Tensor]:
        """Run only `layers`, on `inputs` [T, E] instead of embeddings, and the head, to check each part by itself.

        Returns the logits and the residual stream in float32 [T, E], before the last norm.
        """
        model, embeddings = self._model, inputs.to(self._dtype).contiguous()
        before = model.embeddings, model.vocabulary, model.layers, model.num_layers, model.scale
        ids = iter(range(len(inputs)))
        numbered = [segment._replace(tokens=[next(ids) for _ in segment.tokens]) for segment in segments]
        model.embeddings, model.vocabulary, model.num_layers = embeddings.data_ptr(), len(inputs), len(layers)
        model.scale = 1
        model.layers = ctypes.addressof(self._layers) + layers.start * ctypes.sizeof(_Layer)
        try:
            return self(numbered).logits.clone(), self._stream[: len(inputs)].clone()
        finally:
            model.embeddings, model.vocabulary, model.layers, model.num_layers, model.scale = before

    def choice(self, rows: int) -> tuple[Tensor, Tensor]:
        """The experts of so many rows in the last layer with a mixture, and their shares: [rows, K] each."""
        assert self.room is not None
        chosen, shares = (self.room.tensors[name][:rows].clone() for name in ("chosen", "shares"))
        return chosen, shares

    def _fill(self, layer: Layer, routed: Routed | None, to: _Layer) -> None:
        to.attention_norm, to.epsilon = self._numbers(layer.attention_norm.weight), layer.attention_norm.epsilon
        to.mlp_norm, to.mlp_epsilon = self._numbers(layer.mlp_norm.weight), layer.mlp_norm.epsilon
        if layer.head_norm is not None:
            to.head_norm, to.head_epsilon = self._numbers(layer.head_norm), layer.epsilon
        if layer.attention_after is not None and layer.mlp_after is not None:
            to.attention_after = self._numbers(layer.attention_after.weight)
            to.mlp_after = self._numbers(layer.mlp_after.weight)
        to.has_gelu, to.has_gates, to.residual = layer.has_gelu, layer.has_gates, layer.residual
        to.qkv, to.output = known_product(layer.qkv), known_product(layer.output)
        if layer.state is None:
            self._attending.append(to)
        else:
            self.remembering.append(own_state := Remembering(layer, self._numbers))
            own_state.point(to)
        if routed is not None:
            to.mixture = routed.address
        if layer.has_share:
            to.share = known_product(layer.share)
        if layer.is_gated:
            to.gate, to.down = known_product(layer.gate), known_product(layer.down)
            if not layer.is_joined:
                to.up = known_product(layer.up)
        own: list[Part | None] = [None] * _NUM_PARTS
        for name, linear in zip(layer.names, layer.linears(), strict=True):
            if isinstance(linear, Adaptable):
                own[_PARTS[name] : _PARTS[name] + len(linear.parts)] = linear.parts
        self._parts += own

    def _attach_states(self) -> None:
        """Use the memory of running states, if it is another one than before."""
        if self.remembering and self._states is not self.remembering[0].module.memory[0]:
            (self._model.num_slots,) = {one.attach() for one in self.remembering}
            self._states = self.remembering[0].module.memory[0]

    def _route(self, layer: Layer) -> Routed | None:
        return None if layer.mixture is None else Routed(layer.mixture, self._dtype, self._kernels, layer.residual)

    def _reach(self, end: int) -> None:
        """Compute the rotations of all positions below `end`.

        None beyond the context length: there some models change the rotations of all positions.
        """
        if end > self._num_angles:
            positions = torch.arange(max(end, min(max(2 * end, _FIRST_POSITIONS), self._context_length)))
            found = self._decoder.angles(positions, torch.float32)
            self._angles = {kind: torch.cat(angles[:2]).contiguous() for kind, angles in found.items()}
            self._num_angles = len(positions)
            self._scales = [angles.scales.flatten() for angles in found.values() if angles.scales is not None]
            for layer, to in zip(self._decoder.layers, self._layers, strict=True):
                to.cosines, to.sines = (one.data_ptr() for one in self._angles[layer.kind])
                to.scales = self._scales[0].data_ptr() if self._scales else 0

    def _numbers(self, tensor: Tensor) -> int:
        return self._address(tensor.detach().float().contiguous())

    def _address(self, tensor: Tensor) -> int:
        self._tensors.append(tensor)
        return tensor.data_ptr()


def known_products(linears: Sequence[Linear]) -> list[Product]:
    """Those of them that have one."""
    return [linear.product for linear in linears if linear.product is not None]


def _sizes(layer: Layer) -> tuple[tuple[int, int], ...]:
    return tuple((product.inputs, product.outputs) for product in known_products(layer.linears()))
