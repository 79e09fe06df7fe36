"""Decoding steps as CUDA graphs: recorded once for each of a few batch sizes, then replayed with new inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..packing import Computed, PackedStep, Segment
from .inputs import DecodeInputs, Shape

Results = tuple[Tensor, Tensor]
"""The logits of a step [T, V] and each row's best token [T]."""

Capture = Callable[[Callable[[], Results]], tuple[Callable[[], None], Results]]
"""Records what a function launches; returns a function that replays it, and the tensors that then hold the results."""


class _Recorded(NamedTuple):
    inputs: DecodeInputs
    replay: Callable[[], None]
    results: Results


class DecodeGraphs:
    """One recorded graph for each of some batch sizes; a batch is padded to the next size."""

    def __init__(
        self,
        run: Callable[[PackedStep], Tensor],
        best: Callable[[Tensor], Tensor],
        shape: Shape,
        capture: Capture | None = None,
    ) -> None:
        """`run` is the forward pass, whose shapes may depend only on the number of rows; `best` chooses from logits."""
        self._capture = capture or partial(_capture, torch.cuda.graph_pool_handle())
        self._chosen = torch.zeros(shape.most_rows, dtype=torch.long, device=shape.device)
        self._sizes = [size for size in (1, 2, 4, *range(8, shape.most_rows, 8)) if size < shape.most_rows]
        self._sizes.append(shape.most_rows)
        self._recorded: dict[int, _Recorded] = {}
        for size in reversed(self._sizes):  # smaller graphs reuse the memory of the largest
            inputs = DecodeInputs(size, shape, self._chosen)

            def compute(inputs: DecodeInputs = inputs) -> Results:
                logits = run(inputs.step)
                return logits, best(logits)

            self._recorded[size] = _Recorded(inputs, *self._capture(compute))

    def __call__(self, segments: Sequence[Segment], chosen: Tensor | None) -> Computed | None:
        """Compute a step in which every row decodes, see `pack` for `chosen`; None for any other step, which the caller
        must run."""
        rows = len(segments)
        if rows > self._sizes[-1] or not all(map(_decodes, segments)):
            return None
        if chosen is not None:
            if len(chosen) > len(self._chosen):
                return None
            self._chosen[: len(chosen)].copy_(chosen)
        recorded = self._recorded[next(size for size in self._sizes if size >= rows)]
        recorded.inputs.fill(segments)
        recorded.replay()
        logits, best = recorded.results
        return Computed(logits[:rows], range(rows), best[:rows])


def _decodes(segment: Segment) -> bool:
    """Whether it is one token, whose logits are wanted, and nothing that is not recorded."""
    is_plain = segment.adapter is None and segment.positions is None and not segment.images
    return is_plain and len(segment.tokens) == 1 and segment.samples and not segment.scores


def _capture(pool: Any, function: Callable[[], Results]) -> tuple[Callable[[], None], Results]:
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # a first call does set-up that must not be recorded
        function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool):
        results = function()
    return graph.replay, results
