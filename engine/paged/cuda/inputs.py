"""What a recorded decoding step reads: tensors that stay where they are, filled with one copy from the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..packing import LayerGroup, PackedStep, Segment
from ..state.slots import NO_STATE
from ..state.step import StateStep, Wave
from .attention import PagedStep

_WIDE, _NARROW = 8, 4  # bytes of a number


class Shape(NamedTuple):
    """What is the same for all recorded steps: `width` blocks of a table, `num_slots` of running states, None without,
    and the most tokens that one step chooses."""

    groups: Sequence[LayerGroup]
    block_size: int
    width: int
    num_slots: int | None
    most_rows: int
    device: torch.device


class DecodeInputs:
    """Those of `size` rows of one token each. Rows that only fill the batch write to blocks and states that nobody
    reads, and attend to one token there.

    `chosen` holds the tokens of the step before, for rows whose token the host does not know yet.
    """

    def __init__(self, size: int, shape: Shape, chosen: Tensor) -> None:
        self._size, self._shape, self.chosen = size, shape, chosen
        self._wide = 2 + len(shape.groups) + (0 if shape.num_slots is None else 2)  # int64 [size] each
        self._fixed = size * (_WIDE * self._wide + _NARROW * len(shape.groups))
        self._memory = torch.empty(self._fixed, dtype=torch.uint8, device=shape.device)
        wide, lengths = self._parts(self._memory)
        ids, positions, *slots = wide
        states, keep = None, torch.arange(size, device=shape.device)
        if shape.num_slots is not None:
            used = slots.pop(-2), slots.pop()
            states = StateStep(*used, (), [Wave(keep, keep + 1, *used, keep, keep)])
        bounds = torch.arange(size + 1, dtype=torch.int32, device=shape.device)
        self._tables = [torch.zeros((size, shape.width), dtype=torch.int32, device=shape.device) for _ in shape.groups]
        steps = [
            PagedStep(own, bounds, length, table, bounds.new_empty((0, 2)), size, group.window)
            for group, own, length, table in zip(shape.groups, slots, lengths, self._tables, strict=True)
        ]
        self._step = PackedStep(ids, positions, keep, range(size), steps, states=states)
        self.fill(())

    @property
    def step(self) -> PackedStep:
        """The step as the forward pass takes it."""
        ids = self._step.ids
        known = ids.where(ids >= 0, self.chosen.clamp(min=0)[(~ids).clamp(min=0)])
        return self._step._replace(ids=known)

    def fill(self, segments: Sequence[Segment]) -> None:
        """Let the next run compute these segments, of one token each."""
        shape, rows = self._shape, len(segments)
        width = max((segment.start // shape.block_size + 1 for segment in segments), default=1)
        size = self._fixed + _NARROW * self._size * width * len(shape.groups)
        is_remote = shape.device.type == "cuda"
        sent = torch.empty(size, dtype=torch.uint8, pin_memory=is_remote)
        wide, lengths = ([one.numpy() for one in part] for part in self._parts(sent))
        tables = self._table_parts(sent, width)
        starts = np.array([segment.start for segment in segments], dtype=np.int64)
        column, inside = np.divmod(starts, shape.block_size)
        wide[0][:rows] = [segment.tokens[0] for segment in segments]
        wide[1][:rows] = starts + np.array([segment.shift for segment in segments], dtype=np.int64)
        wide[0][rows:] = wide[1][rows:] = 0
        for index, (group, table) in enumerate(zip(shape.groups, (one.numpy() for one in tables), strict=True)):
            table[:] = group.num_blocks - 1
            for row, segment, last in zip(table, segments, column.tolist(), strict=False):
                row[: last + 1] = segment.tables[index][: last + 1]
            np.maximum(table, 0, out=table)  # blocks that a window has passed are never read
            wide[2 + index][:rows] = table[np.arange(rows), column] * np.int64(shape.block_size) + inside
            wide[2 + index][rows:] = (group.num_blocks - 1) * shape.block_size
            lengths[index][:rows], lengths[index][rows:] = starts + 1, 1
        if shape.num_slots is not None:
            used = [segment.state for segment in segments if segment.state is not None]
            sources = [shape.num_slots if use.source == NO_STATE else use.source for use in used]
            wide[-2][:rows], wide[-2][rows:] = sources, shape.num_slots
            wide[-1][:rows], wide[-1][rows:] = [use.target for use in used], shape.num_slots + 1
        there = sent.to(shape.device, non_blocking=True)
        self._memory.copy_(there[: self._fixed])
        for own, given in zip(self._tables, self._table_parts(there, width), strict=True):
            own[:, :width].copy_(given)

    def _parts(self, memory: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Numbers of 64 bits, [size] each: ids, positions, each group's slots, and the slots of states, if there are
        some; each group's lengths in 32."""
        border = _WIDE * self._wide * self._size
        wide = memory[:border].view(torch.int64).view(self._wide, self._size)
        lengths = memory[border : self._fixed].view(torch.int32).view(-1, self._size)
        return list(wide), list(lengths)

    def _table_parts(self, memory: Tensor, width: int) -> Iterator[Tensor]:
        yield from memory[self._fixed :].view(torch.int32).view(-1, self._size, width)
