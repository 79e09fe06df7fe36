"""A worker's own connection to the shared broker, which can be cut and mended, or end with its process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence

from ..streams.memory.broker import MemoryBroker
from ..streams.memory.consumer import MemoryConsumer
from ..streams.port import (
    Backlog,
    Bucket,
    BucketSpec,
    ConsumerSpec,
    Delivery,
    Entry,
    Headers,
    Held,
    Message,
    Published,
    Reply,
    StreamSpec,
    Subscription,
    Usage,
)


class Link:
    """Implements `Broker`. While it is cut, calls wait, and acknowledgements are lost."""

    def __init__(self, broker: MemoryBroker) -> None:
        self.outages = 0  # set by cut
        self._broker = broker
        self._up = asyncio.Event()
        self._up.set()
        self._consumers: list[MemoryConsumer] = []

    @property
    def max_payload(self) -> int:
        return self._broker.max_payload

    @property
    def connected(self) -> bool:
        return self._up.is_set()

    def now(self) -> float:
        return self._broker.now()

    def cut(self) -> None:
        self._up.clear()
        self.outages += 1

    def mend(self) -> None:
        self._up.set()

    def sever(self) -> None:
        """The process is gone: nobody hears of it again."""
        self._up.clear()
        for consumer in self._consumers:
            consumer.abandon()

    async def publish(
        self, subject: str, data: bytes, *, message_id: str, headers: Headers | None = None, expect: int | None = None
    ) -> Published:
        await self._up.wait()
        return await self._broker.publish(subject, data, message_id=message_id, headers=headers, expect=expect)

    async def consume(self, spec: ConsumerSpec, *, prefetch: int) -> LinkedConsumer:
        await self._up.wait()
        consumer = await self._broker.consume(spec, prefetch=prefetch)
        self._consumers.append(consumer)
        return LinkedConsumer(self, consumer)

    async def ensure(self, streams: Sequence[StreamSpec], buckets: Sequence[BucketSpec]) -> None:
        await self._up.wait()
        await self._broker.ensure(streams, buckets)

    async def reconfigure(self, streams: Sequence[StreamSpec], buckets: Sequence[BucketSpec]) -> None:
        await self._up.wait()
        await self._broker.reconfigure(streams, buckets)

    async def remove(self, stream: str) -> None:
        await self._up.wait()
        await self._broker.remove(stream)

    async def forget(self, stream: str, consumer: str) -> None:
        await self._up.wait()
        await self._broker.forget(stream, consumer)

    async def replay(self, stream: str, subject: str, after: int = 0) -> list[Message]:
        await self._up.wait()
        return await self._broker.replay(stream, subject, after)

    async def last(self, stream: str, subject: str) -> Message | None:
        await self._up.wait()
        return await self._broker.last(stream, subject)

    async def held(self, stream: str, subject: str = ">") -> Held:
        await self._up.wait()
        return await self._broker.held(stream, subject)

    async def usage(self) -> list[Usage]:
        await self._up.wait()
        return await self._broker.usage()

    async def backlogs(self, streams: Sequence[str]) -> list[Backlog]:
        await self._up.wait()
        return await self._broker.backlogs(streams)

    async def delete(self, stream: str, sequence: int) -> bool:
        await self._up.wait()
        return await self._broker.delete(stream, sequence)

    async def notify(self, subject: str, data: bytes) -> None:
        await self._up.wait()
        await self._broker.notify(subject, data)

    async def listen(self, subject: str, callback: Callable[[Message], None]) -> Subscription:
        await self._up.wait()
        return await self._broker.listen(subject, lambda message: callback(message) if self.connected else None)

    async def refuse(self, subject: str, group: str, why: Callable[[Message], str | None]) -> Subscription:
        await self._up.wait()
        return await self._broker.refuse(subject, group, why)

    async def answer(self, subject: str, group: str, respond: Callable[[Message, Reply], None]) -> Subscription:
        await self._up.wait()
        return await self._broker.answer(subject, group, respond)

    async def bucket(self, name: str) -> LinkedBucket:
        await self._up.wait()
        return LinkedBucket(self._up, await self._broker.bucket(name))

    async def close(self) -> None:
        self.sever()


class LinkedConsumer:
    """Implements `Consumer`."""

    def __init__(self, link: Link, consumer: MemoryConsumer) -> None:
        self._link = link
        self._consumer = consumer

    async def take(self, limit: int) -> list[Delivery]:
        deliveries = await self._consumer.take(limit)
        return [LinkedDelivery(self._link, delivery) for delivery in deliveries]

    async def close(self) -> None:
        await self._consumer.close()


class LinkedDelivery:
    """Implements `Delivery`: it never raises, as the broker delivers again whatever it has not heard of."""

    __slots__ = ("_delivery", "_link", "attempt", "message")

    def __init__(self, link: Link, delivery: Delivery) -> None:
        self._link = link
        self._delivery = delivery
        self.message = delivery.message
        self.attempt = delivery.attempt

    async def ack(self) -> None:
        if self._link.connected:
            await self._delivery.ack()

    async def nak(self, delay: float = 0.0) -> None:
        if self._link.connected:
            await self._delivery.nak(delay)

    async def term(self, reason: str) -> None:
        if self._link.connected:
            await self._delivery.term(reason)

    async def in_progress(self) -> None:
        if self._link.connected:
            await self._delivery.in_progress()

    def shed(self) -> None:
        self._delivery.shed()
        self.message = self._delivery.message


class LinkedBucket:
    """Implements `Bucket`."""

    def __init__(self, up: asyncio.Event, bucket: Bucket) -> None:
        self._up = up
        self._bucket = bucket

    async def get(self, key: str) -> Entry | None:
        await self._up.wait()
        return await self._bucket.get(key)

    async def entries(self, prefix: str = "") -> list[Entry]:
        await self._up.wait()
        return await self._bucket.entries(prefix)

    async def scan(self, prefix: str) -> AsyncGenerator[list[Entry], None]:
        await self._up.wait()
        async for entries in self._bucket.scan(prefix):
            yield entries

    async def put(self, key: str, value: bytes) -> int:
        await self._up.wait()
        return await self._bucket.put(key, value)

    async def create(self, key: str, value: bytes) -> int | None:
        await self._up.wait()
        return await self._bucket.create(key, value)

    async def update(self, key: str, value: bytes, revision: int) -> int | None:
        await self._up.wait()
        return await self._bucket.update(key, value, revision)

    async def delete(self, key: str) -> None:
        await self._up.wait()
        await self._bucket.delete(key)

    async def filled(self) -> tuple[int, int]:
        await self._up.wait()
        return await self._bucket.filled()
