"""vLLM's own Grafana dashboard shows our figures: Prometheus answers its queries from real scrapes.

The queries are those of vLLM's examples/observability/prometheus_grafana/grafana.json, by the titles of its panels.
"""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import pytest
import requests
from prometheus_client.parser import text_string_to_metric_families
from serving import Served, answers

MODEL = '{model_name="tiny"}'


def quantiles(metric: str) -> list[str]:
    """What vLLM's panels of a time show: four quantiles, and the mean."""
    return [
        *(
            f"histogram_quantile({share}, sum by(le) (rate(vllm:{metric}_bucket{MODEL}[5m])))"
            for share in (0.99, 0.95, 0.9, 0.5)
        ),
        f"rate(vllm:{metric}_sum{MODEL}[5m]) / rate(vllm:{metric}_count{MODEL}[5m])",
    ]


def rates(*names: str) -> list[str]:
    return [f"rate(vllm:{name}{MODEL}[5m])" for name in names]


PANELS = {
    "E2E Request Latency": quantiles("e2e_request_latency_seconds"),
    "Token Throughput": rates("prompt_tokens_total", "generation_tokens_total"),
    "Inter Token Latency": quantiles("inter_token_latency_seconds"),
    "Scheduler State": [f"vllm:num_requests_{state}{MODEL}" for state in ("running", "waiting")],
    "Time To First Token Latency": quantiles("time_to_first_token_seconds"),
    "Cache Utilization": [f"vllm:kv_cache_usage_perc{MODEL}"],
    "Request Prompt Length": [f"sum by(le) (increase(vllm:request_prompt_tokens_bucket{MODEL}[5m]))"],
    "Request Generation Length": [f"sum by(le) (increase(vllm:request_generation_tokens_bucket{MODEL}[5m]))"],
    "Finish Reason": [f"sum by(finished_reason) (increase(vllm:request_success_total{MODEL}[5m]))"],
    "Queue Time": rates("request_queue_time_seconds_sum"),
    "Requests Prefill and Decode Time": rates("request_prefill_time_seconds_sum", "request_decode_time_seconds_sum"),
    "Max Generation Token in Sequence Group": rates("request_max_num_generation_tokens_sum"),
}
MAY_BE_ZERO = {"Scheduler State", "Cache Utilization"}  # of an idle server


def scrape(url: str, ended: int) -> dict[str, float]:
    """All samples by their series, once that many requests more are counted than `ended`."""
    until = time.monotonic() + 30
    while True:
        text = requests.get(f"{url}/metrics", timeout=30).text
        found = {
            f"{sample.name}{{{','.join(f'{key}={json.dumps(value)}' for key, value in sample.labels.items())}}}": (
                sample.value
            )
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name.startswith("vllm:")
        }
        if (
            sum(value for key, value in found.items() if key.startswith("vllm:e2e_request_latency_seconds_count"))
            >= ended
        ):
            return found
        assert time.monotonic() < until


@pytest.fixture(scope="module")
def series(model_server: Served) -> list[dict[str, str]]:
    """What Prometheus has after two scrapes with requests between them."""
    answers(model_server.url, "tiny", ["warm"], 4, ignore_eos=True)
    before = scrape(model_server.url, 1)
    ended = sum(value for key, value in before.items() if key.startswith("vllm:e2e_request_latency_seconds_count"))
    answers(model_server.url, "tiny", ["one", "two", "three"], 8, ignore_eos=True)
    after = scrape(model_server.url, int(ended) + 3)
    return [{"series": name, "values": f"{before.get(name, 0)} {value}"} for name, value in after.items()]


@pytest.mark.parametrize("panel", PANELS)
def test_the_panel_shows_data(panel: str, series: list[dict[str, str]], tmp_path: Path) -> None:
    least = ">=" if panel in MAY_BE_ZERO else ">"  # neither has NaN
    asked = [{"expr": f"absent(({query}) {least} 0)", "eval_time": "1m", "exp_samples": []} for query in PANELS[panel]]
    test = {"interval": "1m", "input_series": series, "promql_expr_test": asked}
    (tmp_path / "panel.json").write_text(json.dumps({"evaluation_interval": "1m", "tests": [test]}))
    shown = subprocess.run(
        ["promtool", "test", "rules", "panel.json"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert shown.returncode == 0, shown.stdout + shown.stderr
