"""How MiniCPM-V and Aya Vision write a picture: as a whole, and a large one besides in slices.

Source: `replace_image_token` in transformers' `processing_minicpmv4_6.py` and `processing_aya_vision.py`. Knows no
torch and no transformers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ....schemas.errors import ModelLoadError


def token_side(config: Mapping[str, Any]) -> int:
    """Of the square of patches that one token of MiniCPM-V shows."""
    return 2 if config.get("downsample_mode", "16x") == "4x" else 4


def slices(_: Mapping[str, Any], made: Mapping[str, Any]) -> tuple[int, ...]:
    """Rows and columns of slices, and the patches in height and width of the whole and of each slice."""
    return tuple(int(number) for number in (*made["grids"][0], *made["target_sizes"].flatten()))


def write_slices(config: Mapping[str, Any], grid: Sequence[int], mark: str) -> str:
    """The text that stands for a picture of so many `slices`, where `mark` is the text of one token."""
    rows, columns, *sizes = grid
    patches = token_side(config) ** 2
    whole, *others = [mark * (height * width // patches) for height, width in zip(sizes[::2], sizes[1::2], strict=True)]
    lines = [others[row * columns : (row + 1) * columns] for row in range(rows)]
    return f"<image>{whole}</image>" + "\n".join("".join(f"<slice>{one}</slice>" for one in line) for line in lines)


def image_number(processor: Any, number: int) -> str:
    """The text before an image of this number in its prompt."""
    return f"<image_id>{number}</image_id>" if processor.use_image_id else ""


def write_aya(config: Mapping[str, Any], grid: Sequence[int], mark: str) -> str:
    """The text that stands for a picture in `grid` tiles, the whole included. Raises `ModelLoadError`."""
    tower, strategy = config["vision_config"], config.get("vision_feature_select_strategy", "full")
    if strategy != "full":
        raise ModelLoadError(f"config.json has vision_feature_select_strategy {strategy!r}; it must be 'full'")
    side = int(tower.get("image_size", 224)) // int(tower.get("patch_size", 16))
    tile = mark * (side // int(config.get("downsample_factor", 2))) ** 2
    tiles = "".join(f"TILE_{index}{tile}" for index in range(1, grid[0]))
    return f"<|START_OF_IMG|>{tiles}TILE_GLOBAL{tile}<|END_OF_IMG|>"
