"""Prepares pictures for Perception LM: a small view of the whole, and tiles that the picture is stretched over.

transformers has this processor for torchvision alone, which Penstock does not need; the numbers are the same. Source:
`PerceptionLMImageProcessor` in transformers' `image_processing_perception_lm.py`, and `replace_image_token` in its
`processing_perception_lm.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....schemas.errors import ModelLoadError
from .numbers import RESAMPLING, USUAL, Numbers, pixels_of, resized, settings_of, squares

if TYPE_CHECKING:
    from PIL import Image

_DEFAULTS = USUAL | {
    "tile_size": 448,
    "max_num_tiles": 36,
    "vision_input_type": "thumb+tile",
    "resample": 3,
}


class ThumbnailProcessor:
    """Called like transformers' image processors, with one picture in RGB at a time."""

    def __init__(self, path: Path) -> None:
        """Takes the settings of the processor of the model in the directory `path`. Raises `ModelLoadError`."""
        settings, _ = settings_of(path, _DEFAULTS)
        if settings["resample"] not in RESAMPLING or not settings["do_resize"]:
            raise ModelLoadError(
                f"{path} prepares images in a way that is not supported: resample {settings['resample']} must be one "
                f"of {', '.join(map(str, RESAMPLING))}, and do_resize true"
            )
        self.tile_size, self.max_num_tiles = int(settings["tile_size"]), int(settings["max_num_tiles"])
        self._cuts = settings["vision_input_type"] == "thumb+tile"
        self._resampling, self._numbers = RESAMPLING[settings["resample"]], Numbers.of(settings)

    def __call__(
        self, images: Sequence[Image.Image], max_num_tiles: int | None = None, **_: object
    ) -> Mapping[str, Any]:
        """The input of the model's tower, [1, T, 3, side, side]: the whole, and the tiles."""
        import torch

        (image,) = images
        pixels, side = pixels_of(image), self.tile_size
        shown = [resized(pixels, side, side, self._resampling)]
        if self._cuts:
            columns, rows = self.grid(*image.size, max_num_tiles or self.max_num_tiles)
            shown += squares(resized(pixels, rows * side, columns * side, self._resampling), side)
        return {"pixel_values": torch.stack([self._numbers(one) for one in shown])[None].numpy()}

    def grid(self, width: int, height: int, most: int) -> tuple[int, int]:
        """The columns and rows of tiles, `most` at most: those on which the shorter edge of a picture is longest, if it
        need not be reduced, and otherwise the most of the nearest proportions."""
        if most <= 1:
            return 1, 1
        by_ratio, own = _by_ratio(most), width / height
        found, longest = None, 0.0
        for columns, rows in chain.from_iterable(by_ratio.values()):
            if columns * self.tile_size < width or rows * self.tile_size < height:
                continue
            edge = self._short_edge(width, height, columns, rows)
            if found is None or edge >= longest:
                found, longest = (columns, rows), edge
        if found is not None:
            return found
        if own >= 1:
            nearest = min((ratio for ratio in by_ratio if ratio <= own), key=lambda ratio: abs(ratio - own))
            return max(by_ratio[nearest], key=lambda grid: grid[0])
        nearest = min((ratio for ratio in by_ratio if ratio > own), key=lambda ratio: abs(1 / ratio - 1 / own))
        return max(by_ratio[nearest], key=lambda grid: grid[1])

    def _short_edge(self, width: int, height: int, columns: int, rows: int) -> float:
        """How long the shorter edge of a picture may be within so many tiles; the height of one as high as wide."""
        ratio, factor = width / height, min(columns * self.tile_size / width, rows * self.tile_size / height)
        if ratio > 1:
            return math.floor(factor * width / ratio)
        return math.floor(factor * height * ratio) if ratio < 1 else factor * height


def tile_bounds(processor: Any, fewest: int | None, most: int | None) -> dict[str, Any]:
    """How many tiles have at least and at most so many pixels: any picture is stretched over nearly as many."""
    pixels, found = processor.tile_size**2, processor.max_num_tiles
    if fewest is not None:
        found = max(found, -(-fewest // pixels))
    return {"max_num_tiles": found if most is None else max(1, min(found, most // pixels))}


def tiles_and_side(_: Mapping[str, Any], made: Mapping[str, Any]) -> tuple[int, ...]:
    """How many tiles there are, the whole included, and their pixels in a row."""
    _, count, *_, side = made["pixel_values"].shape
    return int(count), int(side)


def write_thumbnails(config: Mapping[str, Any], grid: Sequence[int], mark: str) -> str:
    """The text that stands for a picture of so many tiles."""
    count, side = grid
    return mark * (count * (side // 14 // int(config.get("projector_pooling_ratio", 1))) ** 2)


def _by_ratio(most: int) -> dict[float, list[tuple[int, int]]]:
    """All columns and rows, in the order in which transformers tries them: of equals the last one wins."""
    found: dict[float, list[tuple[int, int]]] = {}
    for count in range(most, 0, -1):
        for columns in range(1, count + 1):
            if count % columns == 0:
                rows = count // columns
                found.setdefault(columns / rows, []).append((columns, rows))
    return found
