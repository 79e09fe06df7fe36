"""The delta nets of Kimi Linear and Ling's hybrids, in which each number of a key has a decay of its own.

For each head a state S [D, V] maps keys to values. A token with query q, key k, value v, decays a [D] and rate b does

    S' = Diag(a) S + b k (v - (Diag(a) S)' k)'        o = S'' q

Source: Kimi Team, "Kimi Linear" (2025), and `KimiLinearDeltaAttention` and `BailingHybridDeltaAttention` in
transformers, which are the reference. All numbers of states are float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from .delta_net import unit
from .delta_rule import Chunks, Tokens, chunked, decays_between
from .layer import RecurrentLayer, Rule
from .step import StateStep

_CHUNK = 16  # tokens; each pair of them has decays of its own


class KimiDeltaNet(RecurrentLayer):
    """Call `allocate` before the first step."""

    def __init__(self, layer: Any) -> None:
        super().__init__(layer.conv1d)
        self.num_heads: int = layer.num_heads
        self.head_size: int = layer.head_dim
        self.q_proj, self.k_proj, self.v_proj = layer.q_proj, layer.k_proj, layer.v_proj
        self.forget_gate, self.b_proj = layer.forget_gate, layer.b_proj
        whole = hasattr(layer, "g_proj")
        self.gate = layer.g_proj if whole else nn.Sequential(layer.g_a_proj, layer.g_b_proj)
        self.norm, self.out_proj = layer.o_norm, layer.o_proj
        self.activation: nn.Module = ACT2FN[layer.activation]
        self.has_kernels = False

    @property
    def state_shape(self) -> tuple[int, int, int]:
        return self.num_heads, self.head_size, self.head_size

    def forward(self, hidden_states: Tensor, **_: object) -> Tensor:
        """[1, T, E] → [1, T, E], with the slots of `step`."""
        x = hidden_states[0]
        mixed = torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], dim=-1)
        made = [mixed, self.gate(x), self.b_proj(x), self.forget_gate(hidden_states)[0]]
        result: Tensor = self.out_proj(self.read(made, self.step)[None])
        return result

    def mix(self, made: Sequence[Tensor], step: StateStep) -> Tensor:
        """What the tokens read from the states that they change, normalised and gated: [T, H · D]."""
        mixed, gate, b, decay = made
        convolved = self.activation(self.convolve(mixed, step)).view(len(mixed), 3, self.num_heads, self.head_size)
        query, key, value = convolved.unbind(1)
        tokens = Tokens(unit(query) * self.head_size**-0.5, unit(key), value, decay.float(), b.float().sigmoid())
        out = self.scan(tokens, step, Rule(one_each, in_chunks)).to(mixed.dtype)
        normed: Tensor = self.norm(out, gate.view(out.shape))
        return normed.flatten(1)


def one_each(tokens: Tokens, states: Tensor) -> Tensor:
    """One token each of T sequences, `log_decay` [T, H, D]: changes their `states` [T, H, D, V] in place, returns
    [T, H, V]."""
    query, key, value, log_decay, rate = tokens
    flat = states.flatten(0, 1)
    flat.mul_(log_decay.exp().flatten(0, 1)[..., None])
    known = torch.bmm(key.flatten(0, 1)[:, None], flat).view(value.shape)
    change = (value - known) * rate[..., None]
    flat.baddbmm_(key.flatten(0, 1)[..., None], change.flatten(0, 1)[:, None])
    return torch.bmm(query.flatten(0, 1)[:, None], flat).view(value.shape)


def in_chunks(tokens: Tokens, state: Tensor) -> tuple[Tensor, Tensor]:
    """Consecutive tokens of one sequence after `state` [H, D, V]: returns [T, H, V] and the new state.

    `delta_rule.in_chunks`, with decays between two tokens that differ by the numbers of a key.
    """
    num_tokens = len(tokens.query)
    query, key, value, decay = (chunked(tensor, _CHUNK) for tensor in tokens[:4])  # [N, H, C, D]
    rate = chunked(tokens.rate[..., None], _CHUNK)  # [N, H, C, 1]
    since = decay.cumsum(dim=2)
    faded, left = since.exp(), (since[:, :, -1:] - since).exp()
    earlier = decays_between(since) * key[:, :, None]  # keys as they have faded until each later token
    rated = key * rate
    chunks = Chunks(
        system=torch.einsum("nhcd,nhced->nhce", rated, earlier),
        scores=torch.einsum("nhcd,nhced->nhce", query, earlier),
        query=query * faded,
        key=(key * left).transpose(2, 3),
        value=value * rate,
        known=rated * faded,
        ends=faded[:, :, -1, :, None],
    )
    found, state = chunks.after(state)
    return found[:num_tokens], state
