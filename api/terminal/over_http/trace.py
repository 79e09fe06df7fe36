"""`penstock trace`: where a request has been, as a waterfall."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Annotated

import orjson
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ....config import sources
from ....schemas.request_trace import RequestTrace, StageVisit
from ..options import ApiKey, ServerUrl, fatal_errors
from .chat_client import answer_of, server_at

WIDE = 200  # characters of a line, where no terminal has its own width
BAR = 32  # characters of the whole time
WAITS, PREPARES, WORKS = "░", "▒", "█"
_COLOURS = {"completed": "green", "running": "cyan", "waiting": "cyan", "cancelled": "yellow"}


def trace(
    id: Annotated[str, typer.Argument(help="Of the request: in the header x-request-id and in the log.")],
    tenant: Annotated[str | None, typer.Option(help="Whose request it is, with an admin's key.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the trace as JSON.")] = False,
    url: ServerUrl = None,
    api_key: ApiKey = None,
) -> None:
    """Show where a request has been: its stages, workers, takeovers, tool calls and its end.

    It may be under way, or have ended not longer ago than its events are kept.
    """
    with fatal_errors(), server_at(url, api_key, sources.load().settings) as server:
        found = answer_of(server, "GET", f"streams/{id}/trace" + (f"?tenant={tenant}" if tenant else ""))
    if as_json:
        typer.echo(orjson.dumps(found, option=orjson.OPT_INDENT_2))
        return
    console = Console(soft_wrap=True, highlight=False, width=None if sys.stdout.isatty() else WIDE)
    for each in lines(RequestTrace.model_validate(found, strict=False)):
        console.print(each)


def lines(trace: RequestTrace) -> Iterator[Text | Table]:
    """What a terminal shows of a trace."""
    end = trace.ended or trace.now
    yield Text.assemble(
        (trace.id, "bold"),
        f"  {trace.model or ''}  ",
        (trace.status, _COLOURS.get(trace.status, "red")),
        f"  {_counts(trace)}",
    )
    if trace.error is not None:
        yield Text(f"{trace.error['status']} {trace.error.get('code') or ''}: {trace.error['message']}", "red")
    table = Table("at", "stage", "took", "", "", box=None, pad_edge=False)
    table.columns[0].justify = table.columns[2].justify = "right"
    rows = [*_rows(trace, trace.began, max(end, trace.began + 1e-6), 0)]
    for _, row in sorted(rows, key=lambda each: each[0]):
        table.add_row(*row)
    yield table
    yield Text(f"{WAITS} waits  {PREPARES} until the first token  {WORKS} works", "dim")


def _rows(trace: RequestTrace, start: float, end: float, depth: int) -> Iterator[tuple[float, list[Text]]]:
    """The rows of a request and its turns, each with its time."""
    indent = "  " * depth

    def row(at: float, name: str, took: float | None, bar: str, note: str, style: str = "") -> tuple[float, list[Text]]:
        lasted = "" if took is None else _duration(took)
        return at, [
            Text(f"+{at - start:.3f}", "dim"),
            Text(indent + name),
            Text(lasted),
            Text(bar, "cyan"),
            Text(note, style),
        ]

    for visit in trace.stages:
        at = visit.entered or visit.began or visit.first_token or start
        left = visit.left or end
        name = f"{visit.stage} {visit.worker}" if visit.worker and visit.stage == "infer" else visit.stage
        yield row(at, name, left - at, _bar(visit, at, left, start, end), _note(visit))
    for call in trace.calls:
        at = call.began or call.ended or start
        left = call.ended or end
        name = f"call {call.label}/{call.name}" if call.name else f"list {call.label}"
        yield row(
            at,
            name,
            left - at,
            _blocks([(at, left, WORKS)], start, end),
            call.status,
            "red" * (call.status == "failed"),
        )
    for mark in trace.marks:
        style = {"takeover": "bold yellow", "preempted": "yellow", "end": "bold"}.get(mark.kind, "dim")
        yield row(mark.at, "·", None, _blocks([(mark.at, mark.at, "│")], start, end), mark.text, style)
    for turn in trace.turns:
        yield from _rows(turn, start, end, depth + 1)


def _bar(visit: StageVisit, at: float, left: float, start: float, end: float) -> str:
    began = visit.began or left
    first = visit.first_token or (left if visit.epoch else began)
    return _blocks([(at, began, WAITS), (began, first, PREPARES), (first, left, WORKS)], start, end)


def _blocks(parts: list[tuple[float, float, str]], start: float, end: float) -> str:
    """The parts of a bar on the scale of the whole; each that is not empty has at least one character."""
    cells = [" "] * BAR
    for since, until, block in parts:
        first = min(BAR - 1, max(0, int((since - start) / (end - start) * BAR)))
        last = min(BAR, max(0, round((until - start) / (end - start) * BAR)))
        for cell in range(first, max(last, first + 1)):
            if until > since or block == "│":
                cells[cell] = block
    return "".join(cells)


def _note(visit: StageVisit) -> str:
    notes = []
    if visit.attempt > 1:
        notes.append(f"attempt {visit.attempt}")
    if visit.stage == "batch" and visit.worker:
        notes.append(f"to {visit.worker}, {visit.batch_size or 1} together")
    if visit.stage == "batch" and visit.left is None:
        notes.append("waits for a worker or its first token")
    if visit.epoch is not None:
        notes.append(f"{visit.tokens} tokens" + (f" from {visit.from_token} on" if visit.from_token else ""))
        if visit.first_token and visit.last_token and visit.last_token > visit.first_token and visit.tokens > 1:
            notes.append(f"{(visit.tokens - 1) / (visit.last_token - visit.first_token):.1f} a second")
        if visit.preemptions:
            notes.append(f"preempted {visit.preemptions} times")
        if visit.ending in ("lost", "returned"):
            notes.append(visit.ending)
    return ", ".join(notes)


def _counts(trace: RequestTrace) -> str:
    parts = [_duration((trace.ended or trace.now) - trace.began)]
    if trace.first_token is not None:
        parts.append(f"first token after {_duration(trace.first_token - trace.began)}")
    if trace.usage is not None:
        cached = f", {trace.usage['cached_tokens']} cached" if trace.usage.get("cached_tokens") else ""
        parts.append(f"{trace.usage['prompt_tokens']} tokens in{cached}, {trace.usage['completion_tokens']} out")
    return "; ".join(parts)


def _duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"
