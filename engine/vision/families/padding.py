"""Prepares pictures for Kimi K2.5: of their own size, unless it is too large, with black beside them for whole tokens.

transformers has this processor for torchvision alone, which Penstock does not need; the numbers are the same. Source:
`Kimi_K25ImageProcessor` in transformers' `image_processing_kimi_k25.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....schemas.errors import ModelLoadError
from .numbers import RESAMPLING, USUAL, Numbers, pixels_of, resized, settings_of

if TYPE_CHECKING:
    from PIL import Image

_DEFAULTS = USUAL | {
    "size": {"max_height": 512, "max_width": 512},
    "max_patches": 16_384,
    "patch_size": 14,
    "merge_size": 2,
    "resample": 3,
}


class PaddingProcessor:
    """Called like transformers' image processors, with one picture in RGB at a time."""

    def __init__(self, path: Path) -> None:
        """Takes the settings of the processor of the model in the directory `path`. Raises `ModelLoadError`."""
        settings, _ = settings_of(path, _DEFAULTS)
        height, width = (settings["size"].get(name, 0) for name in ("max_height", "max_width"))
        if height != width or not height or settings["resample"] not in RESAMPLING or not settings["do_resize"]:
            raise ModelLoadError(
                f"{path} prepares images in a way that is not supported: size {settings['size']} must have the same "
                f"max_height and max_width, resample be one of {', '.join(map(str, RESAMPLING))}, and do_resize true"
            )
        self._side, self._most = int(height), int(settings["max_patches"])  # both in patches
        self._patch, self._merge = int(settings["patch_size"]), int(settings["merge_size"])
        self._resampling, self._numbers = RESAMPLING[settings["resample"]], Numbers.of(settings)

    def __call__(self, images: Sequence[Image.Image], **_: object) -> Mapping[str, Any]:
        """The input of the model's tower, [K, 3, P, P], and how many patches the picture has in height and width."""
        import numpy as np
        from torch.nn.functional import pad

        (image,) = images
        pixels, patch = pixels_of(image), self._patch
        height, width = self.size(*image.size)
        unit = patch * self._merge
        padded = pad(resized(pixels, height, width, self._resampling), (0, -width % unit, 0, -height % unit))
        patches = self._numbers(padded).unfold(1, patch, patch).unfold(2, patch, patch)  # [3, rows, columns, P, P]
        rows, columns = patches.shape[1:3]
        return {
            "pixel_values": patches.permute(1, 2, 0, 3, 4).flatten(0, 1).numpy(),
            "image_grid_thw": np.array([(1, rows, columns)]),
        }

    def size(self, width: int, height: int) -> tuple[int, int]:
        """The height and width of a picture before there is black beside it."""
        patch, most = self._patch, self._side * self._patch
        count = max(1, height // patch) * max(1, width // patch)
        scale = min(1.0, math.sqrt(self._most / count), most / height, most / width)
        return min(max(1, int(height * scale)), most), min(max(1, int(width * scale)), most)


def write_padded(config: Mapping[str, Any], grid: Sequence[int], mark: str) -> str:
    """The text that stands for a picture of `grid` patches in time, height and width."""
    height, width = config["vision_config"].get("merge_kernel_size", (2, 2))
    return mark * int(math.prod(grid) // (height * width))
