"""`/metrics` for Prometheus and `/server/stats` for people: both tell what this server and its workers have counted."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ...config.metrics import Exposition
from ...schemas.errors import BrokerUnavailable
from ...streams.family import FamilyMetrics
from ...streams.port import Backlog, Usage
from ...streams.topology import DEAD, EVENTS, PRIORITIES, consumed_by
from .models.catalogue import check_admin
from .openapi import refusals
from .requests import Gateway

LOOK = 5.0  # seconds between two questions to the broker, where nobody waits for the answer
FRESH = 1.0  # seconds for which what the broker has said about its streams is used again
_OF_STREAMS = {
    "messages": "Messages in a stream, or entries of a bucket.",
    "bytes": "Bytes of a stream or bucket.",
    "max_bytes": "The limit of a stream or bucket in bytes; 0 for none.",
    "behind": "Messages that the slowest copy of a stream lacks.",
    "away": "Copies of a stream whose servers are gone or have not caught up.",
    "consumers": "Consumers of a stream.",
}
_OF_BACKLOGS = {
    "pending": "Messages of a stream that no copy of its stage has received yet.",
    "leased": "Messages of a stream that its stage works on: delivered and not acknowledged.",
    "redelivered": "Those of penstock_consumer_leased that were delivered more than once.",
}
States = Callable[[], Awaitable[Any]]


class Snapshot:
    """Everything that was counted, by the names of its samples."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._samples = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in families
            for sample in family.samples
        }

    def total(self, name: str, **labels: str) -> float:
        """The sum over all samples of this name that have these labels."""
        return sum(self.values(name, **labels))

    def values(self, name: str, **labels: str) -> list[float]:
        """All samples of this name that have these labels."""
        wanted = labels.items()
        return [value for (known, given), value in self._samples.items() if known == name and wanted <= set(given)]

    def since(self, before: Snapshot) -> Snapshot:
        """What was counted after `before`: right for counters and histograms, whose processes have not restarted."""
        later = Snapshot(())
        later._samples = {key: max(0.0, value - before._samples.get(key, 0.0)) for key, value in self._samples.items()}
        return later

    def mean(self, name: str) -> float | None:
        """Of the histogram `name`; None while it is empty."""
        count = self.total(f"{name}_count")
        return self.total(f"{name}_sum") / count if count else None

    def quantile(self, name: str, share: float) -> float | None:
        """Of the histogram `name`, linear within a bucket, as Prometheus estimates it; None while it is empty."""
        counts: dict[float, float] = {}
        for (known, labels), value in self._samples.items():
            if known == f"{name}_bucket":
                bound = float(dict(labels)["le"])
                counts[bound] = counts.get(bound, 0.0) + value
        bounds = sorted(counts)
        if not bounds or not counts[bounds[-1]]:
            return None
        rank, low, before = share * counts[bounds[-1]], 0.0, 0.0
        for bound in bounds[:-1]:
            if counts[bound] >= rank:
                return low + (bound - low) * (rank - before) / (counts[bound] - before)
            low, before = bound, counts[bound]
        return low


class Deployment(Collector):
    """What the broker and the registry know: the streams, the workers and the states of the models."""

    def __init__(self, gateway: Gateway, states: States) -> None:
        self._gateway, self._states = gateway, states
        self.used: list[Usage] = []  # set by look
        self.backlogs: list[Backlog] = []  # set by look, of the streams that stages consume
        self.models: list[dict[str, Any]] = []  # set by look
        self._workers: dict[str, int] = {}  # how many of each model
        self._looked = float("-inf")
        self._looking = asyncio.Lock()

    async def look(self) -> None:
        """Ask the broker, unless somebody has just now; while it is away the last answer stands.

        `collect` runs in other threads and shows what was found here.
        """
        registry = self._gateway.registry
        live = Counter(worker.model.name for worker in registry.workers)
        self._workers = {name: live[name] for name in {*registry.models, *live}}
        async with self._looking:
            if time.monotonic() - self._looked < FRESH:
                return
            try:
                async with asyncio.timeout(2.0):
                    self.used = await self._gateway.broker.usage()
                    self.models = (await self._states())["models"]
                    self.backlogs = await self._gateway.broker.backlogs(_consumed(self.used))
            except (BrokerUnavailable, TimeoutError):
                pass  # `penstock_broker_connected` tells
            self._looked = time.monotonic()

    def collect(self) -> Iterator[Metric]:
        broker = self._gateway.broker
        yield _gauge(
            "penstock_broker_connected", "Whether the broker is connected: 1 or 0.", [], [([], broker.connected)]
        )
        yield _gauge("penstock_broker_outages", "Outages of the broker so far.", [], [([], broker.outages)])
        for field, text in _OF_STREAMS.items():
            samples = [([used.name], float(getattr(used, field))) for used in self.used]
            yield _gauge(f"penstock_stream_{field}", text, ["stream"], samples)
        yield _gauge(
            "penstock_stream_leader",
            "1 for the server of a cluster that leads the copies of a stream.",
            ["stream", "server"],
            [([used.name, used.leader], 1) for used in self.used if used.leader],
        )
        for field, text in _OF_BACKLOGS.items():
            yield _gauge(
                f"penstock_consumer_{field}",
                text,
                ["stage", "priority", "stream"],
                [([*consumed_by(each.stream), each.stream], float(getattr(each, field))) for each in self.backlogs],
            )
        workers = [([name], count) for name, count in self._workers.items()]
        yield _gauge("penstock_workers", "Live workers of a model.", ["model_name"], workers)
        yield _gauge(
            "penstock_model_state",
            "1 for the state that a model is in.",
            ["model_name", "state"],
            [([model["id"], model["state"]], 1) for model in self.models],
        )
        yield _gauge(
            "penstock_model_loads",
            "How often a model was loaded.",
            ["model_name"],
            [([model["id"]], model["loads"]) for model in self.models],
        )


class MetricsRoutes:
    def __init__(self, gateway: Gateway, family: FamilyMetrics, states: States) -> None:
        self._gateway = gateway
        self.deployment = Deployment(gateway, states)
        self.whole = Exposition(family.texts, self.deployment)

    def add_to(self, app: FastAPI) -> None:
        app.get("/metrics", tags=["operations"], response_class=Response, responses=refusals(403))(self.metrics)
        app.get("/server/stats", tags=["operations"], responses=refusals(403))(self.stats)

    async def keep_fresh(self) -> None:
        """Ask the broker now and then, for those who read `whole` elsewhere; until cancelled."""
        while True:
            await self.deployment.look()
            await asyncio.sleep(LOOK)

    async def metrics(self, request: Request) -> Response:
        """All metrics of this server and its workers, in Prometheus's text format."""
        check_admin(request)
        await self.deployment.look()
        return Response(await asyncio.to_thread(self.whole.text), headers={"content-type": CONTENT_TYPE_LATEST})

    async def stats(self, request: Request) -> Any:
        """The figures that matter most, since the start of the processes that counted them.

        Times are in milliseconds; those of requests are as the workers measured them. `tokens_per_second` is that of
        the last ten seconds.
        """
        check_admin(request)
        await self.deployment.look()
        counted = Snapshot(self.whole.collect())
        queries = counted.total("vllm:prefix_cache_queries_total")
        steps = counted.total("penstock_engine_steps_total")
        lanes = {priority: int(counted.total("penstock_queue_depth", priority=priority)) for priority in PRIORITIES}
        latency = "vllm:e2e_request_latency_seconds"
        return {
            "requests_total": int(counted.total("penstock_requests_total")),
            "requests": {
                outcome: int(counted.total("penstock_requests_total", outcome=outcome))
                for outcome in ("completed", "refused", "failed", "cancelled", "expired")
            },
            "requests_active": int(counted.total("penstock_requests_active")) + sum(lanes.values()),
            "prompt_tokens_total": int(counted.total("vllm:prompt_tokens_total")),
            "generation_tokens_total": int(counted.total("vllm:generation_tokens_total")),
            "tokens_per_second": round(counted.total("penstock_tokens_per_second"), 2),
            "avg_ttft_ms": _ms(counted.mean("vllm:time_to_first_token_seconds")),
            "p99_ttft_ms": _ms(counted.quantile("vllm:time_to_first_token_seconds", 0.99)),
            "avg_latency_ms": _ms(counted.mean(latency)),
            "p99_latency_ms": _ms(counted.quantile(latency, 0.99)),
            "batch_size_avg": round(counted.total("penstock_engine_tokens_total") / steps, 2) if steps else None,
            "cache_hit_rate": (round(counted.total("vllm:prefix_cache_hits_total") / queries, 4) if queries else None),
            "queue_depth": lanes,
            "takeovers_total": int(counted.total("penstock_takeovers_total")),
            "dead_letters": int(counted.total("penstock_stream_messages", stream="DEAD")),
            "workers": [
                {"id": card.id, "model": card.model.name, "capacity": card.capacity}
                for card in self._gateway.registry.workers
            ],
        }


def _consumed(used: Iterable[Usage]) -> list[str]:
    """The streams from which stages take their work. Those of EVENTS are clients, one a request."""
    return [each.name for each in used if each.consumers and each.name not in (DEAD, EVENTS) and each.name.isupper()]


def _gauge(name: str, text: str, labels: list[str], samples: Iterable[tuple[list[str], float]]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=labels)
    for values, value in samples:
        family.add_metric(values, value)
    return family


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 2)
