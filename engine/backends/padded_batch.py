"""A left-padded batch of choices with its key-value cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from ..choice import Choice

Model = Callable[..., Any]
"""Takes token ids, mask, positions and cache as keywords; returns `logits` [B, T, V] and extends the cache by T."""


class _Layer(Protocol):
    """One layer of a cache that holds every position; keys and values are [B, H, W, D] each."""

    keys: Tensor
    values: Tensor


class PaddedBatch:
    """Choices padded on the left to the longest, so that their last tokens line up.

    `mask` [B, W] is 1 at every position that is not padding. After each `forward` the cache is W positions wide.
    """

    def __init__(self, rows: list[Choice], cache: DynamicCache, device: torch.device) -> None:
        """`cache` is empty; the first `forward` computes the prompts and any tokens already generated."""
        histories = [(*choice.prompt, *choice.tokens) for choice in rows]
        width = max(map(len, histories))
        self.rows = rows
        self.mask = torch.tensor([[0] * (width - len(h)) + [1] * len(h) for h in histories], device=device)
        self._cache = cache
        self._unread: Tensor | None = torch.tensor([[0] * (width - len(h)) + [*h] for h in histories], device=device)

    def forward(self, model: Model) -> Tensor:
        """Run the tokens that the cache does not hold yet; returns the logits of every row's last position, [B, V]."""
        if self._unread is not None:  # [B, W]
            tokens = self._unread
            positions = (self.mask.cumsum(-1) - 1).clamp(min=0)
        else:  # [B, 1]
            tokens = torch.tensor([[choice.tokens[-1]] for choice in self.rows], device=self.mask.device)
            self.mask = torch.cat([self.mask, self.mask.new_ones(len(self.rows), 1)], dim=-1)
            positions = self.mask.sum(-1, keepdim=True) - 1
        output = model(input_ids=tokens, attention_mask=self.mask, position_ids=positions, past_key_values=self._cache)
        self._unread = None
        logits: Tensor = output.logits[:, -1]
        return logits

    def keep(self, kept: list[int]) -> None:
        """Drop all rows but `kept`, and the padding that only the dropped ones needed."""
        if len(kept) == len(self.rows):
            return
        self.rows = [self.rows[row] for row in kept]
        indices = torch.tensor(kept, dtype=torch.long, device=self.mask.device)
        self.mask = self.mask[indices]
        if self._unread is not None:
            self._unread = self._unread[indices]
        elif kept:
            self._cache.batch_select_indices(indices)
            self._trim()

    def absorb(self, other: PaddedBatch) -> bool:
        """Take over the rows of `other`, both padded on the left to the wider one; False where that is impossible.

        Both must have run, and their caches must hold every position: those of a sliding window do not line up.
        The keys contain their positions already, so shifting a row within the batch does not change its results.
        """
        mine, theirs = self._plain_layers(), other._plain_layers()
        if mine is None or theirs is None or self._unread is not None or other._unread is not None:
            return False
        width = max(self.mask.shape[1], other.mask.shape[1])
        self.rows = self.rows + other.rows
        self.mask = torch.cat([_pad(self.mask[..., None], width), _pad(other.mask[..., None], width)])[..., 0]
        for layer, others in zip(mine, theirs, strict=True):
            layer.keys = torch.cat([_pad(layer.keys, width), _pad(others.keys, width)])
            layer.values = torch.cat([_pad(layer.values, width), _pad(others.values, width)])
        return True

    def memory(self) -> int:
        """Bytes of keys and values."""
        tensors = (getattr(layer, name, None) for layer in self._cache.layers for name in ("keys", "values"))
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def _plain_layers(self) -> list[_Layer] | None:
        """The cache's layers, if all of them hold every position."""
        layers = self._cache.layers
        return cast("list[_Layer]", layers) if all(type(layer) is DynamicLayer for layer in layers) else None

    def _trim(self) -> None:
        layers = self._plain_layers()
        first = int(self.mask.any(0).int().argmax())
        if layers is None or first == 0:
            return
        self.mask = self.mask[:, first:]
        for layer in layers:
            # Cloned: a view would keep the old memory alive until the next step.
            layer.keys, layer.values = layer.keys[..., first:, :].clone(), layer.values[..., first:, :].clone()


def _pad(tensor: Tensor, width: int) -> Tensor:
    """[…, W, D] → […, width, D], padded with zeros on the left."""
    return torch.nn.functional.pad(tensor, (0, 0, width - tensor.shape[-2], 0))
