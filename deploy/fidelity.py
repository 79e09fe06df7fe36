"""How near `penstock simulate` comes to a real run: it measures a model's costs, alone and as it is served, and sends
the same requests at an even rate to the server and through the simulator.

    python deploy/fidelity.py MODEL [--rate 1,2] [--requests 60] [--prompt 128] [--answer 32]

Prints both sides' times to the first token and to the end, and their tokens a second; ends with 1 if one of these
differs by more than `--most`. Nothing else may run meanwhile.
"""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import orjson
import typer
from prefixes import serving

from penstock.api.bench.load import Client, Sample, open_loop
from penstock.api.bench.report import milliseconds
from penstock.api.bench.server import served_models

ROWS, PROMPTS, CONTEXTS = "1,4,16", "32,128,256", (64, 256)
SERVED = ("--concurrency", "1,4,16", "--requests", "32", "--input-tokens", "64", "--output-tokens", "64")
CACHE = "1GiB"


def penstock(*words: str) -> None:
    """Run a command of penstock to its end; if it fails, so does this, by what it said."""
    if code := subprocess.run([sys.executable, "-m", "penstock", *words], stdout=subprocess.DEVNULL).returncode:
        raise SystemExit(code)


def measure_costs(model: str, folder: Path) -> list[str]:
    """The names of the files in `folder` that have the model's costs."""
    names = [f"costs-{context}.json" for context in CONTEXTS]
    for context, name in zip(CONTEXTS, names, strict=True):
        load = ("--batch", ROWS, "--prompt", PROMPTS, "--context", str(context), "--rounds", "2")
        penstock("bench", "engine", model, *load, "--kv-cache-memory", CACHE, "--json", str(folder / name))
    return names


def measure_served(url: str, folder: Path) -> str:
    """The name of the file in `folder` that has what the server takes."""
    penstock("bench", "serve", url, *SERVED, "--json", str(folder / "served.json"))
    return "served.json"


async def real(url: str, rate: float, requests: int, prompt: int, answer: int) -> dict[str, float]:
    """Times in milliseconds, and tokens a second, of requests to a server."""
    model, client, chance = (await served_models(url))[0], Client(url, time_limit=300.0), random.Random(rate)

    async def one() -> Sample:
        ids = [chance.randrange(100, 1000) for _ in range(prompt)]
        body = {"model": model, "prompt": ids, "max_tokens": answer, "ignore_eos": True, "temperature": 0}
        return await client.post("/v1/completions", body | {"stream": True, "stream_options": {"include_usage": True}})

    for _ in range(3):
        await one()
    samples = list[Sample]()
    await open_loop(one, samples.append, rate=rate, seconds=(requests - 0.5) / rate)
    client.close()
    if failed := [sample.error for sample in samples if sample.error]:
        raise SystemExit(f"{len(failed)} requests failed: {failed[0]}")
    spent = max(sample.ended for sample in samples) - min(sample.sent for sample in samples)
    return {
        "first token p50, ms": milliseconds((sample.to_first for sample in samples), 50) or 0.0,
        "first token p90, ms": milliseconds((sample.to_first for sample in samples), 90) or 0.0,
        "whole p50, ms": milliseconds((sample.ended - sample.sent for sample in samples), 50) or 0.0,
        "tokens a second": sum(sample.tokens for sample in samples) / spent,
    }


def simulated(folder: Path, costs: list[str], rate: float, requests: int, prompt: int, answer: int) -> dict[str, float]:
    """The same of requests in the simulator."""
    scenario, found = folder / f"rate-{rate}.toml", folder / f"rate-{rate}.json"
    scenario.write_text(
        f"jobs = {requests}\n[[workers]]\ncount = 1\nseats = 16\ncosts_from = {orjson.dumps(costs).decode()}\n"
        f'[[tenants]]\nname = "all"\nrate = {rate}\narrivals = "even"\nprompt = {{ mean = {prompt} }}\n'
        f"answer = {{ mean = {answer} }}\n"
    )
    penstock("simulate", str(scenario), "--json", str(found))
    figures: dict[str, Any] = orjson.loads(found.read_bytes())
    (source,) = figures["sources"]
    return {
        "first token p50, ms": 1000 * source["ttft"]["p50"],
        "first token p90, ms": 1000 * source["ttft"]["p90"],
        "whole p50, ms": 1000 * source["total"]["p50"],
        "tokens a second": figures["output_tokens_per_second"],
    }


async def compare(model: str, rates: list[float], requests: int, prompt: int, answer: int, most: float) -> bool:
    is_near = True
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        costs = measure_costs(model, folder)
        arguments = ("--max-batch-size", "16", "--kv-cache-memory", CACHE, "--speculation", "off")
        async with serving(Path(model), *arguments) as url:
            costs.append(await asyncio.to_thread(measure_served, url, folder))
            for rate in rates:
                found = await real(url, rate, requests, prompt, answer)
                expected = simulated(folder, costs, rate, requests, prompt, answer)
                for name, value in found.items():
                    ratio = expected[name] / value
                    is_near = is_near and abs(ratio - 1) <= most
                    sides = f"real {value:,.1f}, simulated {expected[name]:,.1f}, {ratio:.2f} times"
                    print(f"{rate:g} a second, {name}: {sides}", flush=True)
    return is_near


def fidelity(
    model: str,
    rate: str = "1,2",
    requests: int = 60,
    prompt: int = 128,
    answer: int = 32,
    most: float = 0.1,
) -> None:
    """Compare a real and a simulated run."""
    if not asyncio.run(compare(model, [float(one) for one in rate.split(",")], requests, prompt, answer, most)):
        raise SystemExit(1)


if __name__ == "__main__":
    typer.run(fidelity)
