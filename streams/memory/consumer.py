"""Consumers in memory: a group leases a stream's messages to the copies that opened it.

A message stays in `_leases` from its first delivery until it is settled; after its lease has expired, or after a nak,
it waits in `_redeliver`. Leases expire by the event loop's clock.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

from ..port import ConsumerSpec, Delivery, Message
from .stream import MemoryStream, matcher


class MemoryDelivery:
    """Implements `Delivery`."""

    __slots__ = ("_group", "attempt", "message")

    def __init__(self, group: ConsumerGroup, message: Message, attempt: int) -> None:
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
    """`timer` ends the lease or, after a nak, the delay; None while the message waits for a consumer with room."""

    attempt: int
    holder: MemoryConsumer
    timer: asyncio.TimerHandle | None


class ConsumerGroup:
    """All copies of one consumer: which messages are leased, which comes next, and which copy has room. No method
    awaits."""

    def __init__(self, stream: MemoryStream, spec: ConsumerSpec, loop: asyncio.AbstractEventLoop) -> None:
        self.spec = spec  # of the copy that joined last; set by `join`
        self._stream = stream
        self._loop = loop
        self._pattern = matcher(spec.subject)
        self._next = 1  # the first sequence not yet considered
        self._leases: dict[int, _Lease] = {}  # by sequence
        self._redeliver: deque[int] = deque()  # sequences to deliver again
        self._members: list[MemoryConsumer] = []  # the one whose turn it is comes first

    def join(self, spec: ConsumerSpec, prefetch: int) -> MemoryConsumer:
        """Open another copy; with `takeover`, the only one, which starts behind the contiguous settled messages."""
        self.spec = spec
        self._pattern = matcher(spec.subject)
        if spec.takeover:
            self._next = min(self._leases, default=self._next)
            for lease in self._leases.values():
                _cancel(lease)
            for former in self._members:
                former.clear()
            self._leases.clear()
            self._redeliver.clear()
            self._members.clear()
        member = MemoryConsumer(self, prefetch)
        self._members.append(member)
        self.dispatch()
        return member

    def begin_again(self) -> bool:
        """Forget who has leased what; returns whether copies are open, which reopen the consumer at once."""
        for lease in self._leases.values():
            _cancel(lease)
        self._leases.clear()
        self._redeliver.clear()
        self._next = 1
        for member in self._members:
            member.clear()
        self.dispatch()
        return bool(self._members)

    def backlog(self) -> tuple[int, int, int]:
        """How many messages were never delivered, are leased, and are leased again."""
        first = max(self._next, self._stream.first)
        messages = (self._stream.get(sequence) for sequence in range(first, self._stream.last + 1))
        pending = sum(message is not None and bool(self._pattern.fullmatch(message.subject)) for message in messages)
        return pending, len(self._leases), sum(lease.attempt > 1 for lease in self._leases.values())

    def leave(self, member: MemoryConsumer) -> None:
        if member in self._members:
            self._members.remove(member)

    def dispatch(self) -> None:
        """Lease waiting messages to the copies with room, in turn."""
        while (member := self._with_room()) is not None and (message := self._take_next()) is not None:
            self._members.remove(member)
            self._members.append(member)
            sequence = message.sequence
            attempt = self._leases[sequence].attempt + 1 if sequence in self._leases else 1
            delivery = MemoryDelivery(self, message, attempt)
            timer = self._loop.call_later(self.spec.ack_wait, self._expire, delivery)
            self._leases[sequence] = _Lease(attempt, member, timer)
            member.receive(delivery)

    def settle(self, sequence: int) -> None:
        """Remove a message for good; a late ack of an expired lease counts too."""
        lease = self._leases.pop(sequence, None)
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
            lease.timer = self._loop.call_later(delay, self._expire, delivery)
        else:
            self._expire(delivery)

    def extend(self, delivery: MemoryDelivery) -> None:
        lease = self._current(delivery)
        if lease is not None and lease.timer is not None:
            _cancel(lease)
            lease.timer = self._loop.call_later(self.spec.ack_wait, self._expire, delivery)

    def _expire(self, delivery: MemoryDelivery) -> None:
        lease = self._current(delivery)
        if lease is not None:
            lease.timer = None
            lease.holder.drop(delivery)
            self._redeliver.append(delivery.message.sequence)
            self.dispatch()

    def _current(self, delivery: MemoryDelivery) -> _Lease | None:
        """The lease of this `delivery`; None if the message has been settled or leased again since."""
        lease = self._leases.get(delivery.message.sequence)
        return lease if lease is not None and lease.attempt == delivery.attempt else None

    def _with_room(self) -> MemoryConsumer | None:
        return next((member for member in self._members if member.has_room), None)

    def _take_next(self) -> Message | None:
        while self._redeliver:
            sequence = self._redeliver.popleft()
            lease = self._leases.get(sequence)
            if lease is None or lease.timer is not None:
                continue
            message = self._stream.get(sequence)
            spent = 0 < self.spec.max_deliver <= lease.attempt
            if message is not None and not spent:
                return message
            del self._leases[sequence]
        self._next = max(self._next, self._stream.first)
        while self._next <= self._stream.last and len(self._leases) < self.spec.max_ack_pending:
            message = self._stream.get(self._next)
            self._next += 1
            if message is not None and self._pattern.fullmatch(message.subject):
                return message
        return None


class MemoryConsumer:
    """Implements `Consumer`. Made by `ConsumerGroup.join`."""

    def __init__(self, group: ConsumerGroup, prefetch: int) -> None:
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
        """Remove a delivery whose lease has expired before it was taken."""
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
