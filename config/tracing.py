"""Traces by OpenTelemetry: off unless a collector is named, or the program around Penstock has set up a provider.

The API alone is a dependency; the SDK and the exporter come with the extra `otel`. While tracing is off there is no
tracer, and all that remains is that a client's `traceparent` is passed on.

Source: https://www.w3.org/TR/trace-context/
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import threading
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import structlog
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, NonRecordingSpan, ProxyTracerProvider, Span, SpanContext, TraceFlags, Tracer

from ..schemas.errors import StartupError
from ..schemas.urls import is_loopback
from .settings import Settings

if TYPE_CHECKING:
    import requests
    from opentelemetry.sdk.trace import TracerProvider

log = structlog.get_logger(__name__)

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
END_TIMEOUT = 2.0  # seconds in which the last spans are exported
REASON = "penstock.link"  # attribute of a link: why it is there

_parse = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})").fullmatch


@contextlib.asynccontextmanager
async def tracing(settings: Settings, name: str) -> AsyncIterator[Tracer | None]:
    """The tracer of this process, called `name`; None while tracing is off. What is left is exported at the end.

    Raises `StartupError` where a collector is named and the SDK is not installed.
    """
    if settings.otlp_endpoint is None and not any(os.environ.get(variable) for variable in ENDPOINTS):
        given = trace.get_tracer_provider()
        yield None if isinstance(given, ProxyTracerProvider) else given.get_tracer("penstock")
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise StartupError(
            "traces need OpenTelemetry's SDK: install it with `pip install 'penstock[otel]'`, or leave --otlp-endpoint "
            "and OTEL_EXPORTER_OTLP_ENDPOINT out"
        ) from None
    base = settings.otlp_endpoint
    urls = (base, *(os.environ.get(variable) for variable in ENDPOINTS))
    exporter = OTLPSpanExporter(
        endpoint=f"{base.rstrip('/')}/v1/traces" if base else None,
        session=_session(next(url for url in urls if url)),
    )
    own = {"service.instance.id": f"{name}-{os.getpid()}"}
    if not os.environ.get("OTEL_SERVICE_NAME"):
        own["service.name"] = "penstock"
    provider = TracerProvider(resource=Resource.create(own), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    try:
        yield provider.get_tracer("penstock")
    finally:
        await _end(provider)


def _session(url: str) -> requests.Session | None:
    """One without the proxies of the environment, to which this machine's own addresses mean others; None where the
    exporter's own does, as for a collector elsewhere."""
    if not is_loopback(urlsplit(url).hostname or ""):
        return None
    import requests

    session = requests.Session()
    session.trust_env = False
    return session


async def _end(provider: TracerProvider) -> None:
    """Export what is left. A collector that does not answer gets END_TIMEOUT of it: the process must end in time."""
    ending = threading.Thread(target=provider.shutdown, daemon=True)
    ending.start()
    await asyncio.to_thread(ending.join, END_TIMEOUT)
    if ending.is_alive():
        log.warning("the collector of traces does not answer, the last ones are lost")


def is_traceparent(header: str | None) -> bool:
    """Whether it has the form of the W3C's trace context."""
    return header is not None and _parse(header) is not None


def span_context(traceparent: str | None) -> SpanContext | None:
    """The span that a header names; None where it names none."""
    found = _parse(traceparent or "")
    if found is None:
        return None
    trace_id, span_id, flags = (int(part, 16) for part in found.groups())
    context = SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(flags))
    return context if context.is_valid else None


def parent(traceparent: str | None) -> Context:
    """The context in which a span is a child of the one that the header names; else it begins a trace."""
    context = span_context(traceparent)
    return Context() if context is None else trace.set_span_in_context(NonRecordingSpan(context), Context())


def traceparent_of(span: Span) -> str:
    """The header by which the next message continues a span."""
    context = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def links(traceparent: str | None, reason: str) -> list[Link]:
    """A link to the span that a header names, if it names one."""
    context = span_context(traceparent)
    return [] if context is None else [Link(context, {REASON: reason})]


def link(span: Span, traceparent: str | None, reason: str) -> None:
    """Link a span to the one that a header names."""
    for each in links(traceparent, reason):
        span.add_link(each.context, each.attributes)
