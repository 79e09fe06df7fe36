"""Runs a transformers causal language model over packed tokens and our own key-value pools.

What a model's layers need is not read from its configuration but seen: a first pass through the real code, with our
attention function in place, tells each layer's heads, sizes and window. Two checks follow, by result and in float32:
requests packed into one row must not notice each other, and the plain decoder, where its structure fits, must say what
the model says.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from math import inf
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from ...schemas.errors import ModelLoadError
from ..cpu.library import Kernels, span
from ..cpu.process import use_large_pages
from .attention import MatmulAttention, Rules, attend_alone
from .compiled_decoder import CompiledDecoder
from .decoder import Decoder
from .kv_cache import LayerSpec, Pool
from .linear import Applied, Linear, Unfused, fused_weight, release
from .packing import Computed, Group, Segment, Step, pack, rank
from .precision import in_float32
from .proof import Setting, differences, distance

if TYPE_CHECKING:  # they need Triton
    from .graphs import DecodeGraphs
    from .triton_attention import PagedAttention

_log = logging.getLogger(__name__)

_LAYER_TYPES = {"full_attention", "sliding_attention"}

MakeLinear = Callable[[Tensor, Tensor | None], Linear]
"""Weight [O, I] and bias [O] in, the product in the form that the device likes out."""


class Runner:
    """A loaded model, checked and repacked. `specs` says what each layer caches, `groups` which layers share tables.

    `allocate` must be called before `forward`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        block_size: int,
        context_length: int,
        make_linear: MakeLinear,
        kernels: Kernels | None = None,
        make_head: MakeLinear | None = None,
    ) -> None:
        """Takes the model over: its weights move into `make_linear`'s products one by one, the output head's into
        `make_head`'s, if it is given.

        `uncompiled` is why the compiled decoder is not used, empty where it is or where there are no kernels.

        Raises `ModelLoadError` with the reason for a model that cannot be run so.
        """
        self.dtype = model.dtype
        self._device = model.device
        self._model: Any = model
        self._decoder: Decoder | None = None
        self._native: CompiledDecoder | None = None  # computes steps of few tokens; set by `_compile`
        self._pools: list[Pool] = []
        self._graphs: DecodeGraphs | None = None  # set by `record_graphs`
        self._rules: list[Rules] = []  # by layer; set by the first pass
        self.num_weights = 0  # numbers in all products; this and the next two are set by `_fuse`
        self.num_head_weights = 0  # those of the output head, which not every token passes
        self.weight_bytes = 0  # what a decoding step reads, keys and values apart
        self.attention_flops = 0  # for each key that a query sees, all layers together; set by `_look`
        with in_float32(model):
            self.specs = self._look()
            self._attention: Any = self._choose_attention(block_size, torch.float32)
            self.block_size = block_size
            self.groups = tuple(dict.fromkeys((spec.window, spec.num_heads) for spec in self.specs))
            self._group_of = [self.groups.index((spec.window, spec.num_heads)) for spec in self.specs]
            self.allocate([_PROBE_BLOCKS] * len(self.groups))
            self._check_packing()
            is_plain = self._is_plain()
        self._attention = self._choose_attention(block_size, self.dtype)
        self.allocate([_PROBE_BLOCKS] * len(self.groups))
        self._spans: list[tuple[int, int]] = []  # where the weights lie; set by `_fuse`
        self._take_over(partial(self._fuse, make_linear, make_head or make_linear), is_plain)
        if self._device.type == "cpu":
            use_large_pages(self._spans)
        self.uncompiled = self._compile(kernels, context_length)

    @property
    def on_triton(self) -> bool:
        """Whether attention is Triton's kernels, which CUDA graphs can record."""
        return self._device.type == "cuda" and find_spec("triton") is not None

    @torch.inference_mode()
    def allocate(self, num_blocks: Sequence[int]) -> None:
        """Make the pools, so many blocks for each group; what was cached before is gone.

        One more stands behind them: it is never written, so that padding reads numbers whatever others have stored.
        """
        self._packed_groups = [Group(*group, count + 1) for group, count in zip(self.groups, num_blocks, strict=True)]
        self._pools = [
            self._attention.pool(spec, num_blocks[group] + 1)
            for spec, group in zip(self.specs, self._group_of, strict=True)
        ]
        if self._native is not None:
            self._native.attach(self._pools, self._packed_groups, self._group_of, self.block_size)

    @torch.inference_mode()
    def clear(self, tables: Sequence[Sequence[int]]) -> None:
        """Zero the blocks of a sequence: what is not a number would spread to whoever is padded with it later."""
        for group, table in enumerate(tables):
            for pool in self.pools(group):
                pool.clear([block for block in table if block >= 0])

    @property
    def layout(self) -> str:
        """Of the pools: blocks of one layout mean nothing in another."""
        return type(self._pools[0]).__name__

    def pools(self, group: int) -> list[Pool]:
        """The pools of a group's layers, first layer first."""
        return [pool for pool, own in zip(self._pools, self._group_of, strict=True) if own == group]

    def forward(self, segments: Sequence[Segment], chosen: Tensor | None = None) -> Computed:
        """Compute the segments, for `chosen` see `pack`."""
        if self._native is not None and self._native.takes(segments):
            return self._native(segments, chosen)
        return self._compute(segments, chosen)

    @torch.inference_mode()
    def _compute(self, segments: Sequence[Segment], chosen: Tensor | None = None) -> Computed:
        step = self._pack(segments, chosen)
        logits = self._graphs(step) if self._graphs is not None else None
        return Computed(self._forward(step) if logits is None else logits, step.sampled)

    @torch.inference_mode()
    def record_graphs(self, context_length: int, max_batch_size: int) -> None:
        """Decode by CUDA graphs from now on. Raises `RuntimeError` for a model that cannot be recorded."""
        from .graphs import DecodeGraphs

        arguments = self._packed_groups, self.block_size, context_length, max_batch_size, self._device
        self._graphs = DecodeGraphs(self._forward, *arguments)

    def _pack(self, segments: Sequence[Segment], chosen: Tensor | None = None) -> Step:
        make = self._attention.pack_group
        return pack(segments, self._packed_groups, self.block_size, self._device, make, chosen)

    def _forward(self, step: Step) -> Tensor:
        if self._decoder is not None:
            return self._decoder(step.ids, step.positions, step.keep, partial(self._attend, step.groups))
        return self._run(step.ids, step.positions, step.keep, partial(self._attend_apart, step.groups))

    def _attend(self, groups: Sequence[Any], index: int, query: Tensor, keys_values: Tensor) -> Tensor:
        """The layer's rules are those of the first pass."""
        step, pool = groups[self._group_of[index]], self._pools[index]
        mixed: Tensor = self._attention.attend(step, pool, query, keys_values, self._rules[index])
        return mixed

    def _attend_apart(
        self, groups: Sequence[Any], index: int, query: Tensor, key: Tensor, value: Tensor, *_: object
    ) -> Tensor:
        """As `_attend`, for keys and values that come apart and may differ in size."""
        spec = self.specs[index]
        query, key, value = (_widened(tensor, spec.size) for tensor in (query, key, value))
        mixed = self._attend(groups, index, query, torch.cat((key, value)))
        if spec.value_dim == spec.size:
            return mixed
        return mixed.view(len(mixed), -1, spec.size)[..., : spec.value_dim].flatten(1)

    def _choose_attention(self, block_size: int, dtype: torch.dtype) -> MatmulAttention | PagedAttention:
        if not self.on_triton:
            return MatmulAttention(block_size, dtype, self._device)
        from .triton_attention import PagedAttention

        return PagedAttention(block_size, max(spec.size for spec in self.specs), dtype, self._device)

    def _run(self, ids: Tensor, positions: Tensor, keep: Tensor, attention: Callable[..., Tensor]) -> Tensor:
        """The model's own forward, [T] → [len(keep), V]."""
        inputs = {"input_ids": ids[None], "position_ids": positions[None], "logits_to_keep": keep}
        logits: Tensor = self._model(**inputs, use_cache=False, penstock=attention).logits[0]
        return logits

    @torch.inference_mode()
    def _look(self) -> list[LayerSpec]:
        """Run a few tokens and note what each layer asks of its attention function."""
        name = type(self._model).__name__
        config = self._model.config.get_text_config()
        if not self._model._supports_attention_backend:
            raise ModelLoadError(f"{name} does not let its attention be replaced; use --backend hf")
        if self._model._is_stateful or "logits_to_keep" not in inspect.signature(self._model.forward).parameters:
            raise ModelLoadError(f"{name} keeps a running state beside keys and values; use --backend hf")
        types = set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES
        if types:
            raise ModelLoadError(f"{name} has layers of an unknown kind ({', '.join(sorted(types))}); use --backend hf")
        seen: dict[int, LayerSpec] = {}
        rules_of: dict[int, Rules] = {}

        def note(index: int, query: Tensor, key: Tensor, value: Tensor, rules: Rules, window: int | None) -> Tensor:
            if index in seen:
                raise ModelLoadError(f"{name} attends twice in layer {index}; use --backend hf")
            seen[index] = LayerSpec(window, key.shape[0], key.shape[2], value.shape[2])
            rules_of[index] = rules
            self.attention_flops += 2 * query.shape[0] * (key.shape[2] + value.shape[2])
            return attend_alone(query, key, value, rules)

        ids = self._probe()[_PROBE_SPLIT:]
        positions = torch.arange(len(ids), device=self._device) * _PROBE_STRIDE
        try:
            self._alone = self._run(ids, positions, torch.tensor([len(ids) - 1], device=self._device), note)
        except ModelLoadError:
            raise
        except Exception as error:
            raise ModelLoadError(f"{name} cannot be run by the backend 'paged' ({error}); use --backend hf") from error
        if sorted(seen) != list(range(config.num_hidden_layers)):
            raise ModelLoadError(
                f"{name} has {config.num_hidden_layers} layers, and only {len(seen)} of them attend; use --backend hf"
            )
        sliding = [kind == "sliding_attention" for kind in getattr(config, "layer_types", None) or ()]
        if sliding and sliding != [seen[index].window is not None for index in range(len(sliding))]:
            raise ModelLoadError(f"{name} does not tell its attention function about its windows; use --backend hf")
        self._rules = [rules_of[index] for index in range(len(seen))]
        return [seen[index] for index in range(len(seen))]

    def _probe(self) -> Tensor:
        vocabulary: int = self._model.config.get_text_config().vocab_size
        return torch.arange(1, _PROBE_SPLIT + _PROBE_ALONE + 1, device=self._device) * 7919 % vocabulary

    def _probes(self) -> list[Segment]:
        """Two requests, what follows the second asked for."""
        ids = self._probe().tolist()
        first, second = [[block] * len(self.groups) for block in ([0], [1])]
        return [Segment(ids[:_PROBE_SPLIT], 0, first, False), Segment(ids[_PROBE_SPLIT:], 0, second, True)]

    def _probes_apart(self) -> list[Segment]:
        """One more request, token by token at places far apart, in the blocks behind those of `_probes`."""
        tables = [list(range(2, _PROBE_BLOCKS))] * len(self.groups)
        ids = self._probe()[:_PROBE_ALONE].tolist()
        return [Segment([id], place * _PROBE_STRIDE, tables, True) for place, id in enumerate(ids)]

    def _probe_step(self) -> Step:
        """In one row; places far apart, so that rotations tell."""
        step = self._pack(self._probes())
        return step._replace(positions=step.positions * _PROBE_STRIDE)

    @torch.inference_mode()
    def _check_packing(self) -> None:
        self._together = self._forward(self._probe_step())
        if distance(self._alone, self._together) > _TOLERANCE:
            name = type(self._model).__name__
            raise ModelLoadError(f"{name} mixes requests that share a step; use --backend hf")

    @torch.inference_mode()
    def _is_plain(self) -> bool:
        """Whether the plain decoder says what the model says."""
        self._decoder = Decoder.of(self._model, _Views, torch.float32)
        if self._decoder is None:
            return False
        try:
            difference = distance(self._together, self._forward(self._probe_step()))
        except RuntimeError:  # rotations of another size, say
            difference = inf
        self._decoder = None
        if difference > _TOLERANCE:
            _log.info("the plain decoder differs from %s by %.3g", type(self._model).__name__, difference)
        return difference <= _TOLERANCE

    @torch.inference_mode()
    def _take_over(self, fuse: Callable[[Sequence[nn.Linear]], Linear], is_plain: bool) -> None:
        if is_plain:
            self._decoder = Decoder(self._model, fuse, self.dtype)
            return
        for parent in list(self._model.modules()):
            for name, module in parent.named_children():
                if type(module) is nn.Linear:
                    setattr(parent, name, Applied(fuse([module])))

    def _compile(self, kernels: Kernels | None, context_length: int) -> str:
        """Use the compiled decoder where it says what the model says; why not."""
        if kernels is None:
            return ""
        name = type(self._model).__name__
        if self._decoder is None:
            return f"{name} is no plain decoder"
        native = CompiledDecoder.of(self._decoder, kernels, self._rules, self.dtype, context_length)
        if native is None:
            return f"the compiled decoder does not know the shapes, dtype or attention of {name}"
        native.attach(self._pools, self._packed_groups, self._group_of, self.block_size)
        probes = sorted([*self._probes(), *self._probes_apart()], key=rank)
        step = self._pack(probes)
        setting = Setting(self._rules, self.specs, self._packed_groups, self._group_of, self.block_size, self.dtype)
        for part, far, bound in differences(
            self._decoder, native, setting, probes, step, partial(self._attend, step.groups)
        ):
            if not far <= bound:
                return f"the compiled decoder is {far:.3g} from float32 in {part}, more than {bound:.3g}"
        self._native = native
        return ""

    def _fuse(self, make: MakeLinear, make_head: MakeLinear, parts: Sequence[nn.Linear]) -> Linear:
        """One product for modules that share their input; their own memory is freed."""
        weight, bias = fused_weight(parts)
        is_head = parts[0] is self._model.get_output_embeddings()
        linear = (make_head if is_head else make)(weight, bias)
        self.num_weights += weight.numel()
        if is_head:
            self.num_head_weights = weight.numel()
        self.weight_bytes += linear.nbytes
        self._spans.append(span(linear.weight))
        release(parts)
        return linear


_PROBE_SPLIT, _PROBE_ALONE, _PROBE_STRIDE, _PROBE_BLOCKS = 5, 8, 7, 6
_TOLERANCE = 1e-3  # of what is computed in float32


def _widened(tensor: Tensor, size: int) -> Tensor:
    """[…, D] → […, size], zeros behind: they change no score."""
    return tensor if tensor.shape[-1] == size else functional.pad(tensor, (0, size - tensor.shape[-1]))


class _Views(Unfused):
    """The products of modules as they are: nothing is copied or taken over."""

    weight, nbytes = torch.empty(0), 0

    def __init__(self, parts: Sequence[nn.Linear]) -> None:
        self._parts = parts

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self._parts], dim=-1)
