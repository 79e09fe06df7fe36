"""The files of a model's directory in Hugging Face's format. Needs no torch.

Source of the format of the weights: https://github.com/huggingface/safetensors#format (8 bytes of header length, little
endian; a JSON header; the data).
"""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

from ...schemas.errors import ModelLoadError

_INDEX = "model.safetensors.index.json"
_MAX_HEADER = 100 << 20


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file. Raises `ModelLoadError`."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise unreadable(path, error) from error
    except ValueError as error:
        raise ModelLoadError(f"{path} is not JSON: {error}; download it again") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} is not a JSON object; download it again")
    return value


def unreadable(source: Path | str, error: OSError) -> ModelLoadError:
    return ModelLoadError(f"{source} cannot be read: {error.strerror or error}; check the path and its permissions")


def weight_files(directory: Path) -> list[Path]:
    """The model's weight files: the shards that the index names, or `model.safetensors`."""
    index = directory / _INDEX
    if not index.is_file():
        single = directory / "model.safetensors"
        if not single.is_file():
            raise ModelLoadError(
                f"{directory} has neither model.safetensors nor {_INDEX}: the weights are missing; download them"
            )
        return [single]
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except OSError as error:
        raise unreadable(index, error) from error
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelLoadError(f"{index} is not an index of safetensors files ({error}); download it again") from error
    if missing := [name for name in names if not (directory / name).is_file()]:
        raise ModelLoadError(f"{index} names missing files: {', '.join(missing)}; download them again")
    return [directory / name for name in names]


def read_header(path: Path) -> dict[str, list[int]]:
    """The shapes of all tensors in a safetensors file by name. Raises `ModelLoadError` unless the file is whole."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length <= min(_MAX_HEADER, size - 8):
                raise _broken(path, "its header is truncated or missing")
            header = file.read(length)
    except OSError as error:
        raise unreadable(path, error) from error
    try:
        tensors = {name: entry for name, entry in json.loads(header).items() if name != "__metadata__"}
        end = max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
        shapes: dict[str, list[int]] = {name: entry["shape"] for name, entry in tensors.items()}
        sum(map(prod, shapes.values()))  # they are lists of numbers
    except (ValueError, KeyError, IndexError, AttributeError, TypeError) as error:
        raise _broken(path, f"its header cannot be read ({error})") from error
    if 8 + length + end != size:
        raise _broken(path, f"it has {size} bytes instead of the {8 + length + end} in its header")
    return shapes


def _broken(path: Path, why: str) -> ModelLoadError:
    return ModelLoadError(f"{path} is not a complete safetensors file: {why}; download it again")
