"""`penstock bench engine`: how fast the engine alone computes, and how much of what the machine can do that is.

A prefill is judged by the rate of matrix products; a decoding step by the reading of memory too, for it reads all
weights, and the keys and values of its rows. Each round measures the limits before, after and several times within its
work: of both, all work by all time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from math import inf
from random import Random
from statistics import fmean, median
from typing import Annotated, Any

from rich.table import Table
from typer import Argument, Option

from ...config.settings import Settings
from ...config.sources import Loaded, with_projector
from ...engine import Backend, EngineConfig, EngineRequest, GenerationParams
from ...engine.backends.registry import load_backend
from ...engine.choice import Choice
from ...engine.cpu.process import prepare_process, worker_threads
from ...engine.models import resolve_model
from ...engine.progress import loading_bar
from ...schemas.errors import StartupError
from ..terminal.options import with_settings
from . import report as bench_report

PREFILLED = 1024  # tokens of a round, at the least: short prompts are repeated
SLICE = 0.15  # seconds of work between two measurements of the limits
UNITS = {"read_bytes": ("GB/s", 1e-9), "flops": ("TFLOP/s", 1e-12)}

Limits = list[dict[str, float]]


@with_settings
def bench_engine(
    loaded: Loaded,
    model: Annotated[str | None, Argument(help="Directory, GGUF file or Hugging Face id of the model.")] = None,
    batch: Annotated[str, Option(help="Rows that decode together: one measurement each.")] = "1,8,32",
    prompt: Annotated[str, Option(help="Tokens of a prompt to be prefilled: one measurement each.")] = "512",
    context: Annotated[int, Option(min=1, help="Tokens of a row's prompt before decoding is measured.")] = 128,
    steps: Annotated[int, Option(min=1, help="Decoding steps of a round.")] = 32,
    temperature: Annotated[float, Option(min=0, max=2, help="By which tokens are drawn; 0 takes the best.")] = 0.0,
    top_p: Annotated[
        float, Option(min=0.01, max=1, help="The share of the distribution that tokens are drawn from.")
    ] = 1.0,
    rounds: Annotated[int, Option(min=1, help="Of each measurement, in turn; the table has medians.")] = 3,
    limits: Annotated[
        bool, Option("--limits/--no-limits", help="Also measure what the machine can do, which takes 1 GiB.")
    ] = True,
    json: bench_report.Json = None,
) -> None:
    """Measure the engine alone, without a server: prefill and decoding, and their share of the machine's limits.

    Limits are measured beside the work, each by the fastest of several ways.
    Prompts are random, so that no cached prefix shortens them.
    """
    batches = bench_report.whole_numbers(batch, "--batch")
    lengths = bench_report.whole_numbers(prompt, "--prompt")
    given = with_projector(loaded.settings)
    if given.model is None and given.backend != "echo":
        raise StartupError("name a model: penstock bench engine MODEL (a directory, a GGUF file or a Hugging Face id)")
    shared = {name: getattr(given, name) for name in EngineConfig.model_fields.keys() & Settings.model_fields.keys()}
    directory = None if given.model is None or given.backend == "echo" else resolve_model(given.model)
    prepare_process(given.threads or worker_threads(directory, given.workers))
    own = {"model": given.model or "echo", "max_batch_size": max(*batches, given.max_batch_size or 1)}
    own["speculation"] = "off"  # a step is to yield one token of each row
    config = EngineConfig(**shared | own)
    with loading_bar(f"loading {config.model}") as loading:
        backend = load_backend(config, loading)
    with closing(backend), bench_report.bars() as bars:
        longest = backend.info.context_length
        params = GenerationParams(max_tokens=longest, temperature=temperature, top_p=top_p, ignore_eos=True)
        bench = Bench(backend, config, lengths, max(batches), context, steps, params, limits)
        works = {f"prefill {length}": partial(bench.prefill, length) for length in lengths}
        works |= {f"decode {size}": partial(bench.decode, size) for size in batches}
        found: dict[str, list[dict[str, float]]] = {name: [] for name in works}
        bar = bars.add_task("", total=rounds * len(works), news="")
        for name in [*works] * rounds:
            bars.update(bar, description=name)
            found[name].append(works[name]())
            bars.advance(bar)
    medians = {name: {key: median(one[key] for one in each) for key in each[0]} for name, each in found.items()}
    title = f"{config.model}, {config.backend}, {config.quantization or config.dtype}, {bench.threads} threads"
    title += f"; {steps} steps after {context} tokens, medians of {rounds} rounds"
    title += f"; temperature {temperature:g}, top_p {top_p:g}" if temperature else ""
    title += "".join(f"\nslow: {reason}" for reason in backend.info.slow_paths)
    options = {"batch": batches, "prompt": lengths, "context": context, "steps": steps, "rounds": rounds}
    options |= {"temperature": temperature, "top_p": top_p}
    options |= {"engine": config.model_dump()}
    details = {
        "threads": bench.threads,
        "slow_paths": backend.info.slow_paths,
        "limits": bench.limits,
        "medians": medians,
        "rounds": found,
    }
    bench_report.publish(json, "engine", options, details, title, _table(medians, bench.limits))


class Bench:
    """Measures one backend, and the machine's limits where the backend counts its bytes and operations."""

    def __init__(
        self,
        backend: Backend,
        config: EngineConfig,
        lengths: list[int],
        batch: int,
        context: int,
        steps: int,
        params: GenerationParams,
        limits: bool,
    ) -> None:
        """`params` are every row's; the machine's `limits` may be left out. Runs all lengths and the largest batch
        unmeasured.

        Raises `StartupError` for what does not fit.
        """
        import torch  # only now, for `--help` does not need it

        from ...engine.planning.device import resolve_device
        from . import limits as bench_limits

        self._backend, self._context, self._steps, self._random = backend, context, steps, Random(0)
        self._params = params
        room = backend.info.context_length
        for option, need in ("--prompt", max(lengths) + 1), ("--context and --steps", context + steps + 1):
            if need > room:
                raise StartupError(f"{option}: {need} tokens with the answer are above the context of {room}")
        for length in lengths:
            self._prefill(length)
        self._leave(self._rows(batch, context))
        self.threads = torch.get_num_threads()
        self.limits: Limits = []  # all that were measured; set by `_measure`
        self._costs: Any = backend if limits and hasattr(backend, "flops") else None
        if self._costs:
            dtype = getattr(torch, backend.info.dtype or "float32" if config.dtype == "auto" else config.dtype)
            ways = bench_limits.prepare(dtype, resolve_device(config.device))
            self._limit, self._best = partial(bench_limits.measure, ways), bench_limits.limit

    def prefill(self, length: int) -> dict[str, float]:
        amounts = {"flops": self._costs.flops(length, 1, length * (length + 1) // 2)} if self._costs else {}
        return self._measure(partial(self._prefill, length), max(1, PREFILLED // length), length, amounts)

    def decode(self, batch: int) -> dict[str, float]:
        rows, steps, costs, amounts = self._rows(batch, self._context), self._steps, self._costs, {}
        made = sum(len(row.tokens) for row in rows)
        if costs:
            # The newest token of each row is computed next, and sees itself; the mean of the steps.
            seen = batch * self._context + made + batch * (steps - 1) / 2
            amounts["read_bytes"] = costs.weight_bytes + seen * costs.kv_bytes_per_token
            amounts["flops"] = costs.flops(batch, batch, seen)
        found = self._measure(self._backend.step, steps, batch, amounts)
        if sum(len(row.tokens) for row in rows) != made + batch * steps:
            raise _apart(batch, self._context)
        self._leave(rows)
        return found

    def _measure(
        self, run: Callable[[], object], passes: int, tokens: int, amounts: dict[str, Any]
    ) -> dict[str, float]:
        """`tokens`, and the bytes and operations in `amounts`, are those of one pass."""
        samples: list[dict[str, list[float]]] = []
        seconds: list[float] = []
        measured = -inf  # how much of the work was done when the limits were measured last
        for _ in range(passes):
            if amounts and sum(seconds) - measured >= SLICE:
                samples.append(self._limit())
                measured = sum(seconds)
            start = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - start)
        mean = fmean(seconds)
        found = {"passes": passes, "tokens": passes * tokens, "seconds": sum(seconds), "ms": 1000 * median(seconds)}
        found["tokens_per_second"] = tokens / mean
        if amounts:
            samples.append(self._limit())
            self.limits += [{name: max(rates) for name, rates in sample.items()} for sample in samples]
        for name, amount in amounts.items():
            rate, limit = amount / mean, self._best(samples, name)
            found |= {name: amount, f"{name}_per_second": rate, f"{name}_limit": limit, f"{name}_share": rate / limit}
        return found

    def _prefill(self, length: int) -> None:
        self._leave(self._rows(1, length))

    def _rows(self, count: int, length: int) -> list[Choice]:
        """So many rows that all decode, those ready first some tokens ahead."""
        backend, info, tokenizer, rows = self._backend, self._backend.info, self._backend.tokenizer, []
        for _ in range(count):
            prompt = self._random.choices(range(min(info.vocabulary_size, tokenizer.vocabulary_size)), k=length)
            rows.append(Choice(EngineRequest("bench", tuple(prompt), self._params, seed=0), 0, tokenizer, info))
            backend.add(rows[-1])
        while (ready := sum(bool(row.tokens) for row in rows)) < count:
            running = backend.num_running
            backend.step()
            # Rows are missing, or where all decoded no other came in.
            if any(row.finish for row in rows) or backend.num_running < running + (0 < running == ready):
                raise _apart(count, length)
        return rows

    def _leave(self, rows: list[Choice]) -> None:
        for row in rows:
            self._backend.remove(row)


def _apart(count: int, length: int) -> StartupError:
    advice = "raise --kv-cache-memory, or lower --batch, --prompt, --context or --steps, unless lines above say why"
    return StartupError(f"{count} rows of {length} tokens do not run together: {advice}")


def _table(found: dict[str, dict[str, float]], limits: Limits) -> Table:
    """Medians of the works, and of the limits where there are any."""
    columns = [column for unit, _ in UNITS.values() for column in (unit, "of limit")]
    table = bench_report.numbers_table(("what",), ("tokens/s", "ms", *columns))
    for name, each in found.items():
        cells = [f"{each['tokens_per_second']:,.1f}", f"{each['ms']:.1f}"]
        for key, (_, scale) in UNITS.items():
            is_known = key in each
            cells += [f"{scale * each[f'{key}_per_second']:.3g}", f"{each[f'{key}_share']:.0%}"] if is_known else "--"
        table.add_row(name, *cells)
    if limits:
        cells = ["", ""]
        for key, (_, scale) in UNITS.items():
            values = [scale * one[key] for one in limits]
            cells += [f"{median(values):.3g}", f"{min(values):.3g} to {max(values):.3g}"]
        table.add_row("limit: median, range", *cells)
    return table
