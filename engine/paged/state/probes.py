"""Tries the states of a model when it loads: what one step computes, several must compute as well."""

from __future__ import annotations

from collections.abc import Sequence

from ..packing import Segment
from .slots import NO_STATE, StateUse

NUM_SLOTS = 6
"""The slots that the probes use."""


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
