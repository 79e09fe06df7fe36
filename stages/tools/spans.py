"""The spans of a response: one for each call of a tool, and how its turns belong together."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from opentelemetry import trace
from opentelemetry.trace import SpanKind, Tracer

from ...config.tracing import link, parent
from ...schemas.loops import LoopJob, LoopTool
from ..visits import CURRENT


@contextlib.contextmanager
def tool_span(tracer: Tracer | None, tool: LoopTool) -> Iterator[None]:
    """A span while a tool is called, inside that of the stage; what goes in and out stays untold."""
    if tracer is None:
        yield
        return
    visit = CURRENT.get()
    attributes = {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": tool.tool,
        "gen_ai.tool.type": "function" if tool.label == "functions" else "extension",
        "penstock.server_label": tool.label,
    }
    context = parent(visit.traceparent if visit else None)
    span = tracer.start_span(f"execute_tool {tool.tool}", context, SpanKind.INTERNAL, attributes)
    with trace.use_span(span, end_on_exit=True, record_exception=False):
        yield


def link_response(job: LoopJob) -> None:
    """Link the current span with that in which the response began."""
    visit = CURRENT.get()
    if visit is not None and visit.span is not None:
        link(visit.span, job.trace, "response")
