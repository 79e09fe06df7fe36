"""A minute of more work than a running `penstock serve` can do: who is served, who is refused, and how fast.

    penstock serve MODEL --queue-limit 50 & python deploy/overload.py http://127.0.0.1:8000 [--times 5] [--seconds 60]

Measures the capacity first, with as many clients as a batch holds, and the time to the first token of requests of high
priority on the idle server. Then asks `--times` as often as can be answered: one in twenty of high priority, the rest
normal or low, each with a deadline. Prints outcomes by priority, and the memory of every process before and after.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path
from typing import Any

import typer

from penstock.api.bench.load import Client, Sample, closed_loop, open_loop
from penstock.api.bench.report import milliseconds
from penstock.api.bench.server import served_models

PRIORITIES = ("high", "normal", "low")


def resident() -> dict[str, int]:
    """MiB of each of Penstock's processes of this user."""
    found = {}
    for status in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = status.read_text().split("\0")
            if "penstock" in words or "nats-server" in words[0]:
                name = " ".join(words[words.index("penstock") + 1 :][:3]) if "penstock" in words else "broker"
                pages = int((status.parent / "statm").read_text().split()[1])
                found[f"{name.strip()} ({status.parent.name})"] = pages * 4096 >> 20
        except OSError:
            continue  # it has ended
    return found


async def main(url: str, times: float, seconds: float, at_once: int, deadline: float, tokens: int) -> None:
    client, chance = Client(url, time_limit=deadline + 30), random.Random(0)
    model = (await served_models(url))[0]
    samples: dict[str, list[Sample]] = {priority: [] for priority in PRIORITIES}

    async def ask(priority: str) -> Sample:
        prompt = " ".join(str(chance.random()) for _ in range(6))
        body: dict[str, Any] = {"model": model, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
        body |= {"stream": True, "priority": priority, "timeout": deadline}
        sample = await client.post("/v1/completions", body)
        samples[priority].append(sample)
        return sample

    await closed_loop(lambda: ask("normal"), lambda _: None, concurrency=at_once, seconds=5)  # warm
    samples["normal"].clear()
    await closed_loop(lambda: ask("normal"), lambda _: None, concurrency=at_once, seconds=10)
    capacity = len(samples["normal"]) / 10
    await closed_loop(lambda: ask("high"), lambda _: None, concurrency=1, requests=30)
    idle = milliseconds((sample.to_first for sample in samples["high"]), 50)
    for gone in samples.values():
        gone.clear()
    before = resident()
    print(f"capacity {capacity:.1f} requests/s; first token of a high one, idle: {idle:.1f} ms")

    def mixed() -> Any:
        return ask("high" if chance.random() < 0.05 else chance.choice(PRIORITIES[1:]))

    await open_loop(mixed, lambda _: None, rate=times * capacity, seconds=seconds)
    after = resident()
    for priority, those in samples.items():
        answered = [sample for sample in those if sample.error is None]
        refused = [sample for sample in those if (sample.error or "").startswith(("HTTP 503", "HTTP 429"))]
        late = [sample for sample in answered if sample.ended - sample.sent > deadline + 0.5]
        first = milliseconds((sample.to_first for sample in answered), 50)
        refusal = milliseconds((sample.ended - sample.sent for sample in refused), 50)
        outcomes = Counter((sample.error or "answered").partition(":")[0] for sample in those)
        print(f"{priority}: {len(those)} asked, {dict(outcomes)}")
        print(f"  first token p50 {first} ms, refusals p50 {refusal} ms, answered after their deadline {len(late)}")
    for name in sorted(before | after):
        print(f"{name}: {before.get(name, 0)} → {after.get(name, 0)} MiB")
    client.close()


def overload(
    url: str, times: float = 5.0, seconds: float = 60.0, at_once: int = 16, deadline: float = 10.0, tokens: int = 64
) -> None:
    """Ask a server so many times its capacity for so many seconds, and print who was served."""
    asyncio.run(main(url, times, seconds, at_once, deadline, tokens))


if __name__ == "__main__":
    typer.run(overload)
