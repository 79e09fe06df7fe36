"""Reads a text file in chunks of tokens, for commands that run a model over it."""

from __future__ import annotations

from pathlib import Path

from ...config.files import read_text
from ...engine.text.tokenizer import load_tokenizer
from ...schemas.errors import StartupError


def read_chunks(file: Path, option: str, model: str, length: int) -> list[list[int]]:
    """The text of `file` in chunks, see `split`. Raises `StartupError`, which names `option`."""
    try:
        text = read_text(file)
    except OSError as error:
        raise StartupError(f"{option} {file}: {error.strerror}; check the path") from error
    except UnicodeDecodeError as error:
        raise StartupError(f"{option} {file}: is not UTF-8; convert it") from error
    if not text.strip():
        raise StartupError(f"{option} {file}: is empty; give a file with text")
    if chunks := split(text, model, length):
        return chunks
    raise StartupError(f"{option} {file}: has fewer tokens than one chunk, {length}; give a longer text")


def split(text: str, model: str, length: int) -> list[list[int]]:
    """A text in chunks of `length` tokens, each begun as the tokenizer begins a text; what remains is left out."""
    tokenizer = load_tokenizer(model)
    start, ids = tokenizer.encode(""), tokenizer.encode(text, add_special_tokens=False)
    step = length - len(start)
    return [start + ids[at : at + step] for at in range(0, len(ids) - step + 1, step)] if step > 0 else []
