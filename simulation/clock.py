"""An event loop in virtual time: where nothing is ready, its clock jumps to the next timer.

It waits for nobody: what asks for a thread is run at once, and no time passes meanwhile. So a run takes as long as its
work takes, and the same program does the same in every run.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable
from typing import Any

EPOCH = 1_700_000_000.0  # Unix seconds at which every simulation begins


class Stuck(RuntimeError):
    """Nothing is ready, and no timer is set: the simulated program would wait for ever."""


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(_JumpingSelector(self._jump))

    def time(self) -> float:
        """Seconds since the beginning."""
        return self._now

    def now(self) -> float:
        """Unix seconds."""
        return EPOCH + self._now

    def call_soon_threadsafe(self, callback: Callable[..., object], *args: Any, context: Any = None) -> asyncio.Handle:  # type: ignore[override]
        return self.call_soon(callback, *args, context=context)  # there are no other threads

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        done: asyncio.Future[Any] = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:
            done.set_exception(error)
        return done

    def _jump(self, seconds: float | None) -> None:
        if seconds is None:
            raise Stuck("the simulation waits for something that never comes")
        self._now += seconds


class _JumpingSelector(selectors.SelectSelector):
    """Selects nothing, but tells how long it was asked to wait."""

    def __init__(self, jump: Callable[[float | None], None]) -> None:
        super().__init__()
        self._jump = jump

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout > 0:
            self._jump(timeout)
        return []
