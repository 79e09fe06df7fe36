"""What the tokens of a step see of images, as the language model's layers are given it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .embeddings import APART


class Seen(NamedTuple):
    """What the tokens `rows` [K] of a step see instead of their embeddings: `features` [K, E], and by the number of a
    layer what is added before it, `deep` [K, E] each. Those `apart` pass experts of their own, if there are some."""

    rows: Tensor
    features: Tensor
    deep: Mapping[int, Tensor] = MappingProxyType({})
    apart: Tensor | None = None

    def further(self, input_ids: Tensor, *, by_layer: bool) -> dict[str, Any]:
        """What the layers are given besides the embeddings of the tokens [1, T]; `by_layer` as Granite's are."""
        found: dict[str, Any] = {}
        if self.apart is not None:
            found[APART] = torch.zeros_like(input_ids).index_fill(1, self.apart, 1)
        if self.deep:
            mask = torch.zeros_like(input_ids, dtype=torch.bool).index_fill(1, self.rows, True)
            order = self.rows.argsort()  # a mask has its rows in order
            deep = {layer: one[order] for layer, one in self.deep.items()}
            if by_layer:
                found |= {"vision_mask": mask[..., None], "deepstack_features": deep}
            else:
                found |= {"visual_pos_masks": mask, "deepstack_visual_embeds": [*deep.values()]}
        return found
