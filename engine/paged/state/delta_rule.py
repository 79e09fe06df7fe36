"""The gated delta rule: linear attention whose state forgets, and corrects what it already says for a key.

For each head a state S [D, V] maps keys to values. A token with query q, key k, value v, decay a and rate b does

    S' = a S + b k (v - a S' k)'        o = S' q

transformers' `torch_recurrent_gated_delta_rule` and `torch_chunk_gated_delta_rule` are the reference; the form in
chunks is that of Yang et al., "Gated Delta Networks" (2024). All numbers are float32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_CHUNK = 64  # tokens


class Tokens(NamedTuple):
    """`query` and `key` [T, H, D], scaled and normalised, `value` [T, H, V], `log_decay` and `rate` [T, H]."""

    query: Tensor
    key: Tensor
    value: Tensor
    log_decay: Tensor
    rate: Tensor

    def part(self, start: int, end: int) -> Tokens:
        return Tokens(*(tensor[start:end] for tensor in self))


def one_each(tokens: Tokens, states: Tensor) -> Tensor:
    """One token each of T sequences: changes their `states` [T, H, D, V] in place, returns [T, H, V]."""
    query, key, value, log_decay, rate = tokens
    num_tokens, heads, size, _ = states.shape
    flat = states.view(num_tokens * heads, size, -1)
    decay = log_decay.exp()[..., None]  # [T, H, 1]
    both = torch.stack((query, key), dim=2).flatten(0, 1)  # [T·H, 2, D]
    read, known = (decay[..., None] * torch.bmm(both, flat).view(num_tokens, heads, 2, -1)).unbind(2)
    change = (value - known) * rate[..., None]
    flat.mul_(decay.view(-1, 1, 1)).baddbmm_(key.reshape(-1, size, 1), change.reshape(len(flat), 1, -1))
    return read + (query * key).sum(-1, keepdim=True) * change


def in_chunks(tokens: Tokens, state: Tensor) -> tuple[Tensor, Tensor]:
    """Consecutive tokens of one sequence after `state` [H, D, V]: returns [T, H, V] and the new state."""
    mixed = []
    for start in range(0, len(tokens.query), _CHUNK):
        found, state = _chunk(tokens.part(start, start + _CHUNK), state)
        mixed.append(found)
    return torch.cat(mixed), state


def _chunk(tokens: Tokens, state: Tensor) -> tuple[Tensor, Tensor]:
    query, key, value = (tensor.transpose(0, 1) for tensor in tokens[:3])  # [H, C, D]
    decay, rate = (tensor.T[..., None] for tensor in tokens[3:])  # [H, C, 1]
    since = decay.cumsum(dim=1)  # the log of the decay since the chunk's beginning, the token's own included
    count = key.shape[1]
    later = torch.ones(count, count, dtype=torch.bool, device=key.device).triu(1)
    between = (since - since.transpose(1, 2)).masked_fill(later, -torch.inf).exp()  # [H, C, C], from column to row
    faded = since.exp()
    # What each token writes depends on what earlier ones wrote: a triangular system, solved for the changes of all.
    rated = key * rate
    system = (rated @ key.transpose(1, 2)) * between
    changes = torch.linalg.solve_triangular(
        system, value * rate - (rated * faded) @ state, upper=False, unitriangular=True
    )
    mixed = (query * faded) @ state + ((query @ key.transpose(1, 2)) * between) @ changes
    left = (since[:, -1:] - since).exp()
    state = state * faded[:, -1:] + (key * left).transpose(1, 2) @ changes
    return mixed.transpose(0, 1), state
