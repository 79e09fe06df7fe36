"""Runs the plain decoder in one compiled call, for steps of few tokens; it shares weights and pools with `Decoder`.

When decoding one row, reading the weights takes most of the time, and torch's operations between the products a quarter
of it. One call runs all layers, with no Python in between.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Mapping, Sequence
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional

from ...adapters.loaded import LowRank
from ...adapters.low_rank import Part
from ...cpu.library import MOST_ROWS, PLAIN, Kernels
from ...cpu.low_rank import LowRankAddition
from ...cpu.mixture import Room
from ...cpu.rows import Table
from ...vision.tower import Vision
from ..attention import Rules
from ..decoding.beside import Beside
from ..decoding.decoder import Decoder
from ..decoding.layer import Layer
from ..decoding.layer_inputs import CompiledInputs, compiled_input
from ..decoding.linear import Adaptable, known_product, known_products
from ..decoding.mixtures import Routed, used_of
from ..decoding.rows import table_of
from ..kv.kv_cache import Pool
from ..packing import Computed, LayerGroup, Segment
from .crew import Crew
from .fields import LayerFields, ModelFields
from .remembering import Remembering, slots_of
from .showing import Shown, last_position, show, turn

RANK_UNIT = 16
"""The kernels compute so many columns of an adapter's first matrix together."""

_FIRST_POSITIONS = 1024  # rotations computed at first; doubled whenever a step goes beyond

_PARTS = {"qkv": 0, "delta_gates": 1, "rates": 2, "decays": 3, "output": 4, "gate": 5, "up": 6, "down": 7}
_PARTS |= {"share": 8, "input_gate": 9, "input_projection": 10}
_FEW = 32  # tokens of a step, for which threads meet more often than they compute for long
_NUM_PARTS = 11  # of a layer that adapters may change, as in the source: those of `qkv` are up to three


class CompiledDecoder:
    """A `Decoder` for the compiled kernels. Call `attach` before the first step."""

    def __init__(self, decoder: Decoder, kernels: Kernels, dtype: torch.dtype, context_length: int) -> None:
        """One that `of` has found to fit."""
        self._decoder, self._kernels, self._dtype = decoder, kernels, dtype
        self._crews = Crew(torch.get_num_threads()), Crew(torch.get_num_threads())  # of short steps and of long ones
        self._tensors: list[Tensor] = []  # kept alive: the structures hold their addresses
        self._beside: list[Beside] = []  # of the layers that have it
        self._replaced = decoder.replaced
        self._pools: Sequence[Pool] = ()
        self._context_length = context_length
        self._angles: dict[str | None, Tensor] = {}  # cosines and sines [2, P + MOST_ROWS, D] by kind; see `_reach`
        self._num_angles = 0  # P; behind them are those of a step's tokens in images
        self._scales: list[Tensor] = []  # of queries, [P], if the model has any; set by `_reach`
        self._low = torch.empty(0)  # what adapters' first matrices make of the inputs; grown by `table`
        head = known_product(decoder.head)
        self._products = known_products(decoder.linears())
        self._logits = torch.empty((MOST_ROWS, head.outputs))  # reused: allocating would cost each step 0.1 ms
        self._rows = [self._logits[:count] for count in range(MOST_ROWS + 1)]
        self._parts: list[Part | None] = []  # by layer, so many each; None where no adapter can change anything
        factors = ((layer.mixture, layer.residual) for layer in decoder.layers)
        self.routed = [None if one is None else Routed(one, dtype, kernels, factor) for one, factor in factors]
        self.remembering: list[Remembering] = []  # of the layers that keep running states
        self._states: Tensor | None = None  # the first memory of the first of these; set by `_attach_states`
        self._shown: Shown | None = None  # by the last step, whose features the structure of the model points to
        self._layers = (LayerFields * len(decoder.layers))()
        self._attending: list[tuple[int, LayerFields]] = []  # each with the number of its keys and values
        for layer, routed, to in zip(decoder.layers, self.routed, self._layers, strict=True):
            self._fill(layer, routed, to)
        embedding = decoder.embedding.shape[1]
        self._table = table_of(decoder.embedding, decoder.rows, decoder.embedding.dtype, self._address)
        self._model = model = ModelFields(
            half=dtype == torch.bfloat16,
            num_layers=len(self._layers),
            vocabulary=len(decoder.embedding),
            embedding=embedding,
            reading=max(layer.index for layer in decoder.layers if layer.num_parts) + 1,
            embeddings=self._table,
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
        own = decoder.inputs.size if decoder.inputs is not None else 0
        inner = max(own, *(known_product(layer.down).inputs for layer in gated), 0)
        gates = max(own, *(known_product(layer.gate).outputs for layer in gated), 0)
        model.input, model.mixed, model.gated = (
            self._address(torch.zeros((MOST_ROWS, size), dtype=dtype)) for size in (embedding, found, inner)
        )
        levels = max(product.room(MOST_ROWS) for product in self._products)
        model.levels = self._address(torch.zeros(levels, dtype=torch.uint8))
        self._stream = torch.zeros((MOST_ROWS, embedding))
        model.stream = self._address(self._stream)
        sizes = embedding, embedding, wide, max(gates, found), 1
        model.after, model.beside, model.qkv, model.gates, model.shares = (
            self._address(torch.zeros((MOST_ROWS, size))) for size in sizes
        )
        for one in self.remembering[:1]:
            heads = 0 if one.delta is None else one.delta.num_values
            model.convolved, model.rates, model.decays = (
                self._address(torch.zeros((MOST_ROWS, size))) for size in (one.convolution.num_channels, heads, heads)
            )
        self.inputs: CompiledInputs | None = None  # the tokens' own for all layers, if there are any
        if decoder.inputs is not None:
            self.inputs = CompiledInputs(decoder.inputs, dtype, self._address)
            model.layer_inputs = self.inputs.address
            self._parts += getattr(decoder.inputs.projection, "parts", [None])
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
        if None in products or (decoder.inputs is not None and len(decoder.inputs.embedding) < len(decoder.embedding)):
            return None
        states = [layer.state for layer in decoder.layers if layer.state is not None]
        mixtures = [layer.mixture for layer in decoder.layers if layer.mixture is not None]
        if not all(Routed.is_known(one, dtype, kernels) for one in mixtures):
            return None
        mixed = {(used_of(one), one.experts.compiled.sizes) for one in mixtures}
        if len({(one.memory[0].shape[1:], one.state_shape) for one in states}) > 1 or len(mixed) > 1:
            return None
        compiled = cls(decoder, kernels, dtype, context_length)
        for number, layer in compiled._attending:
            rule = rules[number]
            layer.scaling, layer.softcap = rule.scaling, rule.softcap or 0
            if rule.sinks is not None:
                layer.sinks = compiled._numbers(rule.sinks)
        return compiled

    @property
    def rounds_inputs(self) -> bool:
        """Whether products round what they multiply to levels."""
        return any(product.kind != PLAIN for product in self._products)

    def attach(self, pools: Sequence[Pool], groups: Sequence[LayerGroup], group_of: Sequence[int], block: int) -> None:
        """Use `pools`, one a layer that keeps keys and values, from now on; `group_of` is each one's index in `groups`,
        `block` is in tokens."""
        self._pools, self._model.num_groups, self._model.block_size = pools, len(groups), block
        for number, layer in self._attending:
            pool, index = pools[number], group_of[number]
            layer.pool, layer.group, layer.num_blocks = pool.memory.data_ptr(), index, groups[index].num_blocks
            layer.window = groups[index].window or 1 << 62

    def table(self, pairs: Mapping[str, LowRank]) -> ctypes.Array[LowRankAddition]:
        """What an adapter adds to each layer, as the kernels read it; valid as long as `pairs` exist.

        The columns of every `a` must be a multiple of `RANK_UNIT`.
        """
        table = (LowRankAddition * len(self._parts))()
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

    def takes(self, segments: Sequence[Segment]) -> bool:
        """Whether the kernels take this step: few tokens, none of which sees later ones."""
        few = sum(len(segment.tokens) for segment in segments) <= MOST_ROWS
        return few and all(segment.ends is None for segment in segments)

    def __call__(
        self, segments: Sequence[Segment], chosen: Tensor | None = None, vision: Vision | None = None
    ) -> Computed:
        """Compute a step that `takes` accepts; see `pack` for `chosen`. The logits, float32, last until the next call.
        `vision` makes features of images.

        Raises `IndexError` for a token without an embedding or a block, or a segment without slots for its state.
        """
        self._attach_states()
        numbers, sampled = array("q"), []
        known = [] if chosen is None else chosen.tolist()
        order: Sequence[int] = range(len(segments))
        if any(segment.adapter for segment in segments):  # rows of one adapter are computed together if adjacent
            order = sorted(order, key=lambda index: id(segments[index].adapter))
        replaced = self._replaced
        self._reach(max(last_position(segment) for segment in segments) + 1)
        shown = show([segments[index] for index in order], vision, self._dtype, self._decoder.feature_scale)
        self._show(shown)
        row, num_turned = 0, self._num_angles
        for index in order:
            ids, start, tables, samples, scores, adapter, state, shift, images, positions, _ = segments[index]
            address = ctypes.addressof(adapter.compiled) if adapter else 0
            source, targets = slots_of(state, len(ids), self._model.num_slots)
            if positions is not None:
                shift = num_turned - start
                num_turned += turn(positions, self._decoder.angles, self._angles, num_turned)
            wanted = 2 if scores else int(samples)
            numbers.extend((len(ids), start, wanted, len(tables[0]), address, shift, source, len(targets) // 2))
            numbers.append(shown is not None and len(images) > 0)
            ids = ids if chosen is None else [id if id >= 0 else max(known[~id], 0) for id in ids]
            numbers.extend([replaced.get(id, id) for id in ids] if replaced else ids)
            if images and shown is not None:
                numbers.extend(shown.of[row : row + len(ids)])
            row += len(ids)
            for table in tables:
                numbers.extend(table)
            numbers.extend(targets)
            sampled.extend([index] * (len(ids) if scores else wanted))
        best, (address, _) = array("q", bytes(8 * len(sampled))), numbers.buffer_info()
        buffers = address, len(segments), self._logits.data_ptr(), best.buffer_info()[0]
        if self._crews[row > _FEW].run(self._kernels.library.step, self._model, *buffers):
            raise IndexError(f"a token has no block, slot or place in the vocabulary of {self._model.vocabulary}")
        return Computed(self._rows[len(sampled)], sampled, best)

    def part(
        self, segments: Sequence[Segment], inputs: Tensor, layers: range, own: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Run only `layers`, on `inputs` [T, E] instead of embeddings, and the head, to check each part by itself.

        `own` [T, L, P] are the tokens' inputs for all layers, in a model that has some.
        Returns the logits and the residual stream in float32 [T, E], before the last norm.
        """
        model, embeddings = self._model, inputs.to(self._dtype).contiguous()
        before = self._table, model.vocabulary, model.layers, model.num_layers, model.scale, model.reading
        self._replaced = {}  # numbers of inputs are no tokens
        ids = iter(range(len(inputs)))
        numbered = [segment._replace(tokens=[next(ids) for _ in segment.tokens]) for segment in segments]
        model.embeddings, model.vocabulary, model.num_layers = Table(embeddings.data_ptr()), len(inputs), len(layers)
        model.scale, model.reading = 1, len(self._layers)
        if self.inputs is not None:
            self.inputs.give(own)
        model.layers = ctypes.addressof(self._layers) + layers.start * ctypes.sizeof(LayerFields)
        try:
            return self(numbered).logits.clone(), self._stream[: len(inputs)].clone()
        finally:
            model.embeddings, model.vocabulary, model.layers, model.num_layers, model.scale, model.reading = before
            self._replaced = self._decoder.replaced
            if self.inputs is not None:
                self.inputs.give(None)

    def choice(self, rows: int) -> tuple[Tensor, Tensor]:
        """The experts of so many rows in the last layer with a mixture, and their shares: [rows, K] each."""
        assert self.room is not None
        chosen, shares = (self.room.tensors[name][:rows].clone() for name in ("chosen", "shares"))
        return chosen, shares

    def _fill(self, layer: Layer, routed: Routed | None, to: LayerFields) -> None:
        to.attention_norm, to.mlp_norm = (self._numbers(norm.weight) for norm in (layer.attention_norm, layer.mlp_norm))
        to.epsilon = (layer.attention_after or layer.attention_norm).epsilon
        to.mlp_epsilon = (layer.mlp_after or layer.mlp_norm).epsilon
        if layer.head_norm is not None:
            values = [torch.ones_like(layer.head_norm[:1])] * layer.num_kv_heads if layer.norms_values else []
            to.head_norm = self._numbers(torch.cat([layer.head_norm, *values]))
            to.head_epsilon = layer.epsilon
        if layer.attention_after is not None and layer.mlp_after is not None:
            to.attention_after = self._numbers(layer.attention_after.weight)
            to.mlp_after = self._numbers(layer.mlp_after.weight)
        to.has_gelu, to.has_gates, to.residual = layer.has_gelu, layer.has_gates, layer.residual
        to.qkv, to.output = known_product(layer.qkv), known_product(layer.output)
        to.num_q_heads, to.num_kv_heads, to.head_dim = layer.num_q_heads, layer.num_kv_heads, layer.head_dim
        to.num_parts, to.norms_values, to.norms_rows = layer.num_parts, layer.norms_values, layer.norms_rows
        to.rotated, to.scalar = self._decoder.rotated[layer.kind] if layer.rotates else 0, layer.scalar
        to.input = compiled_input(layer, self._address)
        if layer.state is None:
            self._attending.append((layer.number, to))
        else:
            self.remembering.append(own_state := Remembering(layer, self._numbers))
            own_state.point(to)
        if routed is not None:
            to.mixture = routed.address
        if layer.beside is not None:
            self._beside.append(layer.beside.compiled(self._numbers))
            to.beside = ctypes.addressof(self._beside[-1])
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

    def _reach(self, end: int) -> None:
        """Compute the rotations of all positions below `end`.

        None beyond the context length: there some models change the rotations of all positions.
        """
        if end > self._num_angles:
            positions = torch.arange(max(end, min(max(2 * end, _FIRST_POSITIONS), self._context_length)))
            found = self._decoder.angles(positions, torch.float32)
            behind = 0, 0, 0, MOST_ROWS
            self._angles = {kind: functional.pad(torch.cat(angles[:2]), behind) for kind, angles in found.items()}
            self._num_angles = len(positions)
            self._scales = [angles.scales.flatten() for angles in found.values() if angles.scales is not None]
            for layer, to in zip(self._decoder.layers, self._layers, strict=True):
                to.cosines, to.sines = (one.data_ptr() for one in self._angles[layer.kind])
                to.scales = self._scales[0].data_ptr() if self._scales else 0

    def _show(self, shown: Shown | None) -> None:
        model, self._shown = self._model, shown
        model.num_features, model.reach = (0, 0) if shown is None else (shown.features.shape[1], len(shown.deep))
        model.features, model.deep = (0, 0) if shown is None else (shown.features.data_ptr(), shown.deep.data_ptr())

    def _numbers(self, tensor: Tensor) -> int:
        return self._address(tensor.detach().float().contiguous())

    def _address(self, tensor: Tensor) -> int:
        self._tensors.append(tensor)
        return tensor.data_ptr()
