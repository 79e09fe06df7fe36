"""Measure the prefix cache on disk: what reading saves, and what writing costs.

    python deploy/prefix_disk.py MODEL --tokens 1000 --rounds 5

First, a prompt of so many tokens, computed, then read from disk: once as the operating system has it in its cache, once
after it has dropped it. Then the steps of `--streams` decoding streams, with the disk and without in turn. Prints
medians, and the 99th percentile of the steps.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from math import inf
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from penstock.engine.cpu.process import prepare_process


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a directory, a GGUF file or a Hugging Face id")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--tokens", type=int, default=1000, help="of a prompt")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--steps", type=int, default=64, help="of a stream")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, help="where the disk is to be measured; by default a temporary one")
    given = parser.parse_args()
    prepare_process(len(os.sched_getaffinity(0)))
    with tempfile.TemporaryDirectory(dir=given.directory) as directory:
        measure(given, Path(directory))
    return 0


def measure(given: argparse.Namespace, directory: Path) -> None:
    from pydantic import ByteSize

    from penstock.engine import EngineConfig, EngineRequest, GenerationParams
    from penstock.engine.choice import Choice
    from penstock.engine.paged.backend import PagedBackend

    def load(disk: Path | None) -> PagedBackend:
        values: dict[str, Any] = {"kv_cache_memory": ByteSize(2 << 30), "max_batch_size": max(given.streams, 16)}
        return PagedBackend(EngineConfig(model=given.model, dtype=given.dtype, prefix_cache_dir=disk, **values))

    def add(backend: PagedBackend, prompt: Sequence[int], count: int) -> Choice:
        params = GenerationParams(temperature=0, max_tokens=count, ignore_eos=True)
        choice = Choice(EngineRequest("r", tuple(prompt), params, seed=1), 0, backend.tokenizer, backend.info)
        backend.add(choice)
        return choice

    def run(backend: PagedBackend) -> None:
        while backend.num_running or backend.num_waiting or backend.delay() <= 0:
            backend.step()

    def first_token(backend: PagedBackend, prompt: Sequence[int]) -> tuple[float, int]:
        """Seconds, and the tokens that were found."""
        started = time.perf_counter()
        choice = add(backend, prompt, 1)
        run(backend)
        return time.perf_counter() - started, choice.cached_tokens

    def settle(backend: PagedBackend) -> None:
        """Wait for the writer; forget what memory holds."""
        while backend.delay() < inf:
            backend.step()
        before = -1
        while (written := backend.cache_stats().spill.num_written) != before:
            before = written
            time.sleep(0.2)
        backend.blocks.evict()

    def prompt_of(number: int, length: int) -> list[int]:
        return [3 + (number * 131 + 7 * index + index * index) % 1400 for index in range(length)]

    plain, spilling = load(None), load(directory)
    for backend in plain, spilling:
        first_token(backend, prompt_of(999, 300))
    computed: list[float] = []
    warm: list[float] = []
    cold: list[float] = []
    for number in range(given.rounds):
        prompt = prompt_of(number, given.tokens + 1)
        seconds, found = first_token(spilling, prompt)
        assert found == 0
        computed.append(seconds)
        for times, dropped in ((warm, False), (cold, True)):
            settle(spilling)
            if dropped:
                drop(directory)
            seconds, found = first_token(spilling, prompt)
            assert found == given.tokens // 16 * 16
            times.append(seconds)
    base = median(computed)
    print(f"{given.tokens} tokens computed: {milliseconds(computed)}")
    for name, times in (("read, in the system's cache", warm), ("read from the device", cold)):
        print(f"{name}: {milliseconds(times)} = {median(times) / base:.1%}")
    steps: dict[str, list[float]] = {"without": [], "with": []}
    for number in range(given.rounds):
        for name, backend in (("without", plain), ("with", spilling)):
            for stream in range(given.streams):
                add(backend, prompt_of(100 + number * given.streams + stream, 20), given.steps)
            while backend.num_running or backend.num_waiting:
                started = time.perf_counter()
                backend.step()
                steps[name].append(time.perf_counter() - started)
            settle(backend)
    for name, times in steps.items():
        last = quantiles(times, n=100)[98]
        print(
            f"a step of {given.streams} streams {name} the disk: {1e3 * median(times):.1f} ms, 99 % {1e3 * last:.1f} ms"
        )
    print(spilling.cache_stats().spill)


def drop(directory: Path) -> None:
    """Let the operating system forget the files' contents."""
    for path in directory.rglob("*.kv"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def milliseconds(times: Sequence[float]) -> str:
    return f"{1e3 * median(times):.0f} ms ({', '.join(f'{1e3 * one:.0f}' for one in sorted(times))})"


if __name__ == "__main__":
    sys.exit(main())
