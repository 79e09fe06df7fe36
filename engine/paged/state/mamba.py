"""State space layers of the form Mamba-2: of Granite 4, Nemotron-H, Bamba and Falcon-H1.

For each head a state S [N, P] is written by a token's input x [P] and key k [N], and read by its query q [N]:

    S' = exp(dt A) S + k (dt x)'        y = S'' q + D x

Heads of a group share queries and keys. Source: Dao and Gu, "Transformers are SSMs" (2024), and `BambaMixer`,
`GraniteMoeHybridMambaLayer`, `NemotronHMamba2Mixer` and `FalconH1Mixer` in transformers, which is the reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import ACT2FN

from .delta_rule import chunked, decays_between
from .layer import COLUMNS, RecurrentLayer, Rule, is_silu
from .step import StateStep, Wave

_CHUNK = 64  # tokens


class Tokens(NamedTuple):
    """`query` and `key` [T, G, N], `value` [T, H, P], scaled by its step, and `log_decay` [T, H], all in float32."""

    query: Tensor
    key: Tensor
    value: Tensor
    log_decay: Tensor

    def part(self, start: int, end: int) -> Tokens:
        return Tokens(*(tensor[start:end] for tensor in self))


class Mamba(RecurrentLayer):
    def __init__(self, layer: Any) -> None:
        super().__init__(layer.conv1d)
        self.num_heads: int = layer.num_heads
        self.head_size: int = layer.head_dim
        self.num_groups: int = layer.n_groups
        self.key_size: int = layer.ssm_state_size
        self.in_proj, self.out_proj = layer.in_proj, layer.out_proj
        self.norm: nn.Module | None = None if isinstance(layer.norm, nn.Identity) else layer.norm
        self.activation: nn.Module = ACT2FN[layer.activation]
        self.rate: Tensor = -layer.A_log.detach().float().exp()  # [H]
        self.dt_bias: Tensor = layer.dt_bias.detach().float()
        self.dt_limit: tuple[float, float] = layer.time_step_limit
        self.direct: Tensor = layer.D.detach().float()[:, None]  # [H, 1]
        width = self.num_heads * self.head_size
        self.kept = slice(width, width + self.taps.shape[1])
        # Falcon-H1 scales what goes into the projection, and each part of what comes out of it.
        self.in_multiplier: float = getattr(layer, "ssm_in_multiplier", 1.0)
        multipliers: Tensor | None = getattr(layer, "mup_vector", None)
        self.multipliers = None if multipliers is None else multipliers.detach().flatten()
        known = self.norm is None or hasattr(self.norm, "group_size")
        self.has_kernels = self.has_kernels and known and is_silu(self.activation)

    @property
    def state_shape(self) -> tuple[int, int, int]:
        return self.num_heads, self.key_size, self.head_size

    def forward(self, hidden_states: Tensor, **_: object) -> Tensor:
        """[1, T, E] → [1, T, E], with the slots of `step`."""
        x = hidden_states[0]
        projected = self.in_proj(x if self.in_multiplier == 1.0 else x * self.in_multiplier)
        result: Tensor = self.out_proj(self.read([projected], self.step)[None])
        return result

    def mix(self, made: Sequence[Tensor], step: StateStep) -> Tensor:
        (projected,) = made
        width, shared = self.num_heads * self.head_size, self.num_groups * self.key_size
        gate, mixed, dt = self._parts(projected)
        convolved: Tensor = self.activation(self.convolve(mixed, step))
        x, key, query = torch.split(convolved, [width, shared, shared], dim=-1)
        values = x.view(len(x), self.num_heads, self.head_size)
        steps = functional.softplus(dt.float() + self.dt_bias).clamp(*self.dt_limit)  # [T, H]
        query, key = (each.view(len(each), self.num_groups, self.key_size) for each in (query, key))
        tokens = Tokens(query, key, values * steps[..., None], steps * self.rate)
        said = self.scan(tokens, step, Rule(one_each, in_chunks)).add_(values * self.direct).flatten(1)
        said = said.to(projected.dtype)
        out: Tensor = said * functional.silu(gate) if self.norm is None else self.norm(said, gate)
        return out

    def advance(self, made: Sequence[Tensor], waves: Sequence[Wave]) -> Tensor:
        from triton import next_power_of_2

        from . import kernels

        gate, mixed, dt = self._parts(made[0])
        num_heads, size, width = self.state_shape
        convolved = torch.empty(mixed.shape, dtype=torch.float32, device=self.device)
        self.convolve_pieces(mixed, waves, convolved, has_silu=True)
        read = torch.empty((len(mixed), num_heads * width), dtype=torch.float32, device=self.device)
        steps = dt, dt.stride(0), self.rate, self.dt_bias, *map(float, self.dt_limit)
        sizes = self.num_groups, size, width, next_power_of_2(size), COLUMNS
        for wave in waves:
            given = convolved, *steps, self.direct, self._states, *wave[:4], read
            programs = len(wave.starts), num_heads, -(-width // COLUMNS)
            kernels.mamba[programs](*given, *sizes, num_warps=1)
        out = torch.empty(read.shape, dtype=mixed.dtype, device=self.device)
        group = read.shape[1] if self.norm is None else int(self.norm.group_size)  # type: ignore[arg-type]
        norm = (None, 0.0) if self.norm is None else (self.norm.weight, self.norm.variance_epsilon)
        grid, padded = (len(mixed), read.shape[1] // group), next_power_of_2(group)
        warps = min(16, max(1, padded // 512))
        kernels.gated_norm[grid](read, gate, gate.stride(0), *norm, out, group, padded, True, num_warps=warps)
        return out

    def _parts(self, projected: Tensor) -> tuple[Tensor, ...]:
        """The gates, what goes through the convolution, and the steps, of a row."""
        if self.multipliers is not None:
            projected = projected * self.multipliers.to(projected.dtype)
        width, shared = self.num_heads * self.head_size, self.num_groups * self.key_size
        return torch.split(projected, [width, width + 2 * shared, self.num_heads], dim=-1)


def one_each(tokens: Tokens, states: Tensor) -> Tensor:
    """One token each of T sequences: changes their `states` [T, H, N, P] in place, returns [T, H, P]."""
    query, key, value, log_decay = tokens
    num_tokens, heads, size, _ = states.shape
    query, key = (_for_heads(each, heads, dim=1) for each in (query, key))
    flat = states.view(num_tokens * heads, size, -1)
    flat.mul_(log_decay.exp().view(-1, 1, 1)).baddbmm_(key.reshape(-1, size, 1), value.reshape(len(flat), 1, -1))
    return torch.bmm(query.reshape(-1, 1, size), flat).view(value.shape)


def in_chunks(tokens: Tokens, state: Tensor) -> tuple[Tensor, Tensor]:
    """Consecutive tokens of one sequence after `state` [H, N, P]: returns [T, H, P] and the new state.

    Only the states at the borders of chunks are computed in order.
    """
    num_tokens, heads = tokens.value.shape[:2]
    query, key, value = (chunked(tensor, _CHUNK) for tensor in tokens[:3])  # [B, G or H, C, …]
    since = chunked(tokens.log_decay[..., None], _CHUNK).cumsum(dim=2)  # [B, H, C, 1], the token's own decay included
    scores = _for_heads(query @ key.transpose(2, 3), heads, dim=1)
    query, key = _for_heads(query, heads, dim=1), _for_heads(key, heads, dim=1)
    left = (since[:, :, -1:] - since).exp()
    written, ends = (key * left).transpose(2, 3) @ value, since[:, :, -1:].exp()
    before = []
    for at in range(len(written)):
        before.append(state)
        state = torch.addcmul(written[at], state, ends[at])
    read = (query * since.exp()) @ torch.stack(before) + (scores * decays_between(since).squeeze(-1)) @ value
    return read.transpose(1, 2).flatten(0, 1)[:num_tokens], state


def _for_heads(x: Tensor, heads: int, dim: int) -> Tensor:
    """Repeat what consecutive heads share."""
    shared = heads // x.shape[dim]
    return x if shared == 1 else x.repeat_interleave(shared, dim=dim)
