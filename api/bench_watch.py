"""One load and what counts of it: a bar while it runs, the CPU use beside it, its failures afterwards."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any

from rich.progress import Progress

from .bench_load import Sample, clock
from .bench_report import percentile


@dataclass(frozen=True, slots=True)
class Load:
    """What came of one load: its samples, warm-up included, and what counts of it."""

    samples: list[Sample]
    start: float  # of the span that counts, on `clock`
    end: float
    cores: dict[str, float]  # CPU use of each process in that span

    @property
    def counted(self) -> list[Sample]:
        """Those sent in the span that counts, without the failed."""
        return [sample for sample in self.samples if self.start <= sample.sent < self.end and sample.error is None]

    def details(self) -> dict[str, Any]:
        failures = Counter(sample.error for sample in self.samples if sample.error is not None)
        late = milliseconds((sample.late for sample in self.counted), 99)
        return {
            "requests": len(self.samples),
            "counted": len(self.counted),
            "failed": failures.total(),
            "failures": dict(failures.most_common(10)),
            "tokens": sum(sample.tokens for sample in self.samples),
            "sent_late_p99_ms": late,
            "cores": self.cores,
        }


async def watched(
    load: Coroutine[None, None, list[Sample]],
    *,
    warm_up: float,
    seconds: float,
    bars: Progress,
    label: str,
    cpu_times: Callable[[], dict[str, float]],
) -> Load:
    """Run a load that lasts `warm_up + seconds`, of which the latter count."""
    start = clock() + warm_up

    async def watch() -> dict[str, float]:
        bar = bars.add_task(label, total=warm_up + seconds)
        await asyncio.sleep(start - clock())
        before = cpu_times()
        while (left := start + seconds - clock()) > 0:
            bars.update(bar, completed=warm_up + seconds - left)
            await asyncio.sleep(min(left, 0.5))
        bars.update(bar, completed=warm_up + seconds)
        after = cpu_times()
        return {name: (after[name] - before[name]) / seconds for name in before.keys() & after.keys()}

    async with asyncio.TaskGroup() as group:
        watching = group.create_task(watch())
        samples = await load
    return Load(samples, start, start + seconds, watching.result())


def milliseconds(seconds: Iterable[float | None], percent: float) -> float | None:
    """A percentile of those that are there."""
    value = percentile([x for x in seconds if x is not None], percent)
    return None if value is None else 1000 * value
