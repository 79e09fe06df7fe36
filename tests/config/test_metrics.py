"""Metrics of several processes in one: nothing is counted twice, lost, or mixed up."""

from __future__ import annotations

import socket

import pytest
import requests
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from penstock.config.metrics import Exposition, serve_metrics
from penstock.schemas.errors import StartupError


def exposed(worker: str, numbers: list[float]) -> bytes:
    registry = CollectorRegistry()
    counter = Counter("test_events", "Events.", ("kind",), registry=registry)
    gauge = Gauge("test_level", "A level.", ("engine",), registry=registry)
    histogram = Histogram("test_seconds", "Times.", registry=registry, buckets=(1, 10, 100))
    for number in numbers:
        counter.labels("even" if number % 2 == 0 else "odd").inc()
        gauge.labels(worker).set(number)
        histogram.observe(number)
    return generate_latest(registry)


@settings(deadline=None, max_examples=10)  # one takes a third of a second
@given(st.lists(st.lists(st.integers(0, 1000), max_size=8), max_size=4))
def test_the_whole_is_the_sum_of_its_parts(parts: list[list[int]]) -> None:
    texts = [exposed(f"w{place}", list(map(float, numbers))) for place, numbers in enumerate(parts)]
    together = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(Exposition(lambda: texts).text().decode())
        for sample in family.samples
    }
    every = [number for numbers in parts for number in numbers]
    for kind, rest in (("even", 0), ("odd", 1)):
        expected = sum(number % 2 == rest for number in every)
        assert together.get(("test_events_total", (("kind", kind),)), 0) == expected
    for place, numbers in enumerate(parts):
        assert together.get(("test_level", (("engine", f"w{place}"),))) == (numbers[-1] if numbers else None)
    if parts:
        assert together["test_seconds_count", ()] == len(every)
        assert together["test_seconds_bucket", (("le", "10.0"),)] == sum(number <= 10 for number in every)


def test_a_port_that_is_taken_is_told() -> None:
    serve_metrics("127.0.0.1", None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartupError, match=f"port {port}.*--metrics-port"):
            serve_metrics("127.0.0.1", port)
    serve_metrics("127.0.0.1", port)
    assert "penstock_requests_total" in requests.get(f"http://127.0.0.1:{port}/metrics", timeout=10).text
