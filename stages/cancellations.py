"""Requests whose client has gone or said stop, as heard on `control.cancel.<tenant>.<request>`.

A cancel may come before the job it means, so it is remembered for a while; whoever already runs the request is told.
Whoever cancels a response means all of its turns; a turn can be stopped for itself.
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

Cancelled = tuple[str, str]  # tenant and request


class Cancellations:
    def __init__(self) -> None:
        self._heard: OrderedDict[Cancelled, float] = OrderedDict()  # → loop time
        self._callbacks: dict[Cancelled, list[Callable[[], None]]] = {}
        self._watchers: list[Callable[[str, str], None]] = []

    async def listen(self, broker: Broker, subjects: Subjects) -> None:
        await broker.listen(subjects.cancel_all(), self._hear)

    def include(self, tenant: str, request: str) -> bool:
        return (tenant, root_of(request)) in self._heard or (tenant, request) in self._heard

    def watch(self, callback: Callable[[str, str], None]) -> None:
        """Call back with the tenant and the name of every request that is cancelled from now on."""
        self._watchers.append(callback)

    @contextmanager
    def calling(self, tenant: str, request: str, callback: Callable[[], None]) -> Iterator[None]:
        """Call back, at once if it was heard before, should the request be cancelled inside this context."""
        keys = {(tenant, root_of(request)), (tenant, request)}
        for key in keys:
            self._callbacks.setdefault(key, []).append(callback)
        try:
            if self.include(tenant, request):
                callback()
            yield
        finally:
            for key in keys:
                self._callbacks[key].remove(callback)
                if not self._callbacks[key]:
                    del self._callbacks[key]

    def _hear(self, message: Message) -> None:
        tenant, request = message.subject.split(".")[-2:]
        key = (tenant, request)
        now = asyncio.get_running_loop().time()
        self._heard[key] = now
        self._heard.move_to_end(key)
        while len(self._heard) > MOST or next(iter(self._heard.values())) < now - MEMORY:
            self._heard.popitem(last=False)
        for callback in list(self._callbacks.get(key, ())):
            callback()
        for watcher in self._watchers:
            watcher(tenant, request)
