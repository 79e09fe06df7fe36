"""Prepares pictures for Gemma 4 12B, which has no tower: it looks at the colours of squares.

transformers has this processor for torchvision alone, which Penstock does not need; the numbers are the same. Source:
`Gemma4UnifiedImageProcessor` in transformers' `image_processing_gemma4_unified.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....schemas.errors import ModelLoadError
from .bounds import BUDGETS
from .numbers import RESAMPLING, USUAL, Numbers, pixels_of, resized, settings_of

if TYPE_CHECKING:
    from PIL import Image

_DEFAULTS = USUAL | {
    "patch_size": 16,
    "pooling_kernel_size": 3,
    "max_soft_tokens": 280,
    "resample": 3,
    "do_normalize": False,
    "image_mean": [0.0, 0.0, 0.0],
    "image_std": [1.0, 1.0, 1.0],
}


class MergingProcessor:
    """Called like transformers' image processors, with one picture in RGB at a time."""

    def __init__(self, path: Path) -> None:
        """Takes the settings of the processor of the model in the directory `path`. Raises `ModelLoadError`."""
        settings, _ = settings_of(path, _DEFAULTS)
        self.patch_size, self.pooling_kernel_size = settings["patch_size"], settings["pooling_kernel_size"]
        self.max_soft_tokens = settings["max_soft_tokens"]
        if self.max_soft_tokens not in BUDGETS or settings["resample"] not in RESAMPLING or not settings["do_resize"]:
            raise ModelLoadError(
                f"{path} prepares images in a way that is not supported: max_soft_tokens {self.max_soft_tokens} must "
                f"be one of {', '.join(map(str, BUDGETS))}, resample one of {', '.join(map(str, RESAMPLING))}, and "
                "do_resize true"
            )
        self._resampling, self._numbers = RESAMPLING[settings["resample"]], Numbers.of(settings)

    def __call__(self, images: Sequence[Image.Image], max_soft_tokens: int, **_: object) -> Mapping[str, Any]:
        """The inputs of the model, and how many of the squares are the picture's: the others are left out."""
        import torch

        (image,) = images
        pixels = pixels_of(image)
        side = self.patch_size * self.pooling_kernel_size
        rows, columns = self.grid(*image.size, max_soft_tokens)
        numbers = self._numbers(resized(pixels, rows * side, columns * side, self._resampling))
        cut = numbers.unfold(1, side, side).unfold(2, side, side).permute(1, 2, 3, 4, 0)  # [rows, columns, P, P, 3]
        values = torch.zeros(1, max_soft_tokens, side * side * 3)
        values[0, : rows * columns] = cut.flatten(2).flatten(0, 1)
        places = torch.full((1, max_soft_tokens, 2), -1)
        y, x = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
        places[0, : rows * columns] = torch.stack((x, y), -1).flatten(0, 1)
        return {
            "pixel_values": values.numpy(),
            "image_position_ids": places.numpy(),
            "num_soft_tokens_per_image": [rows * columns],
        }

    def grid(self, width: int, height: int, most: int) -> tuple[int, int]:
        """The rows and columns of squares, `most` at most, with a picture's proportions. Raises `ValueError`."""
        side = self.patch_size * self.pooling_kernel_size
        factor = math.sqrt(most * side**2 / (width * height))
        rows, columns = (math.floor(factor * edge / side) for edge in (height, width))
        if not rows and not columns:
            raise ValueError("it is too small")
        if not rows:
            return 1, min(width // height, most)
        return (rows, columns) if columns else (min(height // width, most), 1)
