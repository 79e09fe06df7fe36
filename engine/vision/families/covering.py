"""Prepares pictures for Command A Vision: tiles that cover a picture, and a small view of the whole behind them.

transformers has this processor for torchvision alone, which Penstock does not need; the numbers are the same. Source:
`Cohere2VisionImageProcessor` in transformers' `image_processing_cohere2_vision.py`, and `replace_image_token` in its
`processing_cohere2_vision.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....schemas.errors import ModelLoadError
from .numbers import RESAMPLING, USUAL, Numbers, pixels_of, resized, settings_of, squares

if TYPE_CHECKING:
    from PIL import Image

_DEFAULTS = USUAL | {
    "size": {"height": 512, "width": 512},
    "crop_to_patches": True,
    "max_patches": 12,
    "resample": 3,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}


class CoveringProcessor:
    """Called like transformers' image processors, with one picture in RGB at a time."""

    def __init__(self, path: Path) -> None:
        """Takes the settings of the processor of the model in the directory `path`. Raises `ModelLoadError`."""
        settings, _ = settings_of(path, _DEFAULTS)
        height, width = (settings["size"].get(name, 0) for name in ("height", "width"))
        if height != width or not height or settings["resample"] not in RESAMPLING or not settings["do_resize"]:
            raise ModelLoadError(
                f"{path} prepares images in a way that is not supported: size {settings['size']} must have the same "
                f"height and width, resample be one of {', '.join(map(str, RESAMPLING))}, and do_resize true"
            )
        self._side = int(height)
        self._most = int(settings["max_patches"]) if settings["crop_to_patches"] else 1
        self._resampling, self._numbers = RESAMPLING[settings["resample"]], Numbers.of(settings)

    def __call__(self, images: Sequence[Image.Image], **_: object) -> Mapping[str, Any]:
        """The input of the model's tower, and how many tiles it has."""
        import torch

        (image,) = images
        pixels, side = pixels_of(image), self._side
        columns, rows = self.grid(*image.size)
        shown = squares(resized(pixels, rows * side, columns * side, self._resampling), side)
        if len(shown) > 1:
            shown.append(resized(pixels, side, side, self._resampling))
        return {"pixel_values": torch.stack([self._numbers(one) for one in shown]).numpy(), "num_patches": [len(shown)]}

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """The columns and rows of tiles that a picture is enlarged least to fill; if it must be reduced, least so."""
        most = range(1, self._most + 1)
        grids = sorted(((one, other) for one in most for other in most if one * other <= self._most), key=_size)
        scales = [min(columns * self._side / width, rows * self._side / height) for columns, rows in grids]
        enlarging = [scale for scale in scales if scale >= 1]
        return grids[scales.index(min(enlarging) if enlarging else max(scales))]


def write_covering(config: Mapping[str, Any], grid: Sequence[int], mark: str) -> str:
    """The text that stands for a picture in `grid` tiles, the whole included."""
    tower = config["vision_config"]
    side = (
        int(tower.get("image_size", 512)) // int(tower.get("patch_size", 16)) // int(config.get("downsample_factor", 2))
    )
    return f"<|START_OF_IMG|>{f'{mark * side**2}<|IMG_LINE_BREAK|>' * grid[0]}<|END_OF_IMG|>"


def _size(grid: tuple[int, int]) -> int:
    return grid[0] * grid[1]
