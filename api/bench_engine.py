"""`penstock bench engine`: how fast the engine alone computes, and how much of what the machine can do that is.

A prefill is judged by the rate of matrix products; a decoding step by the reading of memory too, for it reads all
weights, and the keys and values of its rows. Each round measures limit, work, limit: its shares are of the two's mean.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import Annotated, Any

from rich.table import Table
from typer import Argument, Option

from ..config.settings import Settings
from ..config.sources import Loaded
from ..engine import Backend, EngineConfig, EngineRequest, GenerationParams
from ..engine.backends import load_backend
from ..engine.progress import loading_bar
from ..engine.sequence import Sequence
from ..schemas.errors import StartupError
from . import bench_report
from .options import with_settings

LEAD = 3  # tokens of an answer, at the least, before its decoding is measured
PREFILLED = 1024  # tokens of a round, at the least: short prompts are repeated
UNITS = {"read_bytes": ("GB", 1e-9), "flops": ("TFLOP", 1e-12)}


@with_settings
def bench_engine(
    loaded: Loaded,
    model: Annotated[str | None, Argument(help="Directory or Hugging Face id of the model.")] = None,
    batch: Annotated[str, Option(help="Rows that decode together: one measurement each.")] = "1,8,32",
    prompt: Annotated[str, Option(help="Tokens of a prompt to be prefilled: one measurement each.")] = "512",
    context: Annotated[int, Option(min=1, help="Tokens of a row's prompt before decoding is measured.")] = 128,
    steps: Annotated[int, Option(min=1, help="Decoding steps of a round.")] = 32,
    rounds: Annotated[int, Option(min=1, help="Of each measurement, in turn; the table has medians.")] = 3,
    json: Annotated[Path | None, Option(help="File for all rounds and settings; - is standard output.")] = None,
) -> None:
    """Measure the engine alone, without a server: prefill and decoding, and their share of the machine's limits.

    Limits are measured beside the work, each by the fastest of several ways.
    Prompts are random, so that no cached prefix shortens them.
    """
    batches = bench_report.whole_numbers(batch, "--batch")
    lengths = bench_report.whole_numbers(prompt, "--prompt")
    bench_report.check_writable(json, "--json")
    given = loaded.settings
    if given.model is None and given.backend != "echo":
        raise StartupError("name a model: penstock bench engine MODEL (a directory or a Hugging Face id)")
    shared = {name: getattr(given, name) for name in EngineConfig.model_fields.keys() & Settings.model_fields.keys()}
    own = {"model": given.model or "echo", "max_batch_size": max(*batches, given.max_batch_size)}
    config = EngineConfig(**shared | own)
    with loading_bar(f"loading {config.model}") as loading:
        backend = load_backend(config, loading)
    with closing(backend), bench_report.bars() as bars:
        bench = Bench(backend, config.dtype, lengths, max(batches), context, steps)
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
    limits = []
    for key, (unit, scale) in UNITS.items() if bench.limits else ():
        values = sorted(scale * one[key] for one in bench.limits)
        limits.append(f"limit: {median(values):.3g} {unit}/s, from {values[0]:.3g} to {values[-1]:.3g}")
    settings = {"batch": batches, "prompt": lengths, "context": context, "steps": steps, "rounds": rounds}
    details = {"threads": bench.threads, "limits": bench.limits, "medians": medians, "rounds": found}
    settings |= {"engine": config.model_dump()}
    bench_report.publish(json, "engine", settings, details, title, _table(medians), *limits)


class Bench:
    """Measures one backend, and the machine's limits where the backend counts its bytes and operations."""

    def __init__(self, backend: Backend, dtype: str, lengths: list[int], batch: int, context: int, steps: int) -> None:
        """Runs all lengths and the largest batch unmeasured. Raises `StartupError` for what does not fit."""
        import torch  # only now: whoever looks at `--help` need not wait for it

        from . import bench_limits

        self._backend, self._context, self._steps, self._random = backend, context, steps, Random(0)
        room, answer = backend.info.context_length, steps + LEAD
        if max(lengths) >= room:
            raise StartupError(f"--prompt {max(lengths)}: must be less than the context of {room} tokens")
        if context + answer > room:
            fault = f"with an answer of {answer} above the context of {room} tokens"
            raise StartupError(f"--context {context}: {fault}")
        for length in lengths:
            self._prefill(length)
        self._leave(self._together(batch))
        self.threads = torch.get_num_threads()
        self.limits: list[dict[str, float]] = []  # all that were measured; set by `_measure`
        self._limit: Callable[[], dict[str, float]] = dict
        self._costs: Any = backend if hasattr(backend, "flops") else None
        if self._costs:
            numbers = backend.info.dtype or "float32" if dtype == "auto" else dtype
            self._limit = partial(bench_limits.measure, bench_limits.prepare(getattr(torch, numbers)))

    def prefill(self, length: int) -> dict[str, float]:
        amounts = {"flops": self._costs.flops(length, 1, length * (length + 1) // 2)} if self._costs else {}
        return self._measure(partial(self._prefill, length), max(1, PREFILLED // length), length, amounts)

    def decode(self, batch: int) -> dict[str, float]:
        rows, steps, costs, amounts = self._together(batch), self._steps, self._costs, {}
        made = sum(len(row.tokens) for row in rows)
        if costs:
            # The newest token of each row is computed next, and sees itself; the mean of the steps.
            seen = batch * self._context + made + batch * (steps - 1) / 2
            amounts["read_bytes"] = costs.weight_bytes + seen * costs.kv_bytes_per_token
            amounts["flops"] = costs.flops(batch, batch, seen)
        found = self._measure(self._backend.step, steps, batch, amounts)
        if sum(len(row.tokens) for row in rows) != made + batch * steps:
            raise self._apart(rows)
        self._leave(rows)
        return found

    def _measure(
        self, run: Callable[[], object], passes: int, tokens: int, amounts: dict[str, Any]
    ) -> dict[str, float]:
        """`tokens`, and the bytes and operations in `amounts`, are those of one pass."""
        before, seconds = self._limit(), []
        for _ in range(passes):
            start = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - start)
        after, mean = self._limit(), fmean(seconds)
        self.limits += [before, after] if before else []
        found = {"passes": passes, "tokens": passes * tokens, "seconds": sum(seconds), "ms": 1000 * median(seconds)}
        found["tokens_per_second"] = tokens / mean
        for name, amount in amounts.items():
            rate, limit = amount / mean, (before[name] + after[name]) / 2
            found |= {name: amount, f"{name}_per_second": rate, f"{name}_limit": limit, f"{name}_share": rate / limit}
        return found

    def _prefill(self, length: int) -> None:
        row = self._add(length, 1)
        while row.finish is None:
            self._backend.step()
        if row.finish == "error":
            raise self._apart([row])

    def _together(self, batch: int) -> list[Sequence]:
        """So many rows that all decode, those ready first some tokens ahead."""
        backend = self._backend
        rows = [self._add(self._context, backend.info.context_length) for _ in range(batch)]
        while (ready := sum(bool(row.tokens) for row in rows)) < batch:
            running = backend.num_running
            backend.step()
            # Rows are missing, or where all decoded no other came in.
            if any(row.finish for row in rows) or backend.num_running < running + (0 < running == ready):
                raise self._apart(rows)
        for _ in range(LEAD - 1):
            backend.step()
        return rows

    def _add(self, length: int, most: int) -> Sequence:
        info, tokenizer = self._backend.info, self._backend.tokenizer
        prompt = self._random.choices(range(min(info.vocabulary_size, tokenizer.vocabulary_size)), k=length)
        params = GenerationParams(max_tokens=most, temperature=0.0, ignore_eos=True)
        row = Sequence(EngineRequest("bench", tuple(prompt), params, seed=0), 0, tokenizer, info)
        self._backend.add(row)
        return row

    def _leave(self, rows: list[Sequence]) -> None:
        for row in rows:
            self._backend.remove(row)

    def _apart(self, rows: list[Sequence]) -> StartupError:
        failed = any(row.finish == "error" for row in rows)
        advice = "raise --kv-cache-memory, or lower --batch, --context or --steps"
        reason = "the engine failed, as the lines above say" if failed else f"they do not run together: {advice}"
        return StartupError(f"{len(rows)} rows of {self._context} tokens, {self._steps} steps: {reason}")


def _table(found: dict[str, dict[str, float]]) -> Table:
    units = [f"{unit}{end}" for unit, _ in UNITS.values() for end in (" a pass", "/s", ", of limit")]
    table = bench_report.numbers_table(("what",), ("tokens/s", "ms", *units))
    for name, each in found.items():
        cells = [f"{each['tokens_per_second']:,.1f}", f"{each['ms']:.1f}"]
        for key, (_, scale) in UNITS.items():
            amounts = [f"{scale * each.get(name, 0):.3g}" for name in (key, f"{key}_per_second")]
            cells += [*amounts, f"{each[f'{key}_share']:.0%}"] if key in each else "---"
        table.add_row(name, *cells)
    return table
