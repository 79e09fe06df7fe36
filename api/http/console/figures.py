"""The figures of the plots: what was counted over the last few seconds, as a client of the metrics would compute it."""

from __future__ import annotations

from collections import deque
from typing import Any

from ..metrics import Snapshot

WINDOW = 10.0  # seconds
_TTFT = "vllm:time_to_first_token_seconds"
_BETWEEN = "vllm:request_time_per_output_token_seconds"
_LATENCY = "vllm:e2e_request_latency_seconds"
_LAG = "penstock_event_loop_lag_seconds"
_OUTCOMES = ("completed", "refused", "failed", "cancelled", "expired")


class Figures:
    """Rates and quantiles of the newest `WINDOW` seconds. Times are in seconds."""

    def __init__(self) -> None:
        self._snapshots: deque[tuple[float, Snapshot]] = deque()  # with when each was taken; set by add
        self.shown: dict[str, Any] = {}  # those that are known; set by add

    def add(self, now: float, snapshot: Snapshot) -> None:
        """Take what is counted at `now`, in seconds of a monotonic clock."""
        self._snapshots.append((now, snapshot))
        while len(self._snapshots) > 2 and now - self._snapshots[1][0] >= WINDOW:
            self._snapshots.popleft()
        since, before = self._snapshots[0]
        found: dict[str, float | None] = {
            "tokens_per_second": snapshot.total("penstock_tokens_per_second"),
            "kv_cache": _mean(snapshot, "vllm:kv_cache_usage_perc"),
            "waiting": snapshot.total("penstock_queue_depth"),
            "oldest_waiting": max(snapshot.values("penstock_oldest_waiting_seconds"), default=None),
            "active": snapshot.total("penstock_requests_active"),
            "takeovers": snapshot.total("penstock_takeovers_total"),
        }
        if now > since:
            window = snapshot.since(before)
            seconds = now - since
            for outcome in _OUTCOMES:
                found[outcome] = window.total("penstock_requests_total", outcome=outcome) / seconds
            queries, steps = (
                window.total(name) for name in ("vllm:prefix_cache_queries_total", "penstock_engine_steps_total")
            )
            found |= {
                "ttft_p50": window.quantile(_TTFT, 0.5),
                "ttft_p99": window.quantile(_TTFT, 0.99),
                "between_p50": window.quantile(_BETWEEN, 0.5),
                "between_p99": window.quantile(_BETWEEN, 0.99),
                "latency_p50": window.quantile(_LATENCY, 0.5),
                "latency_p99": window.quantile(_LATENCY, 0.99),
                "loop_lag_p99": window.quantile(_LAG, 0.99),
                "prefix_hits": window.total("vllm:prefix_cache_hits_total") / queries if queries else None,
                "batch": window.total("penstock_engine_tokens_total") / steps if steps else None,
            }
        self.shown = {name: round(value, 5) for name, value in found.items() if value is not None}

    def of_worker(self, worker: str) -> dict[str, float]:
        """What is known of one worker."""
        if not self._snapshots:
            return {}
        _, snapshot = self._snapshots[-1]
        names = {
            "active": "penstock_requests_active",
            "tokens_per_second": "penstock_tokens_per_second",
            "kv_cache": "vllm:kv_cache_usage_perc",
            "takeovers": "penstock_takeovers_total",
            "generated": "vllm:generation_tokens_total",
        }
        known = {key: snapshot.values(name, engine=worker) for key, name in names.items()}
        return {key: round(sum(values), 4) for key, values in known.items() if values}


def _mean(snapshot: Snapshot, name: str) -> float | None:
    values = snapshot.values(name)
    return sum(values) / len(values) if values else None
