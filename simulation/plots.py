"""Plots of a run: SVG files that any browser shows, and a page with all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise
from math import ceil, floor, log10
from pathlib import Path

from .figures import percentile
from .found import Found

WIDTH, HEIGHT = 900, 320
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 40, 60
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#555555")
BUCKETS = 100  # of a run's time, in each of which percentiles are taken
MOST_LINES = len(COLOURS)

Line = Sequence[tuple[float, float]]  # seconds and values


def write_plots(found: Found, directory: Path) -> list[Path]:
    """Write the files, the page last; the directory is made if need be. Raises `OSError`."""
    directory.mkdir(parents=True, exist_ok=True)
    written = []
    for name, (title, unit, lines) in _plots(found).items():
        written.append(directory / f"{name}.svg")
        written[-1].write_text(chart(title, unit, lines, found.happened), "utf-8")
    page = "".join(f'<p><img src="{file.name}" alt="{file.stem}"></p>\n' for file in written)
    written.append(directory / "index.html")
    head = '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>Simulation</title>\n'
    written[-1].write_text(f"{head}{page}</html>\n", "utf-8")
    return written


def chart(title: str, unit: str, lines: Mapping[str, Line], marks: Sequence[tuple[float, str]] = ()) -> str:
    """An SVG of lines over time, with a dashed line at each of `marks`."""
    points = [point for line in lines.values() for point in line]
    right = max((x for x, _ in points), default=1.0) or 1.0
    step = _step(max((y for _, y in points), default=1.0) or 1.0)
    top = step * max(1, ceil(max((y for _, y in points), default=1.0) / step))

    def at(x: float, y: float) -> str:
        across = LEFT + (WIDTH - LEFT - RIGHT) * x / right
        return f"{across:.1f},{HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * y / top:.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="15">{escape(title)}</text>',
    ]
    for number in range(round(top / step) + 1):
        x, y = at(0, number * step).split(",")
        parts.append(f'<line x1="{x}" y1="{y}" x2="{WIDTH - RIGHT}" y2="{y}" stroke="#ddd"/>')
        text = f"{number * step:,.10g}"
        parts.append(f'<text x="{LEFT - 6}" y="{float(y) + 4:.1f}" text-anchor="end">{text}</text>')
    across = _step(right)
    for number in range(floor(right / across) + 1):
        x = at(number * across, 0).split(",")[0]
        parts.append(f'<text x="{x}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{number * across:,.10g} s</text>')
    for moment, what in marks:
        x = at(min(moment, right), 0).split(",")[0]
        parts.append(
            f'<line x1="{x}" y1="{TOP}" x2="{x}" y2="{HEIGHT - BOTTOM}" stroke="#999" stroke-dasharray="4 3">'
            f"<title>{escape(what)}</title></line>"
        )
    for (name, line), colour, number in zip(lines.items(), COLOURS, range(len(lines)), strict=False):
        path = " ".join(at(x, y) for x, y in line)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        start = LEFT + number * (WIDTH - LEFT - RIGHT) / max(len(lines), 4)
        parts.append(f'<text x="{start:.0f}" y="{HEIGHT - 12}" fill="{colour}">{escape(name)}</text>')
    parts.append(f'<text x="{WIDTH - RIGHT}" y="20" text-anchor="end">{escape(unit)}</text></svg>\n')
    return "\n".join(parts)


def _plots(found: Found) -> dict[str, tuple[str, str, Mapping[str, Line]]]:
    moments = found.moments
    spans = [(a, b) for a, b in pairwise(moments) if b.at > a.at]
    answered = [(b.at, (b.ended - a.ended) / (b.at - a.at)) for a, b in spans]
    tokens = [(b.at, (b.tokens - a.tokens) / (b.at - a.at)) for a, b in spans]
    busy = [(b.at, 100 * (b.busy - a.busy) / (b.at - a.at) / max(1, a.workers)) for a, b in spans]
    lines = {"waiting": [(m.at, float(m.waiting)) for m in moments]}
    lines["running"] = [(m.at, float(m.running)) for m in moments]
    workers = {"workers": [(m.at, float(m.workers)) for m in moments]}
    return {
        "requests": ("Requests that end", "requests / s", {"ended": answered}),
        "tokens": ("Output", "tokens / s", {"tokens": tokens}),
        "first-tokens": ("Time to the first token, 99th percentile", "seconds", _first_tokens(found)),
        "waiting": ("Requests that wait and run", "requests", lines),
        "utilisation": ("Time that workers compute", "per cent", {"busy": busy}),
        "workers": ("Workers that live", "workers", workers),
    }


def _first_tokens(found: Found) -> Mapping[str, Line]:
    """A line for each of the sources with the most requests."""
    tallies = sorted(found.ledger.tallies.items(), key=lambda each: (-each[1].begun, each[0]))[:MOST_LINES]
    width, lines = max(found.seconds, 1.0) / BUCKETS, {}
    for source, tally in tallies:
        buckets: dict[int, list[float]] = {}
        start = found.began
        for at, seconds in zip(tally.first_at, tally.first, strict=True):
            buckets.setdefault(int((at - start) / width), []).append(seconds)
        name = f"{source.tenant} {source.priority} {source.model}"
        lines[name] = [((n + 0.5) * width, percentile(each, 99) or 0.0) for n, each in sorted(buckets.items())]
    return lines


def _step(most: float) -> float:
    """A round distance between grid lines, of which there are about five."""
    size = 10.0 ** floor(log10(most / 5))
    return next(size * factor for factor in (1, 2, 5, 10) if size * factor >= most / 5)
