"""How an image processor that chooses the size of pictures by itself is held to some bounds, in pixels."""

from __future__ import annotations

from typing import Any

BUDGETS = 70, 140, 280, 560, 1120  # tokens of an image that Gemma 4's processor allows


def budget(processor: Any, fewest: int | None, most: int | None) -> dict[str, Any]:
    """Each picture is resized to about as many pixels as the most tokens have that may stand for it."""
    pixels = (processor.patch_size * processor.pooling_kernel_size) ** 2  # of a token
    found: int = processor.max_soft_tokens
    if fewest is not None:
        found = max(found, next((count for count in BUDGETS if count * pixels >= fewest), BUDGETS[-1]))
    if most is not None:
        found = min(found, max((count for count in BUDGETS if count * pixels <= most), default=BUDGETS[0]))
    return {"max_soft_tokens": found}


def bounds(processor: Any, fewest: int | None, most: int | None) -> dict[str, Any]:
    """What these call edges are pixels."""
    if fewest is None and most is None:
        return {}
    most = most or processor.size["longest_edge"]
    return {"size": {"shortest_edge": min(fewest or processor.size["shortest_edge"], most), "longest_edge": most}}


def frame_bounds(processor: Any, fewest: int | None, most: int | None) -> dict[str, Any]:
    """These count the pixels of all frames that a patch would have in a video."""
    frames = processor.temporal_patch_size
    return bounds(processor, *(None if count is None else count * frames for count in (fewest, most)))
