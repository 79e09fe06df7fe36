"""What passes a model's tower one after another, and the features that it makes, in one form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # light processes do without it
    from torch import Tensor

    from .pictures import Arrays

ORDER = "order"
"""The name among a tower's inputs of what says which features the tokens show, in turn."""


class Part(NamedTuple):
    """What passes the tower at once, and up to where its features are used; None for all."""

    arrays: Arrays
    end: int | None = None


def passes(arrays: Arrays, tiles: int | None, crops: str, size: int) -> list[Part]:
    """The parts of one picture, of at most `size` tiles; `tiles` and `crops` are those of its `Family`."""
    if crops in arrays:
        own = [Part({"pixel_values": crop[None]}, -1) for crop in arrays[crops]]
        return [*own, Part({"pixel_values": arrays["pixel_values"]})]
    if tiles is None:
        return [Part(arrays)]
    before = (slice(None),) * tiles
    return [
        Part(
            {
                name: array[(*before, slice(first, first + size))] if array.ndim > tiles else array
                for name, array in arrays.items()
            }
        )
        for first in range(0, arrays["pixel_values"].shape[tiles], size)
    ]


def arranged(features: Tensor, order: Any, table: Tensor) -> Tensor:
    """The features [F, K, E] of a picture, and among them those of marks, the last rows of `table`, in this order."""
    import torch

    found = torch.from_numpy(order).to(features.device)
    marks = table[len(table) + features.shape[1] - 1 - int(found.max()) :]
    return torch.cat([features, marks[None].to(features.dtype)], dim=1)[:, found]


def stacked(made: Any) -> Tensor:
    """The features of images and the deep ones, [F, K, E]. Granite 4 Vision has deep ones alone, each with the number
    of its layer."""
    import torch

    deep = getattr(made, "deepstack_features", None) or ()
    if made.pooler_output is not None:
        return torch.stack([_rows(one) for one in (made.pooler_output, *deep)])
    named = {layer: _rows(one) for layer, one in deep}
    others = [named[layer] for layer in sorted(named)]
    return torch.stack([torch.zeros_like(others[0]), *others])


def _rows(features: Tensor | Sequence[Tensor]) -> Tensor:
    """Those of all images [K, E]; versions of transformers differ in how they lie."""
    import torch

    return features.flatten(0, -2) if isinstance(features, torch.Tensor) else torch.cat([*features])
