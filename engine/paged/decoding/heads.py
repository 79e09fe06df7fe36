"""Rotary attention of the plain decoder's layers, without what follows it: norms of heads, rotations, gates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:  # it takes `attend` from here
    from .layer import Layer

Attention = Callable[[int, Tensor, Tensor | None], Tensor]
"""Number of the layer among those that keep keys and values, query [Hq, T, D], keys and then values [2 H, T, D] → [T,
Hq · D]. Without new keys and values those that the layer of that number stored in the same step are taken."""


class Angles(NamedTuple):
    """Cosines and sines [1, T, D], the sines of the first half negated: x cos + (x with its halves swapped) sin.

    Queries are multiplied by `scales` [1, T, 1], in models whose attention grows sharper with the position.
    """

    cosines: Tensor
    sines: Tensor
    scales: Tensor | None = None


Rotations = Mapping[str | None, Angles]
"""The angles of each kind of layer."""


def attend(layer: Layer, h: Tensor, angles: Angles, attention: Attention) -> Tensor:
    """What the layer's heads find for inputs [T, E], [T, Hq · D]."""
    heads = layer.qkv(h).view(len(h), -1, layer.head_dim).transpose(0, 1)  # [Hq + 2 H, T, D]
    gates: Tensor | None = None
    if layer.has_gates:
        both = heads[: 2 * layer.num_q_heads]
        heads, gates = torch.cat((both[::2], heads[len(both) :])), both[1::2]
    if layer.num_parts == 1:
        heads = torch.cat((heads, heads[layer.num_q_heads :]))
    query_key = heads[: len(heads) - (layer.num_kv_heads if layer.num_parts else 0)]
    if layer.norms_values:
        values = heads[len(query_key) :]
        values.copy_(functional.rms_norm(values, (layer.head_dim,), None, layer.epsilon))
    if layer.head_norm is not None:
        normed = _normed(layer, query_key) * layer.head_norm.to(h.dtype)
        is_whole = layer.rotates and angles.cosines.shape[-1] == layer.head_dim
        query_key = normed if is_whole else query_key.copy_(normed)
    if layer.rotates and angles.cosines.shape[-1]:
        _rotate(query_key, angles, heads)
    if angles.scales is not None:
        heads[: layer.num_q_heads] *= angles.scales
    keys_values = heads[layer.num_q_heads :] if layer.num_parts else None
    found = attention(layer.number, heads[: layer.num_q_heads], keys_values)
    return found if gates is None else found * gates.transpose(0, 1).flatten(1).sigmoid()


def _normed(layer: Layer, query_key: Tensor) -> Tensor:
    """Queries and keys [Hq + H, T, D] over the root of their mean squares, head by head or all together."""
    if not layer.norms_rows:
        return functional.rms_norm(query_key, (layer.head_dim,), None, layer.epsilon)
    rows = (part.transpose(0, 1) for part in (query_key[: layer.num_q_heads], query_key[layer.num_q_heads :]))
    return torch.cat([functional.rms_norm(row, row.shape[1:], None, layer.epsilon).transpose(0, 1) for row in rows])


def _rotate(query_key: Tensor, angles: Angles, heads: Tensor) -> None:
    """Write the rotated numbers of each head, its first ones if not all rotate, into the first `heads`."""
    (count, num_tokens, _), size = query_key.shape, angles.cosines.shape[-1]
    part = query_key[..., :size]
    swapped = part.reshape(count, num_tokens, 2, size // 2).flip(-2).flatten(-2)
    torch.addcmul(part * angles.cosines, swapped, angles.sines, out=heads[:count, :, :size])
