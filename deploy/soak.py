"""Many random requests with random cancels on one engine: no block may get lost, and memory must stay flat.

    python deploy/soak.py MODEL [--requests 10000] [--seed 0]

Prints a line every tenth of the way: requests, cancelled ones, resident memory, cached blocks, preemptions, evictions.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import typer
from pydantic import ByteSize

from penstock.engine import EngineConfig, GenerationParams, InferenceEngine
from penstock.engine.backends.registry import load_backend
from penstock.engine.paged.backend import PagedBackend


def resident() -> float:
    """MiB of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


async def soak(engine: InferenceEngine, backend: PagedBackend, requests: int, chance: random.Random) -> None:
    roots = [[chance.randrange(3, 400) for _ in range(200)] for _ in range(20)]
    left = iter(range(requests))
    cancelled = 0

    async def client() -> None:
        nonlocal cancelled
        for number in left:
            root = chance.choice(roots)
            prompt = root[: chance.randrange(1, 200)] + [
                chance.randrange(3, 400) for _ in range(chance.randrange(1, 40))
            ]
            params = GenerationParams(
                max_tokens=chance.randrange(1, 40), temperature=chance.choice([0.0, 1.0]), n=chance.choice([1, 1, 1, 3])
            )
            patience = chance.randrange(1, 12) if chance.random() < 0.3 else None
            async for delta in engine.generate_stream(prompt, params):
                assert delta.finish_reason != "error", delta
                if patience is not None and delta.index >= patience:
                    cancelled += 1
                    break
            if (number + 1) % max(requests // 10, 1) == 0:
                stats = engine.stats()
                assert stats.cache is not None
                print(
                    f"{number + 1:6} requests, {cancelled:5} cancelled, {resident():7.1f} MiB, "
                    f"{stats.cache.num_cached_blocks} blocks cached, {stats.cache.num_preemptions} preemptions, "
                    f"{stats.cache.num_evictions} evictions",
                    flush=True,
                )

    await asyncio.gather(*(client() for _ in range(24)))
    await engine.agenerate([5], GenerationParams(max_tokens=1))  # after this, the last cancels have been obeyed
    backend.check_integrity()
    assert backend.blocks.usage == 0, "blocks are held by nobody"
    print("every block is accounted for")


def main(model: str, requests: int = 10_000, seed: int = 0) -> None:
    """Many random requests on one engine."""
    config = EngineConfig(model=model, dtype="float32", device="cpu", kv_cache_memory=ByteSize(4 << 20))
    backend = load_backend(config)
    assert isinstance(backend, PagedBackend)
    with InferenceEngine(config, backend=backend) as engine:
        asyncio.run(soak(engine, backend, requests, random.Random(seed)))


if __name__ == "__main__":
    typer.run(main)
