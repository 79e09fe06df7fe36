"""Prepares pictures for LFM2-VL: a large one becomes tiles, mostly with a small view of the whole behind them.

transformers has this processor for torchvision alone, which Penstock does not need; the numbers are the same. Source:
`Lfm2VlImageProcessor` in transformers' `image_processing_lfm2_vl.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ....schemas.errors import ModelLoadError
from .numbers import RESAMPLING, USUAL, Numbers, pixels_of, resized, settings_of, squares

if TYPE_CHECKING:  # torch comes with the first picture
    from PIL import Image
    from torch import Tensor

_DEFAULTS = USUAL | {
    "downsample_factor": 2,
    "do_image_splitting": True,
    "min_tiles": 2,
    "max_tiles": 10,
    "use_thumbnail": True,
    "min_image_tokens": 64,
    "max_image_tokens": 256,
    "encoder_patch_size": 16,
    "tile_size": 512,
    "max_pixels_tolerance": 2.0,
    "resample": 2,
}


class Cut(NamedTuple):
    """How a picture is shown: in `rows` times `columns` tiles, and as a whole of `height` times `width` pixels, unless
    the tiles are all."""

    rows: int
    columns: int
    height: int
    width: int

    @property
    def is_tiled(self) -> bool:
        return self.rows * self.columns > 1


class TilingProcessor:
    """Called like transformers' image processors, with one picture in RGB at a time."""

    def __init__(self, path: Path) -> None:
        """Takes the settings of the processor of the model in the directory `path`. Raises `ModelLoadError`."""
        settings, whole = settings_of(path, _DEFAULTS)
        self._is_marked = bool(whole.get("use_image_special_tokens", True))
        self._tolerance, self._has_whole = settings["max_pixels_tolerance"], settings["use_thumbnail"]
        self._patch, self._tile = int(settings["encoder_patch_size"]), int(settings["tile_size"])
        self._unit = self._patch * int(settings["downsample_factor"])  # the side of the pixels that make one token
        self._least, self._most = (settings[f"{name}_image_tokens"] * self._unit**2 for name in ("min", "max"))
        fewest, most = settings["min_tiles"], settings["max_tiles"]
        if fewest > most or self._tile % self._unit or settings["resample"] not in RESAMPLING:
            raise ModelLoadError(
                f"{path} prepares images in a way that is not supported: tile_size {self._tile} must be a multiple of "
                f"{self._unit}, min_tiles ({fewest}) at most max_tiles ({most}), and resample one of "
                f"{', '.join(map(str, RESAMPLING))}"
            )
        self._grids = _grids(fewest, most) if settings["do_image_splitting"] and most > 1 else []
        self._resampling, self._numbers = RESAMPLING[settings["resample"]], Numbers.of(settings)

    def __call__(self, images: Sequence[Image.Image], **_: object) -> Mapping[str, Any]:
        """The inputs of the model's tower, and under `tiles` what its text is made of: rows, columns, tokens of a tile
        and of the whole (0 if it is not shown), and whether marks stand around them."""
        import numpy as np
        import torch

        (image,) = images
        cut = self.cut(*image.size)
        pixels = pixels_of(image)
        shown: list[Tensor] = []
        if cut.is_tiled:
            side = self._tile
            whole = resized(pixels, cut.rows * side, cut.columns * side, self._resampling)
            shown += squares(whole, side)
        has_whole = not cut.is_tiled or self._has_whole
        if has_whole:
            shown.append(resized(pixels, cut.height, cut.width, self._resampling))
        parts = [self._patches(one) for one in shown]
        values = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)
        mask = torch.zeros(values.shape[:2], dtype=torch.int32)
        for row, part in zip(mask, parts, strict=True):
            row[: len(part)] = 1
        shapes = [[one.shape[1] // self._patch, one.shape[2] // self._patch] for one in shown]
        tokens = cut.height * cut.width // self._unit**2 if has_whole else 0
        return {
            "pixel_values": values.numpy(),
            "pixel_attention_mask": mask.numpy(),
            "spatial_shapes": np.array(shapes),
            "tiles": (cut.rows, cut.columns, (self._tile // self._unit) ** 2, tokens, int(self._is_marked)),
        }

    def cut(self, width: int, height: int) -> Cut:
        """How a picture of this size is shown."""
        whole = self._within(width, height)
        pixels = max(self._patch, self._rounded(width)) * max(self._patch, self._rounded(height))
        if not self._grids or pixels <= self._most * self._tolerance:
            return Cut(1, 1, *whole)
        columns, rows = self._nearest(width, height)
        return Cut(rows, columns, *whole)

    def _rounded(self, side: int) -> int:
        return round(side / self._unit) * self._unit

    def _within(self, width: int, height: int) -> tuple[int, int]:
        """Height and width near those of a picture, of whole tokens, not too few and not too many."""
        unit, least, most = self._unit, self._least, self._most
        rows, columns = (max(unit, self._rounded(side)) for side in (height, width))
        if rows * columns > most:
            factor = math.sqrt(height * width / most)
            rows, columns = (max(unit, math.floor(side / factor / unit) * unit) for side in (height, width))
        elif rows * columns < least:
            factor = math.sqrt(least / (height * width))
            rows, columns = (math.ceil(side * factor / unit) * unit for side in (height, width))
        return rows, columns

    def _nearest(self, width: int, height: int) -> tuple[int, int]:
        """The columns and rows whose ratio is nearest to a picture's; of several, the most that it half fills."""
        best, found = math.inf, (1, 1)
        for columns, rows in self._grids:
            difference = abs(width / height - columns / rows)
            fills = width * height > 0.5 * self._tile**2 * columns * rows
            if difference < best or (difference == best and fills):
                best, found = difference, (columns, rows)
        return found

    def _patches(self, pixels: Tensor) -> Tensor:
        """[3, H, W] → [K, P * P * 3], the numbers that the tower takes."""
        side = self._patch
        patches = self._numbers(pixels).unfold(1, side, side).unfold(2, side, side)  # [3, rows, columns, P, P]
        return patches.permute(1, 2, 3, 4, 0).flatten(2).flatten(0, 1)


def write_tiles(tiles: Sequence[int], mark: str) -> str:
    """The text that stands for a picture with these `tiles`, where `mark` is the text of one token."""
    rows, columns, tile, whole, is_marked = tiles
    parts = [("", mark * whole)]
    if rows * columns > 1:
        each = product(range(1, rows + 1), range(1, columns + 1))
        parts = [(f"<|img_row_{row}_col_{column}|>", mark * tile) for row, column in each]
        parts += [("<|img_thumbnail|>", mark * whole)] if whole else []
    if not is_marked:
        return "".join(text for _, text in parts)
    return f"<|image_start|>{''.join(map(''.join, parts))}<|image_end|>"


def _grids(fewest: int, most: int) -> list[tuple[int, int]]:
    """Columns and rows of so many tiles, in the order in which transformers tries them."""
    found = {
        (columns, rows)
        for count in range(fewest, most + 1)
        for columns in range(1, count + 1)
        for rows in range(1, count + 1)
        if fewest <= columns * rows <= most
    }
    return sorted(found, key=lambda grid: grid[0] * grid[1])
