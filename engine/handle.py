"""Where the engine's thread leaves a request's deltas, and where whoever asked picks them up."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace

from ..schemas.events import Delta
from .request import EngineRequest


def merge(deltas: Iterable[Delta]) -> list[Delta]:
    """Adjacent deltas of each choice made into one, choices in order of their first delta."""
    by_choice: dict[int, list[Delta]] = {}
    for delta in deltas:
        by_choice.setdefault(delta.choice, []).append(delta)
    return [_join(parts) for parts in by_choice.values()]


def _join(parts: list[Delta]) -> Delta:
    first, last = parts[0], parts[-1]
    if len(parts) == 1:
        return first
    return replace(
        last,
        index=first.index,
        token_ids=tuple(token for part in parts for token in part.token_ids),
        text="".join(part.text for part in parts),
        logprobs=None if last.logprobs is None else tuple(entry for part in parts for entry in part.logprobs or ()),
    )


class RequestHandle:
    """A running request, read in the event loop that opened it.

    Deltas come from the engine's thread through a deque, which needs no lock for that.
    """

    def __init__(self, request: EngineRequest, cancel: Callable[[], None]) -> None:
        self.request = request
        self.loop = asyncio.get_running_loop()
        self.finished = False  # every choice's last delta has been taken; set by `take`
        self._cancel = cancel
        self._pending: deque[Delta] = deque()
        self._news = asyncio.Event()
        self._unfinished = request.params.n
        self._unput = request.params.n  # choices whose last delta has not been put; set by `put`
        self._pausing: asyncio.Future[None] | None = None  # set by `pause`

    def put(self, delta: Delta) -> None:
        """Called by the engine's thread, which has `wake` called afterwards."""
        self._pending.append(delta)
        self._unput -= delta.finish_reason is not None

    def wake(self) -> None:
        """Called in `loop` when something was put."""
        self._news.set()
        if self._unput == 0 and self._pausing is not None:
            _release(self._pausing)

    async def pause(self, seconds: float) -> None:
        """Let deltas gather for a while, unless nothing more will come."""
        if self._unput == 0:
            return
        pausing = self._pausing = self.loop.create_future()
        timer = self.loop.call_later(seconds, _release, pausing)
        try:
            await pausing
        finally:
            timer.cancel()

    async def take(self) -> list[Delta]:
        """Wait for news and return all of it, merged: a slow reader gets fewer, larger deltas.

        Never empty, except after the request has finished.
        """
        while not self._pending and not self.finished:
            self._news.clear()
            await self._news.wait()
        deltas = merge(self._pending.popleft() for _ in range(len(self._pending)))
        self._unfinished -= sum(delta.finish_reason is not None for delta in deltas)
        self.finished = self._unfinished == 0
        return deltas

    def cancel(self) -> None:
        """Stop before the next token; every choice still ends with a delta, its finish reason "cancelled"."""
        if not self.finished:
            self._cancel()


def _release(pausing: asyncio.Future[None]) -> None:
    if not pausing.done():
        pausing.set_result(None)
