"""How MiniCPM-V writes a picture: as a whole, and behind it, if it is large, in slices.

Source: `replace_image_token` in transformers' `processing_minicpmv4_6.py`. Knows no torch and no transformers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def slices(_: Mapping[str, Any], made: Mapping[str, Any]) -> tuple[int, ...]:
    """Rows and columns of slices, and the patches in height and width of the whole and of each slice."""
    return tuple(int(number) for number in (*made["grids"][0], *made["target_sizes"].flatten()))


def write_slices(config: Mapping[str, Any], grid: Sequence[int], mark: str) -> str:
    """The text that stands for a picture of so many `slices`, where `mark` is the text of one token."""
    rows, columns, *sizes = grid
    patches = 4 if config.get("downsample_mode", "16x") == "4x" else 16  # that one token shows
    whole, *others = [mark * (height * width // patches) for height, width in zip(sizes[::2], sizes[1::2], strict=True)]
    lines = [others[row * columns : (row + 1) * columns] for row in range(rows)]
    return f"<image>{whole}</image>" + "\n".join("".join(f"<slice>{one}</slice>" for one in line) for line in lines)


def image_number(processor: Any, number: int) -> str:
    """The text before an image of this number in its prompt."""
    return f"<image_id>{number}</image_id>" if processor.use_image_id else ""
