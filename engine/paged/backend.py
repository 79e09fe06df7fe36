"""The default backend: continuous batching over block-paged keys and values, with a prefix cache.

`step` schedules, runs and commits. The scheduler knows no tensor, and the runner no request; they meet here.

On CUDA the backend launches a step ahead, before the host has read the tokens of the last one: the tokens stay on the
device, and the host reads them while it computes. A row that turns out to have ended has then computed one token too
many. Where the next choice needs the earlier tokens (penalties, grammars), the host reads them first.
"""

from __future__ import annotations

import gc
import logging
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch

from ...schemas.errors import ModelLoadError, Refusal
from ...schemas.events import Delta
from ..adapters.files import AdapterFiles
from ..adapters.loaded import Adapter, Targets
from ..backend import ProgressCallback
from ..choice import Choice
from ..config import EngineConfig
from ..cpu.library import MOST_ROWS, Kernels, NoKernels, load_kernels
from ..models import count_parameters, read_model_info, resolve_model
from ..output import CacheStats, SpeculationStats
from ..planning.device import resolve_device
from ..planning.manifests import PAGED
from ..planning.sizing import SizedConfig, fitting_length, sized, weights_of_model
from ..sampler import DeviceTokens, HostTokens, choose, needs_tokens
from ..text.tokenizer import Tokenizer
from .context import steady_length
from .kv.blocks import KVBlocks
from .kv.kv_plan import check_memory, plan_blocks
from .load import load_model
from .prefixes import load_prefixes, save_prefixes
from .quantization.quantize import ProductMaker
from .runner import Runner
from .scheduling.picture_gate import PictureGate
from .scheduling.rows import Row, Scheduled
from .scheduling.scheduler import Scheduler
from .segments import split_scores, to_segment
from .settings import check_settings, why_expanded
from .speculation.drafts import Speculation, row_cost
from .spill.opening import open_spill
from .state.planning import make_room
from .verdicts import Verdicts

_log = logging.getLogger(__name__)

_BLOCK_SIZE = 16
_CHUNK, _LARGE_CHUNK = {"cpu": 256}, 2048  # on a CPU larger products are no faster, and delay decoding
_EVICT_FROM = 0.80  # usage from which unheld prefixes are evicted early, so that no step waits for eviction


class _Unread(NamedTuple):
    """The tokens of one step, one for each of `rows`; until read, they count as pending."""

    rows: list[Row]
    chosen: DeviceTokens | HostTokens


class PagedBackend:
    """`kv_cache_memory` is a limit: a choice that does not fit waits; one that no longer fits is preempted."""

    manifest = PAGED

    def __init__(
        self, config: EngineConfig, progress: ProgressCallback | None = None, *, ahead: bool | None = None
    ) -> None:
        """`ahead`: launch steps ahead; by default only on CUDA, which computes asynchronously.

        Raises `ConfigurationError` and `ModelLoadError`.
        """
        config.refuse("echo_rate")
        config = sized(config)
        device = resolve_device(config.device)
        check_settings(config, device)
        self._slow_paths: list[str] = []
        self._kernels = kernels = self._load_kernels(config) if device.type == "cpu" else None
        make_product = ProductMaker(config.quantization, device, kernels)
        path = resolve_model(config.model)
        info = read_model_info(path, config.model, config.max_sequence_length)
        info = replace(info, context_length=steady_length(config, path, info.context_length))
        parameters = count_parameters(path)
        self.tokenizer = Tokenizer(path)
        check_memory(config.kv_cache_memory, weights_of_model(config, device.type), config.model, device)
        model = load_model(config, path, info.architecture, device, make_product, progress)
        known = Verdicts.of(config, path, info.context_length, device, kernels)
        self.runner = Runner(model, _BLOCK_SIZE, info.context_length, make_product, kernels, known)
        if self.runner.uncompiled:
            self._slow_paths.append(f"decoding is not compiled: {self.runner.uncompiled}")
        chunked = config.enable_chunked_prefill is not False
        chunk = config.prefill_chunk_size or max(_CHUNK.get(device.type, _LARGE_CHUNK), config.max_batch_size)
        whole = vision.processor.mutual if (vision := self.runner.vision) is not None else 0
        longest = min(max(chunk, whole), info.context_length) if chunked else info.context_length
        self.slots, memory = make_room(config, self.runner)
        self._block_size = self.runner.block_size
        groups = plan_blocks(
            memory,
            self.runner.groups,
            self.runner.specs,
            token_block=self._block_size,
            number_size=self.runner.dtype.itemsize,
            max_batch_size=config.max_batch_size,
            max_step_tokens=longest,
        )
        self.runner.allocate([group.num_blocks for group in groups])
        self.blocks = KVBlocks(self._block_size, groups, longest)
        self._gate = PictureGate(vision.pictures if vision is not None else None)
        reserved = config.reserved_batch_size
        self._scheduler = Scheduler(
            self.blocks, config.max_batch_size, chunk, chunked, reserved, slots=self.slots, gate=self._gate
        )
        self._ahead = device.type == "cuda" if ahead is None else ahead
        self._unread: _Unread | None = None  # set by `step`
        self._most_rows = min(MOST_ROWS, longest)  # of a step that checks guesses
        self._speculation, self._no_speculation = self._guessing(config, make_product.is_quantized)
        self._kv_cache_memory = config.kv_cache_memory
        context = fitting_length(config, info.context_length, self.blocks.capacity)
        if self.runner.on_triton and config.enable_cuda_graph is not False:
            self._record_graphs(config, context)
        elif device.type == "cuda":
            reason = "enable_cuda_graph is false" if self.runner.on_triton else "Triton is missing; install it"
            self._slow_paths.append(f"decoding is not recorded as CUDA graphs: {reason}")
        if device.type == "cuda" and not make_product.is_quantized and (reason := why_expanded(config, device)):
            self._slow_paths.append(reason)
        for reason in self._slow_paths:
            _log.warning("%s: %s", config.model, reason)
        slow_paths = tuple(self._slow_paths)
        self._spill = open_spill(config, path, info, self.runner, self.blocks, kernels, slow_paths)
        info = replace(info, most_images=None if vision is None else vision.pictures.most_held)
        self.info = replace(info, parameters=parameters, context_length=context, slow_paths=slow_paths)

    def _guessing(self, config: EngineConfig, is_quantized: bool) -> tuple[Speculation | None, str]:
        """What guesses tokens; None, and the reason, where that is unwanted or might change answers."""
        if config.speculation == "off":
            return None, "speculation is off"
        if self.runner.states:
            return None, "the model keeps running states, which cannot take back a wrong guess"
        if self._ahead or self._kernels is None or self.runner.uncompiled:
            return None, "decoding is not compiled: only compiled steps have the same bits at any number of rows"
        return Speculation(self.tokenizer, config.speculation_depth, row_cost(is_quantized)), ""

    def _load_kernels(self, config: EngineConfig) -> Kernels | None:
        reason = "compile_kernels is false"
        if config.compile_kernels:
            try:
                return load_kernels()
            except NoKernels as error:
                reason = str(error)
        self._slow_paths.append(f"decoding is not compiled: {reason}")
        return None

    def _record_graphs(self, config: SizedConfig, context_length: int) -> None:
        try:
            self.runner.record_graphs(context_length, config.max_batch_size)
        except Exception as error:  # torch's or Triton's
            if config.enable_cuda_graph:
                raise ModelLoadError(
                    f"cannot record {config.model} as CUDA graphs ({error}); leave enable_cuda_graph out"
                ) from error
            self._slow_paths.append(f"decoding is not recorded as CUDA graphs: {error}")

    @property
    def num_running(self) -> int:
        return self._scheduler.num_running

    @property
    def num_waiting(self) -> int:
        return self._scheduler.num_waiting + self._spill.num_held

    def cache_stats(self) -> CacheStats:
        stats = self.blocks.stats()
        return CacheStats(
            memory=self._kv_cache_memory,
            num_tokens=max(pool.num_blocks for pool in self.blocks.pools) * self._block_size,
            usage=self.blocks.usage,
            num_blocks=stats.num_blocks,
            num_cached_blocks=stats.num_cached,
            num_queried_tokens=stats.queries,
            num_hit_tokens=stats.hits,
            num_evictions=stats.evictions,
            num_preemptions=self._scheduler.num_preemptions,
            speculation=self.speculation_stats(),
            spill=self._spill.stats(),
        )

    def speculation_stats(self) -> SpeculationStats:
        return self._speculation.stats if self._speculation else SpeculationStats(off=self._no_speculation)

    @property
    def weight_bytes(self) -> int:
        """The bytes of weights that a decoding step of one row reads."""
        return self.runner.weight_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        return self.runner.dtype.itemsize * sum(spec.numbers for spec in self.runner.specs)

    def flops(self, num_tokens: int, num_logits: int, num_attended: int) -> int:
        """The floating-point operations of a step whose queries attend to `num_attended` keys in all."""
        runner = self.runner
        products = num_tokens * (runner.num_weights - runner.num_head_weights) + num_logits * runner.num_head_weights
        return 2 * products + num_tokens * runner.states.flops + num_attended * runner.attention_flops

    def add(self, choice: Choice) -> None:
        if self.runner.vision is not None:
            choice.layout = self.runner.vision.layout(choice.request)
        if not self._spill.hold(choice):
            self._scheduler.add(choice)

    def remove(self, choice: Choice) -> None:
        self._spill.remove(choice)
        self._scheduler.remove(choice)

    def save_prefixes(self, path: Path) -> int:
        return save_prefixes(path, self.blocks, self.slots, self.runner, self.info.source)

    @torch.inference_mode()
    def load_prefixes(self, path: Path) -> int:
        return load_prefixes(path, self.blocks, self.slots, self.runner, self.info.source)

    def adapter_targets(self) -> Targets:
        return self.runner.adaptation.targets

    def load_adapter(self, files: AdapterFiles) -> Adapter:
        adapter = self.runner.load_adapter(files)
        reason = self.runner.slow_adapters
        if reason and reason not in self.info.slow_paths:
            _log.warning("%s: %s", self.info.source, reason)
            self.info = replace(self.info, slow_paths=(*self.info.slow_paths, reason))
        return adapter

    def delay(self) -> float:
        delay = self._spill.delay()
        return min(delay, self._gate.delay()) if self.num_running or self._scheduler.num_waiting else delay

    def close(self) -> None:
        self._gate.close()
        self._spill.close()
        del self.runner
        gc.collect()

    def check_integrity(self) -> None:
        """Raise `AssertionError` unless blocks, tables, states and rows account for each other."""
        self._scheduler.check_integrity()

    @torch.inference_mode()
    def step(self) -> list[Delta]:
        for choice in self._spill.advance():
            self._scheduler.add(choice)
        scheduled = self._scheduler.schedule()
        self._gate.encode(scheduled)
        before, self._unread = self._unread, None
        if not scheduled:
            return self._read(before)
        if self._speculation and (
            guesses := self._speculation.guess(scheduled, self._most_rows - len(scheduled), self._scheduler.reserve)
        ):
            return self._check(self._speculation, scheduled, guesses)
        try:
            now = self._launch(scheduled, before)
        except Exception as error:
            return self._read(before) + self._isolate(scheduled, error)
        self._commit(scheduled, now)
        deltas = self._read(before)
        if self._ahead and not any(needs_tokens(row.choice) for row in now.rows):
            self._unread = now
            return deltas
        return deltas + self._read(now)

    def _launch(self, scheduled: list[Scheduled], before: _Unread | None = None) -> _Unread:
        """Compute a step and choose its tokens; the pending tokens are those of `before`."""
        indices = {row: index for index, row in enumerate(before.rows)} if before else {}
        segments = [to_segment(one, indices.get(one.row)) for one in scheduled]
        chosen = before.chosen.tokens if before and before.rows else None
        logits, sampled, best = split_scores(scheduled, self.runner.forward(segments, chosen))
        rows = [scheduled[index].row for index in sampled]
        return _Unread(rows, choose(logits, [row.choice for row in rows], self._kernels, best))

    def _check(
        self, speculation: Speculation, scheduled: list[Scheduled], guesses: dict[Row, list[int]]
    ) -> list[Delta]:
        """Compute a decoding step with guessed tokens; what follows is that of several steps without."""
        draws = speculation.check(scheduled, guesses, self.runner.forward, self._kernels)
        try:
            first = next(draws)
        except Exception as error:
            return self._isolate(scheduled, error)
        deltas: list[Delta] = []
        for going, chosen in chain((first,), draws):
            now = _Unread([one.row for one in going], chosen)
            self._commit(going, now)
            deltas += self._read(now)
        return deltas

    def _commit(self, scheduled: list[Scheduled], now: _Unread) -> None:
        self._scheduler.commit(scheduled)
        if self.blocks.usage >= _EVICT_FROM:
            self.blocks.evict()
        for row in now.rows:
            row.choice.pending += 1

    def _read(self, unread: _Unread | None) -> list[Delta]:
        deltas: list[Delta] = []
        for row, result in zip(unread.rows, unread.chosen.read(), strict=True) if unread else ():
            choice = row.choice
            choice.pending -= 1
            if choice not in self._scheduler:  # cancelled meanwhile
                continue
            if isinstance(result, Refusal):  # its keys and values may be NaN
                self.runner.clear(self._scheduler.discard(choice))
                if choice.finish is None:
                    deltas.append(choice.fail(result))
                continue
            if choice.finish is None:
                try:
                    delta = choice.append(*result)
                except Exception as error:
                    delta = choice.fail(error)
                if delta is not None:
                    deltas.append(delta)
            if choice.finish is not None and not choice.pending:  # while pending, a step still writes its blocks
                self._scheduler.remove(choice)
        return deltas

    def _isolate(self, scheduled: list[Scheduled], error: Exception) -> list[Delta]:
        """Rerun the rows of a failed step one by one, so that only the culprits fail."""
        if len(scheduled) > 1:
            _log.warning("step of %d rows failed (%r), rerunning them one by one", len(scheduled), error)
        deltas = []
        for one in scheduled:
            if one.row.choice not in self._scheduler:  # its last token was read meanwhile
                continue
            try:
                if len(scheduled) == 1:
                    raise error
                now = self._launch([one])
            except Exception as own:
                self._scheduler.remove(one.row.choice)
                deltas.append(one.row.choice.fail(own))
                continue
            self._commit([one], now)
            deltas += self._read(now)
        return deltas
