"""`penstock bench pipeline`: what the pipeline adds to an engine that costs next to nothing, and what it carries.

Two servers in turn, for a server has one echo rate: a paced one to time the first token among answers as slow as a
model's, and one without limit to see how much goes through. Without limit the worker sends what the engine has made
meanwhile in one message; a `--relay-rate` that the pipeline can follow shows what tokens cost one by one.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress, TimeRemainingColumn

from . import bench_report
from .bench_load import MOST_OPEN, Client, Sample, clock, closed_loop, open_loop
from .bench_report import Figure
from .bench_server import Server, echo_server, running_server
from .bench_watch import Load, milliseconds, watched
from .options import fatal_errors

ADDED_P50, ADDED_P99 = 5.0, 20.0  # targets, milliseconds
RELAYED = 5_000.0  # target, tokens a second
DIRECT_SECONDS = 5.0  # the engine alone is steady enough for less
BATCH_SIZE = 256  # room in the engine, at the least: it must not be what requests wait for
CHAT = "/v1/chat/completions"
MESSAGES = [
    {"role": "system", "content": "You are a helpful assistant. Answer briefly, and say so when you do not know."},
    {"role": "user", "content": "What is a penstock, and what are the parts of a hydroelectric power station called?"},
]


@dataclass(frozen=True, slots=True)
class Plan:
    """The command's options."""

    url: str | None
    rate: float
    tokens: int
    echo_rate: float
    concurrency: int
    relay_tokens: int
    relay_rate: float
    seconds: float
    warm_up: float


def pipeline(
    url: Annotated[
        str | None,
        typer.Option(help="Measure this running `penstock serve --backend echo` instead of servers of our own."),
    ] = None,
    rate: Annotated[
        float, typer.Option(min=0.1, max=10_000, help="Requests a second while first tokens are timed.")
    ] = 50.0,
    tokens: Annotated[int, typer.Option(min=1, max=100_000, help="Tokens of each answer of that load.")] = 16,
    echo_rate: Annotated[
        float, typer.Option(min=0, help="Tokens a second of each of those answers, as a model would make; 0: no limit.")
    ] = 100.0,
    concurrency: Annotated[
        int, typer.Option(min=1, max=MOST_OPEN, help="Requests that run at any moment of the other two loads.")
    ] = 50,
    relay_tokens: Annotated[
        int, typer.Option(min=1, max=100_000, help="Tokens of each answer while tokens a second are counted.")
    ] = 512,
    relay_rate: Annotated[
        float,
        typer.Option(min=0, help="Tokens a second of each of those answers; 0: no limit, and many tokens to a chunk."),
    ] = 0.0,
    seconds: Annotated[float, typer.Option(min=0.1, max=3600, help="Duration of each of the three loads.")] = 20.0,
    warm_up: Annotated[float, typer.Option(min=0, max=600, help="Seconds before each load that do not count.")] = 2.0,
    output: Annotated[Path | None, typer.Option(help="JSON file for the figures and what they depend on.")] = None,
) -> None:
    """Measure the pipeline alone, around an engine that echoes: added latency, tokens and requests a second.

    Three loads over HTTP: chats that stream at an even rate, for the time to the first token, which is compared with
    that of the engine called directly; long streams, many at once, for tokens a second; and answers of one token, for
    requests a second. Times count from the writing of a request on an open connection. Ends with exit code 1 if any
    request failed. Settings in the environment and in penstock.toml hold for the servers it starts.
    """
    with fatal_errors():
        if output is not None:
            bench_report.check_writable(output, "--output")
        plan = Plan(url, rate, tokens, echo_rate, concurrency, relay_tokens, relay_rate, seconds, warm_up)
        with bench_report.bars(TimeRemainingColumn()) as bars:
            loads = asyncio.run(Benchmark(plan, bars).run())
        figures = _figures(loads)
        details = {name: load.details() for name, load in loads.items()}
        console = Console(highlight=False)
        console.print(bench_report.table("penstock bench pipeline", figures))
        if output is not None:
            measured = {"figures": [figure.details() for figure in figures], "loads": details}
            bench_report.write(output, "pipeline", asdict(plan), measured)
    failures = sum((Counter(detail["failures"]) for detail in details.values()), Counter[str]())
    for reason, times in failures.most_common():
        Console(stderr=True).print(f"{times} requests failed: {reason}", style="bold red", markup=False)
    if failures:
        raise typer.Exit(1)


class Benchmark:
    """Runs the loads of a plan, one after the other, with a bar for each."""

    def __init__(self, plan: Plan, bars: Progress) -> None:
        self._plan = plan
        self._bars = bars
        self._batch_size = max(BATCH_SIZE, plan.concurrency)

    async def run(self) -> dict[str, Load]:
        plan = self._plan
        duration = plan.warm_up + plan.seconds
        paced = partial(open_loop, rate=plan.rate, seconds=duration)
        full = partial(closed_loop, concurrency=plan.concurrency, seconds=duration)
        loads = {}
        async with self._server(plan.echo_rate) as server:
            loads["direct"] = await self._direct()
            loads["first_token"] = await self._http("time to first token", server, paced, plan.tokens, streaming=True)
        async with self._server(plan.relay_rate) as server:
            loads["relay"] = await self._http("tokens a second", server, full, plan.relay_tokens, streaming=True)
            loads["requests"] = await self._http("requests a second", server, full, 1, streaming=False)
        return loads

    def _server(self, echo_rate: float) -> AbstractAsyncContextManager[Server]:
        if self._plan.url is not None:
            return running_server(self._plan.url)
        return echo_server(echo_rate=echo_rate, max_batch_size=self._batch_size)

    async def _direct(self) -> Load:
        """The paced load, a shorter one, on an engine in this process."""
        from ..engine import EngineConfig, GenerationParams, InferenceEngine

        plan = self._plan
        config = EngineConfig(model="echo", backend="echo", echo_rate=plan.echo_rate, max_batch_size=self._batch_size)
        params = GenerationParams(max_tokens=plan.tokens, ignore_eos=True)
        seconds = min(plan.seconds, DIRECT_SECONDS)
        with InferenceEngine(config, progress=lambda done, total: None) as engine:

            async def ask() -> Sample:
                sample = Sample()
                async for delta in engine.generate_stream(engine.tokenizer.encode_chat(MESSAGES), params):
                    sample.times.append(clock())
                    sample.sizes.append(len(delta.text))
                    sample.tokens += len(delta.token_ids)
                return sample

            load = open_loop(ask, rate=plan.rate, seconds=plan.warm_up + seconds)
            return await watched(
                load, warm_up=plan.warm_up, seconds=seconds, bars=self._bars, label="engine alone", cpu_times=dict
            )

    async def _http(
        self,
        label: str,
        server: Server,
        load: Callable[[Callable[[], Awaitable[Sample]]], Coroutine[None, None, list[Sample]]],
        tokens: int,
        *,
        streaming: bool,
    ) -> Load:
        body: dict[str, Any] = {
            "model": server.model,
            "messages": MESSAGES,
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": streaming,
        }
        if streaming:
            body["stream_options"] = {"include_usage": True}
        with contextlib.closing(Client(server.url)) as client:

            async def ask() -> Sample:
                sample = await client.post(CHAT, body)
                if sample.error is None and sample.tokens != tokens:
                    sample.error = f"{sample.tokens} tokens came where {tokens} were asked for"
                return sample

            return await watched(
                load(ask),
                warm_up=self._plan.warm_up,
                seconds=self._plan.seconds,
                bars=self._bars,
                label=label,
                cpu_times=server.cpu_times,
            )


def _figures(loads: dict[str, Load]) -> list[Figure]:
    direct, first, relay, requests = (loads[name] for name in ("direct", "first_token", "relay", "requests"))
    figures = []
    for percent, most in ((50, ADDED_P50), (99, ADDED_P99)):
        over_http = milliseconds((sample.to_first for sample in first.counted), percent)
        alone = milliseconds((sample.to_first for sample in direct.counted), percent)
        added = None if over_http is None or alone is None else over_http - alone
        figures += [
            Figure(f"time to first token, p{percent}", over_http, "ms"),
            Figure(f"the same of the engine alone, p{percent}", alone, "ms"),
            Figure(f"added by the pipeline, p{percent}", added, "ms", most),
        ]
    figures += [
        Figure(
            f"time between tokens, p{percent}", milliseconds((x for s in first.counted for x in s.gaps), percent), "ms"
        )
        for percent in (50, 99)
    ]
    seconds = relay.end - relay.start
    tokens = sum(sample.tokens_between(relay.start, relay.end) for sample in relay.samples)
    chunks = sum(relay.start <= moment < relay.end for sample in relay.samples for moment in sample.times)
    answers = sum(requests.start <= s.ended < requests.end for s in requests.samples if s.error is None)
    figures += [
        Figure("tokens relayed", tokens / seconds, "1/s", RELAYED, at_least=True),
        Figure("chunks relayed", chunks / seconds, "1/s"),
        *(Figure(f"CPU of {name} meanwhile", cores, "cores") for name, cores in sorted(relay.cores.items())),
        Figure("requests of one token", answers / seconds, "1/s"),
    ]
    return figures
