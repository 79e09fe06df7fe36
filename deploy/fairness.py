"""A tenant that floods beside one that does not: does the other get its share, as fast as if it were alone?

    penstock serve --port 8000 --api-keys good=sk-good-tenant,bad=sk-bad-tenant &
    python deploy/fairness.py http://127.0.0.1:8000 --good sk-good-tenant --bad sk-bad-tenant --rate 2 --times 10

Both send ordinary requests at an even rate, the flood so many `times` as many, with prompts of so many `numbers`, each
some 18 tokens: 6 as the good tenant's, or fewer requests of more. First the good tenant is alone. Choose a `--rate`
below half of what the server can do: that is the good tenant's fair share. Prints the outcomes of both, the good one's
throughput and the time to its first token, alone and beside the flood.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter

import typer

from penstock.api.bench.load import Client, Sample, open_loop
from penstock.api.bench.report import milliseconds
from penstock.api.bench.server import served_models


async def ask(
    url: str, key: str, model: str, rate: float, seconds: float, tokens: int, numbers: int = 6
) -> list[Sample]:
    client, samples, chance = Client(url, api_key=key, time_limit=120.0), list[Sample](), random.Random(key)

    async def one() -> Sample:
        prompt = " ".join(str(chance.random()) for _ in range(numbers))
        body = {"model": model, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": True}
        return await client.post("/v1/completions", body)

    await open_loop(one, samples.append, rate=rate, seconds=seconds)
    client.close()
    return samples


def told(label: str, samples: list[Sample], seconds: float) -> tuple[float, float]:
    """Print what came of the requests; returns how many a second were answered, and the p99 to the first token."""
    outcomes = Counter((sample.error or "answered").partition(":")[0] for sample in samples)
    half, most = (milliseconds((sample.to_first for sample in samples), share) or 0.0 for share in (50, 99))
    answered = outcomes["answered"] / seconds
    print(f"{label}: {dict(outcomes)}, {answered:.2f} a second, first token p50 {half:.1f} ms, p99 {most:.1f} ms")
    return answered, most


async def compare(
    url: str, good: str, bad: str, rate: float, times: float, seconds: float, tokens: int, numbers: int
) -> tuple[float, float]:
    model = (await served_models(url, good))[0]
    await ask(url, good, model, rate, 3.0, tokens)  # warm
    began = time.monotonic()
    samples = await ask(url, good, model, rate, seconds, tokens)
    calm, calm_first = told("alone", samples, time.monotonic() - began)
    flooding = asyncio.create_task(ask(url, bad, model, rate * times, seconds + 5.0, tokens, numbers))
    await asyncio.sleep(5.0)  # until its queue has grown
    began = time.monotonic()
    samples = await ask(url, good, model, rate, seconds, tokens)
    beside, beside_first = told("beside the flood", samples, time.monotonic() - began)
    told("the flood", await flooding, seconds + 5.0)
    return beside / calm, beside_first / calm_first


def fairness(
    url: str,
    good: str = "",
    bad: str = "",
    rate: float = 2.0,
    times: float = 10.0,
    seconds: float = 20.0,
    tokens: int = 32,
    numbers: int = 6,
) -> None:
    """Measure one tenant alone, and then beside another that sends `times` as many requests."""
    throughput, first = asyncio.run(compare(url, good, bad, rate, times, seconds, tokens, numbers))
    print(
        f"throughput: {throughput:.2f} of that alone (wanted: 0.90)\np99 of the first token: {first:.2f} times (2.00)"
    )


if __name__ == "__main__":
    typer.run(fairness)
