"""What all layers with a running state share: slots for states, and a short convolution over packed rows.

A layer keeps for each sequence the last inputs of its convolution, and mostly a state in float32 besides. Projections
and norms run over the whole row, convolution and state by sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from math import prod
from typing import Generic, NamedTuple, Protocol, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...planning.device import has_triton
from ..kv.kv_cache import zeros
from .step import StateStep, Wave


class Tokens(Protocol):
    """What the tokens of a row bring to a state; `value` [T, H, V] has the shape of what they read."""

    @property
    def value(self) -> Tensor: ...

    def part(self, start: int, end: int) -> Self: ...


T = TypeVar("T", bound=Tokens)

_CHANNELS, COLUMNS = 256, 16  # of one program: of a convolution, of a state

SPARE = 2
"""Rooms behind those of the slots: one that stays zero, and one that nobody reads, for rows that only fill a batch."""


class Rule(NamedTuple, Generic[T]):
    """How states change. `one_each` takes one token each of N sequences and their states, which it changes in place;
    `in_chunks` takes consecutive tokens of one and the state before, and returns that behind them, too."""

    one_each: Callable[[T, Tensor], Tensor]
    in_chunks: Callable[[T, Tensor], tuple[Tensor, Tensor]]


def is_silu(activation: object) -> bool:
    """Whether it is torch's SiLU, the function or the class, or transformers'."""
    return activation is functional.silu or type(activation).__name__ in {"SiLU", "SiLUActivation"}


class StateLayer(nn.Module):
    """Replaces transformers' layer, with its modules. Call `allocate` before the first step.

    `step` reaches it by itself, since not all models pass on to such a layer what their forward was given.
    """

    kept = slice(None)
    """Which numbers of what the first projection makes the convolution keeps."""

    def __init__(self, convolution: nn.Conv1d) -> None:
        super().__init__()
        self.taps: Tensor = convolution.weight.detach().float().squeeze(1).T.contiguous()  # [K, C]
        self.bias: Tensor | None = None if convolution.bias is None else convolution.bias.detach().float()
        self._inputs = torch.empty(0)  # set by `allocate`
        self.step: StateStep | None = None  # which slots the sequences of a row use; set by `States.begin`
        self.has_kernels = has_triton(self.device)

    @property
    def device(self) -> torch.device:
        return self.taps.device

    @property
    def memory(self) -> tuple[Tensor, ...]:
        """What is kept, by slot: first the last inputs of the convolution."""
        return (self._inputs,)

    @property
    def state_shape(self) -> tuple[int, ...]:
        """Of what is kept in float32 besides; () if nothing is."""
        return ()

    @property
    def state_size(self) -> int:
        """How many numbers that is."""
        return prod(self.state_shape) if self.state_shape else 0

    @property
    def flops(self) -> int:
        """The floating-point operations for a token, besides those of the projections."""
        return 2 * self.taps.numel()

    def allocate(self, num_slots: int, dtype: torch.dtype, buffer: Tensor) -> None:
        """Make room for `num_slots` states, and `SPARE` more; earlier ones are lost.

        `buffer`, float32, has room for the states of a full batch; layers share it.
        """
        self._inputs = zeros((num_slots + SPARE, *self._input_shape), dtype, self.device)

    def state_bytes(self, dtype: torch.dtype) -> int:
        """The size of one state."""
        return prod(self._input_shape) * dtype.itemsize + self.state_size * torch.float32.itemsize

    def apart(self, num_slots: int, max_batch_size: int) -> Self:
        """A copy in float32 with memory of its own, which starts with the states of this one's slots."""
        other = copy(self)
        other.allocate(num_slots, torch.float32, torch.empty(max_batch_size * self.state_size))
        for own, theirs in zip(self.memory, other.memory, strict=True):
            theirs[: len(own)] = own
        return other

    def read(self, made: Sequence[Tensor], step: StateStep | None) -> Tensor:
        """What the tokens of a row read from their own inputs and the states, as inputs of the last projection.

        `made` [T, …] is what the others made of the row.
        """
        if step is None:
            raise RuntimeError("a layer with a state needs to know the slots of its sequences")
        return self.advance(made, step.waves) if self.has_kernels else self.mix(made, step)

    def mix(self, made: Sequence[Tensor], step: StateStep) -> Tensor:
        """`read` with torch's operations."""
        raise NotImplementedError

    def advance(self, made: Sequence[Tensor], waves: Sequence[Wave]) -> Tensor:
        """`read` with kernels."""
        raise NotImplementedError

    def convolve_pieces(
        self,
        x: Tensor,
        waves: Sequence[Wave],
        out: Tensor,
        gates: tuple[Tensor, Tensor] | None = None,
        *,
        has_silu: bool = False,
    ) -> None:
        """`convolve` with kernels; multiplied by gates before and after it, [T, C] each with the strides of x, or with
        SiLU."""
        from . import kernels

        channels = x.shape[1]
        given = x, x.stride(0), *(gates or (None, None)), self.taps, self.bias, self._inputs
        sizes = channels, len(self.taps), has_silu, _CHANNELS
        for wave in waves:
            grid = len(wave.tokens), -(-channels // _CHANNELS)
            kernels.convolve[grid](*given, *wave, out, *sizes)

    def convolve(self, x: Tensor, step: StateStep) -> Tensor:
        """[T, C] → [T, C] in float32, each sequence after the inputs in its slot."""
        num_single = len(step.sources)
        convolved = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        if num_single:
            convolved[:num_single] = self._convolve_singles(x[:num_single], step)
        for start, end, source, target in step.pieces:
            convolved[start:end] = self._convolve(x[start:end], source, target)
        return convolved

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


class RecurrentLayer(StateLayer):
    """One whose state is a matrix for each of its heads, of the shape `state_shape`."""

    def __init__(self, convolution: nn.Conv1d) -> None:
        super().__init__(convolution)
        self._states = self._buffer = torch.empty(0)  # set by `allocate`

    @property
    def memory(self) -> tuple[Tensor, Tensor]:
        """The last inputs of the convolution, and the states, by slot."""
        return self._inputs, self._states

    @property
    def flops(self) -> int:
        return super().flops + 6 * self.state_size

    def allocate(self, num_slots: int, dtype: torch.dtype, buffer: Tensor) -> None:
        super().allocate(num_slots, dtype, buffer)
        self._states = zeros((num_slots + SPARE, *self.state_shape), torch.float32, self.device)
        self._buffer = buffer.flatten()

    def scan(self, tokens: T, step: StateStep, rule: Rule[T]) -> Tensor:
        """What the tokens of a row read, by a rule, from the states that they change: [T, H, V] in float32."""
        num_single = len(step.sources)
        out = torch.empty(tokens.value.shape, dtype=torch.float32, device=self.device)
        if num_single:
            states = self._buffer[: num_single * self.state_size].view(num_single, *self.state_shape)
            torch.index_select(self._states, 0, step.sources, out=states)
            out[:num_single] = rule.one_each(tokens.part(0, num_single), states)
            self._states.index_copy_(0, step.targets, states)
        for start, end, source, target in step.pieces:
            out[start:end], self._states[target] = rule.in_chunks(tokens.part(start, end), self._states[source])
        return out
