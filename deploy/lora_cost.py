"""Measure what LoRA adapters cost in decoding: 16 rows of the base, or half of them with one adapter or with eight.

    python deploy/lora_cost.py MODEL [--rank 16] [--steps 40] [--rounds 5]

The adapters are random and change all linear layers. Rounds alternate among the cases: a machine's speed drifts.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from pydantic import ByteSize
from safetensors.torch import save_file

from penstock.engine import EngineConfig, EngineRequest, GenerationParams
from penstock.engine.adapters.files import read_adapter
from penstock.engine.adapters.loaded import Adapter, Targets
from penstock.engine.choice import Choice
from penstock.engine.paged.backend import PagedBackend

_CASES = {
    "16 rows of the base": [0] * 16,
    "8 of the base, 8 of one adapter": [0] * 8 + [1] * 8,
    "8 of the base, 8 of eight adapters": [0] * 8 + [1, 2, 3, 4, 5, 6, 7, 8],
    "16 of eight adapters": [1, 2, 3, 4, 5, 6, 7, 8] * 2,
    "1 row of the base": [0],
    "1 row of an adapter": [1],
}
_CONTEXT = 128  # tokens of each row before the first measured step


def write_random(directory: Path, targets: Targets, rank: int, seed: int) -> Path:
    """An adapter that changes every layer it may, a little."""
    random, tensors = torch.Generator().manual_seed(seed), {}
    for name, size in targets.linear.items():
        for part, shape in (("A", (rank, size.inputs)), ("B", (size.outputs, rank))):
            tensors[f"base_model.model.{name}.lora_{part}.weight"] = 0.01 * torch.randn(shape, generator=random)
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))
    return directory


def measure(backend: PagedBackend, adapters: list[Adapter | None], steps: int) -> float:
    """Tokens a second while one row of each adapter, or of the base, decodes."""
    params, rows = GenerationParams(temperature=0, max_tokens=steps + 64, ignore_eos=True), []
    for number, adapter in enumerate(adapters):
        prompt = tuple((31 * number + 7 * index) % 1000 + 5 for index in range(_CONTEXT))
        request = EngineRequest(str(number), prompt, params, seed=0, cache_salt=str(number))
        rows.append(Choice(request, 0, backend.tokenizer, backend.info, None, adapter))
        backend.add(rows[-1])
    while not all(row.tokens for row in rows):
        backend.step()
    before, start = sum(len(row.tokens) for row in rows), time.perf_counter()
    for _ in range(steps):
        backend.step()
    seconds = time.perf_counter() - start
    made = sum(len(row.tokens) for row in rows) - before
    for row in rows:
        backend.remove(row)
    return made / seconds


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    backend = PagedBackend(EngineConfig(model=options.model, kv_cache_memory=ByteSize(1 << 30), max_batch_size=16))
    targets = backend.adapter_targets()
    adapters: list[Adapter | None] = [None]
    with tempfile.TemporaryDirectory() as root:
        for seed in range(1, 9):
            path = write_random(Path(root) / str(seed), targets, options.rank, seed)
            adapters.append(backend.load_adapter(read_adapter(str(seed), path, targets)))
    memory = sum(adapter.info.memory for adapter in adapters if adapter is not None)
    print(f"8 adapters of rank {options.rank} take {ByteSize(memory).human_readable()}; tokens a second:")
    found: dict[str, list[float]] = {name: [] for name in _CASES}
    for _ in range(options.rounds):
        for name, numbers in _CASES.items():
            found[name].append(measure(backend, [adapters[number] for number in numbers], options.steps))
    for name, rates in found.items():
        print(f"{name:36} {median(rates):8.1f}   ({min(rates):.1f} to {max(rates):.1f})")
    backend.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
