"""How many tokens show a picture in LLaVA-NeXT, LLaVA-OneVision and Granite 4 Vision: they see it whole and in tiles.

The tiles cover one of several sizes, the one that fits the picture best, with borders around it. The tokens of the
whole come first, then those of the tiles without the borders, row by row, and behind each row one that ends it.
Sources: `_get_number_of_features` in transformers' `processing_llava_next.py` and `processing_llava_onevision.py`, and
`select_best_resolution` in its `image_processing_utils.py`. Knows no torch and no transformers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from ....schemas.errors import ModelLoadError

Size = tuple[int, int]  # height and width

# Those of transformers' classes, for a config.json without image_grid_pinpoints, in pixels.
NEXT_SIZES = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
ONEVISION_SIZES = [[384 * rows, 384 * columns] for rows in range(1, 7) for columns in range(1, 7)]
_TOWERS = {"default": "clip_vision_model", "full": "siglip_vision_model"}


def write_next(config: Mapping[str, Any], grid: Sequence[int], mark: str) -> str:
    """The text that stands for a picture of `grid` pixels in height and width. Raises `ModelLoadError`."""
    side = _side(config, "default")
    rows, columns = _shown(config, grid, NEXT_SIZES)
    return mark * (side**2 + rows * (columns + 1))


def write_granite4(config: Mapping[str, Any], grid: Sequence[int], mark: str) -> str:
    """As `write_next`; each tile is reduced by the `downsample_rate`. Source: `_get_number_of_features` in
    transformers' `processing_granite4_vision.py`."""
    side = int(_side(config, "default") * Fraction(str(config["downsample_rate"])))
    rows, columns = _shown(config, grid, NEXT_SIZES, side)
    return mark * (side**2 + rows * (columns + 1))


def granite4_layers(config: Mapping[str, Any]) -> list[int]:
    """The numbers of the layers before which features of an image are added."""
    found = {int(layer) for _, layer in config["deepstack_layer_map"]}
    return sorted(found | {int(layer) for layer in config.get("spatial_target_layers") or (12, 15, 18, 21)})


def write_onevision(config: Mapping[str, Any], grid: Sequence[int], mark: str) -> str:
    """As `write_next`; `grid` has besides how many pictures the prompt has. One of several is seen as a whole alone."""
    side = _side(config, "full")
    if grid[-1] > 1:
        return mark * (side**2 + 1)
    named = str(config.get("vision_aspect_ratio", "anyres_max_9"))
    if (limit := re.fullmatch(r"anyres_max_([1-9]\d*)", named)) is None:
        raise ModelLoadError(
            f"config.json asks for vision_aspect_ratio {named!r}, which is not supported; it must be 'anyres_max_' "
            "and a number"
        )
    rows, columns = _shown(config, grid, ONEVISION_SIZES)
    ratio = math.sqrt(rows * columns / (int(limit[1]) * side**2))
    if ratio > 1.1:
        rows, columns = int(rows // ratio), int(columns // ratio)
    return mark * (side**2 + rows * (columns + 1))


def best_size(height: int, width: int, sizes: Sequence[Sequence[int]]) -> Size:
    """Of `sizes`, each height and width, the one that keeps most of a picture, and of several the smallest."""
    found, most, least = (0, 0), 0, math.inf
    for rows, columns in sizes:
        scale = min(columns / width, rows / height)
        kept = min(int(width * scale) * int(height * scale), height * width)
        wasted = rows * columns - kept
        if kept > most or (kept == most and wasted < least):
            found, most, least = (rows, columns), kept, wasted
    return found


def _side(config: Mapping[str, Any], strategy: str) -> int:
    """How many tokens a tile has in a row. `strategy` is the default of what is done with the tower's first token."""
    kind = config["vision_config"].get("model_type", _TOWERS[strategy])
    own = config.get("vision_feature_select_strategy", strategy)
    needed = "default" if kind == _TOWERS["default"] else "full"  # CLIP's first token is no part of the picture
    if own != needed:
        raise ModelLoadError(
            f"config.json has vision_feature_select_strategy {own!r}, with which a {kind} cannot be used; it must be "
            f"{needed!r}"
        )
    pixels, patch = _tile(config)
    return pixels // patch


def _tile(config: Mapping[str, Any]) -> tuple[int, int]:
    """How many pixels wide a tile is, and a patch of it."""
    tower = config["vision_config"]
    return int(tower.get("image_size", 224)), int(tower.get("patch_size", 16))


def _shown(config: Mapping[str, Any], grid: Sequence[int], defaults: list[list[int]], side: int | None = None) -> Size:
    """The rows and columns of tokens that show a picture in tiles, those of its borders left out. A tile has `side`
    tokens in a row, as many as patches if there is no other number."""
    (height, width), (pixels, patch) = grid[:2], _tile(config)
    sizes = config.get("image_grid_pinpoints") or defaults
    if any(edge < pixels or edge % pixels for size in sizes for edge in size):
        raise ModelLoadError(f"config.json has image_grid_pinpoints that are not all multiples of {pixels} pixels")
    best = best_size(height, width, sizes)
    rows, columns = (edge // pixels * (side or pixels // patch) for edge in best)
    if width / height > columns / rows:
        return rows - (rows - int(round(height * (columns / width), 7))) // 2 * 2, columns
    return rows, columns - (columns - int(round(width * (rows / height), 7))) // 2 * 2
