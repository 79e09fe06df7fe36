"""The gated delta nets of Qwen3-Next and Qwen3.5: layers with a running state, over packed rows of several sequences.

A layer keeps for each sequence the last inputs of its convolution and the state of the delta rule. Projections and
norms run over the whole row, convolution and delta rule by sequence. Source: `Qwen3NextGatedDeltaNet` and
`Qwen3_5GatedDeltaNet` in transformers.
"""

from __future__ import annotations

from copy import copy
from math import prod
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import ACT2FN

from ..kv.kv_cache import zeros
from .delta_rule import Tokens, in_chunks, one_each
from .step import StateStep


class Projected(NamedTuple):
    """`mixed` [T, C] goes through the convolution: queries, keys and values; `gate` [T, H, V], `b` and `a` [T, H]."""

    mixed: Tensor
    gate: Tensor
    b: Tensor
    a: Tensor


class DeltaNet(nn.Module):
    """Replaces transformers' layer, with its modules. Call `allocate` before the first step."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.num_keys: int = layer.num_k_heads
        self.num_values: int = layer.num_v_heads
        self.key_size: int = layer.head_k_dim
        self.value_size: int = layer.head_v_dim
        self.norm, self.out_proj = layer.norm, layer.out_proj
        self.activation: nn.Module = ACT2FN[layer.activation]
        self.taps: Tensor = layer.conv1d.weight.detach().float().squeeze(1).T.contiguous()  # [K, C]
        self.bias: Tensor | None = None if layer.conv1d.bias is None else layer.conv1d.bias.detach().float()
        self.decay: Tensor = -layer.A_log.detach().float().exp()  # [H]
        self.dt_bias: Tensor = layer.dt_bias.detach().float()
        self._inputs = self._states = self._buffer = torch.empty(0)  # set by `allocate`

    @property
    def device(self) -> torch.device:
        return self.taps.device

    @property
    def memory(self) -> tuple[Tensor, Tensor]:
        """The last inputs of the convolution, and the states of the delta rule, by slot."""
        return self._inputs, self._states

    @property
    def state_shape(self) -> tuple[int, int, int]:
        return self.num_values, self.key_size, self.value_size

    def project(self, x: Tensor) -> Projected:
        """[T, E] → what the layer computes with."""
        raise NotImplementedError

    def allocate(self, num_slots: int, dtype: torch.dtype, buffer: Tensor) -> None:
        """Make room for `num_slots` states, and one that stays zero; earlier ones are lost.

        `buffer`, float32, has room for the states of a full batch; layers share it.
        """
        self._inputs = zeros((num_slots + 1, *self._input_shape), dtype, self.device)
        self._states = zeros((num_slots + 1, *self.state_shape), torch.float32, self.device)
        self._buffer = buffer.flatten()

    def state_bytes(self, dtype: torch.dtype) -> int:
        """The size of one state."""
        return prod(self._input_shape) * dtype.itemsize + prod(self.state_shape) * torch.float32.itemsize

    @property
    def flops(self) -> int:
        """The floating-point operations for a token, besides those of the projections."""
        return 2 * self.taps.numel() + 6 * prod(self.state_shape)

    def forward(self, hidden_states: Tensor, penstock_states: StateStep | None = None, **_: object) -> Tensor:
        """[1, T, E] → [1, T, E]; `penstock_states` says which slots the row's sequences use."""
        projected: Tensor = self.out_proj(self.mix(self.project(hidden_states[0]), penstock_states)[None])
        return projected

    def mix(self, projected: Projected, step: StateStep | None) -> Tensor:
        """What the tokens read from the states that they change, normalised and gated: [T, H · V]."""
        if step is None:
            raise RuntimeError("a layer with a state needs to know the slots of its sequences")
        mixed, gate, b, a = projected
        num_single = len(step.sources)
        convolved = torch.empty(mixed.shape, dtype=torch.float32, device=mixed.device)
        if num_single:
            convolved[:num_single] = self._convolve_singles(mixed[:num_single], step)
        for start, end, source, target in step.pieces:
            convolved[start:end] = self._convolve(mixed[start:end], source, target)
        tokens = self._tokens(self.activation(convolved), b, a)
        out = torch.empty(tokens.value.shape, dtype=torch.float32, device=mixed.device)
        if num_single:
            states = self._buffer[: num_single * prod(self.state_shape)].view(num_single, *self.state_shape)
            torch.index_select(self._states, 0, step.sources, out=states)
            out[:num_single] = one_each(tokens.part(0, num_single), states)
            self._states.index_copy_(0, step.targets, states)
        for start, end, source, target in step.pieces:
            out[start:end], self._states[target] = in_chunks(tokens.part(start, end), self._states[source])
        normed: Tensor = self.norm(out.to(mixed.dtype).flatten(0, 1), gate.flatten(0, 1))
        return normed.view(len(out), -1)

    def apart(self, num_slots: int, max_batch_size: int) -> Self:
        """A copy in float32 with memory of its own, which starts with the states of this one's slots."""
        other = copy(self)
        buffer = torch.empty(max_batch_size * prod(self.state_shape))
        other.allocate(num_slots, torch.float32, buffer)
        for own, theirs in zip(self.memory, other.memory, strict=True):
            theirs[: len(own)] = own
        return other

    @property
    def _input_shape(self) -> tuple[int, int]:
        return len(self.taps) - 1, self.taps.shape[1]

    def _convolve_singles(self, x: Tensor, step: StateStep) -> Tensor:
        window = torch.cat((self._inputs[step.sources], x[:, None]), dim=1)  # [T, K, C]
        self._inputs.index_copy_(0, step.targets, window[:, 1:])
        found = (window.float() * self.taps).sum(1)
        return found if self.bias is None else found + self.bias

    def _convolve(self, x: Tensor, source: int, target: int) -> Tensor:
        window = torch.cat((self._inputs[source], x))
        count, taps = len(x), self.taps
        self._inputs[target] = window[count:]
        window = window.float()
        found = window[:count] * taps[0]
        for index in range(1, len(taps)):
            found.addcmul_(window[index : index + count], taps[index])
        return found if self.bias is None else found.add_(self.bias)

    def _tokens(self, convolved: Tensor, b: Tensor, a: Tensor) -> Tokens:
        width = self.num_keys * self.key_size
        sizes = [width, width, self.num_values * self.value_size]
        query, key, value = torch.split(convolved, sizes, dim=-1)
        query, key = (_unit(each.view(len(each), -1, self.key_size)) for each in (query, key))
        shared = self.num_values // self.num_keys
        if shared > 1:  # consecutive value heads share a query and a key
            query, key = (each.repeat_interleave(shared, dim=1) for each in (query, key))
        log_decay = self.decay * functional.softplus(a.float() + self.dt_bias)
        value = value.view(len(value), -1, self.value_size)
        return Tokens(query * self.key_size**-0.5, key, value, log_decay, b.float().sigmoid())


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
        return Projected(mixed, gate.reshape(len(x), -1, self.value_size), b.flatten(1), a.flatten(1))


class SplitDeltaNet(DeltaNet):
    """Qwen3.5's: four projections."""

    def __init__(self, layer: Any) -> None:
        super().__init__(layer)
        self.in_proj_qkv, self.in_proj_z = layer.in_proj_qkv, layer.in_proj_z
        self.in_proj_b, self.in_proj_a = layer.in_proj_b, layer.in_proj_a

    def project(self, x: Tensor) -> Projected:
        return self.projected(self.in_proj_qkv(x), self.in_proj_z(x), self.in_proj_b(x), self.in_proj_a(x))

    def projected(self, mixed: Tensor, gate: Tensor, b: Tensor, a: Tensor) -> Projected:
        """What the four projections made of a row of tokens."""
        return Projected(mixed, gate.view(len(gate), -1, self.value_size), b, a)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)
