"""Checks the compiled decoder against a float32 evaluation of the model, layer by layer.

Layers amplify rounding: two correct decoders of a real model may differ more than a wrong kernel from a right one. So
each layer gets the same inputs as its float32 reference, and the check compares what it adds to them. The bound for the
whole model is how far torch's operations in the dtype of the weights are from float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...cpu.layouts import numbers, rounded_inputs
from ...cpu.library import BLOCK, PLAIN, Kernels, Product
from ..attention import MatmulAttention, Rules
from ..decoding.decoder import Decoder, advance
from ..decoding.heads import Attention
from ..decoding.linear import Unfused, known_products
from ..decoding.mixtures import Routed
from ..kv.kv_cache import LayerSpec
from ..packing import LayerGroup, PackedStep, Segment, pack
from ..probes import BLOCKS
from ..state.probes import moved, slots_of
from .compiled_decoder import CompiledDecoder

_NUMBERS = 1 << 20  # of a weight that are converted to float32 at a time, so that they stay in the cache
_LAYER = {torch.float32: 1e-4, torch.bfloat16: 0.03}  # the bound for one layer's rounding; typical is up to 0.007
_MODEL = {torch.float32: 1e-3, torch.bfloat16: 0.1}  # the least bound for the whole model's, or
_CLOSE = 0.05  # the distance of routes that rounding may exchange, in standard deviations of a row's
_STEEP = 0.5  # the same where rounding may exchange experts, or inputs become levels; a wrong model is 1 off or more
_LATER = {"output", "down", "input_projection"}  # a layer's products of what its others have made
_TOGETHER = 33  # tokens of a piece: enough for the kernels to take a query for each lane
_FACTOR = 3  # times torch's own distance from float32: which of two roundings is nearer is chance


class Difference(NamedTuple):
    """How far the compiled decoder is from float32 in one part of the model, and how far it may be."""

    part: str
    distance: float
    bound: float


class Setting(NamedTuple):
    """How a model's layers attend, and the layout of the cache for the probes."""

    rules: Sequence[Rules]
    specs: Sequence[LayerSpec]
    groups: Sequence[LayerGroup]
    group_of: Sequence[int]
    block_size: int
    dtype: torch.dtype


def fault(
    decoder: Decoder,
    candidate: CompiledDecoder,
    setting: Setting,
    probes: Sequence[Segment],
    step: PackedStep,
    attend: Attention,
) -> str:
    """Why the compiled decoder must not be used; empty if it may be. See `differences`."""
    for part, far, bound in differences(decoder, candidate, setting, probes, step, attend):
        if not far <= bound:
            return f"the compiled decoder is {far:.3g} from float32 in {part}, more than {bound:.3g}"
    if not (candidate.remembering or attends_together(candidate, decoder, setting)):
        return "the compiled decoder computes tokens together otherwise than each by itself"
    return ""


@torch.inference_mode()
def attends_together(candidate: CompiledDecoder, decoder: Decoder, setting: Setting) -> bool:
    """Whether a piece, whose queries share the keys before them, has the bits of its tokens alone."""
    ids = [(index + 1) * 7919 % len(decoder.embedding) for index in range(_TOGETHER)]
    tables = [list(range(2, BLOCKS))] * len(setting.groups)  # of the probes that are done
    whole = candidate([Segment(ids, 0, tables, True)]).logits.clone()
    apart = [Segment([id], index, tables, index == len(ids) - 1) for index, id in enumerate(ids)]
    return torch.equal(whole, candidate(apart).logits)


@torch.inference_mode()
def differences(
    decoder: Decoder,
    candidate: CompiledDecoder,
    setting: Setting,
    probes: Sequence[Segment],
    step: PackedStep,
    attend: Attention,
) -> list[Difference]:
    """Compare each layer, the head and the whole model. `step` is `probes` packed for `attend`, in the same order."""
    dtype, reference, found = setting.dtype, _Reference(decoder, setting, probes), []

    def note(part: str, right: Tensor, compiled: Tensor, bound: float) -> None:
        found.append(Difference(part, distance(right, compiled), bound))

    silent = [segment._replace(samples=False) for segment in probes]
    exact = decoder.embed(step.ids).float()
    own = reference.inputs(step.ids, exact)
    if own is not None and candidate.inputs is not None:
        candidate(silent)
        note("the inputs of all layers", own.flatten(1), candidate.inputs.made(len(own)), _LAYER[dtype])
    for index, routed in enumerate(candidate.routed):
        given = exact.to(dtype)
        _, compiled = candidate.part(silent, given, range(index, index + 1), own)
        choice = None if routed is None else Choice(routed, *candidate.choice(len(given)))
        right, exact = reference.advance(index, given.float(), exact, choice, own)
        if choice is not None:
            note(f"the choice of experts in layer {index}", *choice.shares_of_all, _LAYER[dtype])
        note(f"layer {index}", right - given.float(), compiled - given.float(), _LAYER[dtype])
    every = [segment._replace(samples=True) for segment in probes]
    ends = torch.tensor([len(segment.tokens) for segment in probes]).cumsum(0) - 1
    given = exact.to(dtype)
    compiled, _ = candidate.part(every, given, range(0))
    note("the head", reference.head(given[ends].float()), compiled, _LAYER[dtype])
    right = reference.head(exact[ends])
    rounding = distance(right, decoder(step.ids, step.positions, ends, attend, None, step.states))
    is_steep = candidate.room is not None or candidate.rounds_inputs
    least = _STEEP if is_steep else _MODEL[dtype]
    note("the model", right, candidate(every).logits, max(least, _FACTOR * rounding))
    return found


def distance(right: Tensor, other: Tensor) -> float:
    """The distance of logits, relative to their spread."""
    right, other = right.float(), other.float()
    return float((right - other).norm() / (right - right.mean()).norm().clamp(min=1e-12))


class _Exact(Unfused):
    """A product with the numbers that the kernels multiply, computed in float32."""

    def __init__(
        self, product: Product, dtype: torch.dtype, kernels: Kernels | None = None, is_fitted: bool = True
    ) -> None:
        """With `kernels`, they compute with levels, in float32 as well: torch would take minutes for all experts. See
        `rounded_inputs` for `is_fitted`."""
        self.product: Product = product
        self._dtype, self._kernels, self._is_fitted = dtype, kernels, is_fitted

    def __call__(self, x: Tensor) -> Tensor:
        product, blocks = self.product, -(-self.product.outputs // BLOCK)
        x = rounded_inputs(product, x, self._dtype, self._is_fitted)
        if self._kernels is not None and product.kind != PLAIN:
            return self._kernels.multiply(product, x)
        count = max(1, _NUMBERS // (BLOCK * product.inputs))
        parts = [
            x @ numbers(product, self._dtype, start, min(start + count, blocks)).T for start in range(0, blocks, count)
        ]
        whole, bias = torch.cat(parts, dim=-1)[:, : product.outputs], product.tensors[2]
        return whole.contiguous() if bias is None else whole + bias


class _Kept(_Exact):
    """One whose inputs and `kept` outputs are rounded as the kernels round them, which keep these for the tokens that
    follow.

    A head that reads little from its state is normalised all the same, which makes the smallest differences large.
    """

    def __init__(self, product: Product, dtype: torch.dtype, kept: slice) -> None:
        super().__init__(product, dtype)
        self._kept = kept

    def __call__(self, x: Tensor) -> Tensor:
        made = super().__call__(x.to(self._dtype).float() if self.product.kind == PLAIN else x)
        made[:, self._kept] = made[:, self._kept].to(self._dtype).float()
        return made


class Choice:
    """The experts that the compiled decoder chose, by themselves and for a mixture in float32.

    Where the routes of two experts are nearly equal, rounding chooses: float32 must then take the same one.
    """

    def __init__(self, routed: Routed, chosen: Tensor, shares: Tensor) -> None:
        """`chosen` and `shares` [T, K] of the first inputs."""
        self._routed, self._chosen, self._shares = routed, chosen, shares
        self.shares_of_all = shares, shares  # right ones and the compiled decoder's, where it chose; set by `mix`

    def mix(self, rows: Tensor, dtype: torch.dtype, packed: Tensor) -> Tensor:
        """What the mixture makes of [1, 2 T, E], whose row i is that of input rows[i]."""
        h, count = packed[0, rows.argsort()], len(self._chosen)
        routes, shares, chosen = self._routed.choose(h)
        right = torch.zeros(routes.shape).scatter_(1, chosen, shares)
        own = torch.zeros(routes[:count].shape).scatter_(1, self._chosen, self._shares)
        is_other = (self._chosen.sort(-1).values != chosen[:count].sort(-1).values).any(-1)
        last, least = (routes[:count].gather(1, each).amin(-1) for each in (chosen[:count], self._chosen))
        is_tie = is_other & (last - least <= _CLOSE * routes[:count].std(-1))
        self.shares_of_all = right[:count][~is_tie], own[~is_tie]
        right[:count][is_tie] = own[is_tie]
        mixed, h = torch.zeros_like(h), self._routed.prepare(h)
        for part, products in zip(right.T, self._routed.packed.pairs, strict=True):
            if len(visits := part.nonzero()[:, 0]):
                both = zip(known_products(products), (True, False), strict=True)
                inner, outer = (_Exact(known, dtype, self._routed.kernels, fitted) for known, fitted in both)
                mixed[visits] += part[visits, None] * outer(self._routed.packed.activate(inner(h[visits])))
        return mixed[None, rows]


class _Reference:
    """The decoder in float32, including keys and values; it computes the probes twice, with different inputs.

    That takes as long as once, most of which goes into the conversion of the weights.
    """

    def __init__(self, decoder: Decoder, setting: Setting, probes: Sequence[Segment]) -> None:
        self._decoder, self._setting = decoder, setting
        device = torch.device("cpu")
        self._attention = MatmulAttention(setting.block_size, torch.float32, device)
        self._groups = [group._replace(num_blocks=2 * group.num_blocks) for group in setting.groups]
        others = [group.num_blocks for group in setting.groups]  # the first block of the second time
        twice: list[Segment] = []
        rows: list[int] = []  # of the first inputs and, behind them, the second ones: the order of `twice`
        count = sum(len(segment.tokens) for segment in probes)
        self._num_slots = max((1 + slot for segment in probes for slot in slots_of(segment.state)), default=0)
        for segment in probes:
            tables = [[block + first for block in table] for table, first in zip(segment.tables, others, strict=True)]
            other = None if segment.state is None else moved(segment.state, self._num_slots)
            twice += [segment, segment._replace(tables=tables, state=other)]
            own = range(start := len(rows) // 2, start + len(segment.tokens))
            rows += [*own, *(count + row for row in own)]
        self._rows = torch.tensor(rows)
        make, slots = self._attention.pack_group, 2 * self._num_slots
        self._step = pack(twice, self._groups, setting.block_size, device, make, num_slots=slots)
        self._rotations = decoder.angles(self._step.positions, torch.float32)
        self._pools: dict[int, Any] = {}  # by the numbers of the layers, which others may attend to

    def inputs(self, ids: Tensor, x: Tensor) -> Tensor | None:
        """The tokens' own inputs for all layers, [T, L, P], if the model has any."""
        if self._decoder.inputs is None:
            return None
        own: Any = copy(self._decoder.inputs)
        own.projection = self._exact(own.projection.product)
        made: Tensor = own(self._decoder.read(ids), x)
        return made

    def advance(
        self, index: int, first: Tensor, second: Tensor, choice: Choice | None, own: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Run one layer on two residual streams [T, E]: what they are after it. `choice` is for the first."""
        found = torch.empty(2 * len(first), first.shape[1])
        inputs = None if own is None else own[:, index].repeat(2, 1)[self._rows]
        found[self._rows] = self._advance(index, torch.cat((first, second))[self._rows], choice, inputs)
        return found[: len(first)], found[len(first) :]

    def _advance(self, index: int, x: Tensor, choice: Choice | None, inputs: Tensor | None) -> Tensor:
        layer: Any = copy(self._decoder.layers[index])
        for name in layer.names:
            setattr(layer, name, self._exact(getattr(layer, name).product, name not in _LATER))
        if layer.state is not None:
            layer.state = state = layer.state.apart(2 * self._num_slots, len(x))
            if layer.is_delta_net or layer.is_mamba:
                layer.qkv = _Kept(layer.qkv.product, self._setting.dtype, state.kept)
        if choice is not None:
            layer.mixture = partial(choice.mix, self._rows, self._setting.dtype)
        return advance(layer, x, self._rotations[layer.kind], self._attend, self._step.states, inputs)

    def head(self, x: Tensor) -> Tensor:
        return self._decoder.scaled(self._exact(self._decoder.head.product)(self._decoder.norm(x)))

    def _exact(self, product: Product | None, is_fitted: bool = True) -> _Exact:
        assert product is not None
        return _Exact(product, self._setting.dtype, is_fitted=is_fitted)

    def _attend(self, index: int, query: Tensor, keys_values: Tensor | None) -> Tensor:
        setting, group = self._setting, self._setting.group_of[index]
        if keys_values is not None:
            self._pools[index] = self._attention.pool(setting.specs[index], self._groups[group].num_blocks)
        step, pool = self._step.groups[group], self._pools[index]
        return self._attention.attend(step, pool, query, keys_values, setting.rules[index])
