"""The gated delta nets of Qwen3-Next, Qwen3.5 and OLMo Hybrid, whose states are those of the delta rule.

Source: `Qwen3NextGatedDeltaNet`, `Qwen3_5GatedDeltaNet` and `OlmoHybridGatedDeltaNet` in transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import ACT2FN

from .delta_rule import Tokens, in_chunks, one_each
from .layer import COLUMNS, RecurrentLayer, Rule, is_silu
from .step import StateStep, Wave


class Projected(NamedTuple):
    """`mixed` [T, C] goes through the convolution: queries, keys and values; `gate` [T, H · V], `b` and `a` [T, H]."""

    mixed: Tensor
    gate: Tensor
    b: Tensor
    a: Tensor


class DeltaNet(RecurrentLayer):
    """Call `allocate` before the first step."""

    highest_rate = 1.0
    """Of what a token may change; above 1, the state may go past what the token wants it to say."""

    def __init__(self, layer: Any, norm: str = "norm", out_proj: str = "out_proj") -> None:
        super().__init__(layer.conv1d)
        self.num_keys: int = layer.num_k_heads
        self.num_values: int = layer.num_v_heads
        self.key_size: int = layer.head_k_dim
        self.value_size: int = layer.head_v_dim
        self.norm, self.out_proj = getattr(layer, norm), getattr(layer, out_proj)
        self.activation: nn.Module = ACT2FN[layer.activation]
        self.decay: Tensor = -layer.A_log.detach().float().exp()  # [H]
        self.dt_bias: Tensor = layer.dt_bias.detach().float()
        self.has_kernels = self.has_kernels and is_silu(self.activation)

    @property
    def state_shape(self) -> tuple[int, int, int]:
        return self.num_values, self.key_size, self.value_size

    def project(self, x: Tensor) -> Projected:
        """[T, E] → what the layer computes with."""
        raise NotImplementedError

    def forward(self, hidden_states: Tensor, **_: object) -> Tensor:
        """[1, T, E] → [1, T, E], with the slots of `step`."""
        projected: Tensor = self.out_proj(self.read(self.project(hidden_states[0]), self.step)[None])
        return projected

    def read(self, made: Sequence[Tensor], step: StateStep | None) -> Tensor:
        if len(made) == 1:  # all side by side
            sizes = [self.taps.shape[1], self.num_values * self.value_size, self.num_values, self.num_values]
            made = torch.split(made[0], sizes, dim=-1)
        return super().read(made, step)

    def mix(self, made: Sequence[Tensor], step: StateStep) -> Tensor:
        """What the tokens read from the states that they change, normalised and gated: [T, H · V]."""
        mixed, gate, b, a = made
        gate = gate.view(len(gate), -1, self.value_size)
        tokens = self._tokens(self.activation(self.convolve(mixed, step)), b, a)
        out = self.scan(tokens, step, Rule(one_each, in_chunks))
        normed: Tensor = self.norm(out.to(mixed.dtype).flatten(0, 1), gate.flatten(0, 1))
        return normed.view(len(out), -1)

    def advance(self, made: Sequence[Tensor], waves: Sequence[Wave]) -> Tensor:
        from triton import next_power_of_2

        from . import kernels

        mixed, gate, b, a = made
        num_heads, size, width = self.state_shape
        convolved = torch.empty(mixed.shape, dtype=torch.float32, device=self.device)
        self.convolve_pieces(mixed, waves, convolved, has_silu=True)
        read = torch.empty((len(mixed), num_heads, width), dtype=torch.float32, device=self.device)
        rates = b, b.stride(0), a, a.stride(0), self.decay, self.dt_bias
        shared = self.num_keys, num_heads // self.num_keys
        sizes = size, width, next_power_of_2(size), COLUMNS
        for wave in waves:
            given = convolved, *rates, self._states, *wave[:4], read, self.key_size**-0.5
            grid = len(wave.starts), num_heads, -(-width // COLUMNS)
            kernels.delta[grid](*given, *shared, *sizes, num_warps=1)
        out = torch.empty((len(mixed), num_heads * width), dtype=mixed.dtype, device=self.device)
        gates = gate.flatten(1)
        norm = self.norm.weight, self.norm.variance_epsilon, out, width, next_power_of_2(width), False
        kernels.gated_norm[(len(mixed), num_heads)](read, gates, gates.stride(0), *norm, num_warps=1)
        return out

    def _tokens(self, convolved: Tensor, b: Tensor, a: Tensor) -> Tokens:
        width = self.num_keys * self.key_size
        sizes = [width, width, self.num_values * self.value_size]
        query, key, value = torch.split(convolved, sizes, dim=-1)
        query, key = (unit(each.view(len(each), -1, self.key_size)) for each in (query, key))
        shared = self.num_values // self.num_keys
        if shared > 1:  # consecutive value heads share a query and a key
            query, key = (each.repeat_interleave(shared, dim=1) for each in (query, key))
        log_decay = self.decay * functional.softplus(a.float() + self.dt_bias)
        value = value.view(len(value), -1, self.value_size)
        rate = b.float().sigmoid() * self.highest_rate
        return Tokens(query * self.key_size**-0.5, key, value, log_decay, rate)


class NextDeltaNet(DeltaNet):
    """Qwen3-Next's: two projections, whose outputs are grouped by the heads of the keys."""

    def __init__(self, layer: Any) -> None:
        super().__init__(layer)
        self.in_proj_qkvz, self.in_proj_ba = layer.in_proj_qkvz, layer.in_proj_ba

    def project(self, x: Tensor) -> Projected:
        shared = self.num_values // self.num_keys
        sizes = self.key_size, self.key_size, shared * self.value_size, shared * self.value_size
        query, key, value, gate = self.in_proj_qkvz(x).view(len(x), self.num_keys, -1).split(sizes, dim=-1)
        b, a = self.in_proj_ba(x).view(len(x), self.num_keys, -1).split((shared, shared), dim=-1)
        mixed = torch.cat([each.flatten(1) for each in (query, key, value)], dim=-1)
        return Projected(mixed, gate.flatten(1), b.flatten(1), a.flatten(1))


class SplitDeltaNet(DeltaNet):
    """Qwen3.5's: four projections."""

    def __init__(self, layer: Any) -> None:
        super().__init__(layer)
        self.in_proj_qkv, self.in_proj_z = layer.in_proj_qkv, layer.in_proj_z
        self.in_proj_b, self.in_proj_a = layer.in_proj_b, layer.in_proj_a

    def project(self, x: Tensor) -> Projected:
        return Projected(self.in_proj_qkv(x), self.in_proj_z(x), self.in_proj_b(x), self.in_proj_a(x))


class SeparateDeltaNet(DeltaNet):
    """OLMo Hybrid's: six projections."""

    def __init__(self, layer: Any) -> None:
        super().__init__(layer, "o_norm", "o_proj")
        self.q_proj, self.k_proj, self.v_proj = layer.q_proj, layer.k_proj, layer.v_proj
        self.g_proj, self.b_proj, self.a_proj = layer.g_proj, layer.b_proj, layer.a_proj
        if layer.allow_neg_eigval:
            self.highest_rate = 2.0
            self.has_kernels = False  # whose rates end at 1

    def project(self, x: Tensor) -> Projected:
        mixed = torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], dim=-1)
        return Projected(mixed, self.g_proj(x), self.b_proj(x), self.a_proj(x))


def unit(x: Tensor) -> Tensor:
    """[…, D] → […, D], of length 1."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)
