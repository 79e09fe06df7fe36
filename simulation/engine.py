"""An engine that computes nothing: the real scheduler, block tables and choices, whose steps take their time.

The tokens of an answer are letters in the order of the alphabet, so that a reader sees a gap, and its length is its
request's seed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from math import inf
from typing import Any

from ..engine import EngineConfig, InferenceEngine
from ..engine.backend import Backend, NoAdapters, NoPrefixes
from ..engine.choice import Choice
from ..engine.driver import Driver
from ..engine.handle import RequestHandle
from ..engine.models import ModelInfo
from ..engine.output import CacheStats
from ..engine.paged.kv.blocks import GroupSpec, KVBlocks
from ..engine.paged.scheduling.rows import Scheduled
from ..engine.paged.scheduling.scheduler import Scheduler
from ..engine.planning.manifest import INTERFACE, Manifest
from ..engine.text.byte_tokenizer import END_OF_TEXT, ByteTokenizer
from ..schemas.events import Delta
from ..schemas.params import GenerationParams
from .costs import StepClock

BLOCK = 16  # tokens, as in the paged backend
EVICT_FROM = 0.80  # of the blocks, as there
FIRST_LETTER, LETTERS = ord("a"), 26

_MANIFEST = Manifest(
    id="simulated",
    interface=INTERFACE,
    backend="penstock.simulation.engine:SimulatedBackend",
    licence="Apache-2.0",
    formats=(),
    devices=("cpu",),
    modes=("text",),
    resume="exact",
    parameters=frozenset(GenerationParams.model_fields) - {"grammar", "logits_processors", "logprobs"},
)


def token_at(index: int) -> int:
    """The token at this index of every answer."""
    return FIRST_LETTER + index % LETTERS


class SimulatedBackend(NoAdapters, NoPrefixes):
    """Runs each step in two halves, between which its time passes."""

    manifest = _MANIFEST

    def __init__(self, config: EngineConfig, clock: StepClock, kv_tokens: int, now: Callable[[], float]) -> None:
        """`config` has been sized; `kv_tokens` fit into the cache. `now` is in Unix seconds."""
        batch, context = config.max_batch_size, config.max_sequence_length
        assert batch is not None and context is not None
        chunk = max(config.prefill_chunk_size or 0, batch)
        self.tokenizer = ByteTokenizer()
        self.info = ModelInfo(
            source=config.model,
            architecture="Simulated",
            context_length=context,
            vocabulary_size=self.tokenizer.vocabulary_size,
            eos_token_ids=self.tokenizer.eos_token_ids,
        )
        self.blocks = KVBlocks(BLOCK, [GroupSpec(max(1, kv_tokens // BLOCK), None)], chunk)
        self.scheduler = Scheduler(self.blocks, batch, chunk, reserved=config.reserved_batch_size, now=now)
        self.clock = clock
        self._launched: list[Scheduled] = []  # set by begin

    @property
    def num_running(self) -> int:
        return self.scheduler.num_running

    @property
    def num_waiting(self) -> int:
        return self.scheduler.num_waiting

    def add(self, choice: Choice) -> None:
        self.scheduler.add(choice)

    def remove(self, choice: Choice) -> None:
        self.scheduler.remove(choice)

    def delay(self) -> float:
        return 0.0 if self.num_running or self.num_waiting else inf

    def close(self) -> None:
        self._launched.clear()

    def cache_stats(self) -> CacheStats:
        stats = self.blocks.stats()
        return CacheStats(
            memory=0,
            num_tokens=self.blocks.pools[0].num_blocks * BLOCK,
            usage=self.blocks.usage,
            num_blocks=stats.num_blocks,
            num_cached_blocks=stats.num_cached,
            num_queried_tokens=stats.queries,
            num_hit_tokens=stats.hits,
            num_evictions=stats.evictions,
            num_preemptions=self.scheduler.num_preemptions,
        )

    def step(self) -> list[Delta]:
        """Both halves, in no time."""
        self.begin()
        return self.finish()

    def begin(self) -> float:
        """Schedule a step; returns the seconds that it takes, 0 if there is nothing to compute."""
        launched = self._launched = self.scheduler.schedule()
        if not launched:
            return 0.0
        prompt_tokens = decoding = seen = 0
        pairs = 0.0
        for row, count, _ in launched:
            computed = row.num_computed
            if count > 1 or computed < row.num_known - 1:
                prompt_tokens += count
                pairs += count * (computed + count / 2)
            else:
                decoding += 1
                seen += computed + 1
        return self.clock.seconds(prompt_tokens, pairs, decoding, seen)

    def finish(self) -> list[Delta]:
        """Commit the step that was begun, and choose its tokens."""
        scheduler, launched = self.scheduler, self._launched
        self._launched = []
        scheduler.commit(launched)
        if self.blocks.usage >= EVICT_FROM:
            self.blocks.evict()
        deltas: list[Delta] = []
        for row, _, samples in launched:
            choice = row.choice
            if not samples or choice not in scheduler:
                continue
            index = len(choice.tokens)
            is_last = index + 1 >= choice.request.seed
            delta = choice.append(END_OF_TEXT if is_last else token_at(index))
            if delta is not None:
                deltas.append(delta)
            if choice.finish is not None:
                scheduler.remove(choice)
        return deltas


class LoopDriver(Driver):
    """Steps its backend by timers of the event loop, without a thread."""

    def __init__(self, load: Callable[[], Backend], stall_timeout: float) -> None:
        self.busy = 0.0  # seconds for which steps were computed
        self._timer: asyncio.Handle | None = None  # of the step that is computed, or of the next look
        self._loop = asyncio.get_running_loop()
        super().__init__(load, stall_timeout)

    @property
    def healthy(self) -> bool:
        return not self._closing

    def submit(self, choices: Iterable[Choice], handle: RequestHandle) -> None:
        super().submit(choices, handle)
        self._wake()

    def cancel_choices(self, choices: list[Choice]) -> None:
        super().cancel_choices(choices)
        self._wake()

    def call(self, work: Callable[[], Any]) -> Future[Any]:
        result: Future[Any] = Future()
        result.set_result(work())
        return result

    def close(self, timeout: float | None) -> bool:
        self._closing = True
        if self._timer is not None:
            self._timer.cancel()
        return True

    def _start(self, load: Callable[[], Backend]) -> Backend:
        return load()

    def _wake(self) -> None:
        if self._timer is None and not self._closing:
            self._timer = self._loop.call_soon(self._next)

    def _next(self) -> None:
        self._timer = None
        if self._commands:
            self._deliver(self._obey())
        backend = self.backend
        assert isinstance(backend, SimulatedBackend)
        if (seconds := backend.begin()) > 0:
            self.busy += seconds
            self._timer = self._loop.call_later(seconds, self._end, backend)

    def _end(self, backend: SimulatedBackend) -> None:
        self._deliver(backend.finish())
        self.num_steps += 1
        self._next()


def simulated_engine(config: EngineConfig, backend: SimulatedBackend) -> InferenceEngine:
    return InferenceEngine(config, backend=backend, driver=LoopDriver)
