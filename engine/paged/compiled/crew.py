"""How many threads compute a step: fewer while other programs want their cores.

The threads of a step wait for each other more than a hundred times. Where one shares its core with another program,
all of them come to wait whenever Linux gives that program its turn: on two cores one busy program makes steps ten times
slower, and one thread alone is several times faster than two. What a step computes is the same on any number.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable

from .fields import ModelFields

_STEPS = 4  # after which the share of waiting is judged
_LONG = 0.05  # seconds, or after so long
_MOST_WAITING = 0.3  # of the time of all threads: above it, two are slower than one
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 4.0  # seconds until one more is tried; doubled each time that this was too early


class Crew:
    """Knows from the last steps how many threads are best, at most `most`. `clock` returns seconds."""

    def __init__(self, most: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self.threads = most  # of the next step; set by `tell`
        self._most = most
        self._clock = clock
        self._steps = 0
        self._spent = 0.0  # seconds of the steps since the last judgement
        self._waited = 0.0  # and of their threads that waited, together
        self._pause = _FIRST_PAUSE
        self._again = 0.0  # when one more may be tried
        self._is_trial = False  # of one more

    def run(self, step: Callable[..., int], model: ModelFields, *given: int) -> int:
        """Call `step` with the address of `model`, which holds the number of threads and for how many nanoseconds they
        waited together, and with what is given; returns what it returns."""
        model.threads = self.threads
        began = self._clock()
        code = step(ctypes.byref(model), *given)
        if self._most > 1 and not code:  # it has computed
            self.tell(self._clock() - began, model.slept / 1e9)
        return code

    def tell(self, seconds: float, waited: float) -> None:
        """A step took so long, for which its threads waited so many seconds together."""
        self._steps += 1
        self._spent += seconds
        self._waited += waited
        if self._steps < _STEPS and self._spent < _LONG:
            return
        share = self._waited / (self._spent * self.threads) if self._spent else 0.0
        self._steps, self._spent, self._waited = 0, 0.0, 0.0
        now, was_trial, self._is_trial = self._clock(), self._is_trial, False
        if share > _MOST_WAITING:
            self._pause = min(2 * self._pause, _LONGEST_PAUSE) if was_trial else _FIRST_PAUSE
            self._again = now + self._pause
            self.threads = max(1, self.threads - 1)
        elif self.threads < self._most and (was_trial or now >= self._again):
            self.threads += 1
            self._is_trial = True
