"""An event loop in virtual time: where nothing is ready, its clock jumps to the next timer.

It waits for nobody: what asks for a thread is run at once, and no time passes meanwhile. So a run takes as long as its
work takes, and the same program does the same in every run.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, copy_context
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Any, TypeVar

Result = TypeVar("Result")
EPOCH = 1_700_000_000.0  # Unix seconds at which every simulation begins


class Stuck(RuntimeError):
    """Nothing is ready, and no timer is set: the simulated program would wait for ever."""


class _Handle(asyncio.Handle):
    """Asyncio's own asks its loop whether it debugs; a simulation makes 64 handles for each request."""

    __slots__ = ()

    def __init__(
        self, callback: Callable[..., object], args: tuple[Any, ...], loop: VirtualLoop, context: Context | None
    ) -> None:
        self._context = copy_context() if context is None else context
        self._loop = loop
        self._callback = callback
        self._args = args
        self._cancelled = False
        self._repr = None
        self._source_traceback = None


class _Timer(_Handle, asyncio.TimerHandle):
    __slots__ = ()

    def __init__(
        self,
        when: float,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        loop: VirtualLoop,
        context: Context | None,
    ) -> None:
        super().__init__(callback, args, loop, context)
        self._when = when
        self._scheduled = False  # in a heap of asyncio's


class VirtualLoop(asyncio.SelectorEventLoop):
    """Keeps its own timers, and selects nothing: a simulation spends much of its time in its event loop."""

    _ready: deque[asyncio.Handle]  # of asyncio's own loop
    _stopping: bool

    def __init__(self) -> None:
        self._now = 0.0
        self._numbers = count()  # of timers: of those for one moment, the one that was set first goes first
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []  # a heap
        self._num_cancelled = 0  # of these at most; set by _timer_handle_cancelled
        super().__init__()

    def time(self) -> float:
        """Seconds since the beginning."""
        return self._now

    def now(self) -> float:
        """Unix seconds."""
        return EPOCH + self._now

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Any = None) -> asyncio.Handle:  # type: ignore[override]
        handle = _Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]  # there are no other threads

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        timer = _Timer(when, callback, args, self, context)
        heappush(self._timers, (when, next(self._numbers), timer))
        return timer

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, Result], *, name: str | None = None, context: Context | None = None
    ) -> asyncio.Task[Result]:
        return asyncio.Task(coro, loop=self, name=name, context=context)

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        done: asyncio.Future[Any] = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:
            done.set_exception(error)
        return done

    def _run_once(self) -> None:
        """Turns until the loop is stopped: each runs what was ready when it began, and the timers that are due."""
        ready = self._ready
        while True:
            if not (ready or self._stopping):
                self._jump()
            timers, now = self._timers, self._now
            while timers and timers[0][0] <= now:
                ready.append(heappop(timers)[2])
            for _ in range(len(ready)):
                handle = ready.popleft()
                if not handle._cancelled:
                    try:  # as handle._run() does, without a call for each
                        handle._context.run(handle._callback, *handle._args)  # type: ignore[attr-defined]
                    except (SystemExit, KeyboardInterrupt):
                        raise
                    except BaseException as error:
                        self._tell(handle, error)
            if self._stopping:
                return

    def _tell(self, handle: asyncio.Handle, error: BaseException) -> None:
        """Have asyncio's handler hear of an error in a callback."""
        self.call_exception_handler(
            {"message": f"Exception in callback {handle!r}", "exception": error, "handle": handle}
        )

    def _jump(self) -> None:
        """Let the time of the next timer come."""
        timers = self._timers
        while timers and timers[0][2].cancelled():
            heappop(timers)
        if not timers:
            raise Stuck("the simulation waits for something that never comes")
        self._now = max(self._now, timers[0][0])

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Drop the cancelled timers once they may be half of all. A handle calls this before it is cancelled."""
        self._num_cancelled += handle.when() > self._now
        if self._num_cancelled > len(self._timers) // 2:
            self._timers = [timer for timer in self._timers if not timer[2].cancelled()]
            heapify(self._timers)
            self._num_cancelled = 0
