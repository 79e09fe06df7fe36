"""Measures a model on every backend that can run it here, to find the fastest."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import orjson
from rich.console import Console
from rich.table import Table

from ...config.process import python
from ...config.settings import Settings
from ...config.sources import flag
from ...engine.planning.discovery import find_backends, why_not
from ...schemas.errors import PenstockError

ROWS, PROMPT, ANSWER = 8, 128, 64  # requests, and the tokens of each, that the measure stands for
_LOAD = f"--batch {ROWS} --prompt {PROMPT} --context {PROMPT} --steps 16 --rounds 1 --no-limits".split()
_SETTINGS = ("device", "dtype", "quantization", "max_sequence_length", "kv_cache_memory")


class Measured(NamedTuple):
    """`seconds` that a backend takes for `ROWS` requests together; None if it cannot run the model, for a `reason`."""

    backend: str
    seconds: float | None
    reason: str


def measure_backends(source: str, values: Mapping[str, object], settings: Settings) -> list[Measured]:
    """Run a model on each backend in a process of its own, the fastest first. `values` are keys of the model's table.

    Backends that need no model's files are left out.
    """
    found = []
    for one in find_backends(settings.allowed_backends):
        if one.manifest is None or not one.manifest.formats:
            continue
        try:
            reason = why_not(one.manifest, source, str(values.get("device", "auto")))
        except PenstockError as error:
            reason = str(error)
        if not reason and "text" not in one.manifest.modes:
            reason = "it makes no text"
        found.append(Measured(one.id, None, reason) if reason else _measure(one.id, source, values))
    return sorted(found, key=lambda one: (one.seconds is None, one.seconds))


def show(measured: list[Measured]) -> None:
    """Print what was found."""
    table = Table("backend", f"{ROWS} requests of {PROMPT} + {ANSWER} tokens", box=None, pad_edge=False)
    for one in measured:
        table.add_row(one.backend, one.reason if one.seconds is None else f"{one.seconds:.2f} s")
    Console(soft_wrap=True, highlight=False, markup=False).print(table)


def _measure(backend: str, source: str, values: Mapping[str, object]) -> Measured:
    given = [text for name in _SETTINGS if name in values for text in (flag(name), str(values[name]))]
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "found.json"
        command = python("penstock", "bench", "engine", source, "--backend", backend, *given)
        done = subprocess.run([*command, *_LOAD, "--json", str(file)], capture_output=True, text=True)
        if done.returncode != 0:
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            return Measured(backend, None, lines[-1].removeprefix("error: ") if lines else f"exit {done.returncode}")
        medians = orjson.loads(file.read_bytes())["medians"]
    prefill, decode = medians[f"prefill {PROMPT}"], medians[f"decode {ROWS}"]
    seconds = ROWS * PROMPT / prefill["tokens_per_second"] + ROWS * ANSWER / decode["tokens_per_second"]
    return Measured(backend, seconds, "")
