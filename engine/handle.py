"""The handle of a request: the engine's thread puts its deltas in, and the caller takes them out."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from itertools import chain
from operator import attrgetter

from ..schemas.events import Delta
from .request import EngineRequest, Preemption


def merge(deltas: list[Delta], key: Callable[[Delta], Hashable] = attrgetter("choice")) -> list[Delta]:
    """Merge the deltas of each choice, or of each `key`, into one, in order of their first deltas."""
    together: dict[Hashable, list[Delta]] = {}
    for delta in deltas:
        together.setdefault(key(delta), []).append(delta)
    return [_join(parts) for parts in together.values()]


def _join(parts: list[Delta]) -> Delta:
    first, last = parts[0], parts[-1]
    if len(parts) == 1:
        return first
    return Delta(  # `replace` takes seven times as long
        request=last.request,
        epoch=last.epoch,
        choice=last.choice,
        index=first.index,
        token_ids=tuple(chain.from_iterable([part.token_ids for part in parts])),
        text="".join([part.text for part in parts]),
        logprobs=None if last.logprobs is None else tuple(entry for part in parts for entry in part.logprobs or ()),
        finish_reason=last.finish_reason,
        cached_tokens=last.cached_tokens,
        error=last.error,
        stop_reason=last.stop_reason,
        prompt_logprobs=first.prompt_logprobs,
    )


def started(starts: Iterable[Callable[[], RequestHandle]]) -> list[RequestHandle]:
    """The handles of what is started here; if one start raises, those before are cancelled."""
    handles: list[RequestHandle] = []
    try:
        for start in starts:
            handles.append(start())
    except BaseException:
        for handle in handles:
            handle.cancel()
        raise
    return handles


class RequestHandle:
    """A running request; read it in the event loop that opened it.

    Deltas arrive from the engine's thread through a deque, which needs no lock. The thread wakes the loop only for a
    reader that waits, or at the end: a loop that wakes for each token takes time from a model on the same cores.
    """

    def __init__(self, request: EngineRequest, cancel: Callable[[], None], fallback: str | None = None) -> None:
        self.request = request
        self.loop = asyncio.get_running_loop()
        self.preemptions: list[Preemption] = []  # that nobody has read; added by the scheduler, removed by the reader
        self.times: dict[int, tuple[float, float]] = {}  # by choice: of its first and its newest tokens; set by `take`
        self.finished = False  # every choice's last delta has been taken; set by `take`
        self.fallback = fallback  # the backend that runs it instead of the first
        self._cancel = cancel
        self._pending: deque[tuple[Delta, float]] = deque()  # and when it was put, of the monotonic clock
        self._news = asyncio.Event()
        self._waiting = False  # the reader, for any delta; set by `take`
        self._tails: dict[int, str | None] = {}  # by choice: its last text; None behind the border. Set by `_side`
        self._unfinished = request.params.n
        self._unput = request.params.n  # choices whose last delta has not been put; set by `put`
        self._pausing: asyncio.Future[None] | None = None  # set by `pause`

    def put(self, delta: Delta) -> None:
        """Add a delta; the engine's thread calls this, then schedules `wake` if `needs_wake` says so."""
        self._pending.append((delta, time.monotonic()))
        self._unput -= delta.finish_reason is not None

    @property
    def needs_wake(self) -> bool:
        """Whether the reader must hear of what has been put. The engine's thread asks behind `put`, and the reader
        looks for deltas behind its word that it waits: so one of them sees the other's."""
        return self._waiting or self._unput == 0

    def wake(self) -> None:
        """Wake the reader; called in `loop` after `put`."""
        self._news.set()
        if self._unput == 0 and self._pausing is not None:
            _release(self._pausing)

    async def pause(self, seconds: float) -> None:
        """Let deltas accumulate for `seconds`, or until the last one has arrived."""
        if self._unput == 0:
            return
        pausing = self._pausing = self.loop.create_future()
        timer = self.loop.call_later(seconds, _release, pausing)
        try:
            await pausing
        finally:
            timer.cancel()

    async def take(self) -> list[Delta]:
        """Wait for deltas and return all of them, merged: a slow reader gets fewer, larger deltas, none across the
        request's border.

        Never empty, except after the request has finished.
        """
        while not self._pending and not self.finished:
            self._news.clear()
            self._waiting = True
            if not self._pending:
                await self._news.wait()
            self._waiting = False
        taken = [self._pending.popleft() for _ in range(len(self._pending))]
        for delta, put in taken:
            if delta.token_ids:
                self.times[delta.choice] = self.times.get(delta.choice, (put, put))[0], put
        deltas = [delta for delta, _ in taken]
        if self.request.border:
            deltas = merge(deltas, self._side)
        elif len(deltas) > 1:
            deltas = merge(deltas)
        self._unfinished -= sum(delta.finish_reason is not None for delta in deltas)
        self.finished = self._unfinished == 0
        return deltas

    def _side(self, delta: Delta) -> tuple[int, bool]:
        """The delta's choice, and whether it lies behind the border there."""
        border, tail = self.request.border, self._tails.get(delta.choice, "")
        if tail is None:
            return delta.choice, True
        text = tail + delta.text
        self._tails[delta.choice] = None if border in text else text[1 - len(border) :]
        return delta.choice, False

    def cancel(self) -> None:
        """Stop before the next token; every choice still ends with a delta, with finish reason "cancelled"."""
        if not self.finished:
            self._cancel()


def _release(pausing: asyncio.Future[None]) -> None:
    if not pausing.done():
        pausing.set_result(None)
