"""`penstock bench pipeline`: what the pipeline adds to an engine that costs next to nothing, and what it carries.

Two servers in turn, for a server has one echo rate: a paced one to time the first token among answers as slow as a
model's, and one without limit to see how much goes through. Without limit the worker sends what the engine has made
meanwhile in one message; a `--relay-rate` that the pipeline can follow shows what tokens cost one by one.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress, TimeRemainingColumn
from rich.table import Column, Table
from typer import Option

from . import bench_report
from .bench_load import MOST_OPEN, Ask, Client, Loop, Sample, clock, closed_loop, open_loop
from .bench_report import milliseconds
from .bench_server import Server, echo_server
from .options import fatal_errors

ADDED = {50: 5.0, 99: 20.0}  # targets, milliseconds of each percentile
RELAYED = 5_000.0  # target, tokens a second
DIRECT_SECONDS = 5.0  # the engine alone is steady enough for less
BATCH_SIZE = 256  # room in the engine, at the least: it must not be what requests wait for
PAUSE = 0.1  # seconds after a failure before its client asks again: a dead server is not hammered
MESSAGES = [
    {"role": "system", "content": "You are a helpful assistant. Answer briefly, and say so when you do not know."},
    {"role": "user", "content": "What is a penstock, and what are the parts of a hydroelectric power station called?"},
]


def pipeline(
    url: Annotated[
        str | None, Option(help="Measure this running `penstock serve --backend echo` instead of servers of our own.")
    ] = None,
    rate: Annotated[float, Option(min=0.1, max=10_000, help="Requests a second while first tokens are timed.")] = 50.0,
    tokens: Annotated[int, Option(min=1, max=100_000, help="Tokens of each answer of that load.")] = 16,
    echo_rate: Annotated[
        float, Option(min=0, help="Tokens a second of each of those answers, as a model would make; 0: no limit.")
    ] = 100.0,
    concurrency: Annotated[
        int, Option(min=1, max=MOST_OPEN, help="Requests that run at any moment of the other two loads.")
    ] = 50,
    relay_tokens: Annotated[
        int, Option(min=1, max=100_000, help="Tokens of each answer while tokens a second are counted.")
    ] = 512,
    relay_rate: Annotated[
        float, Option(min=0, help="Tokens a second of each of those answers; 0: no limit, and many tokens to a chunk.")
    ] = 0.0,
    seconds: Annotated[float, Option(min=0.1, max=3600, help="Duration of each of the three loads.")] = 20.0,
    warm_up: Annotated[float, Option(min=0, max=600, help="Seconds before each load that do not count.")] = 2.0,
    output: Annotated[Path | None, Option(help="JSON file for the figures and what they depend on.")] = None,
) -> None:
    """Measure the pipeline alone, around an engine that echoes: added latency, tokens and requests a second.

    Three loads over HTTP: chats that stream at an even rate, for the time to the first token, which is compared with
    that of the engine called directly; long streams, many at once, for tokens a second; and answers of one token, for
    requests a second. Times count from the writing of a request on an open connection. Ends with exit code 1 if any
    request failed. Settings in the environment and in penstock.toml hold for the servers it starts.
    """
    options = {name: value for name, value in locals().items() if name != "output"}
    with fatal_errors():
        bench_report.check_writable(output, "--output")
        with bench_report.bars(TimeRemainingColumn()) as bars:
            loads = asyncio.run(Benchmark(SimpleNamespace(**options), bars).run())
        figures, details = _figures(**loads), {name: load.details() for name, load in loads.items()}
        Console(highlight=False).print(_table(figures))
        bench_report.write(output, "pipeline", options, {"figures": figures, "loads": details})
    failures = sum((Counter(load["failures"]) for load in details.values()), Counter[str]())
    for reason, times in failures.most_common():
        Console(stderr=True).print(f"{times} requests failed: {reason}", style="bold red", markup=False)
    if failures:
        raise typer.Exit(1)


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
        return {
            "requests": len(self.samples),
            "counted": len(self.counted),
            "failed": failures.total(),
            "failures": dict(failures.most_common(10)),
            "tokens": sum(sample.tokens for sample in self.samples),
            "sent_late_p99_ms": milliseconds((sample.late for sample in self.counted), 99),
            "cores": self.cores,
        }


class Benchmark:
    """Runs the loads, one after the other, with a bar for each; `asked` holds the command's options."""

    def __init__(self, asked: Any, bars: Progress) -> None:
        self._asked, self._bars, self._batch_size = asked, bars, max(BATCH_SIZE, asked.concurrency)

    async def run(self) -> dict[str, Load]:
        asked, duration = self._asked, self._asked.warm_up + self._asked.seconds
        paced = partial(open_loop, rate=asked.rate, seconds=duration)
        full = partial(closed_loop, concurrency=asked.concurrency, seconds=duration)
        loads = {}
        async with echo_server(asked.url, asked.echo_rate, self._batch_size) as server:
            loads["direct"] = await self._direct()
            loads["first_token"] = await self._http("time to first token", server, paced, asked.tokens)
        async with echo_server(asked.url, asked.relay_rate, self._batch_size) as server:
            loads["relay"] = await self._http("tokens a second", server, full, asked.relay_tokens)
            loads["requests"] = await self._http("requests a second", server, full, 1, stream=False)
        return loads

    async def _direct(self) -> Load:
        """The paced load, a shorter one, on an engine in this process."""
        from ..engine import EngineConfig, GenerationParams, InferenceEngine

        asked, seconds = self._asked, min(self._asked.seconds, DIRECT_SECONDS)
        config = EngineConfig(model="echo", backend="echo", echo_rate=asked.echo_rate, max_batch_size=self._batch_size)
        params = GenerationParams(max_tokens=asked.tokens, ignore_eos=True)
        with InferenceEngine(config, progress=lambda done, total: None) as engine:

            async def ask() -> Sample:
                sample = Sample()
                async for delta in engine.generate_stream(engine.tokenizer.encode_chat(MESSAGES), params):
                    sample.times.append(clock())
                    sample.texts.append(delta.text)
                    sample.tokens += len(delta.token_ids)
                return sample

            loop = partial(open_loop, rate=asked.rate, seconds=asked.warm_up + seconds)
            return await self._watched("engine alone", loop, ask, seconds, dict)

    async def _http(self, label: str, server: Server, loop: Loop, tokens: int, *, stream: bool = True) -> Load:
        body = {"model": server.model, "messages": MESSAGES, "max_tokens": tokens, "ignore_eos": True, "stream": stream}
        body |= {"stream_options": {"include_usage": True}} if stream else {}
        with closing(Client(server.url)) as client:

            async def ask() -> Sample:
                sample = await client.post("/v1/chat/completions", body)
                if sample.error is None and sample.tokens != tokens:
                    sample.error = f"{sample.tokens} tokens came where {tokens} were asked for"
                if sample.error is not None:
                    await asyncio.sleep(PAUSE)
                return sample

            return await self._watched(label, loop, ask, self._asked.seconds, server.cpu_times)

    async def _watched(
        self, label: str, loop: Loop, ask: Ask, seconds: float, cpu_times: Callable[[], dict[str, float]]
    ) -> Load:
        """Run a load of which the `seconds` after the warm-up count, beside a bar and the processes' CPU clocks."""
        samples: list[Sample] = []
        start, total = clock() + self._asked.warm_up, self._asked.warm_up + seconds
        bar = self._bars.add_task(label, total=total)

        async def watch() -> dict[str, float]:
            await asyncio.sleep(start - clock())
            before = cpu_times()
            while (left := start + seconds - clock()) > 0:
                self._bars.update(bar, completed=total - left)
                await asyncio.sleep(min(left, 0.5))
            self._bars.update(bar, completed=total)
            after = cpu_times()
            return {name: (after[name] - before[name]) / seconds for name in before.keys() & after.keys()}

        async with asyncio.TaskGroup() as group:
            watching = group.create_task(watch())
            await loop(ask, samples.append)
        return Load(samples, start, start + seconds, watching.result())


def _figure(
    name: str, value: float | None, unit: str = "ms", target: float | None = None, *, at_least: bool = False
) -> dict[str, Any]:
    """One measured value, None where nothing was measured. `target` is the most it should be, or the least."""
    met = None
    if target is not None and value is not None:
        met = value >= target if at_least else value <= target
    return {"name": name, "value": value, "unit": unit, "target": target, "at_least": at_least, "met": met}


def _figures(direct: Load, first_token: Load, relay: Load, requests: Load) -> list[dict[str, Any]]:
    figures = []
    for percent, most in ADDED.items():
        over_http, alone = (milliseconds((s.to_first for s in load.counted), percent) for load in (first_token, direct))
        added = None if over_http is None or alone is None else over_http - alone
        figures.append(_figure(f"time to first token, p{percent}", over_http))
        figures.append(_figure(f"the same of the engine alone, p{percent}", alone))
        figures.append(_figure(f"added by the pipeline, p{percent}", added, target=most))
    gaps = [gap for sample in first_token.counted for gap in sample.gaps]
    figures += [_figure(f"time between tokens, p{percent}", milliseconds(gaps, percent)) for percent in ADDED]
    start, end = relay.start, relay.end
    tokens = sum(sample.tokens_between(start, end) for sample in relay.samples)
    chunks = sum(start <= moment < end for sample in relay.samples for moment in sample.times)
    figures.append(_figure("tokens relayed", tokens / (end - start), "1/s", RELAYED, at_least=True))
    figures.append(_figure("chunks relayed", chunks / (end - start), "1/s"))
    figures += [_figure(f"CPU of {name} meanwhile", cores, "cores") for name, cores in sorted(relay.cores.items())]
    answers = sum(requests.start <= one.ended < requests.end for one in requests.samples if one.error is None)
    return [*figures, _figure("requests of one token", answers / (requests.end - requests.start), "1/s")]


def _table(figures: list[dict[str, Any]]) -> Table:
    columns = ("figure", Column("measured", justify="right"), "unit", Column("target", justify="right"))
    table = Table(*columns, title="penstock bench pipeline", title_justify="left", box=None, pad_edge=False)
    for figure in figures:
        value, target = figure["value"], figure["target"]
        shown = "none" if value is None else f"{value:,.{0 if value >= 1000 else 2}f}"
        wanted = "" if target is None else f"{'≥' if figure['at_least'] else '≤'} {target:,g}"
        style = {True: "green", False: "red", None: ""}[figure["met"]]
        table.add_row(figure["name"], shown, figure["unit"], wanted, style=style)
    return table
