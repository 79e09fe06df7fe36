"""What a run found, in figures: a document for programs, and tables of it for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from math import ceil
from typing import Any

from rich.table import Table

from .found import Found
from .laws import Tally

PERCENTILES = (50, 90, 99)


def document(found: Found) -> dict[str, Any]:
    """All figures. Times are in seconds of the simulation, and equal for equal scenarios."""
    ledger = found.ledger
    tallies = ledger.tallies.values()
    outcomes = sum((tally.outcomes for tally in tallies), Counter[str]())
    seconds = found.seconds or 1.0
    return {
        "scenario": found.scenario.model_dump(mode="json"),
        "seconds": found.seconds,
        "requests": sum(tally.sent for tally in tallies),
        "outcomes": dict(sorted(outcomes.items())),
        "requests_per_second": outcomes["done"] / seconds,
        "output_tokens": sum(tally.tokens for tally in tallies),
        "output_tokens_per_second": sum(tally.tokens for tally in tallies) / seconds,
        "utilisation": found.busy / found.lived if found.lived else 0.0,
        "takeovers": found.takeovers,
        "preemptions": found.preemptions,
        "cached_prompt_share": found.cached / found.looked_up if found.looked_up else 0.0,
        "sources": [
            {"tenant": tenant, "priority": priority, "model": model, **_of(tally, seconds)}
            for (tenant, priority, model), tally in sorted(ledger.tallies.items())
        ],
        "laws": {"broken": ledger.num_broken, "first": ledger.broken, "lowest_share": ledger.lowest_share},
        "events": [{"at": at, "what": what} for at, what in found.happened],
        "moments": [moment._asdict() for moment in found.moments],
    }


def percentile(values: Iterable[float], percent: float) -> float | None:
    """By nearest rank; None of none."""
    ordered = sorted(values)
    return ordered[max(0, ceil(len(ordered) * percent / 100) - 1)] if ordered else None


def tables(figures: dict[str, Any]) -> list[object]:
    """What `document` returned, for a terminal."""
    whole = Table(box=None, pad_edge=False, show_header=False)
    for name, text in {
        "simulated": f"{figures['seconds']:,.1f} s",
        "requests": f"{figures['requests']:,}, {figures['requests_per_second']:,.1f} answered / s",
        "output tokens": f"{figures['output_tokens']:,}, {figures['output_tokens_per_second']:,.0f} / s",
        "workers compute": f"{figures['utilisation']:.0%} of their time",
        "prompts in caches": f"{figures['cached_prompt_share']:.0%}",
        "takeovers": f"{figures['takeovers']:,}",
        "preemptions": f"{figures['preemptions']:,}",
    }.items():
        whole.add_row(name, text)
    share = figures["laws"]["lowest_share"]
    if share is not None:
        whole.add_row("lowest fair share", f"{share:.2f} of the most that another tenant got")
    by_source = Table("tenant", "priority", "model", box=None, pad_edge=False)
    ranks = " / ".join(f"p{percent}" for percent in PERCENTILES)
    for head in ("sent", "answered", "refused", f"TTFT {ranks}, ms", f"total {ranks}, ms", "tokens / s"):
        by_source.add_column(head, justify="right", no_wrap=True)
    for one in figures["sources"]:
        refused = ", ".join(f"{count:,} {code}" for code, count in one["outcomes"].items() if code != "done")
        times = [" / ".join(_ms(seconds) for seconds in one[kind].values()) for kind in ("ttft", "total")]
        by_source.add_row(
            one["tenant"],
            one["priority"],
            one["model"],
            f"{one['sent']:,}",
            f"{one['outcomes'].get('done', 0):,}",
            refused or "0",
            *times,
            f"{one['tokens_per_second']:,.0f}",
        )
    return [whole, "", by_source]


def _of(tally: Tally, seconds: float) -> dict[str, Any]:
    return {
        "sent": tally.sent,
        "outcomes": dict(sorted(tally.outcomes.items())),
        "tokens": tally.tokens,
        "tokens_per_second": tally.tokens / seconds,
        "ttft": {f"p{p}": percentile(tally.first, p) for p in PERCENTILES},
        "total": {f"p{p}": percentile(tally.total, p) for p in PERCENTILES},
    }


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:,.0f}"
