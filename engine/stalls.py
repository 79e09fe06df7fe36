"""Detects a request that makes no progress while the engine runs. Knows no backend and no thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from .choice import Choice

_CHECKS = 8  # checks within the limit
_LEAST_CHECKS = 3  # without progress before a stall: one step may take longer than the limit and leave a choice out


class Stall(NamedTuple):
    choice: Choice
    is_first: bool  # the choice has not stalled before


@dataclass(slots=True)
class _Watched:
    progress: tuple[int, int]
    since: float  # clock time of the last observed progress
    checks: int = 0  # since then
    stalls: int = 0


class StallClock:
    """Reports a choice as stalled if nothing is computed for it in `limit` seconds, though it is its turn.

    While a choice waits for its turn or for room (`Choice.is_waiting`), any other choice's progress counts as its own.
    """

    def __init__(self, limit: float, clock: Callable[[], float]) -> None:
        self.interval = limit / _CHECKS  # seconds between two checks
        self._limit = limit
        self._clock = clock
        self._checked = clock()
        self._watched: dict[Choice, _Watched] = {}

    @property
    def is_due(self) -> bool:
        return self._clock() - self._checked >= self.interval

    def check(self, unfinished: Iterable[Choice]) -> list[Stall]:
        """The stalled ones among all of the engine's unfinished choices; call it between two steps.

        Returning a choice restarts its clock.
        """
        now = self._checked = self._clock()
        before = self._watched
        self._watched = {one: before.get(one) or _Watched(_progress(one), now) for one in unfinished}
        moved = {one for one, watched in self._watched.items() if watched.progress != _progress(one)}
        anyone_moved = bool(moved) or not before.keys() <= self._watched.keys()
        stalls = []
        for choice, watched in self._watched.items():
            watched.checks += 1
            if choice in moved or (choice.is_waiting and anyone_moved):
                watched.progress, watched.since, watched.checks = _progress(choice), now, 0
            elif now - watched.since >= self._limit and watched.checks >= _LEAST_CHECKS:
                watched.since, watched.checks = now, 0
                stalls.append(Stall(choice, watched.stalls == 0))
                watched.stalls += 1
        return stalls


def _progress(choice: Choice) -> tuple[int, int]:
    encoded = choice.layout.num_encoded if choice.layout is not None else 0
    return choice.num_computed + encoded, len(choice.tokens)
