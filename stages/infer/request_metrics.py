"""What a worker measures: each request's phases, and its engine's state whenever somebody asks."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import get_args

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ...config import metrics
from ...engine import EngineStats
from ...engine.output import SpillStats
from ...schemas.events import Delta, FinishReason
from ...schemas.jobs import ValidatedJob
from ...schemas.registry import OUTPUT_WEIGHT
from .served import ServedTokens

Times = dict[int, tuple[float, float]]  # by choice: seconds at which its first and its newest tokens were generated

_WINDOW = 10.0  # seconds over which tokens a second are measured


class WorkerMetrics:
    """The metrics of one worker: looked up once, since every token touches them. `clock` is in seconds."""

    def __init__(self, model: str, worker: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.served = ServedTokens(clock)
        labels = model, worker
        self.first_token = metrics.TIME_TO_FIRST_TOKEN.labels(*labels)
        self.inter_token = metrics.INTER_TOKEN.labels(*labels)
        self.time_per_token = metrics.TIME_PER_TOKEN.labels(*labels)
        self.latency = metrics.LATENCY.labels(*labels)
        self.queue_time = metrics.QUEUE_TIME.labels(*labels)
        self.prefill_time = metrics.PREFILL_TIME.labels(*labels)
        self.decode_time = metrics.DECODE_TIME.labels(*labels)
        self.inference_time = metrics.INFERENCE_TIME.labels(*labels)
        self.request_prompt = metrics.REQUEST_PROMPT.labels(*labels)
        self.request_generation = metrics.REQUEST_GENERATION.labels(*labels)
        self.request_longest = metrics.REQUEST_LONGEST.labels(*labels)
        self.request_choices = metrics.REQUEST_CHOICES.labels(*labels)
        self.request_limit = metrics.REQUEST_LIMIT.labels(*labels)
        self.prompt_tokens = metrics.PROMPT_TOKENS.labels(*labels)
        self.generation_tokens = metrics.GENERATION_TOKENS.labels(*labels)
        self.takeovers = metrics.TAKEOVERS.labels(*labels)
        self.seats_received = metrics.SEATS_RECEIVED.labels(*labels)
        self.active = metrics.ACTIVE.labels(*labels)
        self.finished = {reason: metrics.FINISHED.labels(*labels, reason) for reason in get_args(FinishReason)}


class RequestMetrics:
    """Measures one request in one epoch, in the worker that runs it. Times are Unix seconds.

    Of a request that was taken over, each worker counts its own tokens; the time to its first token is measured by the
    worker that generated it, the whole by the one that finished it.
    """

    def __init__(self, job: ValidatedJob, worker: WorkerMetrics, now: Callable[[], float] = time.time) -> None:
        self._job, self._worker, self._now = job, worker, now
        self._began = now()
        self._is_begun = False  # tokens were published; set by published
        self._times: Times = {}  # of all published tokens; set by published
        self._counts: dict[int, int] = {}  # by choice, of its tokens; set by continued and published
        self._is_continued = False  # set by continued

    def began(self) -> None:
        """The engine has the request: nobody had begun it before."""
        job, worker = self._job, self._worker
        worker.queue_time.observe(max(0.0, self._began - job.created))
        worker.prompt_tokens.inc(job.prompt_tokens)
        worker.request_prompt.observe(job.prompt_tokens)
        worker.request_choices.observe(job.params.n)
        if job.params.max_tokens is not None:
            worker.request_limit.observe(job.params.max_tokens)

    def continued(self, token_ids: Sequence[Sequence[int]]) -> None:
        """This worker continues behind the tokens, by choice, that another one has published."""
        self._worker.takeovers.inc()
        self._counts = {choice: len(ids) for choice, ids in enumerate(token_ids)}
        self._is_continued = any(self._counts.values())

    def published(self, deltas: Sequence[Delta], times: Times) -> None:
        """The deltas are stored. What lies between tokens is the engine's time, however many travelled together."""
        for delta in deltas:
            count = len(delta.token_ids)
            if count:
                self._tokens(delta.choice, count, times[delta.choice])
            if delta.finish_reason is not None:
                self._worker.finished[delta.finish_reason].inc()

    def _tokens(self, choice: int, count: int, times: tuple[float, float]) -> None:
        worker, (first, newest) = self._worker, times
        worker.generation_tokens.inc(count)
        worker.served.add(self._job.tenant, OUTPUT_WEIGHT * count)
        if not (self._is_begun or self._is_continued):
            now = self._now()
            worker.first_token.observe(max(0.0, now - self._job.created))
            worker.prefill_time.observe(max(0.0, now - self._began))
        self._is_begun = True
        if choice in self._times:
            worker.inter_token.observe((newest - self._times[choice][1]) / count)
        elif count > 1:
            worker.inter_token.observe((newest - first) / (count - 1))
        self._times[choice] = times
        self._counts[choice] = self._counts.get(choice, 0) + count

    def ended(self) -> None:
        """Every choice has finished and is stored."""
        now, worker = self._now(), self._worker
        total, longest = sum(self._counts.values()), max(self._counts.values(), default=0)
        worker.latency.observe(max(0.0, now - self._job.created))
        worker.inference_time.observe(max(0.0, now - self._began))
        worker.request_generation.observe(total)
        worker.request_longest.observe(longest)
        if self._is_begun and not self._is_continued:
            firsts, newest = zip(*self._times.values(), strict=True)
            decoding = max(newest) - min(firsts)
            worker.decode_time.observe(decoding)
            if longest > 1:
                worker.time_per_token.observe(decoding / (longest - 1))


class Unmeasured(RequestMetrics):
    """Of a canary, which is nobody's request."""

    def began(self) -> None: ...

    def continued(self, token_ids: Sequence[Sequence[int]]) -> None: ...

    def published(self, deltas: Sequence[Delta], times: Times) -> None: ...

    def ended(self) -> None: ...


@contextlib.contextmanager
def exposed(stats: Callable[[], EngineStats], model: str, worker: str) -> Iterator[None]:
    """Show the state of a worker's engine among the metrics."""
    state = EngineMetrics(stats, model, worker)
    metrics.REGISTRY.register(state)
    try:
        yield
    finally:
        metrics.REGISTRY.unregister(state)


class EngineMetrics(Collector):
    """The state of a worker's engine at the moment somebody asks."""

    def __init__(self, stats: Callable[[], EngineStats], model: str, worker: str) -> None:
        self._stats, self._values = stats, (model, worker)
        self._tokens: deque[tuple[float, int]] = deque()  # when, and how many there were; set by _rate

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        yield self._gauge("vllm:num_requests_running", "Choices in the engine's running batch.", stats.num_running)
        yield self._gauge("vllm:num_requests_waiting", "Choices that wait in the engine.", stats.num_waiting)
        yield self._counter("penstock_engine_steps", "Steps of the engine.", stats.num_steps)
        yield self._counter("penstock_engine_tokens", "Tokens that the engine generated.", stats.num_generated_tokens)
        yield self._gauge(
            "penstock_tokens_per_second", "Generated tokens a second, over about ten seconds.", self._rate(stats)
        )
        yield self._gauge("penstock_adapter_bytes", "Memory of the loaded adapters.", stats.adapter_memory)
        if (cache := stats.cache) is None:
            return
        guesses = cache.speculation
        yield self._counter(
            "vllm:spec_decode_num_drafts", "Times that a step checked guessed tokens.", guesses.num_drafts
        )
        yield self._counter("vllm:spec_decode_num_draft_tokens", "Tokens that were guessed.", guesses.num_draft_tokens)
        yield self._counter(
            "vllm:spec_decode_num_accepted_tokens",
            "Guessed tokens that were right.",
            guesses.num_accepted_tokens,
        )
        yield self._gauge(
            "vllm:kv_cache_usage_perc", "Share of the key-value cache that requests hold, 0 to 1.", cache.usage
        )
        yield self._gauge("penstock_kv_cache_bytes", "Size of the key-value cache.", cache.memory)
        yield self._gauge("penstock_kv_cache_tokens", "Tokens that the key-value cache can hold.", cache.num_tokens)
        yield self._counter("vllm:num_preemptions", "Requests that the engine preempted.", cache.num_preemptions)
        yield self._counter(
            "vllm:prefix_cache_queries", "Tokens looked up in the prefix cache.", cache.num_queried_tokens
        )
        yield self._counter("vllm:prefix_cache_hits", "Tokens found in the prefix cache.", cache.num_hit_tokens)
        yield self._counter("penstock_prefix_cache_evictions", "Cached blocks that were evicted.", cache.num_evictions)
        yield from self._spilled(cache.spill)

    def _spilled(self, spill: SpillStats) -> Iterator[Metric]:
        name = "penstock_prefix_disk"
        yield self._gauge(f"{name}_bytes", "Size of the prefix cache on disk.", spill.num_bytes)
        yield self._counter(f"{name}_written_blocks", "Cached blocks written to disk.", spill.num_written)
        yield self._counter(f"{name}_found_blocks", "Blocks read from disk into the prefix cache.", spill.num_found)
        yield self._counter(
            f"{name}_dropped_blocks", "Cached blocks not written to disk because too many waited.", spill.num_dropped
        )
        yield self._counter(
            f"{name}_damaged_blocks", "Blocks on disk that were damaged, and removed.", spill.num_damaged
        )

    def _rate(self, stats: EngineStats) -> float:
        now, tokens = time.monotonic(), self._tokens
        tokens.append((now, stats.num_generated_tokens))
        while len(tokens) > 2 and now - tokens[1][0] >= _WINDOW:
            tokens.popleft()
        since, before = tokens[0]
        return (stats.num_generated_tokens - before) / (now - since) if now > since else 0.0

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=metrics.ENGINE)
        family.add_metric(self._values, value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=metrics.ENGINE)
        family.add_metric(self._values, value)
        return family
