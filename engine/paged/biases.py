"""Biases by position (ALiBi): each head adds to a score what grows evenly with how near the key is.

The biases are further numbers of queries and keys, whose products they are: so blocks, prefixes, files of them and the
kernels hold and compute them without knowing. Numbers of keys are exact in 16 bits, and what a query subtracts is the
same for all keys, so that it only keeps the scores small. Source: https://arxiv.org/abs/2108.12409
"""

from __future__ import annotations

import torch
from torch import Tensor

_PART = 256  # positions up to here, and so many times as many, are exact in bfloat16


def biased(query: Tensor, key: Tensor, positions: Tensor, slopes: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """Add slopes [H] · (the key's position - the query's) to the scores of queries and keys [1, H, T, D] at `positions`
    [T], which are multiplied by `scaling`. Each becomes [1, H, T, D + 3]."""
    whole = positions // _PART * _PART
    own = torch.stack((whole, positions - whole, torch.full_like(positions, _PART)), dim=-1).to(key.dtype)
    steep = (slopes / scaling)[:, None].expand(-1, len(positions))
    given = torch.stack((steep, steep, -steep * positions / _PART), dim=-1).to(query.dtype)
    return torch.cat((query, given[None]), dim=-1), torch.cat((key, own.expand(1, key.shape[1], -1, -1)), dim=-1)


def biased_by(query: Tensor, key: Tensor, biases: Tensor) -> tuple[Tensor, Tensor]:
    """Add `biases` [Hq, T] of each head's keys to the scores of queries [1, Hq, T, D] and keys [1, H, T, D], which are
    multiplied besides. Each becomes as many numbers wider as queries share a key, and one."""
    heads, count = key.shape[1], len(biases) // key.shape[1]
    each = biases.view(heads, count, -1).transpose(1, 2).to(key.dtype)  # [H, T, G]
    own = torch.cat((each, torch.ones_like(each[..., :1])), dim=-1)
    chosen = torch.eye(count, dtype=query.dtype, device=query.device).repeat(heads, 1)  # [Hq, G]
    chosen = chosen[:, None].expand(-1, biases.shape[1], -1)
    given = torch.cat((chosen, -biases[..., None].to(query.dtype)), dim=-1)
    return torch.cat((query, given[None]), dim=-1), torch.cat((key, own[None]), dim=-1)
