"""`penstock bench serve`: how fast any server that speaks OpenAI's HTTP answers, at one concurrency after the other.

A closed loop: each of `concurrency` clients asks again as soon as its last answer has ended. Tokens are those of the
server's `usage`, for a chunk may hold several. TTFT is the time to the first chunk with text; TPOT is (end - first) /
(tokens - 1), the time of a token after the first, and there is none for an answer that came in one chunk.
"""

from __future__ import annotations

import asyncio
import io
import random
from contextlib import closing
from functools import partial
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer
from rich.bar import Bar
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from typer import Option

from ...schemas.errors import StartupError
from ..terminal.options import fatal_errors
from . import report as bench_report
from .load import Client, Sample, closed_loop
from .server import served_models


def bench_serve(
    url: Annotated[str, typer.Argument(help="Where the server answers; /v1 may follow.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, Option(help="Which of its models; the first that it lists by default.")] = None,
    api_key: Annotated[str, Option(envvar="OPENAI_API_KEY", help="Never printed.", show_default=False)] = "",
    chat: Annotated[bool, Option("--chat", help="Ask /v1/chat/completions, not /v1/completions.")] = False,
    input_tokens: Annotated[int, Option(min=1, help="Tokens of a prompt, very nearly.")] = 128,
    output_tokens: Annotated[int, Option(min=1, help="Tokens of an answer, at most.")] = 64,
    concurrency: Annotated[str, Option(help="Requests at once: a level each, in rising order.")] = "1,8,32",
    requests: Annotated[int | None, Option(min=1, help="Of a level; 2 * concurrency or 8 by default.")] = None,
    ignore_eos: Annotated[bool, Option(help="Ask for full length: vLLM, SGLang, Penstock know how.")] = True,
    timeout: Annotated[float, Option(min=0.1, help="Seconds until a request has failed.")] = 300.0,
    json: bench_report.Json = None,
    plot: Annotated[
        typer.FileTextWrite | None, Option(lazy=False, encoding="utf-8", metavar="FILE.svg", help="For a plot.")
    ] = None,
) -> None:
    """Measure any OpenAI-compatible server: throughput, and the times of its tokens.

    Sends prompts of random numbers, which no cache knows, and streams greedy answers.
    Four small requests find out first how many tokens a number is to the server, and
    before each level as many requests as it has at once do not count.
    Ctrl-C ends it with what is complete so far.

    Exit codes: 1 no server answers, or all requests of a level failed;
    2 an option is wrong; 130 Ctrl-C.
    """
    options = {name: value for name, value in locals().items() if name not in ("api_key", "json", "plot")}
    levels, key = bench_report.whole_numbers(concurrency, "--concurrency"), api_key.strip()
    base = (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1")
    if "@" in urlsplit(base).netloc:
        raise typer.BadParameter("the URL holds a password, which would be printed: use OPENAI_API_KEY instead")
    if not (key.isascii() and key.isprintable()):
        raise typer.BadParameter("--api-key: has characters that HTTP cannot carry")
    if plot is not None and not plot.name.endswith(".svg"):
        raise typer.BadParameter(f"--plot {plot.name}: name a file that ends in .svg")
    body: dict[str, Any] = {"model": model, "max_tokens": output_tokens, "temperature": 0}
    body |= {"stream": True, "stream_options": {"include_usage": True}} | ({"ignore_eos": True} if ignore_eos else {})
    benchmark = Benchmark(base, key, timeout, f"/v1/{'chat/' if chat else ''}completions", body)
    interrupted = False
    try:
        with fatal_errors(1), bench_report.bars() as bars:
            asyncio.run(benchmark.run(input_tokens, levels, requests, bars))
    except KeyboardInterrupt:
        interrupted = True
    found = benchmark.found
    measured = [{"concurrency": level, **one} for level, one in zip(levels, found.values(), strict=False)]
    title = f"{body['model']} at {base}: {input_tokens} tokens in, {output_tokens} out"
    title += "; interrupted: this is what was complete" if interrupted else ""
    picture = _plot(measured)
    options |= {"url": base, "model": body["model"], "concurrency": levels}
    details = {"interrupted": interrupted, "levels": measured}
    bench_report.publish(json, "serve", options, details, title, *bench_report.shown(found), picture)
    if plot is not None:
        console = Console(record=True, file=io.StringIO(), width=120)
        console.print(picture)
        plot.write(console.export_svg(title=title))
    if interrupted or not all(level["completed"] for level in measured):
        raise typer.Exit(130 if interrupted else 1)


class Benchmark:
    """`found` holds the figures of each level, of the last one those so far where `run` was cancelled."""

    def __init__(self, url: str, key: str, timeout: float, path: str, body: dict[str, Any]) -> None:
        self.found: dict[str, dict[str, Any]] = {}
        self._url, self._key, self._path, self._body = url, key, path, body
        self._client = Client(url, api_key=key, time_limit=timeout)

    async def run(self, input_tokens: int, levels: list[int], requests: int | None, bars: Progress) -> None:
        """Sets the body's model where it is None. Raises `StartupError` where the server cannot be measured."""
        served = await served_models(self._url, self._key)
        model = self._body["model"] = self._body["model"] or served[0]
        if model not in served:
            raise StartupError(f"no model {model!r} at {self._url}; --model can be: {', '.join(served)}")
        with closing(self._client):
            words = max(1, input_tokens // 8)
            for _ in range(4):  # each comes nearer, for a chat's template is among the tokens too
                sample = await self._ask(words, max_tokens=2)
                if not sample.prompt_tokens:  # though it may have no text
                    advice = "; run again with --no-ignore-eos" if "ignore_eos" in str(sample.error) else ""
                    raise StartupError(f"a first request failed: {sample.error}{advice}")
                words = max(1, round(words * input_tokens / sample.prompt_tokens))
            ask = partial(self._ask, words)
            for level in levels:
                loop, total = partial(closed_loop, ask, concurrency=level), requests or max(8, 2 * level)
                await loop(lambda _: None, requests=level)
                loop = partial(loop, requests=total)
                await bench_report.measured(f"concurrency {level}", bars, loop, self.found, total)

    async def _ask(self, words: int, **more: object) -> Sample:
        # Of as many digits each, so that as many are as long, whatever the tokenizer.
        prompt = " ".join(str(number) for number in random.choices(range(1000, 10_000), k=words))
        content = {"messages": [{"role": "user", "content": prompt}]} if "chat" in self._path else {"prompt": prompt}
        sample = await self._client.post(self._path, self._body | content | more)
        if sample.error is None and not sample.prompt_tokens:
            sample.error = "no usage: the server does not count tokens (stream_options.include_usage)"
        elif sample.error is None and not sample.times:
            sample.error = "no text: the answer is empty"
        elif sample.error is not None and self._key:
            sample.error = sample.error.replace(self._key, "***")
        return sample


def _plot(levels: list[dict[str, Any]]) -> Table:
    """Throughput and the time to the first token by concurrency, as bars."""
    rows = [(one["output_tokens_per_second"], one["ttft_ms"]["p50"], one["ttft_ms"]["p99"]) for one in levels]
    table = Table("at once", *("", "output tokens / s", "", "TTFT p50, ms", "", "TTFT p99, ms"), box=None)
    for level, row in zip(levels, rows, strict=True):
        cells: list[Any] = []
        for value, column, colour in zip(row, zip(*rows, strict=True), ("blue", "green", "red"), strict=True):
            most = max(other or 0.0 for other in column) or 1.0
            cells += [Bar(most, 0, value or 0.0, width=20, color=colour), bench_report.number(value)]
        table.add_row(str(level["concurrency"]), *cells)
    return table
