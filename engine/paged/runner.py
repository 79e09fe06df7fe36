"""Runs a transformers causal language model over packed tokens and block-paged key-value pools.

The runner does not read what the layers need from the model's configuration: it observes each layer's heads, sizes and
window in a first pass through the model's own code, with its own attention function. Two checks follow, on results in
float32: requests packed into one row must not affect each other, and the plain decoder, where the structure fits, must
compute what the model computes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...schemas.errors import ModelLoadError
from ..adapters.files import AdapterFiles
from ..adapters.loaded import Adapter
from ..adapters.low_rank import Adaptation, place
from ..cpu.library import Kernels, span
from ..cpu.process import return_memory, use_large_pages
from ..plain.model import PlainModel
from ..planning.device import has_triton
from ..sampler import best_tokens
from ..vision.seen import Seen
from ..vision.tower import LanguageModel, Probe, Vision
from .attention import Rules, widened, with_rules
from .compiled.compiled_decoder import RANK_UNIT, CompiledDecoder
from .compiled.proof import Setting, distance, fault
from .decoding.decoder import Decoder
from .decoding.linear import Adaptable, Linear, MakeLinear, Views, release, replace_linears
from .decoding.precision import in_float32
from .decoding.turning import Orders, turned
from .devices import choose_attention, take_experts
from .kv.kv_cache import LayerSpec, Pool, populated
from .layers import observe
from .packing import Computed, LayerGroup, PackedStep, Segment, pack, rank
from .probes import BLOCKS, SPLIT, TOLERANCE, image_probe, look, probe_ids, probes, probes_apart, stride_of
from .state.memory import States
from .state.probes import NUM_SLOTS, NUM_TRIED, after_others, in_steps, with_slots
from .verdicts import NO_VERDICTS, Verdict, Verdicts

if TYPE_CHECKING:  # some need Triton
    from transformers import PreTrainedModel

    from .cuda.graphs import DecodeGraphs

_log = logging.getLogger(__name__)

MakeProduct = Callable[[Sequence[nn.Linear], str, bool], Linear]
"""Makes a product of modules that share their input; the first's name, and whether that is the output head."""


class Runner:
    """A loaded model, checked and repacked. `specs` says what each layer caches, `groups` which layers share tables.

    Call `allocate` before `forward`, and `states.allocate` if it keeps states.
    """

    def __init__(
        self,
        model: PreTrainedModel | PlainModel | LanguageModel,
        block_size: int,
        context_length: int,
        make_product: MakeProduct,
        kernels: Kernels | None = None,
        verdicts: Verdicts = NO_VERDICTS,
    ) -> None:
        """Take over the model: its weights move into products of `make_product`; `verdicts` spare it known checks.

        `uncompiled` says why the compiled decoder is not used; it is empty if it is used, or if there are no kernels.

        Raises `ModelLoadError` with the reason for a model that this backend cannot run.
        """
        self.dtype, self.device, self._stride = model.dtype, model.device, stride_of(context_length)
        self._model: Any = model
        self.vision: Vision | None = model.vision if isinstance(model, LanguageModel) else None
        self._name: str = getattr(model, "name", type(model).__name__)
        self._decoder: Decoder | None = None
        self._compiled: CompiledDecoder | None = None  # computes steps of few tokens; set by `_compile`
        self._pools: list[Pool] = []
        self._rules: list[Rules] = []  # by attending layer; this and the next two are set by the first pass
        self._numbers: dict[int, int] = {}  # of attending layers, by their indices in the model
        self.states = States()
        self.adaptation = Adaptation(model)
        self.num_weights = 0  # numbers in all products; this and the next two are set by `_fuse`
        self.num_head_weights = 0  # those of the output head, which only sampled tokens pass
        self.weight_bytes = 0  # what a decoding step reads, without keys and values
        self.attention_flops = 0  # for each key that a query attends to, in all layers; set by `_observe`
        with in_float32(model):
            known = verdicts.read()
            seen = look(model, self._probe(), known) if isinstance(model, LanguageModel) else None
            self.specs = self._observe()
            self._attention: Any = choose_attention(block_size, self.specs, torch.float32, self.device, self.on_triton)
            self.block_size = block_size
            self.groups = tuple(dict.fromkeys((spec.window, spec.num_heads) for spec in self.specs))
            self._group_of = [self.groups.index((spec.window, spec.num_heads)) for spec in self.specs]
            self.allocate([BLOCKS] * len(self.groups))
            self.states.allocate(NUM_SLOTS, 2, torch.float32)
            is_plain = known.is_plain if known is not None else self._check(seen)
        self._attention = choose_attention(block_size, self.specs, self.dtype, self.device, self.on_triton)
        self.allocate([BLOCKS] * len(self.groups))
        self._spans: list[tuple[int, int]] = []  # addresses and sizes of the weights; set by `_fuse`
        self._take_over(partial(self._fuse, make_product), is_plain)
        for experts in take_experts(model, make_product, kernels, self.device, on_triton=self.on_triton):
            self.num_weights += experts.num_active_weights
            self.weight_bytes += experts.active_bytes
            self._spans += experts.spans
        if self.device.type == "cpu":
            use_large_pages(self._spans)
            return_memory()
        self.uncompiled = self._compile(kernels, context_length, known is not None and known.is_compiled)
        pauses = self.vision is not None and self.vision.pauses
        verdicts.keep(Verdict(is_plain, self._compiled is not None, pauses))

    @property
    def on_triton(self) -> bool:
        """Whether attention runs in Triton kernels, which CUDA graphs can record."""
        return has_triton(self.device)

    @torch.inference_mode()
    def allocate(self, num_blocks: Sequence[int]) -> None:
        """Create the pools, with `num_blocks` for each group; the contents of earlier pools are lost.

        Each pool gets one more block that is never written, so that padding always reads zeros.
        """
        anywhere = self.vision is None or not self.vision.processor.in_windows
        is_prefix = self.vision is not None and self.vision.processor.is_prefix
        self._packed_groups = [
            LayerGroup(*group, count + 1, is_mutual=anywhere or group[0] is not None, is_near=is_prefix)
            for group, count in zip(self.groups, num_blocks, strict=True)
        ]
        kinds = zip(self.specs, self._group_of, strict=True)
        self._pools = populated([self._attention.pool(spec, num_blocks[group] + 1) for spec, group in kinds])
        self._graphs: DecodeGraphs | None = None  # set by `record_graphs`: those recorded before use the earlier pools
        if self._compiled is not None:
            self._compiled.attach(self._pools, self._packed_groups, self._group_of, self.block_size)

    @torch.inference_mode()
    def clear(self, tables: Sequence[Sequence[int]]) -> None:
        """Zero the blocks of a sequence: NaN in them would spread to a later row that they pad."""
        for group, table in enumerate(tables):
            for pool in self.pools(group):
                pool.clear([block for block in table if block >= 0])

    @property
    def layout(self) -> str:
        """The layout of the pools: blocks of one layout are meaningless in another."""
        return type(self._pools[0]).__name__

    def pools(self, group: int) -> list[Pool]:
        """The pools of a group's layers, in order."""
        return [pool for pool, own in zip(self._pools, self._group_of, strict=True) if own == group]

    def forward(self, segments: Sequence[Segment], chosen: Tensor | None = None) -> Computed:
        """Compute the segments; see `pack` for `chosen`."""
        if self._compiled is not None and self._compiled.takes(segments):
            return self._compiled(segments, chosen, self.vision)
        return self._compute(segments, chosen)

    @torch.inference_mode()
    def _compute(self, segments: Sequence[Segment], chosen: Tensor | None = None) -> Computed:
        if self._graphs is not None and (computed := self._graphs(segments, chosen)) is not None:
            return computed
        step = self._pack(segments, chosen)
        return Computed(self._forward(step), step.sampled)

    @property
    def slow_adapters(self) -> str:
        """Which fast path a step with adapters does not take; empty if it takes them all."""
        return "steps that hold requests with an adapter are not recorded as CUDA graphs" if self._graphs else ""

    @torch.inference_mode()
    def load_adapter(self, files: AdapterFiles) -> Adapter:
        """Put an adapter into memory, for segments to use. Raises `InvalidRequest`."""
        adapter = place(files, self.dtype, self.device, RANK_UNIT if self._compiled else 1, self.adaptation.orders)
        return replace(adapter, compiled=self._compiled.table(adapter.pairs)) if self._compiled else adapter

    @torch.inference_mode()
    def record_graphs(self, context_length: int, max_batch_size: int) -> None:
        """Decode with CUDA graphs from now on. Raises `RuntimeError` for a model that cannot be recorded."""
        from .cuda.graphs import DecodeGraphs
        from .cuda.inputs import Shape

        slots, width = self.states.num_slots if self.states else None, -(-context_length // self.block_size)
        shape = Shape(self._packed_groups, self.block_size, width, slots, max_batch_size, self.device)
        self._graphs = DecodeGraphs(self._forward, best_tokens, shape)

    def _pack(self, segments: Sequence[Segment], chosen: Tensor | None = None) -> PackedStep:
        make = self._attention.pack_group
        return pack(segments, self._packed_groups, self.block_size, self.device, make, chosen, self.states.num_slots)

    def _forward(self, step: PackedStep) -> Tensor:
        seen = self.vision.see(step.images, self.device) if self.vision is not None else None
        with self.adaptation.using(step.users, len(step.ids)):
            run: Callable[..., Tensor] = self._run if self._decoder is None else self._decoder
            attend = partial(self._attend_apart if self._decoder is None else self._attend, step.groups)
            return run(step.ids, step.positions, step.keep, attend, seen, step.states)

    def _attend(self, groups: Sequence[Any], index: int, query: Tensor, keys_values: Tensor | None) -> Tensor:
        """Attend with the rules that the layer used in the first pass."""
        step, pool = groups[self._group_of[index]], self._pools[index]
        mixed: Tensor = self._attention.attend(step, pool, query, keys_values, self._rules[index])
        return mixed

    def _attend_apart(
        self, groups: Sequence[Any], index: int, query: Tensor, key: Tensor, value: Tensor, rules: Rules, *_: object
    ) -> Tensor:
        """Like `_attend`, for separate keys and values, which may differ in size, and for tokens that choose."""
        spec = self.specs[index := self._numbers[index]]
        query, key, value = (widened(tensor, spec.size) for tensor in (query, key, value))
        step, pool, both = groups[self._group_of[index]], self._pools[index], torch.cat((key, value))
        rules = self._rules[index]._replace(choice=rules.choice)
        mixed: Tensor = self._attention.attend(step, pool, query, both, rules)
        return mixed.view(len(mixed), -1, spec.size)[..., : spec.value_dim].flatten(1)

    def _run(
        self,
        ids: Tensor,
        positions: Tensor,
        keep: Tensor,
        attention: Callable[..., Tensor],
        seen: Seen | None = None,
        states: Any = None,
    ) -> Tensor:
        """The model's own forward, [T] → [len(keep), V]."""
        if isinstance(self._model, PlainModel):
            result: Tensor = self._model(ids, positions, keep, partial(with_rules, attention))
            return result
        inputs: dict[str, Any] = {"input_ids": ids[None], "position_ids": positions[None], "logits_to_keep": keep}
        inputs |= {} if seen is None else {"seen": seen}
        self.states.begin(states)
        logits: Tensor = self._model(**inputs, use_cache=False, penstock=attention).logits[0]
        return logits

    @torch.inference_mode()
    def _observe(self) -> list[LayerSpec]:
        """Run a few tokens and record what each layer does."""
        ids = self._probe()[SPLIT:]
        positions = torch.arange(len(ids), device=self.device) * self._stride
        keep = torch.tensor([len(ids) - 1], device=self.device)
        with self.adaptation.observe(len(ids)):
            found = observe(self._model, self._name, partial(self._run, ids, positions, keep))
        self._rules, self._numbers, self.states = found.rules, found.numbers, States(found.stateful)
        self._reads = found.reads
        self.attention_flops, self._alone = found.attention_flops, found.logits
        return found.specs

    def _probe(self) -> Tensor:
        return probe_ids(self._model.config.get_text_config().vocab_size, self.device)

    def _probes(self) -> list[Segment]:
        both = probes(self._probe().tolist(), len(self.groups))
        return with_slots(both) if self.states else both

    def _probe_step(self, segments: Sequence[Segment] | None = None) -> PackedStep:
        """`_probes` or others packed into one row, at distant positions, so that wrong rotations show."""
        step = self._pack(segments or self._probes())
        return step._replace(positions=step.positions * self._stride)

    @torch.inference_mode()
    def _check_packing(self) -> None:
        self._together = self._forward(self._probe_step())
        if distance(self._alone, self._together) > TOLERANCE:
            raise ModelLoadError(f"{self._name} mixes requests that share a step; use --backend hf")
        if self.states:
            *_, last = [self._forward(self._probe_step(segments)) for segments in in_steps(self._probes())]
            if not distance(self._alone, last) <= TOLERANCE:
                raise ModelLoadError(f"{self._name} loses its state between steps; choose another model")

    def _check(self, seen: Probe | None) -> bool:
        """Check the model; returns whether the plain decoder computes what the model does, also of what is `seen`."""
        self._check_packing()
        difference = self._plain_difference(self._together, self._probe_step())
        if TOLERANCE < difference < inf:
            _log.info("plain decoder differs from %s by %.3g", self._name, difference)
        return (seen is None or self._sees_plainly(seen)) and difference <= TOLERANCE

    @torch.inference_mode()
    def _plain_difference(self, expected: Tensor, step: PackedStep) -> float:
        """How far the plain decoder is from what the model computes; infinite if the model is built otherwise."""
        self._decoder = Decoder.of(self._model, Views, torch.float32)
        try:
            return inf if self._decoder is None else distance(expected, self._forward(step))
        except Exception as error:  # rotations of another size, or kernels that this device cannot run
            _log.info("plain decoder cannot run %s: %r", self._name, error)
            return inf
        finally:
            self._decoder = None

    @torch.inference_mode()
    def _sees_plainly(self, seen: Probe) -> bool:
        """Check that packed tokens see an image as the model does; returns whether the plain decoder does so, too."""
        probe = image_probe(self._model.vision, seen, self._probe().tolist(), len(self.groups), self.block_size)
        self.allocate([probe.num_blocks] * len(self.groups))
        step = self._pack(with_slots(probe.segments) if self.states else probe.segments)
        if not (far := distance(probe.logits, self._forward(step))) <= TOLERANCE:
            raise ModelLoadError(f"{self._name} sees images in a way that is not supported (off by {far:.3g})")
        return self._plain_difference(probe.logits, step) <= TOLERANCE

    @torch.inference_mode()
    def _take_over(self, fuse: MakeLinear, is_plain: bool) -> None:
        if is_plain:
            self._decoder = Decoder(self._model, fuse, self.dtype)
            return
        replace_linears(self._model, fuse, self._reads)
        self.adaptation.hook(self._model)

    def _compile(self, kernels: Kernels | None, context_length: int, is_proven: bool) -> str:
        """Use the compiled decoder if it computes what the model computes; else return the reason why not."""
        if kernels is None:
            return ""
        if self._decoder is None:
            return f"{self._name} is not a plain decoder"
        compiled = CompiledDecoder.of(self._decoder, kernels, self._rules, self.dtype, context_length)
        if compiled is None:
            return f"the compiled decoder does not support the shapes, dtype or attention of {self._name}"
        compiled.attach(self._pools, self._packed_groups, self._group_of, self.block_size)
        if is_proven:
            self._compiled = compiled
            return ""
        ids, count = self._probe().tolist(), len(self.groups)
        tried = sorted([*probes(ids, count), *probes_apart(ids, count)], key=rank)
        if self.states:
            self.states.allocate(NUM_TRIED, len(tried), self.dtype)
            self._compute(self._probes())  # leaves states for others to continue
            tried = after_others(tried)
        step = self._pack(tried)
        setting = Setting(self._rules, self.specs, self._packed_groups, self._group_of, self.block_size, self.dtype)
        reason = fault(self._decoder, compiled, setting, tried, step, partial(self._attend, step.groups))
        self._compiled = None if reason else compiled
        return reason

    def _fuse(self, make: MakeProduct, parts: Sequence[nn.Linear], orders: Orders = ()) -> Linear:
        """Make one product of modules that share their input, and free their memory."""
        count = sum(part.weight.numel() for part in parts)
        is_head = parts[0] is self._model.get_output_embeddings()
        name = next(name for name, module in self._model.named_modules() if module is parts[0])
        linear = make(turned(parts, orders), name, is_head)
        self.num_weights, self.num_head_weights = self.num_weights + count, self.num_head_weights + count * is_head
        self.weight_bytes += linear.nbytes
        self._spans.append(span(linear.weight))
        release(parts)
        layers = self.adaptation.parts(parts, orders)
        return Adaptable(linear, self.adaptation, layers) if layers else linear
