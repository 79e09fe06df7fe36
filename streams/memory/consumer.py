"""Consumers in memory: a group leases a stream's messages to the copies that opened it.

A message waits in `_pending` until its first delivery, and stays in `_leases` from then on until it is settled; after
its lease has expired, or after a nak, it waits in `_redeliver`. Leases expire by the event loop's clock: those that
run are in order of their beginnings, so that one timer serves them all.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from dataclasses import dataclass, replace

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

    def shed(self) -> None:
        self.message = replace(self.message, data=b"")


@dataclass(slots=True, eq=False)
class _Lease:
    """`since` is the loop time of its beginning or renewal. After a nak, `timer` ends the delay. Without either, the
    message waits for a consumer with room."""

    attempt: int
    holder: MemoryConsumer
    delivery: MemoryDelivery
    since: float | None
    timer: asyncio.TimerHandle | None = None


class ConsumerGroup:
    """All copies of one consumer: which messages are leased, which comes next, and which copy has room. No method
    awaits."""

    def __init__(self, stream: MemoryStream, spec: ConsumerSpec, loop: asyncio.AbstractEventLoop) -> None:
        self.spec = spec  # of the copy that joined last; set by `join`
        self._stream = stream
        self._loop = loop
        self._pattern = matcher(spec.subject)
        self.matches = self._pattern.fullmatch  # whether a subject is the consumer's
        self._pending = deque(stream.sequences(self._pattern))  # that were never leased; some may be stored no more
        self._leases: dict[int, _Lease] = {}  # by sequence
        self._running: OrderedDict[int, _Lease] = OrderedDict()  # those that expire, the next one first
        self._expiry: asyncio.TimerHandle | None = None  # when the first of them may do so
        self._redeliver: deque[int] = deque()  # sequences to deliver again
        self._members: list[MemoryConsumer] = []  # the one whose turn it is comes first

    def join(self, spec: ConsumerSpec, member: MemoryConsumer) -> None:
        """Add another open copy; with `takeover`, the only one, which starts behind the contiguous settled messages."""
        if spec.subject != self.spec.subject:
            self._pattern = matcher(spec.subject)
            self.matches = self._pattern.fullmatch
            first = self._pending[0] if self._pending else self._stream.last + 1
            self._pending = deque(self._stream.sequences(self._pattern, first))
        self.spec = spec
        if spec.takeover:
            if self._leases:
                self._pending = deque(self._stream.sequences(self._pattern, min(self._leases)))
            for former in self._members:
                former.clear()
            self._forget_leases()
            self._members.clear()
        if self._expiry is not None:  # by the `ack_wait` of before
            self._expiry.cancel()
            self._expire_due()
        member.group = self
        self._members.append(member)
        self.dispatch()

    def retire(self) -> list[MemoryConsumer]:
        """The stream is no more: deliver nothing. Returns the open copies, which hang until they join another group."""
        self._forget_leases()
        self._pending.clear()
        members, self._members = self._members, []
        for member in members:
            member.clear()
        return members

    def begin_again(self) -> bool:
        """Forget who has leased what; returns whether copies are open, which reopen the consumer at once."""
        self._forget_leases()
        self._pending = deque(self._stream.sequences(self._pattern))
        for member in self._members:
            member.clear()
        self.dispatch()
        return bool(self._members)

    def backlog(self) -> tuple[int, int, int]:
        """How many messages were never delivered, are leased, and are leased again."""
        pending = sum(self._stream.get(sequence) is not None for sequence in self._pending)
        return pending, len(self._leases), sum(lease.attempt > 1 for lease in self._leases.values())

    def leave(self, member: MemoryConsumer) -> None:
        if member in self._members:
            self._members.remove(member)

    def offer(self, sequence: int) -> None:
        """A message on the consumer's subject has been stored."""
        if self._pending:
            first = self._stream.first
            while self._pending and self._pending[0] < first:  # or those of a consumer without copies would be kept
                self._pending.popleft()
        self._pending.append(sequence)
        self.dispatch()

    def dispatch(self) -> None:
        """Lease waiting messages to the copies with room, in turn."""
        while self._pending or self._redeliver:
            if (member := self._with_room()) is None or (message := self._take_next()) is None:
                return
            if len(self._members) > 1:
                self._members.remove(member)
                self._members.append(member)
            sequence = message.sequence
            attempt = self._leases[sequence].attempt + 1 if sequence in self._leases else 1
            delivery = MemoryDelivery(self, message, attempt)
            lease = self._leases[sequence] = _Lease(attempt, member, delivery, self._loop.time())
            self._run(sequence, lease)
            member.receive(delivery)

    def settle(self, sequence: int) -> None:
        """Remove a message for good; a late ack of an expired lease counts too."""
        lease = self._leases.pop(sequence, None)
        if lease is None:
            return
        self._halt(lease)
        if self._stream.spec.retention == "work_queue":
            self._stream.remove(sequence)
        self.dispatch()

    def give_back(self, delivery: MemoryDelivery, delay: float) -> None:
        lease = self._current(delivery)
        if lease is None:
            return
        self._halt(lease)
        if delay > 0:
            lease.timer = self._loop.call_later(delay, self._expire, lease)
        else:
            self._expire(lease)

    def extend(self, delivery: MemoryDelivery) -> None:
        lease = self._current(delivery)
        if lease is not None and (lease.since is not None or lease.timer is not None):
            self._halt(lease)
            lease.since = self._loop.time()
            self._run(delivery.message.sequence, lease)

    def _run(self, sequence: int, lease: _Lease) -> None:
        """Have a lease expire that begins now."""
        self._running[sequence] = lease
        if self._expiry is None:
            self._expiry = self._loop.call_later(self.spec.ack_wait, self._expire_due)

    def _halt(self, lease: _Lease) -> None:
        """Have a lease not expire, nor its delay end."""
        if lease.since is not None:
            del self._running[lease.delivery.message.sequence]
            lease.since = None
        if lease.timer is not None:
            lease.timer.cancel()
            lease.timer = None

    def _expire_due(self) -> None:
        """End the leases whose time is over, and look again when that of the next one is."""
        while self._running:
            lease = next(iter(self._running.values()))
            assert lease.since is not None
            if (due := lease.since + self.spec.ack_wait) > self._loop.time():
                self._expiry = self._loop.call_at(due, self._expire_due)
                return
            self._halt(lease)
            self._expire(lease)
        self._expiry = None

    def _expire(self, lease: _Lease) -> None:
        lease.timer = None
        lease.holder.drop(lease.delivery)
        self._redeliver.append(lease.delivery.message.sequence)
        self.dispatch()

    def _forget_leases(self) -> None:
        for lease in self._leases.values():
            self._halt(lease)
        self._leases.clear()
        self._redeliver.clear()

    def _current(self, delivery: MemoryDelivery) -> _Lease | None:
        """The lease of this `delivery`; None if the message has been settled or leased again since."""
        lease = self._leases.get(delivery.message.sequence)
        return lease if lease is not None and lease.attempt == delivery.attempt else None

    def _with_room(self) -> MemoryConsumer | None:
        for member in self._members:
            if member.has_room:
                return member
        return None

    def _take_next(self) -> Message | None:
        while self._redeliver:
            sequence = self._redeliver.popleft()
            lease = self._leases.get(sequence)
            if lease is None or lease.since is not None or lease.timer is not None:
                continue
            message = self._stream.get(sequence)
            spent = 0 < self.spec.max_deliver <= lease.attempt
            if message is not None and not spent:
                return message
            del self._leases[sequence]
        while self._pending and len(self._leases) < self.spec.max_ack_pending:
            message = self._stream.get(self._pending.popleft())
            if message is not None:
                return message
        return None


class MemoryConsumer:
    """Implements `Consumer`, once `ConsumerGroup.join` has set its `group`."""

    group: ConsumerGroup

    def __init__(self, prefetch: int) -> None:
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
                self.group.dispatch()
                return taken
            self._arrived.clear()
            await self._arrived.wait()
        return []

    async def close(self) -> None:
        if not self._closed:
            buffered = list(self._buffer)
            self.abandon()
            for delivery in buffered:
                await delivery.nak()

    def abandon(self) -> None:
        """The holder is gone without a word: what it has stays leased until its leases expire."""
        if not self._closed:
            self._closed = True
            self._arrived.set()
            self.group.leave(self)
            self._buffer.clear()
