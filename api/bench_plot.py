"""What `bench serve` found, drawn over concurrency: as SVG, or as PNG where matplotlib is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from html import escape
from math import floor, log, log10
from pathlib import Path
from typing import Any

from ..schemas.errors import StartupError

WIDTH, HEIGHT = 440, 320  # of a panel
LEFT, RIGHT, TOP, BOTTOM = 72, 16, 64, 52  # margins around its axes
COLOURS = ("#0b6bcb", "#c2410c")  # apart for the colour-blind too
X_LABEL = "concurrent requests"

Panels = dict[str, dict[str, list[float | None]]]  # label of the y axis → name of a curve → a value for each x


def check_format(path: Path) -> None:
    """Raise `StartupError` where `draw` could not make this file."""
    if path.suffix not in (".svg", ".png"):
        raise StartupError(f"--plot {path}: name a file that ends in .svg or .png")
    if path.suffix == ".png" and importlib.util.find_spec("matplotlib") is None:
        raise StartupError(f"--plot {path}: PNG needs matplotlib, which is not installed; name an .svg file instead")


def draw(path: Path, title: str, levels: Sequence[dict[str, Any]]) -> None:
    """Write the plot in the format that the file's ending says. Raises `StartupError`."""
    panels: Panels = {
        "output tokens a second": {"throughput": [level["output_tokens_per_second"] for level in levels]},
        "time to first token, ms": {
            name: [level["ttft_ms"][key] for level in levels] for name, key in (("median", "p50"), ("p99", "p99"))
        },
    }
    try:
        (_png if path.suffix == ".png" else _svg)(path, title, [level["concurrency"] for level in levels], panels)
    except OSError as error:
        raise StartupError(f"cannot write {path}: {error.strerror}") from error


def _svg(path: Path, title: str, concurrencies: list[int], panels: Panels) -> None:
    width = WIDTH * len(panels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT}" width="{width}" height="{HEIGHT}" '
        'font-family="system-ui, sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>',
        _text(LEFT, 24, title, "start", 'font-size="14"'),
    ]
    for place, (label, curves) in enumerate(panels.items()):
        parts += [f'<g transform="translate({place * WIDTH} 0)">', *_panel(concurrencies, label, curves), "</g>"]
    path.write_text("\n".join([*parts, "</svg>\n"]), encoding="utf-8")


def _panel(concurrencies: list[int], label: str, curves: dict[str, list[float | None]]) -> list[str]:
    step = _step(max((y for values in curves.values() for y in values if y is not None), default=1.0))
    span = log(concurrencies[-1] / concurrencies[0])
    bottom, right, middle = HEIGHT - BOTTOM, WIDTH - RIGHT, (TOP + HEIGHT - BOTTOM) / 2
    turned = f'transform="rotate(-90 16 {middle})"'
    across = [
        LEFT + 16 + (right - LEFT - 32) * (log(x / concurrencies[0]) / span if span else 0.5) for x in concurrencies
    ]
    up = [bottom - tick * (bottom - TOP) / 4 for tick in range(5)]
    parts = [f'<path d="M{LEFT} {y}H{right}" stroke="{"#ddd" if tick else "#222"}"/>' for tick, y in enumerate(up)]
    parts += [_text(LEFT - 6, y + 4, f"{tick * step:,.10g}", "end") for tick, y in enumerate(up)]
    parts += [_text(x, bottom + 18, str(name), "middle") for x, name in zip(across, concurrencies, strict=True)]
    parts += [
        _text((LEFT + right) / 2, HEIGHT - 12, X_LABEL, "middle"),
        _text(16, middle, label, "middle", turned),
    ]
    for place, ((name, values), colour) in enumerate(zip(curves.items(), COLOURS, strict=False)):
        points = [
            (f"{x:.1f}", f"{bottom - y / step * (bottom - TOP) / 4:.1f}", f"{y:,.4g}")
            for x, y in zip(across, values, strict=True)
            if y is not None
        ]
        line = " ".join(f"{x},{y}" for x, y, _ in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [
            f'<circle cx="{x}" cy="{y}" r="4" fill="{colour}"><title>{value}</title></circle>' for x, y, value in points
        ]
        parts.append(_text(LEFT + 110 * place, TOP - 16, f"● {name}", "start", f'fill="{colour}"'))
    return parts


def _step(most: float) -> float:
    """A round number, four of which reach `most`."""
    unit = 10.0 ** floor(log10(most / 4)) if most > 0 else 1.0
    return unit * next((factor for factor in (1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 6, 8) if 4 * factor * unit >= most), 10)


def _text(x: float, y: float, text: str, anchor: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {more}>{escape(text)}</text>'


def _png(path: Path, title: str, concurrencies: list[int], panels: Panels) -> None:
    size = (WIDTH * len(panels) / 80, HEIGHT / 80)
    figure = importlib.import_module("matplotlib.figure").Figure(size, layout="constrained")
    figure.suptitle(title)
    for axes, (label, curves) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
        for (name, values), colour in zip(curves.items(), COLOURS, strict=False):
            axes.plot(concurrencies, [float("nan") if y is None else y for y in values], "o-", label=name, color=colour)
        axes.set(xlabel=X_LABEL, ylabel=label, xscale="log", ylim=(0, None))
        axes.set_xticks(concurrencies, [str(x) for x in concurrencies])
        axes.minorticks_off()
        axes.legend()
    figure.savefig(path, dpi=160)
