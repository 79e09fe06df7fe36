"""What `--scheduling prefix_aware` brings where many requests share few long beginnings: it starts `penstock serve`
with a model of random weights for each strategy, sends both the same requests, and judges the figures.

    python deploy/prefixes.py [--workers 4] [--prefixes 32] [--rate 2.5] [--requests 160]

The beginnings, of `--length` tokens, are asked for by Zipf's law, each time with another end. A worker's cache holds
`--held` of them, so none has all. Prints the time to the first token, the share of prompt tokens that were cached, and
the most requests that a worker got, in terms of the mean; ends with 1 if p50 is above 0.6 times that of `least_loaded`
or a worker got more than 1.5 times the mean. The first `--warm` requests fill the caches and do not count.
"""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import httpx2
import typer
from prometheus_client.parser import text_string_to_metric_families
from tiny_model import make_tiny_model

from penstock.api.bench.load import Client, Sample, open_loop
from penstock.api.bench.report import milliseconds
from penstock.api.bench.server import served_models

VOCABULARY = 512
SIZES = {
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 1024,
    "max_position_embeddings": 4096,
}
TOKEN_BYTES = 6 * 2 * 2 * 96 * 2  # of keys and values in bfloat16
END, ANSWER = 32, 8  # tokens
MOST_TIME, MOST_LOAD = 0.6, 1.5


@dataclass(frozen=True)
class Load:
    prefixes: int
    length: int
    rate: float
    warm: int
    requests: int

    def prompts(self) -> list[list[int]]:
        """The prompts of all requests in order, always the same."""
        chance = random.Random(0)

        def words(count: int) -> list[int]:
            return [chance.randrange(3, VOCABULARY) for _ in range(count)]

        beginnings = [words(self.length) for _ in range(self.prefixes)]
        weights = [1 / rank for rank in range(1, self.prefixes + 1)]
        chosen = chance.choices(beginnings, weights, k=self.warm + self.requests)
        return [beginning + words(END) for beginning in chosen]


@dataclass(frozen=True)
class Figures:
    p50: float  # milliseconds to the first token
    p90: float
    cached: float  # share of prompt tokens
    most: float  # requests of the worker that got the most, in terms of the mean


@asynccontextmanager
async def serving(model: Path, *arguments: str) -> AsyncIterator[str]:
    """The URL of a server of its own, which is ended afterwards."""
    with tempfile.TemporaryDirectory(prefix="penstock-prefixes-") as state:
        words = ("serve", str(model), "--port", "0", "--state-dir", state, *arguments)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "penstock", *words),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        assert process.stdout is not None
        try:
            async with asyncio.timeout(180):
                async for line in process.stdout:
                    if line.startswith(b"penstock ready "):
                        break
                else:
                    raise SystemExit("the server did not start")
            yield line.split()[-1].decode()
        finally:
            process.terminate()
            await process.communicate()


async def counts(url: str) -> dict[str, Counter[str]]:
    """Some of the server's counters, by name and worker."""
    async with httpx2.AsyncClient(timeout=10.0) as client:
        text = (await client.get(f"{url}/metrics")).raise_for_status().text
    found: dict[str, Counter[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, Counter())[sample.labels.get("engine", "")] += int(sample.value)
    return found


async def measure(url: str, load: Load) -> Figures:
    model, client = (await served_models(url))[0], Client(url, time_limit=120.0)
    prompts = load.prompts()

    async def send(part: list[list[int]]) -> list[Sample]:
        samples, left = list[Sample](), iter(part)

        async def one() -> Sample:
            body = {"model": model, "prompt": next(left), "max_tokens": ANSWER, "ignore_eos": True, "stream": True}
            return await client.post("/v1/completions", body)

        await open_loop(one, samples.append, rate=load.rate, seconds=(len(part) - 0.5) / load.rate)
        return samples

    await send(prompts[: load.warm])
    before = await counts(url)
    samples = await send(prompts[load.warm :])
    client.close()
    if failed := [sample.error for sample in samples if sample.error]:
        raise SystemExit(f"{len(failed)} requests failed: {failed[0]}")
    after = await counts(url)
    got = {name: after[name] - before[name] for name in after}
    requests = got["vllm:request_success_total"]
    workers = len(after["vllm:kv_cache_usage_perc"])
    p50, p90 = (milliseconds((sample.to_first for sample in samples), share) or 0.0 for share in (50, 90))
    cached = got["vllm:prefix_cache_hits_total"].total() / got["vllm:prefix_cache_queries_total"].total()
    return Figures(p50, p90, cached, max(requests.values()) / (requests.total() / workers))


async def compare(load: Load, workers: int, held: int) -> bool:
    memory = held * (load.length + END + ANSWER + 16) * TOKEN_BYTES
    found: dict[str, Figures] = {}
    with tempfile.TemporaryDirectory() as directory:
        model = make_tiny_model(Path(directory) / "model", "llama", vocabulary_size=VOCABULARY, sizes=SIZES)
        for strategy in ("least_loaded", "prefix_aware"):
            arguments = ("--workers", str(workers), "--kv-cache-memory", str(memory), "--scheduling", strategy)
            async with serving(model, *arguments) as url:
                figures = found[strategy] = await measure(url, load)
            print(
                f"{strategy}: first token p50 {figures.p50:.0f} ms, p90 {figures.p90:.0f} ms, {figures.cached:.0%} of "
                f"prompts cached, the busiest worker got {figures.most:.2f} times the mean"
            )
    share = found["prefix_aware"].p50 / found["least_loaded"].p50
    print(f"p50: {share:.2f} times that of least_loaded (wanted: {MOST_TIME}; busiest worker: {MOST_LOAD})")
    return share <= MOST_TIME and found["prefix_aware"].most <= MOST_LOAD


def prefixes(
    workers: int = 4,
    prefixes: int = 32,
    length: int = 1536,
    held: Annotated[int, typer.Option(help="Beginnings that a worker's cache holds.")] = 8,
    rate: float = 2.5,
    warm: int = 64,
    requests: int = 160,
) -> None:
    """Compare both strategies on the same requests."""
    if not asyncio.run(compare(Load(prefixes, length, rate, warm, requests), workers, held)):
        raise SystemExit(1)


if __name__ == "__main__":
    typer.run(prefixes)
