"""What makes the keys and values of two engines the same numbers, as one hash: any difference is another identity."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any

from ...cpu.library import Kernels
from ...models import ModelInfo, files_of, state_of
from ...planning.device import surroundings
from ...planning.sizing import SizedConfig
from ..runner import Runner


def identity(
    config: SizedConfig,
    path: Path,
    info: ModelInfo,
    runner: Runner,
    kernels: Kernels | None,
    slow_paths: Sequence[str],
) -> bytes:
    """16 bytes that differ wherever the weights, the settings, the code or the machine may change a number.

    `path` is the model's, `info` what its runner was built with, and `slow_paths` says which fast paths it does not
    take. Reads all weight files at the first call for a model. Raises `OSError`.
    """
    parts = surroundings(runner.device) | {
        "weights": weights_digest(path, config.prefix_cache_dir),
        "context": info.context_length,  # long contexts may rotate all positions otherwise
        "settings": [config.dtype, config.quantization, config.attention, config.enable_cuda_graph],
        "layout": [runner.layout, runner.block_size, str(runner.dtype), runner.specs],
        "kernels": kernels.name if kernels is not None else "",
        "slow paths": list(slow_paths),
    }
    return sha256(json.dumps(parts, sort_keys=True).encode()).digest()[:16]


def weights_digest(path: Path, notes: Path | None = None) -> str:
    """The hash of all that a model's files say of its weights: names, configurations, every byte.

    What was read is noted in the directory `notes`, and not read again while no file has changed.
    """
    files, state = files_of(path), state_of(path)
    note = notes and notes / f"{sha256(os.fsencode(path)).hexdigest()[:32]}.weights"
    if notes is not None and note is not None:
        notes.mkdir(mode=0o700, parents=True, exist_ok=True)
        if (known := _read_note(note, state)) is not None:
            return known
    digest = sha256()
    for file in files:
        with file.open("rb") as content:
            digest.update(file.name.encode() + b"\0" + file_digest(content, "sha256").digest())
    if note is not None:
        part = note.with_suffix(f".{os.getpid()}.part")
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as written:
            json.dump({"files": state, "digest": digest.hexdigest()}, written)
        part.rename(note)
    return digest.hexdigest()


def _read_note(note: Path, state: list[list[Any]]) -> str | None:
    """The digest that this user has noted for files in this state."""
    try:
        with note.open() as file:
            known = json.load(file)
            own = os.fstat(file.fileno()).st_uid == os.geteuid()
        return str(known["digest"]) if own and known["files"] == state else None
    except (OSError, ValueError, KeyError, TypeError):  # none yet, or none of ours: it is written anew
        return None
