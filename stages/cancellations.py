"""Requests whose client has gone or said stop, as heard on `control.cancel.<request>`.

A cancel may come before the job it means, so it is remembered for a while; whoever already runs the request is told.
Whoever cancels a response means all of its turns.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..schemas.loops import root_of
from ..streams.port import Broker, Message
from ..streams.topology import Subjects

MEMORY = 600.0  # seconds: longer than a job stays on its way without its deadline passing, with the default deadline
MOST = 100_000


class Cancellations:
    def __init__(self) -> None:
        self._heard: OrderedDict[str, float] = OrderedDict()  # request → loop time
        self._callbacks: dict[str, list[Callable[[], None]]] = {}
        self._watchers: list[Callable[[str], None]] = []

    async def listen(self, broker: Broker, subjects: Subjects) -> None:
        await broker.listen(subjects.cancel_all(), self._hear)

    def __contains__(self, request: str) -> bool:
        return root_of(request) in self._heard

    def watch(self, callback: Callable[[str], None]) -> None:
        """Call back with the name of every request that is cancelled from now on."""
        self._watchers.append(callback)

    @contextmanager
    def calling(self, request: str, callback: Callable[[], None]) -> Iterator[None]:
        """Call back, at once if it was heard before, should the request be cancelled inside this context."""
        request = root_of(request)
        self._callbacks.setdefault(request, []).append(callback)
        try:
            if request in self._heard:
                callback()
            yield
        finally:
            self._callbacks[request].remove(callback)
            if not self._callbacks[request]:
                del self._callbacks[request]

    def _hear(self, message: Message) -> None:
        request = message.subject.rpartition(".")[2]
        now = asyncio.get_running_loop().time()
        self._heard[request] = now
        self._heard.move_to_end(request)
        while len(self._heard) > MOST or next(iter(self._heard.values())) < now - MEMORY:
            self._heard.popitem(last=False)
        for callback in list(self._callbacks.get(request, ())):
            callback()
        for watcher in self._watchers:
            watcher(request)
