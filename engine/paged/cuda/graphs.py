"""Decoding steps as CUDA graphs: recorded once for each of a few batch sizes, then replayed with new inputs.

A step of fewer rows is padded: the padding rows write to a block that no request reads, and attend to one token of it;
their running states begin with zeros and go where nobody reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..packing import LayerGroup, PackedStep
from ..state.step import StateStep
from .attention import PagedStep

Capture = Callable[[Callable[[], Tensor]], tuple[Callable[[], None], Tensor]]
"""Records what a function launches; returns a function that replays it, and the tensor that then holds the result."""


class _Recorded(NamedTuple):
    inputs: PackedStep
    replay: Callable[[], None]
    logits: Tensor


class DecodeGraphs:
    """One recorded graph for each of some batch sizes; a batch is padded to the next size."""

    def __init__(
        self,
        run: Callable[[PackedStep], Tensor],
        groups: Sequence[LayerGroup],
        block_size: int,
        context_length: int,
        max_batch_size: int,
        device: torch.device,
        num_slots: int | None = None,
        capture: Capture | None = None,
    ) -> None:
        """`run` is the forward pass; its shapes may depend only on the number of rows. Running states are in
        `num_slots` slots, if the model keeps some."""
        self._groups, self._device, self._num_slots = groups, device, num_slots
        self._block_size, self._context_length = block_size, context_length
        self._capture = capture or partial(_capture, torch.cuda.graph_pool_handle())
        self._sizes = [size for size in (1, 2, 4, *range(8, max_batch_size, 8)) if size < max_batch_size]
        self._sizes.append(max_batch_size)
        self._recorded: dict[int, _Recorded] = {}
        for size in reversed(self._sizes):  # smaller graphs reuse the memory of the largest
            inputs = self._inputs(size)
            self._recorded[size] = _Recorded(inputs, *self._capture(partial(run, inputs)))

    def __call__(self, step: PackedStep) -> Tensor | None:
        """Logits [T, V] of a step in which every row decodes; None for any other step, which the caller must run."""
        rows = len(step.ids)
        if len(step.keep) != rows or step.groups[0].num_decoding != rows or rows > self._sizes[-1]:
            return None
        size = next(size for size in self._sizes if size >= rows)
        recorded = self._recorded[size]
        self._fill(recorded.inputs, step, rows)
        recorded.replay()
        return recorded.logits[:rows]

    def _inputs(self, size: int) -> PackedStep:
        def full(shape: tuple[int, ...], value: int, dtype: torch.dtype) -> Tensor:
            return torch.full(shape, value, dtype=dtype, device=self._device)

        width = -(-self._context_length // self._block_size)
        steps = [
            PagedStep(
                slots=full((size,), (group.num_blocks - 1) * self._block_size, torch.long),
                bounds=torch.arange(size + 1, dtype=torch.int32, device=self._device),
                lengths=full((size,), 1, torch.int32),
                tables=full((size, width), group.num_blocks - 1, torch.int32),
                tiles=full((0, 2), 0, torch.int32),
                num_decoding=size,
                window=group.window,
            )
            for group in self._groups
        ]
        zeros = full((size,), 0, torch.long)
        keep, states = torch.arange(size, device=self._device), None
        if self._num_slots is not None:
            sources, targets = (full((size,), self._num_slots + spare, torch.long) for spare in range(2))
            states = StateStep(sources, targets, ())
        return PackedStep(zeros, zeros.clone(), keep, range(size), steps, states=states)

    def _fill(self, inputs: PackedStep, step: PackedStep, rows: int) -> None:
        inputs.ids[:rows].copy_(step.ids)
        inputs.positions[:rows].copy_(step.positions)
        for group, own, given in zip(self._groups, inputs.groups, step.groups, strict=True):
            own.slots[:rows].copy_(given.slots)
            own.lengths[:rows].copy_(given.lengths)
            own.tables[:rows, : given.tables.shape[1]].copy_(given.tables)
            # Unused rows must not write to the blocks of an earlier step's requests.
            own.slots[rows:].fill_((group.num_blocks - 1) * self._block_size)
            own.lengths[rows:].fill_(1)
            own.tables[rows:].fill_(group.num_blocks - 1)
        if self._num_slots is not None and inputs.states is not None and step.states is not None:
            for spare, (slots, used) in enumerate(zip(inputs.states[:2], step.states[:2], strict=True)):
                slots[:rows].copy_(used)
                slots[rows:].fill_(self._num_slots + spare)


def _capture(pool: Any, function: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # a first call does set-up that must not be recorded
        function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool):
        result = function()
    return graph.replay, result
