"""`penstock bench pipeline`: what the pipeline adds to an engine that costs next to nothing, and what it carries.

Two servers in turn, for a server has one echo rate: a paced one to time the first token among answers as slow as a
model's, and one without limit to see how much goes through. Without limit the worker sends what the engine has made
meanwhile in one message; a `--relay-rate` that the pipeline can follow shows what tokens cost one by one.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from math import inf
from typing import Annotated, Any

import typer
from typer import Option

from ...config.sources import load
from ...engine import EngineConfig, GenerationParams, InferenceEngine
from ..serve.listening import base_url, listen
from ..serve.processes import Part
from ..terminal.options import fatal_errors
from . import report as bench_report
from .load import Ask, Client, Sample, clock, closed_loop, open_loop
from .server import running

ADDED = {"p50": 5.0, "p99": 20.0}  # targets, milliseconds of each percentile
RELAYED = 5_000.0  # target, tokens a second
ECHO_RATE = 100.0  # tokens a second of each answer while first tokens are timed, as of a model
WARM_UP = 2.0  # seconds before each load that do not count
BATCH_SIZE = 1024  # room in the engine: it must not be what requests wait for
MESSAGES = [
    {"role": "system", "content": "You are a helpful assistant. Answer briefly, and say so when you do not know."},
    {"role": "user", "content": "What is a penstock, and what are the parts of a hydroelectric power station called?"},
]


def pipeline(
    rate: Annotated[float, Option(min=0.1, max=10_000, help="Requests a second while first tokens are timed.")] = 50.0,
    tokens: Annotated[int, Option(min=1, max=100_000, help="Tokens of each answer of that load.")] = 16,
    concurrency: Annotated[int, Option(min=1, max=BATCH_SIZE, help="Requests at once in the other two loads.")] = 50,
    relay_tokens: Annotated[int, Option(min=1, max=100_000, help="Tokens of each answer of the long streams.")] = 512,
    relay_rate: Annotated[float, Option(min=0, help="Tokens a second of each of them; 0 is without limit.")] = 0.0,
    seconds: Annotated[float, Option(min=0.1, max=3600, help="Duration of each load.")] = 20.0,
    json: bench_report.Json = None,
) -> None:
    """Measure the pipeline alone, around an engine that echoes: added latency, tokens and requests a second.

    Chats arrive at an even rate, over HTTP and at the engine itself: what is added to the first token.
    Then long streams, many at once: tokens a second; and answers of one token: requests a second.
    Ends with exit code 1 if any request failed.
    Settings in the environment and in penstock.toml hold for the servers it starts: with PENSTOCK_NATS_REPLICAS=3 the
    broker is three of them.
    """
    options = {name: value for name, value in locals().items() if name != "json"}
    loads: dict[str, dict[str, Any]] = {}

    async def measure(label: str, loop: Callable[..., Awaitable[None]], ask: Ask) -> None:
        await loop(ask, lambda _: None, seconds=min(WARM_UP, seconds))
        await bench_report.measured(label, bars, partial(loop, ask, seconds=seconds), loads)

    async def run() -> None:
        paced, full = partial(open_loop, rate=rate), partial(closed_loop, concurrency=concurrency)
        config = EngineConfig(model="echo", backend="echo", echo_rate=ECHO_RATE, max_batch_size=BATCH_SIZE)
        with InferenceEngine(config, progress=lambda done, total: None) as engine:
            await measure("engine alone", paced, partial(_direct, engine, tokens))
        async with _echo_server(ECHO_RATE) as client:
            await measure("first token", paced, partial(_chat, client, tokens))
        async with _echo_server(relay_rate) as client:
            await measure("relay", full, partial(_chat, client, relay_tokens))
            await measure("one token", full, partial(_chat, client, 1, stream=False))

    with fatal_errors(), bench_report.bars() as bars:
        asyncio.run(run())
    figures = figures_with_targets(loads) if all(load["completed"] for load in loads.values()) else {}
    table = bench_report.numbers_table(("figure",), ("measured", "at most", "at least"))
    for name, figure in figures.items():
        is_met = figure.get("at_least", 0.0) <= figure["measured"] <= figure.get("at_most", inf)
        cells = (bench_report.number(figure.get(key)) for key in ("measured", "at_most", "at_least"))
        table.add_row(name, *cells, style="green" if is_met else "red")
    details = {"figures": figures, "loads": loads}
    bench_report.publish(json, "pipeline", options, details, *bench_report.shown(loads), "", table)
    if any(load["failed"] for load in loads.values()):
        raise typer.Exit(1)


async def _direct(engine: InferenceEngine, tokens: int) -> Sample:
    sample, params = Sample(), GenerationParams(max_tokens=tokens, ignore_eos=True)
    async for delta in engine.generate_stream(engine.tokenizer.encode_chat(MESSAGES), params):
        sample.times.append(clock())
        sample.tokens += len(delta.token_ids)
    sample.ended = clock()
    return sample


@contextlib.asynccontextmanager
async def _echo_server(echo_rate: float) -> AsyncIterator[Client]:
    """A client of a server of our own."""
    own = {"backend": "echo", "echo_rate": echo_rate, "max_batch_size": BATCH_SIZE, "served_model_name": "echo"}
    settings = load(own | {"drain_timeout": 1, "log_level": "warning", "workers": 1}).settings
    with contextlib.closing(listen("127.0.0.1", 0)) as listener:
        descriptor, url = listener.fileno(), base_url(listener)
        parts = [Part("front", ("front", "--fd", str(descriptor)), (descriptor,)), Part("worker", ("worker",))]
        async with running(settings, parts, [url]):
            with contextlib.closing(Client(url)) as client:
                yield client


async def _chat(client: Client, tokens: int, *, stream: bool = True) -> Sample:
    body = {"model": "echo", "messages": MESSAGES, "max_tokens": tokens, "ignore_eos": True, "stream": stream}
    body |= {"stream_options": {"include_usage": True}} if stream else {}
    sample = await client.post("/v1/chat/completions", body)
    if sample.error is None and sample.tokens != tokens:
        sample.error = f"{sample.tokens} tokens came where {tokens} were asked for"
    return sample


def figures_with_targets(loads: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """What was measured of what should be so much `at_most`, or `at_least`."""
    over_http, alone = (loads[name]["ttft_ms"] for name in ("first token", "engine alone"))
    added = {key: {"measured": over_http[key] - alone[key], "at_most": most} for key, most in ADDED.items()}
    figures = {f"added by the pipeline, {key}, ms": figure for key, figure in added.items()}
    relayed = {"measured": loads["relay"]["output_tokens_per_second"], "at_least": RELAYED}
    return figures | {"tokens relayed / s": relayed}
