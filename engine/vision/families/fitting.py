"""Prepares pictures for Llama 4: tiles that a picture fits into with black beside it, and a small view of the whole.

transformers has this processor for torchvision alone, which Penstock does not need; the numbers are the same, those of
bfloat16 included. Source: `Llama4ImageProcessor` in transformers' `image_processing_llama4.py`, and
`_prompt_split_image` in its `processing_llama4.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....schemas.errors import ModelLoadError
from .numbers import RESAMPLING, USUAL, pixels_of, resized, settings_of, squares

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor

_DEFAULTS = USUAL | {
    "size": {"height": 336, "width": 336},
    "max_patches": 16,
    "resize_to_max_canvas": False,
    "resample": 2,
}


class FittingProcessor:
    """Called like transformers' image processors, with one picture in RGB at a time."""

    def __init__(self, path: Path) -> None:
        """Takes the settings of the processor of the model in the directory `path`. Raises `ModelLoadError`."""
        settings, _ = settings_of(path, _DEFAULTS)
        height, width = (settings["size"].get(name, 0) for name in ("height", "width"))
        is_known = height == width and height and settings["resample"] in RESAMPLING
        if not is_known or not all(settings[name] for name in ("do_resize", "do_rescale", "do_normalize")):
            raise ModelLoadError(
                f"{path} prepares images in a way that is not supported: size {settings['size']} must have the same "
                f"height and width, resample be one of {', '.join(map(str, RESAMPLING))}, and do_resize, do_rescale "
                "and do_normalize true"
            )
        self._side, self._most = int(height), int(settings["max_patches"])
        self._enlarges, self._resampling = bool(settings["resize_to_max_canvas"]), RESAMPLING[settings["resample"]]
        self._scale, self._mean = settings["rescale_factor"], settings["image_mean"]
        self._deviation = settings["image_std"]

    def __call__(self, images: Sequence[Image.Image], **_: object) -> Mapping[str, Any]:
        """The input of the model's tower, and in how many rows and columns of tiles the picture lies."""
        import torch
        from torch.nn.functional import pad

        (image,) = images
        pixels, side = pixels_of(image), self._side
        rows, columns = self.grid(*image.size)
        height, width = self._inside(*image.size, rows * side, columns * side)
        fitted = resized(pixels, height, width, self._resampling)
        fitted = pad(fitted, (0, columns * side - width, 0, rows * side - height))
        shown = squares(self._numbers(fitted), side)
        if len(shown) > 1:
            shown.append(self._numbers(resized(pixels, side, side, self._resampling)))
        return {"pixel_values": torch.stack(shown).float().numpy(), "aspect_ratios": [(rows, columns)]}

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """The rows and columns of tiles that a picture is enlarged least to fit into, or most, if the files say so; if
        it must be reduced, least so. Of several the fewest tiles."""
        most = range(1, self._most + 1)
        grids = [(rows, columns) for rows in most for columns in most if rows * columns <= self._most]
        scales = [min(rows * self._side / height, columns * self._side / width) for rows, columns in grids]
        enlarging = [scale for scale in scales if scale >= 1]
        chosen = (max if self._enlarges else min)(enlarging) if enlarging else max(scales)
        found = [grid for grid, scale in zip(grids, scales, strict=True) if scale == chosen]
        return min(found, key=lambda grid: grid[0] * grid[1])

    def _inside(self, width: int, height: int, most_high: int, most_wide: int) -> tuple[int, int]:
        """The height and width of a picture inside its tiles, with its proportions."""
        if not self._enlarges:
            most_high, most_wide = (
                min(max(edge, self._side), most) for edge, most in ((height, most_high), (width, most_wide))
            )
        by_width, by_height = most_wide / width, most_high / height
        if by_width < by_height:
            return max(1, min(math.floor(height * by_width), most_high)), most_wide
        return most_high, max(1, min(math.floor(width * by_height), most_wide))

    def _numbers(self, pixels: Tensor) -> Tensor:
        """[3, H, W] in 8 bits → the same in bfloat16, in which each step is rounded."""
        import torch

        mean, deviation = (
            torch.tensor(one, dtype=torch.bfloat16)[:, None, None] for one in (self._mean, self._deviation)
        )
        numbers: Tensor = (pixels.to(torch.bfloat16) * self._scale - mean) / deviation
        return numbers


def rows_and_columns_of_tiles(_: Mapping[str, Any], made: Mapping[str, Any]) -> tuple[int, ...]:
    rows, columns = made["aspect_ratios"][0]
    return int(rows), int(columns)


def write_fitting(config: Mapping[str, Any], grid: Sequence[int], mark: str) -> str:
    """The text that stands for a picture in a `grid` of rows and columns of tiles."""
    tower, (rows, columns) = config["vision_config"], grid
    side = int(tower.get("image_size", 448)) // int(tower.get("patch_size", 14))
    tile = mark * int(side**2 // round(1 / float(tower.get("pixel_shuffle_ratio", 0.5)) ** 2))
    line = "<|tile_x_separator|>".join([tile] * columns) + "<|tile_y_separator|>"
    tiles = line * rows if rows * columns > 1 else ""
    return f"<|image_start|>{tiles}<|image|>{tile}<|image_end|>"
