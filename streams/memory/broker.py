"""The broker in the memory of one process, for embedding, trials and tests. It survives no crash; otherwise it gives
the same guarantees as JetStream.

Everything that communicates shares one `MemoryBroker`. Its clock is the event loop's, so a test can drive it.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import NamedTuple

from ...schemas.errors import BrokerUnavailable, StartupError, StreamFull, StreamMissing
from ..port import (
    MESSAGE_ID,
    Backlog,
    BucketSpec,
    ConsumerSpec,
    Entry,
    Headers,
    Held,
    Message,
    Published,
    Reply,
    StreamSpec,
    Subscription,
    Usage,
    check_size,
    message_size,
)
from ..prefixes import begins
from .consumer import MemoryConsumer
from .groups import ConsumerGroups
from .listening import Listeners
from .stream import MemoryStream, head_of, matcher


class MemoryBroker:
    """Implements `Broker`; `max_payload` in bytes. Create it in the event loop that uses it.

    `now` is the clock, in Unix seconds, by which messages are stamped.
    """

    def __init__(
        self, *, max_payload: int = 8 << 20, now: Callable[[], float] = time.time, publishes_in_a_row: int = 1
    ) -> None:
        """After so many publishes the publisher lets other tasks run."""
        self._loop = asyncio.get_running_loop()
        self._in_a_row = publishes_in_a_row
        self._publishes = 0
        self._max_payload = max_payload
        self._now = now
        self._streams: dict[str, MemoryStream] = {}  # by name in upper case, as JetStream's are
        self._by_head: dict[str, list[tuple[str, MemoryStream]]] = {}  # streams, by the first two tokens of subjects
        self._groups: dict[str, ConsumerGroups] = {}  # by stream
        self._left: dict[str, list[tuple[ConsumerSpec, MemoryConsumer]]] = {}  # open copies, by stream that was removed
        self._consumers: list[MemoryConsumer] = []
        self._buckets: dict[str, MemoryBucket] = {}
        self._listeners = Listeners(self._loop)
        self._refusers: list[_Refuser] = []
        self._answerers: list[_Answerer] = []
        self._closed = False

    @property
    def max_payload(self) -> int:
        return self._max_payload

    @property
    def connected(self) -> bool:
        return not self._closed

    def now(self) -> float:
        return self._now()

    @property
    def outages(self) -> int:
        return 0

    async def ensure(self, streams: Sequence[StreamSpec], buckets: Sequence[BucketSpec]) -> None:
        self._by_head.clear()
        for spec in streams:
            if (stream := self._streams.get(spec.name.upper())) is not None:
                stream.check(spec)
            else:
                name = spec.name.upper()
                made = self._streams[name] = MemoryStream(spec, self._loop.time, self._now)
                self._groups[name] = ConsumerGroups(made, self._loop)
                for former, member in self._left.pop(name, ()):
                    if not member.closed:
                        self._groups[name].join(former, member)
        for bucket in buckets:
            self._buckets.setdefault(bucket.name, MemoryBucket(bucket, self._loop.time, self._max_payload))

    async def reconfigure(self, streams: Sequence[StreamSpec], buckets: Sequence[BucketSpec]) -> None:
        await self.ensure(streams, buckets)
        for spec in streams:
            self._streams[spec.name.upper()].configure(spec)
        for bucket in buckets:
            self._buckets[bucket.name].spec = bucket
        self._by_head.clear()

    def watch(self, stream: str, callback: Callable[[Message], None]) -> None:
        """Have `callback` called with each message of a stream once it is stored, and not with those that are refused
        or stored already, which listeners hear as well."""
        self._find(stream).watcher = callback

    async def remove(self, stream: str) -> None:
        self._streams.pop(stream.upper(), None)
        self._by_head.clear()
        groups = self._groups.pop(stream.upper(), None)
        if groups is not None and (left := groups.retire()):
            self._left[stream.upper()] = left

    async def publish(
        self, subject: str, data: bytes, *, message_id: str, headers: Headers | None = None, expect: int | None = None
    ) -> Published:
        whole = {**(headers or {}), MESSAGE_ID: message_id}
        size = check_size(data, whole, self._max_payload)
        if self._closed:
            raise BrokerUnavailable("the broker is closed")
        head = head_of(subject)
        self._listeners.notify(subject, head, data, whole)  # as NATS does, even if the stream refuses it
        for name, stream in self._streams_beginning(head):
            if stream.accepts(subject):
                published = stream.store(subject, data, whole, size, expect)
                if not published.duplicate:
                    self._groups[name].offer(subject, published.sequence)
                self._publishes += 1
                if self._publishes % self._in_a_row == 0:  # a publisher in a loop must not starve the other tasks
                    await asyncio.sleep(0)
                return published
        raise BrokerUnavailable(self._refuse(Message(subject, data, whole)) or f"no stream stores {subject}")

    async def consume(self, spec: ConsumerSpec, *, prefetch: int) -> MemoryConsumer:
        name = spec.stream.upper()
        if (stream := self._streams.get(name)) is None:
            raise StartupError(f"consumer {spec.name} of stream {spec.stream}: stream not found")
        groups = self._groups[name]
        if stream.spec.retention == "work_queue" and (other := groups.overlapping(spec)) is not None:
            raise StartupError(
                f"consumer {spec.name} of stream {name}: its consumer {other} already takes some of {spec.subject}"
            )
        consumer = MemoryConsumer(prefetch)
        groups.join(spec, consumer)
        self._consumers = [*(open_one for open_one in self._consumers if not open_one.closed), consumer]
        return consumer

    async def replay(self, stream: str, subject: str, after: int = 0) -> list[Message]:
        return self._find(stream).on_subject(subject, after)

    async def last(self, stream: str, subject: str) -> Message | None:
        return self._find(stream).last_on(subject)

    async def held(self, stream: str, subject: str = ">") -> Held:
        return self._find(stream).held(subject)

    async def usage(self) -> list[Usage]:
        return [
            *(stream.usage()._replace(consumers=len(self._groups[name])) for name, stream in self._streams.items()),
            *(bucket.usage() for bucket in self._buckets.values()),
        ]

    async def backlogs(self, streams: Sequence[str]) -> list[Backlog]:
        found: list[Backlog] = []
        for stream in streams:
            if (name := stream.upper()) in self._streams:
                counts = [group.backlog() for group in self._groups[name]]
                found.append(Backlog(stream, *map(sum, zip((0, 0, 0), *counts, strict=True))))
        return found

    async def delete(self, stream: str, sequence: int) -> bool:
        found = self._find(stream)
        is_there = found.get(sequence) is not None
        found.remove(sequence)
        return is_there

    async def forget(self, stream: str, consumer: str) -> None:
        groups = self._groups.get(stream.upper())
        group = groups.get(consumer) if groups is not None else None
        if groups is not None and group is not None and not group.begin_again():
            groups.remove(consumer)

    async def notify(self, subject: str, data: bytes) -> None:
        self._listeners.notify(subject, head_of(subject), data, {})
        self._refuse(Message(subject, data, {}))

    async def listen(self, subject: str, callback: Callable[[Message], None]) -> Subscription:
        return self._listeners.add(subject, callback)

    async def refuse(self, subject: str, group: str, why: Callable[[Message], str | None]) -> Subscription:
        refuser = _Refuser(self._refusers, matcher(subject), group, why)
        self._refusers.append(refuser)
        return refuser

    async def answer(self, subject: str, group: str, respond: Callable[[Message, Reply], None]) -> Subscription:
        answerer = _Answerer(self._answerers, matcher(subject), respond)
        self._answerers.append(answerer)
        return answerer

    async def ask(self, subject: str, data: bytes) -> bytes:
        """What is answered on `subject`, as a client's request has it. Raises `BrokerUnavailable` if nobody answers."""
        answered: asyncio.Future[bytes] = self._loop.create_future()

        async def reply(answer: bytes) -> None:
            if not answered.done():
                answered.set_result(answer)

        for answerer in self._answerers:
            if answerer.pattern.fullmatch(subject):
                self._loop.call_soon(answerer.respond, Message(subject, data, {}), reply)
                return await answered
        raise BrokerUnavailable(f"nobody answers on {subject}")

    async def bucket(self, name: str) -> MemoryBucket:
        if (found := self._buckets.get(name)) is None:
            raise BrokerUnavailable(f"there is no bucket {name}")
        return found

    async def close(self) -> None:
        for consumer in self._consumers:
            await consumer.close()
        self._listeners.clear()
        self._closed = True

    def _streams_beginning(self, head: str) -> list[tuple[str, MemoryStream]]:
        """The streams, in order, that may accept a subject with these first two tokens."""
        found = self._by_head.get(head)
        if found is None:
            found = [one for one in self._streams.items() if one[1].may_accept(head)]
            if found:
                self._by_head[head] = found
        return found

    def _find(self, stream: str) -> MemoryStream:
        if (found := self._streams.get(stream.upper())) is None:
            raise StreamMissing(f"the stream {stream} does not exist")
        return found

    def _refuse(self, message: Message) -> str:
        one_each = {refuser.group: refuser for refuser in self._refusers if refuser.pattern.fullmatch(message.subject)}
        return " ".join(filter(None, [refuser.why(message) for refuser in one_each.values()]))


class _Refuser(NamedTuple):
    """Implements `Subscription`."""

    refusers: list[_Refuser]
    pattern: re.Pattern[str]
    group: str
    why: Callable[[Message], str | None]

    async def close(self) -> None:
        self.refusers.remove(self)


class _Answerer(NamedTuple):
    """Implements `Subscription`."""

    answerers: list[_Answerer]
    pattern: re.Pattern[str]
    respond: Callable[[Message, Reply], None]

    async def close(self) -> None:
        self.answerers.remove(self)


class _StoredEntry(NamedTuple):
    entry: Entry
    written: float
    size: int


class MemoryBucket:
    """Implements `Bucket`."""

    def __init__(self, spec: BucketSpec, clock: Callable[[], float], max_payload: int) -> None:
        self.spec = spec  # set by MemoryBroker.reconfigure
        self._clock = clock
        self._max_payload = max_payload
        self._kept: OrderedDict[str, _StoredEntry] = OrderedDict()  # least recently written first
        self._revision = 0
        self._bytes = 0

    async def get(self, key: str) -> Entry | None:
        self._expire()
        kept = self._kept.get(key)
        return kept.entry if kept else None

    async def entries(self, prefix: str = "") -> list[Entry]:
        self._expire()
        is_wanted = begins(prefix)
        return [kept.entry for key, kept in self._kept.items() if is_wanted(key)]

    async def scan(self, prefix: str) -> AsyncGenerator[list[Entry], None]:
        yield await self.entries(prefix)

    async def put(self, key: str, value: bytes) -> int:
        check_size(value, {}, self._max_payload)
        self._expire()
        size = len(key) + message_size(value, {})
        most = self.spec.max_bytes
        # As in JetStream, replacing a value may make a full bucket slightly fuller.
        if most and self.spec.discard == "new" and key not in self._kept and self._bytes + size > most:
            raise StreamFull(f"{key}: maximum bytes exceeded", storage=True)
        await self.delete(key)
        self._revision += 1
        self._kept[key] = _StoredEntry(Entry(key, value, self._revision), self._clock(), size)
        self._bytes += size
        while most and self.spec.discard == "old" and self._bytes > most:
            await self.delete(next(iter(self._kept)))
        return self._revision

    async def create(self, key: str, value: bytes) -> int | None:
        return await self.update(key, value, 0)

    async def update(self, key: str, value: bytes, revision: int) -> int | None:
        self._expire()
        kept = self._kept.get(key)
        if (kept.entry.revision if kept else 0) != revision:
            return None
        return await self.put(key, value)

    async def delete(self, key: str) -> None:
        if (kept := self._kept.pop(key, None)) is not None:
            self._bytes -= kept.size

    async def filled(self) -> tuple[int, int]:
        self._expire()
        return self._bytes, self.spec.max_bytes

    def usage(self) -> Usage:
        self._expire()
        return Usage(self.spec.name, len(self._kept), self._bytes, 0, self.spec.max_bytes, last=self._revision)

    def _expire(self) -> None:
        now, ttl = self._clock(), self.spec.ttl
        while ttl and self._kept and now - next(iter(self._kept.values())).written >= ttl:
            self._bytes -= self._kept.popitem(last=False)[1].size
