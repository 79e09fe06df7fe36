"""`penstock bench serve`: how fast any server that speaks OpenAI's HTTP answers, at one concurrency after the other.

A closed loop: each of `concurrency` clients asks again as soon as its last answer has ended. Tokens are those of the
server's `usage`, for a chunk may hold several. TTFT is the time to the first chunk with text; TPOT is (end - first) /
(tokens - 1), the time of a token after the first, and there is none for an answer that came in one chunk.
"""

from __future__ import annotations

import asyncio
from contextlib import closing
from functools import partial
from pathlib import Path
from random import Random
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer
from rich.console import Console
from rich.progress import Progress
from typer import Option

from ..schemas.errors import StartupError
from . import bench_report
from .bench_load import Client, Sample, closed_loop
from .bench_server import served_models
from .options import fatal_errors

# Of four letters each, so that where a token is a byte, too, prompts of as many words are as long.
WORDS = (  # noqa: SIM905
    "able acid army away baby back ball band bank base bath bear bell bird blue boat body bone book boom cake calm "
    "camp card care cash chat chip city clay coal coat code cold cook copy core corn crew dark data date dawn deal"
).split()
PROBE = 64  # words


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
    ignore_eos: Annotated[bool, Option(help="Ask for full length: vLLM, SGLang, Penstock know how.")] = True,
    seed: Annotated[int | None, Option(help="For the same prompts; a cache may know them.")] = None,
    timeout: Annotated[float, Option(min=0.1, help="Seconds until a request has failed.")] = 300.0,
    json: Annotated[Path | None, Option(help="File for all figures and settings; - is standard output.")] = None,
    plot: Annotated[Path | None, Option(help="File for a plot: .svg.")] = None,
) -> None:
    """Measure any OpenAI-compatible server: throughput, and the times of its tokens.

    Sends prompts of random words, which no cache knows, and streams greedy answers.
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
        bench_report.check_writable(json, "--json")
        bench_report.check_writable(plot, "--plot")
        if plot is not None and plot.suffix != ".svg":
            raise StartupError(f"--plot {plot}: name a file that ends in .svg")
    body: dict[str, Any] = {"model": model, "max_tokens": output_tokens, "temperature": 0}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    body |= ({"ignore_eos": True} if ignore_eos else {}) | ({"seed": seed} if seed is not None else {})
    path = f"/v1/{'chat/' if chat else ''}completions"
    benchmark = Benchmark(base, key, timeout, path, body, Random(seed))
    interrupted = False
    try:
        with fatal_errors(1), bench_report.bars() as bars:
            asyncio.run(benchmark.run(input_tokens, levels, requests, warm_up, bars))
    except KeyboardInterrupt:
        interrupted = True
    found = benchmark.found
    title = f"{body['model']} at {base}: {input_tokens} tokens in, {output_tokens} out"
    settings |= {"url": base, "model": body["model"], "concurrency": levels}
    measured = [{"concurrency": level, **found[f"concurrency {level}"]} for level in levels[: len(found)]]
    details = {"interrupted": interrupted, "levels": measured}
    shown = (title, bench_report.loads_table(found)) if found else ()
    bench_report.publish(json, "serve", settings, details, *shown, secret=key)
    if plot is not None and found:
        bench_report.plot(plot, title, measured)
    bench_report.print_failures(found)
    errors = Console(stderr=True)
    if interrupted:
        errors.print("interrupted: this is what was complete" if found else "interrupted: nothing was complete")
    if interrupted or not all(level["completed"] for level in found.values()):
        raise typer.Exit(130 if interrupted else 1)


def _base(url: str) -> str:
    url = (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1")
    if "@" in urlsplit(url).netloc:
        raise StartupError("the URL holds a password, which would be printed: use OPENAI_API_KEY instead")
    return url


class Benchmark:
    """`found` holds the figures of each level, of the last one those so far where `run` was cancelled."""

    def __init__(self, url: str, key: str, timeout: float, path: str, body: dict[str, Any], random: Random) -> None:
        self.found: dict[str, dict[str, Any]] = {}
        self._url, self._key, self._path, self._body, self._random = url, key, path, body, random
        self._client = Client(url, api_key=key, time_limit=timeout)
        self._words = 1  # of a prompt; set by `run`

    async def run(
        self, input_tokens: int, levels: list[int], requests: int | None, warm_up: int | None, bars: Progress
    ) -> None:
        """Sets the body's model where it is None. Raises `StartupError` where the server cannot be measured."""
        served = await served_models(self._url, self._key)
        model = self._body["model"] = self._body["model"] or served[0]
        if model not in served:
            raise StartupError(f"no model {model!r} at {self._url}; --model can be: {', '.join(served)}")
        with closing(self._client):
            one, many = [await self._count(words) for words in (1, 1 + PROBE)]
            per_word = (many - one) / PROBE
            if per_word <= 0:
                raise StartupError(f"the server counts {one} tokens for 1 word and {many} for {1 + PROBE}: of no use")
            around = one - per_word  # a chat template's
            self._words = max(1, round((input_tokens - around) / per_word))
            for level in levels:
                loop, total = partial(closed_loop, self._ask, concurrency=level), requests or max(8, 2 * level)
                await loop(lambda _: None, requests=level if warm_up is None else warm_up)
                loop = partial(loop, requests=total)
                await bench_report.measured(f"concurrency {level}", bars, loop, self.found, total)

    async def _count(self, words: int) -> int:
        """Tokens of a prompt of so many words, as the server counts them."""
        self._words = words
        sample = await self._ask(max_tokens=2)
        if sample.error is not None and not sample.prompt_tokens:  # so few tokens may be no text
            advice = "; run again with --no-ignore-eos" if "ignore_eos" in sample.error else ""
            raise StartupError(f"a first request failed: {sample.error}{advice}")
        return sample.prompt_tokens

    async def _ask(self, **more: object) -> Sample:
        prompt = " ".join(self._random.choices(WORDS, k=self._words))
        content = {"messages": [{"role": "user", "content": prompt}]} if "chat" in self._path else {"prompt": prompt}
        sample = await self._client.post(self._path, self._body | content | more)
        if sample.error is None and not sample.prompt_tokens:
            sample.error = "no usage: the server does not count tokens (stream_options.include_usage)"
        elif sample.error is None and not sample.times:
            sample.error = "no text: the answer is empty"
        elif sample.error is not None and self._key:
            sample.error = sample.error.replace(self._key, "***")
        return sample
