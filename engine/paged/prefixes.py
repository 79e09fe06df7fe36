"""Saves cached prefixes to a file and loads them, so that an engine keeps its prefix cache over a restart.

One safetensors file holds the keys and values of whole blocks, layer by layer; metadata identifies the model. A file
of another model, dtype or block size is refused: its numbers would be meaningless.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ...schemas.errors import ConfigurationError
from .kv.block_pool import BlockPool
from .kv.blocks import KVBlocks
from .kv.kv_cache import Pool
from .runner import Runner
from .state.slots import StateSlots

_VERSION = "1"


def save_prefixes(path: Path, blocks: KVBlocks, slots: StateSlots | None, runner: Runner, model: str) -> int:
    """Write every cached block and running state, replacing the file atomically; returns their number.

    Raises `OSError`.
    """
    tensors: dict[str, torch.Tensor] = {}
    keys: list[list[str]] = []
    for group, (pool, memories) in enumerate(_rooms(blocks, slots, runner)):
        cached = pool.cached()
        keys.append([key.hex() for key, _ in cached])
        for layer, memory in enumerate(memories):
            tensors[f"{group}.{layer}"] = memory.blocks([block for _, block in cached])
    metadata = _identity(blocks, runner, model) | {"blocks": json.dumps(keys)}
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        save_file(tensors, temporary, metadata)
        temporary.replace(path)
    except SafetensorError as error:
        raise OSError(f"cannot write {path}: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)
    return sum(map(len, keys))


def load_prefixes(path: Path, blocks: KVBlocks, slots: StateSlots | None, runner: Runner, model: str) -> int:
    """Restore what `save_prefixes` wrote, the most recently used first; returns the number.

    Raises `ConfigurationError` for a file of another model, or a missing or broken one.
    """
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            expected = _identity(blocks, runner, model)
            if wrong := [name for name, value in expected.items() if metadata.get(name) != value]:
                raise ConfigurationError(
                    [f"{path} is for another {', '.join(wrong)} and cannot be loaded; save the prefixes again"]
                )
            restored = 0
            rooms = _rooms(blocks, slots, runner)
            for group, (keys, (pool, memories)) in enumerate(zip(json.loads(metadata["blocks"]), rooms, strict=True)):
                index_of = {bytes.fromhex(key): index for index, key in enumerate(keys)}
                found = pool.restore(list(index_of))
                indices = torch.tensor([index_of[key] for key, _ in found], dtype=torch.long)
                for layer, memory in enumerate(memories):
                    saved = file.get_tensor(f"{group}.{layer}").index_select(memory.axis, indices)
                    memory.restore([block for _, block in found], saved)
                restored += len(found)
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise ConfigurationError([f"cannot load prefixes from {path}: {error}; save them again"]) from error
    return restored


def _rooms(blocks: KVBlocks, slots: StateSlots | None, runner: Runner) -> list[tuple[BlockPool, list[Pool]]]:
    """What is handed out, and its memory in each layer: the blocks of each group, then the running states."""
    rooms = [(pool, runner.pools(group)) for group, pool in enumerate(blocks.pools)]
    return rooms if slots is None else [*rooms, (slots.pool, runner.states.pools)]


def _identity(blocks: KVBlocks, runner: Runner, model: str) -> dict[str, str]:
    return {
        "version": _VERSION,
        "model": model,
        "layout": json.dumps([runner.layout, blocks.block_size, str(runner.dtype), runner.specs]),
    }
