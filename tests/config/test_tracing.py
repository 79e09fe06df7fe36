"""Whether there is a tracer, and what of a client's trace is believed."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import requests
import structlog
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SpanExporter, SpanExportResult

from penstock.config.settings import Settings
from penstock.config.tracing import ENDPOINTS, is_traceparent, span_context, tracing
from penstock.schemas.errors import StartupError


async def test_without_a_collector_there_is_no_tracer() -> None:
    async with tracing(Settings(), "test") as tracer:
        assert tracer is None


@pytest.mark.parametrize("by_variable", [False, True])
async def test_without_the_sdk_a_collector_is_an_error(monkeypatch: pytest.MonkeyPatch, by_variable: bool) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    if by_variable:
        monkeypatch.setenv(ENDPOINTS[1], "http://127.0.0.1:9")
    settings = Settings() if by_variable else Settings(otlp_endpoint="http://127.0.0.1:9")
    with pytest.raises(StartupError, match=r"penstock\[otel\]"):
        async with tracing(settings, "test"):
            pass


@pytest.mark.parametrize("answers", [True, False])
async def test_a_collector_that_does_not_answer_holds_no_process_up(
    monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    got, going_on = threading.Event(), threading.Event()

    class Collector(SpanExporter):
        def __init__(self, endpoint: str, session: object) -> None:
            assert endpoint == "http://127.0.0.1:9/v1/traces"

        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            got.set()
            if not answers:
                going_on.wait()
            return SpanExportResult.SUCCESS

    name = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(OTLPSpanExporter=Collector))
    if not answers:
        monkeypatch.setattr("penstock.config.tracing.END_TIMEOUT", 0.01)
    with structlog.testing.capture_logs() as logged:
        async with tracing(Settings(otlp_endpoint="http://127.0.0.1:9"), "test") as tracer:
            assert tracer is not None
            tracer.start_span("a request").end()
    late = "the collector of traces does not answer, the last ones are lost"
    assert [line["event"] for line in logged] == ([] if answers else [late])
    going_on.set()
    assert got.wait(60)


@pytest.mark.parametrize(
    ("address", "takes"), [("127.0.0.1", False), ("localhost", False), ("[::1]", False), ("collector.example", True)]
)
@pytest.mark.parametrize("by_variable", [False, True])
async def test_a_collector_of_this_machine_is_not_asked_by_a_proxy(
    monkeypatch: pytest.MonkeyPatch, address: str, takes: bool, by_variable: bool
) -> None:
    sessions: list[requests.Session | None] = []

    def exporter(endpoint: str | None, session: requests.Session | None) -> SpanExporter:
        sessions.append(session)
        return ConsoleSpanExporter()

    name = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(OTLPSpanExporter=exporter))
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    url = f"http://{address}:4318"
    if by_variable:
        monkeypatch.setenv(ENDPOINTS[1], url)
    async with tracing(Settings() if by_variable else Settings(otlp_endpoint=url), "test"):
        (session,) = sessions
    proxies = (session or requests.Session()).merge_environment_settings(url, {}, None, None, None)["proxies"]
    assert bool(proxies) == takes


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331",
        "00-0AF7651916CD43DD8448EB211C80319C-B7AD6B7169203331-01",
        "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01\r\nx: y",
    ],
)
def test_a_malformed_trace_is_none(header: str | None) -> None:
    assert not is_traceparent(header)
    assert span_context(header) is None


def test_zeros_name_no_span() -> None:
    assert span_context(f"00-{'0' * 32}-{'0' * 16}-01") is None
