"""Who listens to a broker in memory: a message visits only those whose subjects begin as its own does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ..port import Headers, Message
from .stream import matcher, may_match


class Listeners:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._all: list[Listener] = []
        self._by_head: dict[str, list[Listener]] = {}  # those who may hear a subject, by its head

    def add(self, subject: str, callback: Callable[[Message], None]) -> Listener:
        listener = Listener(self, subject, callback)
        self._all.append(listener)
        self._by_head.clear()
        return listener

    def remove(self, listener: Listener) -> None:
        self._all.remove(listener)
        self._by_head.clear()

    def clear(self) -> None:
        self._all.clear()
        self._by_head.clear()

    def notify(self, subject: str, head: str, data: bytes, headers: Headers) -> None:
        """Tell of a message on `subject`, whose `head_of` is known."""
        found = self._by_head.get(head)
        if found is None:
            found = self._by_head[head] = [one for one in self._all if may_match(one.subject, head)]
        for listener in found:
            if listener.pattern.fullmatch(subject):
                # Deferred, as over a network: a callback's error must not reach the publisher.
                self._loop.call_soon(listener.hear, Message(subject, data, headers))


class Listener:
    """Implements `Subscription`."""

    def __init__(self, listeners: Listeners, subject: str, callback: Callable[[Message], None]) -> None:
        self.subject = subject
        self.pattern = matcher(subject)
        self._listeners = listeners
        self._callback = callback
        self._closed = False

    def hear(self, message: Message) -> None:
        if not self._closed:
            self._callback(message)

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._listeners.remove(self)
