"""The plain decoder in one compiled call, for steps of few tokens; it shares weights and pools with `Decoder`.

Decoding one row is the reading of the weights, and what torch does between its products costs a quarter of the time.
One call does all layers, so that nothing of Python is left in between.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import ClassVar, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from .attention import Rules
from .decoder import Decoder
from .kernels import MOST_ROWS, Kernels, Product
from .kv_cache import Pool
from .packing import Group, Ints, Segment, Step

_MOST_KEYS = 1024
"""Of prefills: the kernel attends token by token, and behind more keys matrix products are faster. Measured for
Qwen2-0.5B: 64, 128 and 256 tokens take 90, 173 and 350 ms behind 1,024 keys, and with `Decoder` 98, 174 and 327."""

_INT, _POINTER, _FLOAT = ctypes.c_int64, ctypes.c_void_p, ctypes.c_float


class _Layer(ctypes.Structure):
    _fields_: ClassVar = [
        *((name, _POINTER) for name in ("attention_norm", "mlp_norm", "head_norm")),
        *((name, Product) for name in ("qkv", "output", "gate", "up", "down")),
        ("pool", _POINTER),
        *((name, _INT) for name in ("num_blocks", "window", "group")),
        *((name, _FLOAT) for name in ("epsilon", "mlp_epsilon", "head_epsilon", "scaling")),
    ]


class _Model(ctypes.Structure):
    _fields_: ClassVar = [
        *((name, _INT) for name in ("half", "threads", "num_layers")),
        *((name, _INT) for name in ("embedding", "queries", "keys", "size", "block_size")),
        ("layers", _POINTER),
        ("norm", _POINTER),
        ("head", Product),
        *((name, _POINTER) for name in ("input", "mixed", "gated", "qkv")),
        ("epsilon", _FLOAT),
    ]


class _Places(ctypes.Structure):
    _fields_: ClassVar = [*((name, _POINTER) for name in ("slots", "lengths", "tables")), ("width", _INT)]


class Places(NamedTuple):
    """Where the tokens of a step lie in one group's pools: slots [T], keys up to their own [T], block tables [T, N]."""

    slots: Ints
    lengths: Ints
    tables: Ints


class NativeDecoder:
    """`attach` must be called before the first step."""

    def __init__(self, decoder: Decoder, kernels: Kernels, products: Sequence[Product], dtype: torch.dtype) -> None:
        """`products` are those of `decoder`, five of each layer and the head's."""
        self._decoder, self._kernels, self._products, self._dtype = decoder, kernels, products, dtype
        self._tensors: list[Tensor] = []  # whose addresses the structures hold, beside the products' own
        self._pools: Sequence[Pool] = ()
        first, (_, output, gate, _, down), head = decoder.layers[0], products[:5], products[-1]
        self._layers = (_Layer * len(decoder.layers))()
        for index, (layer, to) in enumerate(zip(decoder.layers, self._layers, strict=True)):
            to.attention_norm, to.epsilon = self._numbers(layer.attention_norm.weight), layer.attention_norm.epsilon
            to.mlp_norm, to.mlp_epsilon = self._numbers(layer.mlp_norm.weight), layer.mlp_norm.epsilon
            if layer.head_norm is not None:
                to.head_norm, to.head_epsilon = self._numbers(layer.head_norm), layer.epsilon
            to.qkv, to.output, to.gate, to.up, to.down = products[5 * index : 5 * index + 5]
        self._model = model = _Model(
            half=dtype == torch.bfloat16,
            threads=torch.get_num_threads(),
            num_layers=len(self._layers),
            embedding=output.outputs,
            queries=first.num_queries,
            keys=first.num_keys,
            size=output.inputs // first.num_queries,
            layers=ctypes.addressof(self._layers),
            norm=self._numbers(decoder.norm.weight),
            head=head,
            epsilon=decoder.norm.epsilon,
        )
        model.input, model.mixed, model.gated = (
            self._address(torch.zeros((MOST_ROWS, size), dtype=dtype))
            for size in (gate.inputs, output.inputs, down.inputs)
        )
        model.qkv = self._address(torch.zeros((MOST_ROWS, products[0].outputs)))

    @classmethod
    def of(cls, decoder: Decoder, kernels: Kernels, rules: Sequence[Rules], dtype: torch.dtype) -> Self | None:
        """None for what the kernels do not know, or where a product of theirs is not torch's."""
        products = [linear.product for linear in decoder.linears()]
        known = [product for product in products if product is not None]
        shapes = {(layer.num_queries, layer.num_keys) for layer in decoder.layers}
        sizes = {tuple((one.inputs, one.outputs) for one in known[at : at + 5]) for at in range(0, len(known) - 1, 5)}
        plain = all(rule.softcap is None and rule.sinks is None for rule in rules)
        if len(known) < len(products) or len(shapes) > 1 or len(sizes) > 1 or not plain:
            return None
        native = cls(decoder, kernels, known, dtype)
        for rule, layer in zip(rules, native._layers, strict=True):
            layer.scaling = rule.scaling
        return native

    def attach(self, pools: Sequence[Pool], groups: Sequence[Group], group_of: Sequence[int], block: int) -> None:
        """Use these pools from now on; the layers' groups, and tokens of a block."""
        self._pools, self._model.block_size = pools, block
        for pool, layer, index in zip(pools, self._layers, group_of, strict=True):
            layer.pool, layer.group, layer.num_blocks = pool.memory.data_ptr(), index, groups[index].num_blocks
            layer.window = groups[index].window or 1 << 62

    @staticmethod
    def takes(segments: Sequence[Segment]) -> bool:
        """Whether a step is one for the kernels: few tokens, and no part of a prompt behind a long context."""
        few = sum(len(segment.tokens) for segment in segments) <= MOST_ROWS
        return few and all(len(segment.tokens) == 1 or segment.end <= _MOST_KEYS for segment in segments)

    def pack_group(self, packed: Sequence[Segment], tables: Sequence[Ints], slots: Ints, group: Group) -> Places:
        counts = [len(segment.tokens) for segment in packed]
        padded = np.zeros((len(packed), max(map(len, tables))), dtype=np.int64)
        for row, table in zip(padded, tables, strict=True):
            row[: len(table)] = table
        lengths = np.concatenate([np.arange(segment.start, segment.end) for segment in packed]) + 1
        return Places(slots, lengths, padded.repeat(counts, axis=0))

    def __call__(self, step: Step) -> Tensor:
        """Logits [K, V] of a step whose groups are `Places`."""
        embedded, cosines, sines = self._decoder.begin(step.ids, step.positions)
        x, cosines, sines = embedded.float(), cosines.float(), sines.float()
        groups: Sequence[Places] = step.groups
        places = (_Places * len(groups))(
            *(_Places(*(array.ctypes.data for array in one), one.tables.shape[1]) for one in groups)
        )
        logits = embedded.new_empty((len(step.keep), self._model.head.outputs))
        angles, keep = (cosines.data_ptr(), sines.data_ptr()), (step.keep.data_ptr(), len(step.keep))
        model = ctypes.byref(self._model)
        self._kernels.library.step(model, x.data_ptr(), len(x), *angles, places, *keep, logits.data_ptr())
        return logits

    def _numbers(self, tensor: Tensor) -> int:
        return self._address(tensor.detach().float().contiguous())

    def _address(self, tensor: Tensor) -> int:
        self._tensors.append(tensor)
        return tensor.data_ptr()
