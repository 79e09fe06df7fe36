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
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import typer
from rich.progress import Progress
from typer import Option

from ..config.sources import load
from . import bench_report
from .bench_load import Client, Sample, clock, closed_loop, open_loop
from .bench_server import running
from .keeper import Part
from .options import fatal_errors
from .supervisor import base_url, listen

ADDED = {"p50": 5.0, "p99": 20.0}  # targets, milliseconds of each percentile
RELAYED = 5_000.0  # target, tokens a second
ECHO_RATE = 100.0  # tokens a second of each answer while first tokens are timed, as of a model
DIRECT_SECONDS = 5.0  # the engine alone is steady enough for less
BATCH_SIZE = 256  # room in the engine, at the least: it must not be what requests wait for
PAUSE = 0.1  # seconds after a failure before its client asks again: a dead server is not hammered
MESSAGES = [
    {"role": "system", "content": "You are a helpful assistant. Answer briefly, and say so when you do not know."},
    {"role": "user", "content": "What is a penstock, and what are the parts of a hydroelectric power station called?"},
]


Timed = Callable[..., Awaitable[None]]  # a loop whose seconds are still missing


def pipeline(
    rate: Annotated[float, Option(min=0.1, max=10_000, help="Requests a second while first tokens are timed.")] = 50.0,
    tokens: Annotated[int, Option(min=1, max=100_000, help="Tokens of each answer of that load.")] = 16,
    concurrency: Annotated[int, Option(min=1, max=1024, help="Requests at once in the other two loads.")] = 50,
    relay_tokens: Annotated[int, Option(min=1, max=100_000, help="Tokens of each answer of the long streams.")] = 512,
    relay_rate: Annotated[float, Option(min=0, help="Tokens a second of each of them; 0 is without limit.")] = 0.0,
    seconds: Annotated[float, Option(min=0.1, max=3600, help="Duration of each load.")] = 20.0,
    warm_up: Annotated[float, Option(min=0, max=600, help="Seconds before each load that do not count.")] = 2.0,
    output: Annotated[Path | None, Option(help="JSON file for all figures and settings; - is standard output.")] = None,
) -> None:
    """Measure the pipeline alone, around an engine that echoes: added latency, tokens and requests a second.

    Chats arrive at an even rate, over HTTP and at the engine itself: what is added to the first token.
    Then long streams, many at once: tokens a second; and answers of one token: requests a second.
    Ends with exit code 1 if any request failed.
    Settings in the environment and in penstock.toml hold for the servers it starts.
    """
    options = {name: value for name, value in locals().items() if name != "output"}
    with fatal_errors():
        bench_report.check_writable(output, "--output")
        with bench_report.bars() as bars:
            loads = asyncio.run(Benchmark(SimpleNamespace(**options), bars).run())
        figures = figures_with_targets(loads)
        table = bench_report.numbers_table(("figure",), ("measured", "target"))
        for figure in figures:
            value, target, unit = figure["value"], figure["target"], figure["unit"]
            shown = "none" if value is None else f"{value:,.{0 if value >= 1000 else 1}f} {unit}"
            limit = f"{'≤' if unit == 'ms' else '≥'} {target:,g} {unit}"
            table.add_row(figure["name"], shown, limit, style="green" if figure["met"] else "red")
        details = {"figures": figures, "loads": loads}
        bench_report.publish(output, "pipeline", options, details, bench_report.loads_table(loads), "", table)
    bench_report.print_failures(loads)
    if any(load["failed"] for load in loads.values()):
        raise typer.Exit(1)


@contextlib.asynccontextmanager
async def _echo_server(echo_rate: float, batch_size: int) -> AsyncIterator[str]:
    """The URL of a server of our own."""
    own = {"backend": "echo", "echo_rate": echo_rate, "max_batch_size": batch_size, "served_model_name": "echo"}
    settings = load(own | {"drain_timeout": 1, "log_level": "warning", "workers": 1}).settings
    with contextlib.closing(listen("127.0.0.1", 0)) as listener:
        descriptor, url = listener.fileno(), base_url(listener)
        parts = [Part("front", ("front", "--fd", str(descriptor)), (descriptor,)), Part("worker", ("worker",))]
        async with running(settings, parts, [url]):
            yield url


class Benchmark:
    """Runs the loads, one after the other; `asked` holds the command's options."""

    def __init__(self, asked: Any, bars: Progress) -> None:
        self._asked, self._bars, self._batch_size = asked, bars, max(BATCH_SIZE, asked.concurrency)
        self._found: dict[str, dict[str, Any]] = {}

    async def run(self) -> dict[str, dict[str, Any]]:
        """What was measured of each load."""
        asked = self._asked
        paced, full = partial(open_loop, rate=asked.rate), partial(closed_loop, concurrency=asked.concurrency)
        async with _echo_server(ECHO_RATE, self._batch_size) as url:
            await self._direct(paced)
            await self._http("first token", url, paced, asked.tokens)
        async with _echo_server(asked.relay_rate, self._batch_size) as url:
            await self._http("relay", url, full, asked.relay_tokens)
            await self._http("one token", url, full, 1, stream=False)
        return self._found

    async def _direct(self, loop: Timed) -> None:
        """The paced load, a shorter one, on an engine in this process."""
        from ..engine import EngineConfig, GenerationParams, InferenceEngine

        config = EngineConfig(model="echo", backend="echo", echo_rate=ECHO_RATE, max_batch_size=self._batch_size)
        params = GenerationParams(max_tokens=self._asked.tokens, ignore_eos=True)
        with InferenceEngine(config, progress=lambda done, total: None) as engine:

            async def ask() -> Sample:
                sample = Sample()
                async for delta in engine.generate_stream(engine.tokenizer.encode_chat(MESSAGES), params):
                    sample.times.append(clock())
                    sample.tokens += len(delta.token_ids)
                sample.ended = clock()
                return sample

            await self._measured("engine alone", partial(loop, ask), min(self._asked.seconds, DIRECT_SECONDS))

    async def _http(self, label: str, url: str, loop: Timed, tokens: int, *, stream: bool = True) -> None:
        body = {"model": "echo", "messages": MESSAGES, "max_tokens": tokens, "ignore_eos": True, "stream": stream}
        body |= {"stream_options": {"include_usage": True}} if stream else {}
        with contextlib.closing(Client(url)) as client:

            async def ask() -> Sample:
                sample = await client.post("/v1/chat/completions", body)
                if sample.error is None and sample.tokens != tokens:
                    sample.error = f"{sample.tokens} tokens came where {tokens} were asked for"
                if sample.error is not None:
                    await asyncio.sleep(PAUSE)
                return sample

            await self._measured(label, partial(loop, ask), self._asked.seconds)

    async def _measured(self, label: str, loop: Timed, seconds: float) -> None:
        await loop(lambda _: None, seconds=self._asked.warm_up)
        await bench_report.measured(label, self._bars, partial(loop, seconds=seconds), self._found)


def figures_with_targets(loads: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """What has a target: for milliseconds the most it should be, else the least. None where nothing was measured."""
    figures = []
    for key, most in ADDED.items():
        over_http, alone = (loads[name]["ttft_ms"][key] for name in ("first token", "engine alone"))
        added = None if over_http is None or alone is None else over_http - alone
        met = added is not None and added <= most
        figures.append(
            {"name": f"added by the pipeline, {key}", "value": added, "unit": "ms", "target": most, "met": met}
        )
    relayed = loads["relay"]["output_tokens_per_second"]
    figure = {"name": "tokens relayed", "value": relayed, "unit": "1/s", "target": RELAYED, "met": relayed >= RELAYED}
    return [*figures, figure]
