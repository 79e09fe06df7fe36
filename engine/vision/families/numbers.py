"""What is common to image processors that transformers has for torchvision alone: the numbers are the same without it.

Source: `TorchvisionBackend` in transformers' `image_processing_backends.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from ....schemas.errors import ModelLoadError
from ...checkpoints.files import read_json

if TYPE_CHECKING:  # torch comes with the first picture
    from PIL import Image
    from torch import Tensor

RESAMPLING = {2: "bilinear", 3: "bicubic"}
"""The names of torch, by the numbers of Pillow."""
USUAL: dict[str, Any] = {
    "do_resize": True,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
"""Settings that most of transformers' classes of image processors have, where a file leaves them open."""


class Numbers(NamedTuple):
    """Turns colours into the numbers that a tower takes: times `scale`, less a mean, by a deviation."""

    scale: float | None
    shift: tuple[list[float], list[float]] | None

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Self:
        scale = settings["rescale_factor"] if settings["do_rescale"] else None
        return cls(scale, (settings["image_mean"], settings["image_std"]) if settings["do_normalize"] else None)

    def __call__(self, pixels: Tensor) -> Tensor:
        """[3, H, W] in 8 bits → the same in float32."""
        import torch

        numbers = pixels.float()
        if self.shift is not None:
            mean, deviation = (torch.tensor(one) * (1 / (self.scale or 1)) for one in self.shift)
            return (numbers - mean[:, None, None]) / deviation[:, None, None]
        return numbers if self.scale is None else numbers * self.scale


def settings_of(path: Path, defaults: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings of the image processor of the model in the directory `path`, and those of its processor as a whole.
    Raises `ModelLoadError`."""
    whole = _read(path / "processor_config.json")
    own = whole.get("image_processor") or _read(path / "preprocessor_config.json")
    if not own:
        raise ModelLoadError(f"{path} has no preprocessor_config.json, which says how images are prepared; add it")
    return {**defaults, **{name: own[name] for name in defaults if own.get(name) is not None}}, whole


def pixels_of(image: Image.Image) -> Tensor:
    """A picture in RGB, as [3, H, W] in 8 bits."""
    import numpy as np
    import torch

    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()


def resized(pixels: Tensor, height: int, width: int, resampling: str) -> Tensor:
    """[3, H, W] → [3, height, width]."""
    from torch.nn.functional import interpolate

    if pixels.shape[1:] == (height, width):
        return pixels
    return interpolate(pixels[None], (height, width), mode=resampling, antialias=True)[0]


def squares(pixels: Tensor, side: int) -> list[Tensor]:
    """Cut a picture [3, R * side, C * side] into R times C, row by row."""
    import torch

    return [tile for row in torch.split(pixels, side, 1) for tile in torch.split(row, side, 2)]


def _read(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}
