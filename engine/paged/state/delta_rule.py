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
from torch.nn import functional

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
    """Consecutive tokens of one sequence after `state` [H, D, V]: returns [T, H, V] and the new state.

    What depends on the tokens alone is computed for all chunks at once; only what reads the state goes in order.
    """
    num_tokens = len(tokens.query)
    query, key, value = (chunked(tensor, _CHUNK) for tensor in tokens[:3])  # [N, H, C, D]
    decay, rate = (chunked(tensor[..., None], _CHUNK) for tensor in tokens[3:])  # [N, H, C, 1]
    since = decay.cumsum(dim=2)  # the log of the decay since the chunk's beginning, the token's own included
    between = decays_between(since).squeeze(-1)
    faded, left = since.exp(), (since[:, :, -1:] - since).exp()
    rated = key * rate
    chunks = Chunks(
        system=(rated @ key.transpose(2, 3)) * between,
        scores=(query @ key.transpose(2, 3)) * between,
        query=query * faded,
        key=(key * left).transpose(2, 3),
        value=value * rate,
        known=rated * faded,
        ends=faded[:, :, -1:],
    )
    found, state = chunks.after(state)
    return found[:num_tokens], state


class Chunks(NamedTuple):
    """What the tokens of N chunks do, as far as it depends on them alone.

    `system` and `scores` [N, H, C, C]: how much of a token's change later ones take back, and how much of it they read.
    `query` [N, H, C, D] and `known` [N, H, C, D] read the state before their chunk, `key` [N, H, D, C] writes into that
    behind it, of which `ends` [N, H, 1 or D, 1] are left, and `value` [N, H, C, V] is what would be written alone.
    """

    system: Tensor
    scores: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    known: Tensor
    ends: Tensor

    def after(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """Behind `state` [H, D, V]: returns what all tokens read, [N · C, H, V], and the new state."""
        # What each token writes depends on what earlier ones wrote: a triangular system, solved for the changes of all.
        sides = torch.cat((self.value, self.known), dim=-1)
        solved = torch.linalg.solve_triangular(self.system, sides, upper=False, unitriangular=True)
        alone, of_state = solved.split((self.value.shape[-1], self.known.shape[-1]), dim=-1)
        found = []
        for at in range(len(solved)):
            changes = torch.baddbmm(alone[at], of_state[at], state, alpha=-1)
            found.append(torch.baddbmm(torch.bmm(self.scores[at], changes), self.query[at], state))
            state = torch.baddbmm(state * self.ends[at], self.key[at], changes)
        return torch.stack(found).transpose(1, 2).flatten(0, 1), state


def chunked(x: Tensor, size: int) -> Tensor:
    """[T, H, D] → [N, H, C, D], N chunks of at most `size` tokens, the last one filled with zeros."""
    size = min(size, len(x))
    padded = functional.pad(x, (0, 0, 0, 0, 0, -len(x) % size))
    return padded.view(-1, size, *x.shape[1:]).transpose(1, 2)


def decays_between(since: Tensor) -> Tensor:
    """The decay from each token of a chunk to each later one, from column to row, [N, H, C, D] → [N, H, C, C, D]."""
    count = since.shape[2]
    later = torch.ones(count, count, dtype=torch.bool, device=since.device).triu(1)[..., None]
    return (since[:, :, :, None] - since[:, :, None]).masked_fill(later, -torch.inf).exp()
