"""What `penstock bench chaos` prints of what it found."""

from __future__ import annotations

from collections import Counter
from typing import Any

from .. import report as bench_report
from ..report import milliseconds, number


def outcome(found: dict[str, Any]) -> list[object]:
    """Lines and a table."""
    laws = Counter(one["law"] for one in found["raw"])
    title = "{requests} requests: {lost} lost, {doubled} doubled, {different} different; {seats_leaked} seats leaked; "
    title = title.format_map(found) + f"{len(found['raw'])} broken laws"
    undisturbed, disturbed = found["model_loads"]
    if undisturbed:
        title += f"; models loaded {undisturbed} times undisturbed, {disturbed} times disturbed"
    clients = ", ".join(f"clients {what} {count}" for what, count in found["detours"].items())
    columns = ("times", "recovered", "after, ms, p50", "max", "longest pause, ms")
    recoveries = bench_report.numbers_table(("fault",), columns)
    for kind in dict.fromkeys(one["kind"] for one in found["strikes"]):
        those = [one for one in found["strikes"] if one["kind"] == kind]
        away, pauses = ([one[name] for one in those] for name in ("away", "longest_pause"))
        back = sum(one is not None for one in away)
        figures = milliseconds(away, 50), milliseconds(away, 100), milliseconds(pauses, 100)
        recoveries.add_row(kind, *map(number, (len(those), back, *figures)))
    faults = [f"request {one['request']} {one['kind']}: {one['detail']}" for one in found["faults"]]
    raw = [f"{one['request']}: {one['law']}: {one['detail']}" for one in found["raw"]]
    counts = [f"{count} times broken: {law}" for law, count in laws.most_common()]
    return [title, *bench_report.shown(found["loads"]), clients, recoveries, *faults, *counts, *raw]
