"""State space layers of the form Mamba-1: of Mamba, Falcon Mamba and Jamba.

Each channel i has a state h [N]. A token with input x, step t, key k [N] and query q [N], all but the key and the query
by channel, does

    h' = exp(t A) h + k t x        y = h'' q + D x

Source: Gu and Dao, "Mamba" (2023), and `MambaMixer`, `FalconMambaMixer` and `JambaMambaMixer` in transformers, which is
the reference. All numbers of states are float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import ACT2FN

from .layer import RecurrentLayer, Rule
from .step import StateStep

_PART = 16  # tokens whose decays are in memory at a time


class Tokens(NamedTuple):
    """`query` and `key` [T, N], `value` [T, I], scaled by its `step` [T, I], all in float32."""

    query: Tensor
    key: Tensor
    value: Tensor
    step: Tensor

    def part(self, start: int, end: int) -> Tokens:
        return Tokens(*(tensor[start:end] for tensor in self))


class Selective(RecurrentLayer):
    """Call `allocate` before the first step."""

    def __init__(self, layer: Any) -> None:
        super().__init__(layer.conv1d)
        self.in_proj, self.x_proj, self.dt_proj, self.out_proj = (
            getattr(layer, f"{name}_proj") for name in ("in", "x", "dt", "out")
        )
        norms = (getattr(layer, f"{name}_layernorm", nn.Identity()) for name in ("dt", "b", "c"))
        self.dt_norm, self.key_norm, self.query_norm = norms
        self.activation: nn.Module = ACT2FN[layer.activation]
        self.rate: Tensor = -layer.A_log.detach().float().exp().T.contiguous()  # [N, I]
        self.direct: Tensor = layer.D.detach().float()
        self.sizes = [int(layer.time_step_rank), *[int(layer.ssm_state_size)] * 2]
        self.has_kernels = False

    @property
    def state_shape(self) -> tuple[int, int]:
        size, width = self.rate.shape
        return size, width

    def forward(self, hidden_states: Tensor, **_: object) -> Tensor:
        """[1, T, E] → [1, T, E], with the slots of `step`."""
        made: Tensor = self.out_proj(self.read([self.in_proj(hidden_states[0])], self.step)[None])
        return made

    def mix(self, made: Sequence[Tensor], step: StateStep) -> Tensor:
        mixed, gate = made[0].chunk(2, dim=-1)
        x: Tensor = self.activation(self.convolve(mixed, step)).to(mixed.dtype)
        time, key, query = self.x_proj(x).split(self.sizes, dim=-1)
        lasting = functional.softplus(self.dt_proj(self.dt_norm(time)).float())
        values = x.float()
        tokens = Tokens(self.query_norm(query).float(), self.key_norm(key).float(), values * lasting, lasting)
        rule = Rule(partial(one_each, self.rate), partial(in_order, self.rate))
        said = self.scan(tokens, step, rule).addcmul_(values, self.direct)
        out: Tensor = (said * self.activation(gate.float())).to(mixed.dtype)
        return out


def one_each(rate: Tensor, tokens: Tokens, states: Tensor) -> Tensor:
    """One token each of T sequences: changes their `states` [T, N, I] in place, returns [T, I]; `rate` is A [N, I]."""
    query, key, value, step = tokens
    states.mul_((step[:, None] * rate).exp()).addcmul_(key[..., None], value[:, None])
    return torch.bmm(query[:, None], states)[:, 0]


def in_order(rate: Tensor, tokens: Tokens, state: Tensor) -> tuple[Tensor, Tensor]:
    """Consecutive tokens of one sequence after `state` [N, I]: returns [T, I] and the new state."""
    found = []
    for start in range(0, len(tokens.value), _PART):
        query, key, value, step = tokens.part(start, start + _PART)
        states = key[..., None] * value[:, None]  # [T, N, I]
        decays = (step[:, None] * rate).exp_()
        for at in range(len(states)):
            state = states[at].addcmul_(state, decays[at])
        found.append(torch.bmm(query[:, None], states)[:, 0])
    return torch.cat(found), state
