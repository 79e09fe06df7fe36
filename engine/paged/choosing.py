"""Attention to the tokens that an indexer chooses, DeepSeek's sparse attention.

Each token has a small key besides, by which later ones choose. It lies spread behind the keys of all heads, so that
blocks, prefixes and files of them hold it without knowing. Source: `DeepseekV32Indexer` in transformers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

_MOST = 1 << 23  # similarities that are in memory at a time


class Choice(NamedTuple):
    """How the queries of a step choose: by the `top` highest scores. `queries` [T, N, D] are compared with keys [D], of
    which every head has a part behind the first `start` numbers of its own; what is above 0 is weighted by `weights`
    [T, N]."""

    queries: Tensor
    weights: Tensor
    scaling: float
    top: int
    start: int

    def unchosen(self, tokens: slice, keys: Tensor, hidden: Tensor) -> Tensor | None:
        """Which keys the queries of these tokens do not attend to: [..., H, L, S] and, of a query each in its own
        sequence or of all in one, `hidden` [..., Q, L] → [..., Q, L]. None if there are too few to choose from.

        Of keys with the same score the first are chosen, however many follow.
        """
        if keys.shape[-2] <= self.top:
            return None
        queries, weights = self.queries[tokens].float(), self.weights[tokens].float()
        size, heads = queries.shape[-1], keys.shape[-3]
        parts = keys[..., self.start : self.start + width_of(size, heads)]
        whole = parts.transpose(-3, -2).flatten(-2)[..., :size].float()  # [..., L, D]
        step = max(1, _MOST // (queries.shape[1] * whole.shape[-2]))
        found = list[Tensor]()
        for start in range(0, len(queries), step):
            own = whole if whole.ndim == 2 else whole[start : start + step]
            similar = torch.matmul(queries[start : start + step], own.transpose(-1, -2)).mul_(self.scaling).relu_()
            found.append(torch.matmul(weights[start : start + step, None], similar)[:, 0])  # of [Q, N, L]
        scores = torch.cat(found).view(hidden.shape).masked_fill_(hidden, -torch.inf)
        chosen = scores.sort(dim=-1, descending=True, stable=True).indices[..., : self.top]
        return torch.ones_like(hidden).scatter_(-1, chosen, False)


def width_of(size: int, heads: int) -> int:
    """How many numbers of a key of `size` each head has."""
    return -(-size // heads)


def with_parts(keys: Tensor, own: Tensor) -> Tensor:
    """The keys [1, H, T, D] with the parts of those by which tokens are chosen, [1, T, E]."""
    heads, width = keys.shape[1], width_of(own.shape[-1], keys.shape[1])
    spread = functional.pad(own, (0, heads * width - own.shape[-1])).view(*own.shape[:2], heads, width)
    return torch.cat((keys, spread.transpose(1, 2).to(keys.dtype)), dim=-1)
