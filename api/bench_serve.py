"""`penstock bench serve`: how fast any server that speaks OpenAI's HTTP answers, at one concurrency after the other.

A closed loop: each of `concurrency` clients asks again as soon as its last answer has ended. Tokens are those of the
server's `usage`, for a chunk may hold several. TTFT is the time to the first chunk with text; TPOT is (end - first) /
(tokens - 1), the time of a token after the first, and there is none for an answer that came in one chunk.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import closing
from functools import partial
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn
from rich.table import Column, Table
from tokenizers import Tokenizer
from typer import Option

from ..schemas.errors import StartupError
from . import bench_report
from .bench_load import Client, Sample, clock, closed_loop
from .bench_report import milliseconds
from .bench_server import served_models
from .options import fatal_errors

# Of four letters each, so that where a token is a byte, too, prompts of as many words are as long.
WORDS = (
    "able acid army away baby back ball band bank base bath bear bell bird blue boat body bone book boom cake calm "
    "camp card care cash chat chip city clay coal coat code cold cook copy core corn crew dark data date dawn deal"
)
PROBE = 64  # words
RATES = {"requests_per_second": "requests / s", "output_tokens_per_second": "output tokens / s"}
RATES |= {"total_tokens_per_second": "total tokens / s"}
MEANS = {"input_tokens_mean": "input tokens", "output_tokens_mean": "output tokens"}
TIMES = {"ttft_ms": "TTFT, ms", "tpot_ms": "TPOT, ms", "e2e_ms": "end to end, ms", "longest_gap_ms": "longest gap, ms"}


def bench_serve(
    url: Annotated[str, typer.Argument(help="Where the server answers; /v1 may follow.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, Option(help="Which of its models; the first that it lists by default.")] = None,
    api_key: Annotated[str, Option(envvar="OPENAI_API_KEY", help="Never printed.", show_default=False)] = "",
    chat: Annotated[bool, Option("--chat", help="Ask /v1/chat/completions, not /v1/completions.")] = False,
    input_tokens: Annotated[int, Option(min=1, help="Tokens of a prompt, as nearly as words can.")] = 128,
    output_tokens: Annotated[int, Option(min=1, help="Tokens of an answer, at most.")] = 64,
    concurrency: Annotated[str, Option(help="Requests at once: a level each, in rising order.")] = "1,8,32",
    requests: Annotated[int | None, Option(min=1, help="Of a level; 2 * concurrency or 8 by default.")] = None,
    warm_up: Annotated[int | None, Option(min=0, help="Before each level; concurrency by default.")] = None,
    shared_prefix: Annotated[int, Option(min=0, help="Tokens with which every prompt begins.")] = 0,
    ignore_eos: Annotated[bool, Option(help="Ask for full length: vLLM, SGLang, Penstock know how.")] = True,
    temperature: Annotated[float, Option(min=0, help="0 is greedy.")] = 0.0,
    seed: Annotated[int | None, Option(help="For the same prompts and draws; a cache may know them.")] = None,
    timeout: Annotated[float, Option(min=0.1, help="Seconds until a request has failed.")] = 300.0,
    json: Annotated[Path | None, Option(help="File for all figures and settings; - is standard output.")] = None,
    plot: Annotated[Path | None, Option(help="File for a plot: .svg, or .png where matplotlib is.")] = None,
    tokenizer: Annotated[Path | None, Option(help="Directory of tokenizer.json, for exact prompts.")] = None,
) -> None:
    """Measure any OpenAI-compatible server: throughput, and the times of its tokens.

    Sends prompts of random words, which no cache knows, and streams answers.
    Two small requests find out first how many tokens a word is to the server.
    Ctrl-C ends it with what is complete so far.

    Exit codes: 1 no server answers, or all requests of a level failed;
    2 an option is wrong; 130 Ctrl-C.
    """
    settings = {name: value for name, value in locals().items() if name not in ("api_key", "json", "plot")}
    with fatal_errors():
        levels, base, key = bench_report.whole_numbers(concurrency, "--concurrency"), _base(url), api_key.strip()
        if not (key.isascii() and key.isprintable()):
            raise StartupError("--api-key: has characters that HTTP cannot carry")
        if shared_prefix >= input_tokens:
            raise StartupError(f"--shared-prefix {shared_prefix}: must be less than --input-tokens {input_tokens}")
        bench_report.check_writable(json, "--json")
        bench_report.check_plot(plot)
        prompts = Prompts(input_tokens, shared_prefix, Random(seed), tokenizer)
    body: dict[str, Any] = {"model": model, "max_tokens": output_tokens, "temperature": temperature}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    body |= ({"ignore_eos": True} if ignore_eos else {}) | ({"seed": seed} if seed is not None else {})
    benchmark = Benchmark(base, key, prompts, body, f"/v1/{'chat/' if chat else ''}completions", timeout)
    interrupted = False
    try:
        columns = (MofNCompleteColumn(), TextColumn("{task.fields[rate]}"))
        with fatal_errors(1), bench_report.bars(*columns) as bars:
            asyncio.run(benchmark.run(levels, requests, warm_up, bars))
    except KeyboardInterrupt:
        interrupted = True
    found = benchmark.found
    title = f"{body['model']} at {base}: {input_tokens} tokens in, {output_tokens} out"
    with fatal_errors():
        if found:
            console = Console(stderr=json == bench_report.STDOUT, highlight=False, markup=False)
            console.print(title, _table(found), sep="\n")
        settings |= {"url": base, "model": body["model"], "concurrency": levels}
        bench_report.write(json, "serve", settings, {"interrupted": interrupted, "levels": found}, secret=key)
        if plot is not None and found:
            bench_report.plot(plot, title, found)
    errors = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
    for level in found:
        for failure in level["failures"]:
            which = f"{failure['count']} requests failed at concurrency {level['concurrency']}"
            errors.print(f"{which}, the first with: {failure['first']}", style="bold red")
    if interrupted:
        errors.print("interrupted: this is what was complete" if found else "interrupted: nothing was complete")
    if interrupted or not all(level["completed"] for level in found):
        raise typer.Exit(130 if interrupted else 1)


def _base(url: str) -> str:
    url = (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1")
    if "@" in urlsplit(url).netloc:
        raise StartupError("the URL holds a password, which would be printed: use OPENAI_API_KEY instead")
    return url


class Prompts:
    """Random words, about `tokens` tokens in a prompt, the first `shared` of which are the same in all."""

    def __init__(self, tokens: int, shared: int, random: Random, tokenizer: Path | None) -> None:
        self._tokens, self._shared, self._random = tokens, shared, random
        self._prefix, self._around, self._per_word = "", 0.0, 1.0  # set by `fit`
        try:
            self._tokenizer = tokenizer and Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
        except Exception as error:  # the library knows no other class
            raise StartupError(f"--tokenizer {tokenizer}: cannot read tokenizer.json there: {error}") from None

    async def fit(self, count: Callable[[str], Awaitable[int]]) -> None:
        """Learn from how many tokens the server counts for one word and for more. Raises `StartupError`."""
        word, more = self._words(1), self._words(1 + PROBE)
        one, many = await count(word), await count(more)
        self._per_word = (many - one) / PROBE
        if self._per_word <= 0:
            raise StartupError(f"the server counts {one} tokens for 1 word and {many} for {1 + PROBE}: of no use")
        self._around = one - (len(self._ends(word)) or self._per_word)  # a chat template's
        self._prefix = f"{self._text(self._shared)} " if self._shared else ""

    def draw(self) -> str:
        return self._text(self._tokens - self._around, self._prefix)

    def _words(self, count: int) -> str:
        return " ".join(self._random.choices(WORDS.split(), k=count))

    def _text(self, tokens: float, prefix: str = "") -> str:
        """`prefix`, made longer to so many tokens."""
        if not self._tokenizer:
            return prefix + self._words(max(1, round(tokens / self._per_word) - len(prefix.split())))
        count = max(1, round(tokens))
        text = prefix + self._words(count)
        return text[: self._ends(text)[count - 1]]

    def _ends(self, text: str) -> list[int]:
        """Where each token of a text ends, as far as there is a tokenizer."""
        found = self._tokenizer.encode(text, add_special_tokens=False).offsets if self._tokenizer else []
        return [end for _, end in found]


class Benchmark:
    """`found` holds the figures of each level, of the last one those so far where `run` was cancelled."""

    def __init__(self, url: str, key: str, prompts: Prompts, body: dict[str, Any], path: str, timeout: float) -> None:
        self.found: list[dict[str, Any]] = []
        self._url, self._key, self._path, self._timeout = url, key, path, timeout
        self._prompts, self._body = prompts, body

    async def run(self, levels: list[int], requests: int | None, warm_up: int | None, bars: Progress) -> None:
        """Sets the body's model where it is None. Raises `StartupError` where the server cannot be measured."""
        served = await served_models(self._url, self._key)
        model = self._body["model"] = self._body["model"] or served[0]
        if model not in served:
            raise StartupError(f"no model {model!r} at {self._url}; --model can be: {', '.join(served)}")
        with closing(Client(self._url, api_key=self._key, time_limit=self._timeout)) as self._client:
            await self._prompts.fit(self._count)
            for level in levels:
                update = partial(bars.update, bars.add_task(f"concurrency {level}", rate=""))
                await self._loop(level, level if warm_up is None else warm_up, update)
                await self._loop(level, requests or max(8, 2 * level), update, self.found)

    async def _count(self, prompt: str) -> int:
        """Tokens of it, as the server counts them."""
        sample = await self._ask(prompt, max_tokens=2)
        if sample.error is not None and not sample.prompt_tokens:  # so few tokens may be no text
            advice = "; run again with --no-ignore-eos" if "ignore_eos" in sample.error else ""
            raise StartupError(f"a first request failed: {sample.error}{advice}")
        return sample.prompt_tokens

    async def _loop(
        self, level: int, total: int, update: Callable[..., None], found: list[dict[str, Any]] | None = None
    ) -> None:
        """Send `total` prompts, `level` at once; their figures, complete or not, go into `found`."""
        prompts = iter([self._prompts.draw() for _ in range(total)])
        samples: list[Sample] = []
        start = clock()

        def ended(sample: Sample) -> None:
            samples.append(sample)
            rate = sum(sample.tokens for sample in samples if sample.error is None) / (clock() - start)
            update(total=total, completed=len(samples), rate=f"{rate:,.0f} tok/s")

        try:
            await closed_loop(lambda: self._ask(next(prompts)), ended, concurrency=level, requests=total)
        finally:
            if samples and found is not None:
                found.append(_figures(level, total, samples, clock() - start))

    async def _ask(self, prompt: str, **more: object) -> Sample:
        content = {"messages": [{"role": "user", "content": prompt}]} if "chat" in self._path else {"prompt": prompt}
        sample = await self._client.post(self._path, self._body | content | more)
        if sample.error is None and not sample.prompt_tokens:
            sample.error = "no usage: the server does not count tokens (stream_options.include_usage)"
        elif sample.error is None and not sample.times:
            sample.error = "no text: the answer is empty"
        elif sample.error is not None and self._key:
            sample.error = sample.error.replace(self._key, "***")
        return sample


def _figures(level: int, total: int, samples: list[Sample], seconds: float) -> dict[str, Any]:
    """Of the completed alone, times in milliseconds; the failed are counted by the kind that begins their error."""
    done = [sample for sample in samples if sample.error is None]
    failures: dict[str, dict[str, Any]] = {}
    for error in (sample.error for sample in samples if sample.error is not None):
        kind = error.partition(": ")[0]
        failures.setdefault(kind, {"kind": kind, "count": 0, "first": error})["count"] += 1
    tokens = {"input": sum(sample.prompt_tokens for sample in done), "output": sum(sample.tokens for sample in done)}
    counts = {"concurrency": level, "requests": total, "completed": len(done), "failed": len(samples) - len(done)}
    return {
        **counts,
        "failures": list(failures.values()),
        "seconds": seconds,
        **{f"{name}_tokens": count for name, count in tokens.items()},
        **{f"{name}_tokens_mean": count / len(done) if done else None for name, count in tokens.items()},
        "requests_per_second": len(done) / seconds,
        "output_tokens_per_second": tokens["output"] / seconds,
        "total_tokens_per_second": sum(tokens.values()) / seconds,
        "ttft_ms": _spread(one.to_first for one in done),
        "tpot_ms": _spread(
            (one.ended - one.times[0]) / (one.tokens - 1) for one in done if one.gaps and one.tokens > 1
        ),
        "e2e_ms": _spread(one.ended - one.sent for one in done),
        "gap_ms": _spread(gap for one in done for gap in one.gaps),
        "longest_gap_ms": _spread(max(one.gaps, default=None) for one in done),
    }


def _spread(seconds: Iterable[float | None]) -> dict[str, float | None]:
    values = [value for value in seconds if value is not None]
    mean = {"mean": 1000 * fmean(values) if values else None}
    return mean | {f"p{percent}": milliseconds(values, percent) for percent in (50, 90, 99)}


def _table(levels: list[dict[str, Any]]) -> Table:
    columns = (Column(str(level["concurrency"]), justify="right") for level in levels)
    table = Table("concurrency", "", *columns, box=None, pad_edge=False)

    def row(name: str, statistic: str, values: Iterable[float | None]) -> None:
        table.add_row(name, statistic, *("-" if x is None else f"{x:,.{0 if x >= 1000 else 1}f}" for x in values))

    for name in ("completed", "failed"):
        table.add_row(name, "", *(f"{level[name]} of {level['requests']}" for level in levels))
    for name, label in (RATES | MEANS).items():
        row(label, "mean" if name in MEANS else "", (level[name] for level in levels))
    for name, label in TIMES.items():
        for statistic in ("mean", "p50", "p90", "p99"):
            row(label if statistic == "mean" else "", statistic, (level[name][statistic] for level in levels))
    return table
