"""Look into safetensors files without torch: are they whole, and how many numbers do they hold?

Source of the format: https://github.com/huggingface/safetensors#format (8 bytes of header length, little endian; a JSON
header; the data).
"""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

from ..schemas.errors import ModelLoadError

_INDEX = "model.safetensors.index.json"
_MAX_HEADER = 100 << 20


def count_parameters(directory: Path) -> int:
    """Check every weight file that the model in `directory` needs, and count its numbers.

    Raises `ModelLoadError` naming the file that is missing or broken.
    """
    return sum(_count(path) for path in weight_files(directory))


def weight_files(directory: Path) -> list[Path]:
    """The files that hold the model's weights: the shards named by the index, or `model.safetensors` alone."""
    index = directory / _INDEX
    if not index.is_file():
        single = directory / "model.safetensors"
        if not single.is_file():
            raise ModelLoadError(f"{directory} holds no model.safetensors and no {_INDEX}: the weights are missing")
        return [single]
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelLoadError(f"{index} is not an index of safetensors files: {error}") from error
    if missing := [name for name in names if not (directory / name).is_file()]:
        raise ModelLoadError(f"{index} names files that are not there: {', '.join(missing)}; download them again")
    return [directory / name for name in names]


def _count(path: Path) -> int:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= min(_MAX_HEADER, size - 8):
            raise _broken(path, "its header is cut off or was never written")
        header = file.read(length)
    try:
        tensors = {name: entry for name, entry in json.loads(header).items() if name != "__metadata__"}
        end = max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
        parameters: int = sum(prod(entry["shape"]) for entry in tensors.values())
    except (ValueError, KeyError, IndexError, AttributeError, TypeError) as error:
        raise _broken(path, f"its header cannot be read ({error})") from error
    if 8 + length + end != size:
        raise _broken(path, f"it has {size} bytes, and its header speaks of {8 + length + end}")
    return parameters


def _broken(path: Path, why: str) -> ModelLoadError:
    return ModelLoadError(f"{path} is not a whole safetensors file: {why}; download it again")
