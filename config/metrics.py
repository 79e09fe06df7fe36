"""What Penstock measures, under the names by which Prometheus collects it.

A metric called `vllm:…` means what it means at vLLM, so that dashboards and autoscalers made for it work unchanged; its
label `engine` is the worker's id. No label names a tenant, a request or anything else that clients choose.

Each process counts in `REGISTRY`. Children of one `penstock serve` or `penstock agent` publish what they have counted
(`exposed`), and the parent's one `/metrics` shows all of it (`Exposition`).

Sources: https://docs.vllm.ai/en/latest/usage/metrics.html, https://prometheus.io/docs/practices/naming/
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.exposition import generate_latest, start_http_server
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector, CollectorRegistry

from ..schemas.errors import StartupError

disable_created_metrics()  # type: ignore[no-untyped-call]

REGISTRY = CollectorRegistry()

ENGINE = ("model_name", "engine")

_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_BETWEEN_TOKENS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5, 10, 40)
_PHASE = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 60, 120, 240, 960)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 200_000)
_LAG = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


def _counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
    return Counter(name, text, labels, registry=REGISTRY)


def _gauge(name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
    return Gauge(name, text, labels, registry=REGISTRY)


def _histogram(name: str, text: str, buckets: tuple[float, ...], labels: tuple[str, ...] = ENGINE) -> Histogram:
    return Histogram(name, text, labels, buckets=buckets, registry=REGISTRY)


# What workers count of each request.
TIME_TO_FIRST_TOKEN = _histogram(
    "vllm:time_to_first_token_seconds", "From the validation of a request to its first token.", _FIRST_TOKEN
)
INTER_TOKEN = _histogram(
    "vllm:inter_token_latency_seconds",
    "Between two tokens of a choice: the mean over those that were published together.",
    _BETWEEN_TOKENS,
)
TIME_PER_TOKEN = _histogram(
    "vllm:request_time_per_output_token_seconds",
    "Between two tokens of a choice: the mean over a request.",
    _BETWEEN_TOKENS,
)
LATENCY = _histogram("vllm:e2e_request_latency_seconds", "From the validation of a request to its end.", _PHASE)
QUEUE_TIME = _histogram(
    "vllm:request_queue_time_seconds", "From the validation of a request to its beginning at a worker.", _PHASE
)
PREFILL_TIME = _histogram(
    "vllm:request_prefill_time_seconds", "From a request's beginning at a worker to its first token.", _PHASE
)
DECODE_TIME = _histogram("vllm:request_decode_time_seconds", "From a request's first token to its last.", _PHASE)
INFERENCE_TIME = _histogram(
    "vllm:request_inference_time_seconds", "From a request's beginning at a worker to its last token.", _PHASE
)
REQUEST_PROMPT = _histogram("vllm:request_prompt_tokens", "Tokens of a request's prompts.", _TOKENS)
REQUEST_GENERATION = _histogram("vllm:request_generation_tokens", "Tokens generated for a request.", _TOKENS)
REQUEST_LONGEST = _histogram(
    "vllm:request_max_num_generation_tokens", "Tokens generated for the longest choice of a request.", _TOKENS
)
REQUEST_CHOICES = _histogram("vllm:request_params_n", "Choices that a request asks for.", (1, 2, 5, 10, 20, 50, 128))
REQUEST_LIMIT = _histogram("vllm:request_params_max_tokens", "The limit of tokens of a request's choices.", _TOKENS)
FINISHED = _counter(
    "vllm:request_success", "Choices that finished, by the reason of their end.", (*ENGINE, "finished_reason")
)
PROMPT_TOKENS = _counter("vllm:prompt_tokens", "Tokens of the prompts of the requests that began.", ENGINE)
GENERATION_TOKENS = _counter("vllm:generation_tokens", "Tokens that were generated and published.", ENGINE)
TAKEOVERS = _counter(
    "penstock_takeovers", "Requests that a worker continued after another one had left them unfinished.", ENGINE
)
SEATS_RECEIVED = _counter("penstock_seats_received", "Seats of the requests that arrived at a worker.", ENGINE)
ACTIVE = _gauge("penstock_requests_active", "Requests that run or wait at a worker.", ENGINE)

# What the stages count.
REQUESTS = _counter(
    "penstock_requests",
    "Requests that ended, by outcome: completed, refused, failed, cancelled or expired.",
    ("outcome",),
)
REFUSALS = _counter(
    "penstock_refusals", "Requests that were refused or failed, by the code of their error.", ("reason",)
)
RATE_REFUSALS = _counter(
    "penstock_rate_refusals",
    "Requests refused as their tenant had used up its requests or tokens a minute, by where: bridge or stage.",
    ("where",),
)
RATE_CONFLICTS = _counter(
    "penstock_rate_conflicts", "Charges that were made again, as another process had changed the account."
)
DEAD_LETTERS = _counter("penstock_dead_letters", "Messages that became dead letters, by the stage.", ("stage",))
REDELIVERIES = _counter(
    "penstock_redeliveries",
    "Messages that came again to a stage, by reason: turn, in a lane where jobs are given back so that other tenants "
    "go first, or failure.",
    ("stage", "reason"),
)
RETRIES = _counter("penstock_retries", "Messages that a stage gave back after a failure, to try again.", ("stage",))
QUEUE_DEPTH = _gauge(
    "penstock_queue_depth", "Requests in the lane of a model, by priority.", ("model_name", "priority")
)
RETURNED = _gauge(
    "penstock_requests_returned",
    "Requests that a worker left when it ended, and that wait for another one, by the copy of the batch stage.",
    ("model_name",),
)
OLDEST_WAITING = _gauge(
    "penstock_oldest_waiting_seconds",
    "How long the first request in the lane of a model has waited; 0 if none waits.",
    ("model_name", "priority"),
)
ACCEPTING = _gauge(
    "penstock_accepting",
    "Whether the lane of a model takes requests of this priority: 1 or 0.",
    ("model_name", "priority"),
)
SEATS_SENT = _counter("penstock_seats_sent", "Seats of the requests that the batch stage sent to workers.")
SEATS_IN_FLIGHT = _gauge("penstock_seats_in_flight", "Seats sent to a worker that it has not counted yet.", ("engine",))
BATCH_SIZE = _histogram(
    "penstock_batch_size", "Requests that the batch stage sent to a worker together.", (1, 2, 4, 8, 16, 32, 64), ()
)

# What the HTTP bridge counts.
HTTP_REQUESTS = _counter(
    "http_requests", "HTTP requests that were answered, by method, route and status.", ("method", "handler", "status")
)
HTTP_DURATION = _histogram(
    "http_request_duration_seconds",
    "From the head of an HTTP request to the end of its answer.",
    _PHASE,
    ("method", "handler"),
)
CANARY = _gauge("penstock_answering", "Whether requests are answered, as the bridge finds by asking itself: 1 or 0.")
HTTP_OPEN = _gauge("http_requests_in_progress", "HTTP requests that are being answered.")

# What every process counts.
LOOP_LAG = _histogram(
    "penstock_event_loop_lag_seconds", "How late the event loop of a process runs a timer.", _LAG, ("process",)
)


def exposed() -> bytes:
    """What this process has counted, in Prometheus's text format."""
    return generate_latest(REGISTRY)


def serve_metrics(host: str, port: int | None, shown: Collector = REGISTRY) -> None:
    """Answer Prometheus on this port from now on, in a thread; without a port do nothing. Raises `StartupError`."""
    if port is None:
        return
    registry = CollectorRegistry(auto_describe=False)
    registry.register(shown)
    try:
        start_http_server(port, host, registry)
    except OSError as error:
        raise StartupError(
            f"metrics cannot be served on {host} port {port}: {error.strerror}; choose another --metrics-port"
        ) from None


class Exposition(Collector):
    """What this process and others have counted, in one: metrics of the same name are joined.

    Samples with the same labels are added up, which is right for counters and histograms; gauges of several processes
    differ in a label.
    """

    def __init__(self, texts: Callable[[], Iterable[bytes]], *others: Collector) -> None:
        """`texts` returns what other processes have `exposed`; `others` are shown beside what this one has counted."""
        self._texts, self._collectors = texts, (REGISTRY, *others)

    def collect(self) -> Iterator[Metric]:
        merged: dict[str, Metric] = {}
        for metric in self._every():
            known = merged.get(metric.name)
            if known is None:
                merged[metric.name] = known = Metric(metric.name, metric.documentation, metric.type)
            known.samples += metric.samples
        for metric in merged.values():
            totals: dict[tuple[object, ...], float] = {}
            for sample in metric.samples:
                key = sample.name, *sorted(sample.labels.items())
                totals[key] = totals.get(key, 0.0) + sample.value
            metric.samples = []
            for (name, *labels), value in totals.items():
                metric.add_sample(str(name), dict(labels), value)  # type: ignore[arg-type]
            yield metric

    def text(self) -> bytes:
        """All of it in Prometheus's text format."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return generate_latest(registry)

    def _every(self) -> Iterator[Metric]:
        for collector in self._collectors:
            yield from collector.collect()
        for text in self._texts():
            yield from text_string_to_metric_families(text.decode())
