"""The features that a model's tower makes of pictures, in one form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def stacked(made: Any) -> Tensor:
    """The features of images and the deep ones, [F, K, E]."""
    deep = getattr(made, "deepstack_features", None) or ()
    return torch.stack([_rows(one) for one in (made.pooler_output, *deep)])


def _rows(features: Tensor | Sequence[Tensor]) -> Tensor:
    """Those of all images [K, E]; versions of transformers differ in how they lie."""
    return features.flatten(0, -2) if isinstance(features, Tensor) else torch.cat([*features])
