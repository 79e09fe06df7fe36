"""What the name of a model's source tells: a path, or a Hugging Face id; and the names of GGUF files."""

from __future__ import annotations

import re
from pathlib import Path

GGUF = ".gguf"

_SHARD = re.compile(r"(.+)-(\d{5})-of-\d{5}")


def looks_like_path(source: str) -> bool:
    """Whether `source` can only be a path: a hub id is `name` or `owner/name`."""
    if source.startswith(("/", ".", "~")) or source.endswith("/") or source.lower().endswith(GGUF):
        return True
    return source.count("/") > 1 or "\\" in source


def is_gguf(path: Path) -> bool:
    """Whether `path` is a GGUF file by its name or, like those that Ollama keeps, by its first bytes."""
    if path.suffix.lower() == GGUF:
        return not path.is_dir()
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def gguf_model(name: str) -> str | None:
    """The name of the model in a GGUF file called `name`: for the first of several shards that of all.

    None for other files: those of another kind, later shards, and the vision parts of models.
    """
    if not name.lower().endswith(GGUF) or name.lower().startswith("mmproj"):
        return None
    stem = name[: -len(GGUF)]
    shard = _SHARD.fullmatch(stem)
    return stem if shard is None else shard[1] if int(shard[2]) == 1 else None
