"""Which choices run and which wait, where a backend has fixed places: each running one has a place until it ends."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from operator import attrgetter

from ..schemas.jobs import most_together
from .choice import Choice

_PRIORITY = 1_000  # arrivals that one level of priority outranks
_order = attrgetter("order")


class Row:
    """A choice; `sequence` is set while it runs, and `num_computed` counts the tokens that the model holds of it."""

    __slots__ = ("choice", "has_failed", "num_computed", "order", "sequence")

    def __init__(self, choice: Choice, arrival: int) -> None:
        self.choice = choice
        self.order = arrival + _PRIORITY * choice.request.priority
        self.sequence = -1
        self.num_computed = 0
        self.has_failed = False  # a call that computed it with others: it has begun anew, once

    @property
    def num_lacking(self) -> int:
        """Tokens to compute before the next one can be chosen."""
        return len(self.choice.prompt) + len(self.choice.tokens) - self.num_computed

    def next_tokens(self, count: int) -> Sequence[int]:
        """The next `count` tokens that the model does not hold."""
        prompt, tokens = self.choice.prompt, self.choice.tokens
        start = self.num_computed - len(prompt)
        if start >= 0:
            return tokens[start : start + count]
        return [*prompt[self.num_computed : self.num_computed + count], *tokens[: max(start + count, 0)]]


class Line:
    """All choices, by priority and arrival. `reserved` of `size` running ones are for priority 0 alone."""

    def __init__(self, size: int, reserved: int) -> None:
        self.running: list[Row] = []  # both in order
        self.waiting: list[Row] = []
        self._reserved = min(reserved, size - 1)
        self._most_of_one = most_together(size)
        self._rows: dict[Choice, Row] = {}
        self._arrivals = 0
        self._free = list(range(size))  # a heap: low numbers lie together, and what lies together is computed together

    def add(self, choice: Choice) -> None:
        row = self._rows[choice] = Row(choice, self._arrivals)
        self._arrivals += 1
        insort(self.waiting, row, key=_order)

    def remove(self, choice: Choice) -> int | None:
        """Drop a choice, known or not; returns the sequence that it had, whose tokens are to be forgotten."""
        row = self._rows.pop(choice, None)
        if row is None:
            return None
        if row.sequence < 0:
            self.waiting.remove(row)
            return None
        self.running.remove(row)
        heappush(self._free, row.sequence)
        return row.sequence

    def admit(self) -> list[Row]:
        """Start the waiting choices for which there is room, in order; returns them."""
        started: list[Row] = []
        for row in self.waiting.copy():
            if not self._free:
                break
            others = sum(other.choice.request is row.choice.request for other in self.running)
            is_full = row.choice.request.priority > 0 and len(self._free) <= self._reserved
            if is_full or others >= self._most_of_one:
                continue
            self.waiting.remove(row)
            row.sequence = heappop(self._free)
            row.choice.is_waiting = False
            insort(self.running, row, key=_order)
            started.append(row)
        return started

    def clear(self) -> None:
        """Drop all choices."""
        self._free += [row.sequence for row in self.running]
        heapify(self._free)
        self.running.clear()
        self.waiting.clear()
        self._rows.clear()
