"""Consumers in memory: a group lends a stream's messages to the copies that opened it, one lease a message.

A message is *lent* from its delivery until it is settled; one whose lease ran out, or which was refused, is still
lent, and waits in `_again` to be delivered once more. Leases run on the event loop's clock.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

from ..port import ConsumerSpec, Delivery, Message
from .stream import MemoryStream
from .wildcards import matcher


class MemoryDelivery:
    """Implements `Delivery`."""

    __slots__ = ("_group", "attempt", "message")

    def __init__(self, group: Group, message: Message, attempt: int) -> None:
        self._group = group
        self.message = message
        self.attempt = attempt

    async def ack(self) -> None:
        self._group.settle(self.message.sequence)

    async def nak(self, delay: float = 0.0) -> None:
        self._group.give_back(self, delay)

    async def term(self, reason: str) -> None:
        self._group.settle(self.message.sequence)

    async def in_progress(self) -> None:
        self._group.extend(self)


@dataclass(slots=True, eq=False)
class _Lease:
    """`timer` ends it, or, after a nak, its delay; None while the message waits for somebody with room."""

    attempt: int
    holder: MemoryConsumer
    timer: asyncio.TimerHandle | None


class Group:
    """All copies of one consumer: what is lent, what comes next, and who has room. Everything here is synchronous."""

    def __init__(self, stream: MemoryStream, spec: ConsumerSpec, loop: asyncio.AbstractEventLoop) -> None:
        self.spec = spec  # `join` replaces it by the last opener's
        self._stream = stream
        self._loop = loop
        self._pattern = matcher(spec.subject)
        self._next = 1  # the first sequence never looked at
        self._lent: dict[int, _Lease] = {}  # by sequence
        self._again: deque[int] = deque()  # sequences to deliver once more
        self._members: list[MemoryConsumer] = []  # whose turn it is comes first

    def join(self, spec: ConsumerSpec, prefetch: int) -> MemoryConsumer:
        """Open one more copy; under `takeover` the only one, which starts behind what is settled without a gap."""
        self.spec = spec
        self._pattern = matcher(spec.subject)
        if spec.takeover:
            self._next = min(self._lent, default=self._next)
            for lease in self._lent.values():
                _cancel(lease)
            for former in self._members:
                former.clear()
            self._lent.clear()
            self._again.clear()
            self._members.clear()
        member = MemoryConsumer(self, prefetch)
        self._members.append(member)
        self.dispatch()
        return member

    def leave(self, member: MemoryConsumer) -> None:
        if member in self._members:
            self._members.remove(member)

    def dispatch(self) -> None:
        """Lend what can be lent to whoever has room, in turn."""
        while (member := self._with_room()) is not None and (message := self._take_next()) is not None:
            self._members.remove(member)
            self._members.append(member)
            sequence = message.sequence
            attempt = self._lent[sequence].attempt + 1 if sequence in self._lent else 1
            delivery = MemoryDelivery(self, message, attempt)
            timer = self._loop.call_later(self.spec.ack_wait, self._run_out, delivery)
            self._lent[sequence] = _Lease(attempt, member, timer)
            member.receive(delivery)

    def settle(self, sequence: int) -> None:
        """Done with it for good, whoever says so: a late ack of a lease that ran out counts too."""
        lease = self._lent.pop(sequence, None)
        if lease is None:
            return
        _cancel(lease)
        if self._stream.spec.retention == "work_queue":
            self._stream.remove(sequence)
        self.dispatch()

    def give_back(self, delivery: MemoryDelivery, delay: float) -> None:
        lease = self._current(delivery)
        if lease is None:
            return
        _cancel(lease)
        if delay > 0:
            lease.timer = self._loop.call_later(delay, self._run_out, delivery)
        else:
            self._run_out(delivery)

    def extend(self, delivery: MemoryDelivery) -> None:
        lease = self._current(delivery)
        if lease is not None and lease.timer is not None:
            _cancel(lease)
            lease.timer = self._loop.call_later(self.spec.ack_wait, self._run_out, delivery)

    def _run_out(self, delivery: MemoryDelivery) -> None:
        lease = self._current(delivery)
        if lease is not None:
            lease.timer = None
            lease.holder.drop(delivery)
            self._again.append(delivery.message.sequence)
            self.dispatch()

    def _current(self, delivery: MemoryDelivery) -> _Lease | None:
        """The lease that `delivery` still is, None if the message was settled or lent anew since."""
        lease = self._lent.get(delivery.message.sequence)
        return lease if lease is not None and lease.attempt == delivery.attempt else None

    def _with_room(self) -> MemoryConsumer | None:
        return next((member for member in self._members if member.has_room), None)

    def _take_next(self) -> Message | None:
        while self._again:
            sequence = self._again.popleft()
            lease = self._lent.get(sequence)
            if lease is None or lease.timer is not None:
                continue
            message = self._stream.get(sequence)
            spent = 0 < self.spec.max_deliver <= lease.attempt
            if message is not None and not spent:
                return message
            del self._lent[sequence]
        self._next = max(self._next, self._stream.first)
        while self._next <= self._stream.last and len(self._lent) < self.spec.max_ack_pending:
            message = self._stream.get(self._next)
            self._next += 1
            if message is not None and self._pattern.fullmatch(message.subject):
                return message
        return None


class MemoryConsumer:
    """Implements `Consumer`. Made by `Group.join`."""

    def __init__(self, group: Group, prefetch: int) -> None:
        self._group = group
        self._prefetch = prefetch
        self._buffer: deque[MemoryDelivery] = deque()
        self._arrived = asyncio.Event()
        self._closed = False

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def has_room(self) -> bool:
        return len(self._buffer) < self._prefetch

    def receive(self, delivery: MemoryDelivery) -> None:
        self._buffer.append(delivery)
        self._arrived.set()

    def drop(self, delivery: MemoryDelivery) -> None:
        """Its lease ran out: nobody may take it any more."""
        if delivery in self._buffer:
            self._buffer.remove(delivery)

    def clear(self) -> None:
        self._buffer.clear()

    async def take(self, limit: int) -> list[Delivery]:
        while not self._closed:
            if self._buffer:
                taken: list[Delivery] = [self._buffer.popleft() for _ in range(min(limit, len(self._buffer)))]
                self._group.dispatch()
                return taken
            self._arrived.clear()
            await self._arrived.wait()
        return []

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._arrived.set()
        self._group.leave(self)
        while self._buffer:
            await self._buffer.popleft().nak()


def _cancel(lease: _Lease) -> None:
    if lease.timer is not None:
        lease.timer.cancel()
        lease.timer = None
