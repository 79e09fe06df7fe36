"""Checks the compiled decoder against a float32 evaluation of the model, layer by layer.

Layers amplify rounding: two correct decoders of a real model may differ more than a wrong kernel from a right one. So
each layer gets the same inputs as its float32 reference, and the check compares what it adds to them. The bound for the
whole model is how far torch's operations in the dtype of the weights are from float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ...cpu.layouts import numbers, rounded_inputs
from ...cpu.library import BLOCK, Product
from ..attention import MatmulAttention, Rules
from ..kv_cache import LayerSpec
from ..packing import LayerGroup, PackedStep, Segment, pack
from .compiled_decoder import CompiledDecoder
from .decoder import Attention, Decoder, advance
from .linear import Unfused

_NUMBERS = 1 << 20  # of a weight that are converted to float32 at a time, so that they stay in the cache
_LAYER = {torch.float32: 1e-4, torch.bfloat16: 0.03}  # the bound for one layer's rounding; typical is up to 0.007
_MODEL = {torch.float32: 1e-3, torch.bfloat16: 0.1}  # the least bound for the whole model's, or
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
    exact = functional.embedding(step.ids, decoder.embedding).float()
    for index in range(len(decoder.layers)):
        given = exact.to(dtype)
        right, exact = reference.advance(index, given.float(), exact)
        _, compiled = candidate.part(silent, given, range(index, index + 1))
        note(f"layer {index}", right - given.float(), compiled - given.float(), _LAYER[dtype])
    every = [segment._replace(samples=True) for segment in probes]
    ends = torch.tensor([len(segment.tokens) for segment in probes]).cumsum(0) - 1
    given = exact.to(dtype)
    compiled, _ = candidate.part(every, given, range(0))
    note("the head", reference.head(given[ends].float()), compiled, _LAYER[dtype])
    right = reference.head(exact[ends])
    rounding = distance(right, decoder(step.ids, step.positions, ends, attend))
    note("the model", right, candidate(every).logits, max(_MODEL[dtype], _FACTOR * rounding))
    return found


def distance(right: Tensor, other: Tensor) -> float:
    """The distance of logits, relative to their spread."""
    right, other = right.float(), other.float()
    return float((right - other).norm() / (right - right.mean()).norm().clamp(min=1e-12))


class _Exact(Unfused):
    """A product with the numbers that the kernels multiply, computed in float32."""

    def __init__(self, product: Product, dtype: torch.dtype) -> None:
        self.product: Product = product
        self._dtype = dtype

    def __call__(self, x: Tensor) -> Tensor:
        product, blocks = self.product, -(-self.product.outputs // BLOCK)
        x = rounded_inputs(product, x, self._dtype)
        count = max(1, _NUMBERS // (BLOCK * product.inputs))
        parts = [
            x @ numbers(product, self._dtype, start, min(start + count, blocks)).T for start in range(0, blocks, count)
        ]
        whole, bias = torch.cat(parts, dim=-1)[:, : product.outputs], product.tensors[2]
        return whole.contiguous() if bias is None else whole + bias


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
        for segment in probes:
            tables = [[block + first for block in table] for table, first in zip(segment.tables, others, strict=True)]
            twice += [segment, segment._replace(tables=tables)]
            own = range(start := len(rows) // 2, start + len(segment.tokens))
            rows += [*own, *(count + row for row in own)]
        self._rows = torch.tensor(rows)
        self._step = pack(twice, self._groups, setting.block_size, device, self._attention.pack_group)
        self._angles = decoder.angles(self._step.positions, torch.float32)

    def advance(self, index: int, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        """Run one layer on two residual streams [T, E]: what they are after it."""
        found = torch.empty(2 * len(first), first.shape[1])
        found[self._rows] = self._advance(index, torch.cat((first, second))[self._rows])
        return found[: len(first)], found[len(first) :]

    def _advance(self, index: int, x: Tensor) -> Tensor:
        layer: Any = copy(self._decoder.layers[index])
        for name in ("qkv", "output", "gate", "up", "down"):
            setattr(layer, name, self._exact(getattr(layer, name).product))
        return advance(layer, index, x, self._angles, self._attend)

    def head(self, x: Tensor) -> Tensor:
        return self._exact(self._decoder.head.product)(self._decoder.norm(x))

    def _exact(self, product: Product | None) -> _Exact:
        assert product is not None
        return _Exact(product, self._setting.dtype)

    def _attend(self, index: int, query: Tensor, keys_values: Tensor) -> Tensor:
        setting, group = self._setting, self._setting.group_of[index]
        pool = self._attention.pool(setting.specs[index], self._groups[group].num_blocks)
        return self._attention.attend(self._step.groups[group], pool, query, keys_values, setting.rules[index])
