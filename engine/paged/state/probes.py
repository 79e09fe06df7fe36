"""Tries the states of a model when it loads: what one step computes, several must compute as well."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .slots import NO_STATE, StateUse

if TYPE_CHECKING:  # it takes the states of segments from this room
    from ..packing import Segment

NUM_SLOTS = 6
"""The slots that the probes use."""

NUM_TRIED = 13
"""The slots that `after_others` uses."""


def with_slots(segments: Sequence[Segment]) -> list[Segment]:
    """The same segments, of two requests from their beginning, with a slot each."""
    return [segment._replace(state=StateUse(NO_STATE, slot)) for slot, segment in enumerate(segments)]


def in_steps(segments: Sequence[Segment]) -> list[list[Segment]]:
    """The same two requests in three steps, in the last of which the first gets one more token."""
    first, second = with_slots(segments)
    start, end = 3, len(second.tokens) - 1
    beginning = second._replace(tokens=second.tokens[:start], samples=False)
    middle = second._replace(
        tokens=second.tokens[start:end], start=start, samples=False, state=StateUse(1, 2, ((2, 3),))
    )
    last = second._replace(tokens=second.tokens[end:], start=end, state=StateUse(2, 5))
    more = first._replace(tokens=first.tokens[:1], start=len(first.tokens), state=StateUse(0, 4))
    return [[first, beginning], [middle], [more, last]]


def after_others(segments: Sequence[Segment]) -> list[Segment]:
    """At most ten segments with slots: those of one token continue the states in slots 0 and 1."""
    return [
        segment._replace(
            state=StateUse(index % 2, index + 2)
            if len(segment.tokens) == 1
            else StateUse(NO_STATE, index + 2, ((3, NUM_TRIED - 1),) if segment.samples else ())
        )
        for index, segment in enumerate(segments)
    ]


def slots_of(use: StateUse | None) -> list[int]:
    """The slots that a segment reads and writes."""
    return [] if use is None else [use.source, use.target, *(slot for _, slot in use.captures)]


def moved(use: StateUse, by: int) -> StateUse:
    """The same source, and other slots for what is written."""
    return StateUse(use.source, use.target + by, tuple((count, slot + by) for count, slot in use.captures))
