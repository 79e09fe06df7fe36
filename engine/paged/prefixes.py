"""Cached prefixes in a file, so that a restarted engine knows what the last one knew.

One safetensors file: keys and values of whole blocks, layer by layer, and in its metadata what they belong to. A file
of another model, type or block size is refused: its numbers would mean nothing here.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ...schemas.errors import ConfigurationError
from .blocks import KVBlocks
from .runner import Runner

_VERSION = "1"


def save_prefixes(path: Path, blocks: KVBlocks, runner: Runner, model: str) -> int:
    """Write every cached block; how many there were. Replaces the file at once or not at all. Raises `OSError`."""
    tensors: dict[str, torch.Tensor] = {}
    keys: list[list[str]] = []
    for group, pool in enumerate(blocks.pools):
        cached = pool.cached()
        keys.append([key.hex() for key, _ in cached])
        for layer, memory in enumerate(runner.pools(group)):
            tensors[f"{group}.{layer}"] = memory.blocks([block for _, block in cached])
    metadata = _identity(blocks, runner, model) | {"blocks": json.dumps(keys)}
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        save_file(tensors, temporary, metadata)
        temporary.replace(path)
    except SafetensorError as error:
        raise OSError(f"{path} cannot be written: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)
    return sum(map(len, keys))


def load_prefixes(path: Path, blocks: KVBlocks, runner: Runner, model: str) -> int:
    """Cache again what `save_prefixes` wrote, the most recently used first if not all has room; how many blocks.

    Raises `ConfigurationError` for a file that is not of this model, or no such file at all.
    """
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            expected = _identity(blocks, runner, model)
            if wrong := [name for name, value in expected.items() if metadata.get(name) != value]:
                raise ConfigurationError([f"{path} is of another {', '.join(wrong)}: it cannot be restored here"])
            restored = 0
            for group, keys in enumerate(json.loads(metadata["blocks"])):
                place_of = {bytes.fromhex(key): place for place, key in enumerate(keys)}
                found = blocks.pools[group].restore(list(place_of))
                where = torch.tensor([place_of[key] for key, _ in found], dtype=torch.long)
                for layer, memory in enumerate(runner.pools(group)):
                    saved = file.get_tensor(f"{group}.{layer}").index_select(1, where)
                    memory.restore([block for _, block in found], saved)
                restored += len(found)
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise ConfigurationError([f"{path} holds no prefixes that can be restored: {error}"]) from error
    return restored


def _identity(blocks: KVBlocks, runner: Runner, model: str) -> dict[str, str]:
    return {
        "version": _VERSION,
        "model": model,
        "layout": json.dumps([runner.layout, blocks.block_size, str(runner.dtype), runner.specs]),
    }
