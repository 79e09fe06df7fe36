"""What the name of a model's source tells: a path, or a Hugging Face id; and the names of GGUF files.

A model in GGUF that sees has two files, named with a comma between: `model.gguf,mmproj.gguf`.
"""

from __future__ import annotations

import contextlib
import re
from os.path import exists, isdir, isfile
from pathlib import Path

GGUF = ".gguf"
NO_PROJECTOR = "none"
"""In the place of a projector: the model is for text alone, whatever lies beside it."""

_SHARD = re.compile(r"(.+)-(\d{5})-of-\d{5}")


def looks_like_path(source: str) -> bool:
    """Whether `source` can only be a path: a hub id is `name` or `owner/name`."""
    if source.startswith(("/", ".", "~")) or source.endswith("/") or source.lower().endswith(GGUF):
        return True
    return source.count("/") > 1 or "\\" in source


def check_access(path: Path) -> None:
    """Raise the `OSError` for which nobody can know whether something is at `path`; pass if nothing is there.

    `exists`, `isdir` and `isfile` are false then, and from Python 3.14 on the methods of `Path` are, too.
    """
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, ValueError):
        path.stat()


def parts_of(source: str | Path) -> tuple[Path, str] | None:
    """The model's file and what stands behind the comma, if `source` names both."""
    text = str(source)
    for comma in re.finditer(",", text):
        if isfile(path := Path(text[: comma.start()]).expanduser()) and not exists(text):
            return path, text[comma.end() :]
    return None


def split_pair(path: Path) -> tuple[Path, Path | None]:
    """The file of a model and that of its projector; None if `path` names none."""
    text, projector = parts_of(path) or (path, NO_PROJECTOR)
    return text, None if projector == NO_PROJECTOR else Path(projector).expanduser()


def is_here(source: str | Path) -> bool:
    """Whether `source` names a directory or files of this machine."""
    return parts_of(source) is not None or exists(Path(source).expanduser())


def join_pair(text: Path, projector: Path | str) -> Path:
    """What names both."""
    return Path(f"{text},{projector}")


def absolute_pair(source: str | Path, base: Path | None = None) -> Path | None:
    """What names both files of `source` from anywhere; None if it names one. Without `base` they are seen from here."""
    path = Path(source).expanduser()
    if (pair := parts_of(base / path if base else path)) is None:
        return None
    at = base or Path.cwd()
    text, projector = pair[0] if base else at / pair[0], pair[1]
    return join_pair(text, projector if projector == NO_PROJECTOR else at / Path(projector).expanduser())


def is_gguf(path: Path) -> bool:
    """Whether `path` is a GGUF file by its name or, like those that Ollama keeps, by its first bytes."""
    path = split_pair(path)[0]
    if path.suffix.lower() == GGUF:
        return not isdir(path)
    if not isfile(path):
        return False
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def gguf_model(name: str) -> str | None:
    """The name of the model in a GGUF file called `name`: for the first of several shards that of all.

    None for other files: those of another kind, later shards, and projectors, the vision parts of models.
    """
    if not name.lower().endswith(GGUF) or is_projector(name):
        return None
    stem = name[: -len(GGUF)]
    shard = _SHARD.fullmatch(stem)
    return stem if shard is None else shard[1] if int(shard[2]) == 1 else None


def is_projector(name: str) -> bool:
    """Whether a GGUF file is the vision part of a model, by its name."""
    return name.lower().startswith("mmproj") and name.lower().endswith(GGUF)
