"""What the files of MiniCPM-V 4.7 say of the canvases on which its images lie; see `canvas_positions`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ....schemas.errors import ModelLoadError
from .slices import token_side

_MARKS = ("slice_start_id", "slice_end_id", "image_start_id", "image_end_id", "newline_id")


class Canvas(NamedTuple):
    """`merge` is the side of the square of patches that make one token; `marks` are the ids of the tokens around images
    and slices, the first of which begins a slice."""

    merge: int
    marks: tuple[int, ...]

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Canvas:
        """Raises `ModelLoadError`."""
        if missing := [name for name in _MARKS if not isinstance(config.get(name), int)]:
            raise ModelLoadError(f"config.json does not give {', '.join(missing)}; the model's files are incomplete")
        return cls(token_side(config), tuple(config[name] for name in _MARKS))
