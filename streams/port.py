"""The broker as the pipeline sees it: durable streams, deliveries with one acknowledgement each, keys and values.

`streams/nats` and `streams/memory` implement this port and pass the same conformance suite
(`tests/streams/test_conformance.py`). Only the composition root, the commands and the benchmarks import either.

Every implementation guarantees:

- When a publish returns, the message is stored. One broker object's publishes are stored in the order of the calls.
- Within a stream's `dedup_window` a message id is stored once; a second publish returns `duplicate=True`.
- A work-queue message is delivered until it is acked or terminated: again after `ack_wait` without a call of
  `in_progress`, at once after `nak()`, later after `nak(delay)`; `attempt` counts from 1.
- A consumer delivers first attempts in stream order.
- A read (`replay`, `last`, `held`, those of a bucket) includes every write that was acknowledged to any client before
  the read began.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from ..schemas.errors import PayloadTooLarge

MESSAGE_ID = "Nats-Msg-Id"
TRACE_PARENT = "traceparent"
SCHEMA = "Penstock-Schema"
DEADLINE = "Penstock-Deadline"
NEXT = "Penstock-Next"
HOPS = "Penstock-Hops"  # where the request has been: see schemas/wire/hops.py
DEAD_REASON = "Penstock-Dead-Reason"  # on dead letters: why it failed, its first subject, how often it was delivered
DEAD_SUBJECT = "Penstock-Dead-Subject"
DEAD_ATTEMPTS = "Penstock-Dead-Attempts"
DEAD_BODY = "Penstock-Dead-Body"  # on dead letters with an object for a body: the object, and the requests inside
DEAD_REQUESTS = "Penstock-Dead-Requests"

Headers = Mapping[str, str]

_HEADER_LINES = len(b"NATS/1.0\r\n\r\n")
_PER_HEADER = len(b": \r\n")


@dataclass(frozen=True, slots=True)
class Message:
    """A message, stored or live. `sequence` is its position in the stream, from 1, and `time` is when it was stored, in
    Unix seconds by the broker's clock; both are 0 for a live message."""

    subject: str
    data: bytes
    headers: Headers
    sequence: int = 0
    time: float = field(default=0.0, compare=False)


class Published(NamedTuple):
    sequence: int
    duplicate: bool


class Held(NamedTuple):
    """What a stream holds on some subjects: the number of messages of each. `total` counts those of all subjects, and
    `last` is the newest sequence ever assigned.

    As long as `version` stays the same, nothing was written and nothing has left, if it is not empty.
    """

    by_subject: Mapping[str, int]
    last: int
    total: int
    version: tuple[object, ...] = ()

    @property
    def messages(self) -> int:
        return sum(self.by_subject.values())


class Usage(NamedTuple):
    """What a stream holds, or a bucket, whose name is in lower case. Limits of 0 are none.

    `behind` counts the messages that its slowest copy on another server lacks; `last` is the newest sequence ever
    assigned. `leader` is the server that leads its copies, "" on a single server and during an election; `away` counts
    the copies whose servers are gone or have not caught up.
    """

    name: str
    messages: int
    bytes: int
    max_messages: int
    max_bytes: int
    behind: int = 0
    last: int = 0
    consumers: int = 0
    leader: str = ""
    away: int = 0


class Backlog(NamedTuple):
    """The work that all consumers of a stream together have before them, in messages.

    `pending` have not been delivered; `leased` have, and are not settled; `redelivered` of those more than once.
    """

    stream: str
    pending: int
    leased: int
    redelivered: int


class Delivery(Protocol):
    """A message leased to one holder, who calls exactly one of `ack`, `nak` and `term`.

    These never raise for a lost connection: the lease expires and the broker delivers the message again.
    """

    @property
    def message(self) -> Message: ...

    @property
    def attempt(self) -> int:
        """1 for the first delivery."""

    async def ack(self) -> None:
        """Settle the message: everything it caused is stored."""

    async def nak(self, delay: float = 0.0) -> None:
        """Give the message back, to be delivered again after `delay` seconds."""

    async def term(self, reason: str) -> None:
        """Settle the message without success: it is never delivered again."""

    async def in_progress(self) -> None:
        """Renew the lease: `ack_wait` starts again."""

    def shed(self) -> None:
        """Forget the data of the message: it is only to be given back."""


class Consumer(Protocol):
    async def take(self, limit: int) -> list[Delivery]:
        """Wait for at least one delivery and return up to `limit` of them, oldest first.

        Returns an empty list only after `close`. While the broker is unavailable, it waits.
        """

    async def close(self) -> None:
        """Stop pulling messages; those received but not taken go back to the stream at once."""


class Subscription(Protocol):
    async def close(self) -> None: ...


Reply = Callable[[bytes], Awaitable[None]]
"""Sends an answer to whoever asked."""


class Entry(NamedTuple):
    key: str
    value: bytes
    revision: int


class Bucket(Protocol):
    """Keys and values, each with a revision; an entry expires `ttl` seconds after its last write.

    Writes raise `PayloadTooLarge` if no message can hold the value, and `StreamFull` if the bucket is full.
    """

    async def get(self, key: str) -> Entry | None: ...

    async def entries(self, prefix: str = "") -> list[Entry]:
        """The entries whose keys begin with `prefix`, least recently written first; others are not fetched. A token
        that is `*` stands for any."""

    def scan(self, prefix: str) -> AsyncGenerator[list[Entry], None]:
        """`entries`, some at a time, however many there are; what changes meanwhile is in it twice, once, or not."""

    async def put(self, key: str, value: bytes) -> int:
        """Write unconditionally; returns the revision."""

    async def create(self, key: str, value: bytes) -> int | None:
        """Write if the key has no value and return the revision; otherwise None."""

    async def update(self, key: str, value: bytes, revision: int) -> int | None:
        """Write if the entry still has this `revision` and return the new one; otherwise None."""

    async def delete(self, key: str) -> None: ...

    async def filled(self) -> tuple[int, int]:
        """The bytes of all entries, and the most that there may be; 0 for no limit."""
        ...


@dataclass(frozen=True, slots=True)
class StreamSpec:
    """`name` has no namespace (`JOBS`), `subjects` do. A limit of 0 means no limit; times are in seconds."""

    name: str
    subjects: tuple[str, ...]
    retention: Literal["work_queue", "limits"]
    storage: Literal["file", "memory"]
    discard: Literal["new", "old"] = "old"
    max_messages: int = 0
    max_messages_per_subject: int = 0
    max_bytes: int = 0
    max_age: float = 0.0
    dedup_window: float = 120.0


@dataclass(frozen=True, slots=True)
class ConsumerSpec:
    """A durable consumer, shared by all copies that open it under the same name.

    `takeover`: the last copy to open it is its only holder, and messages that the former holder left unacknowledged
    are delivered at once instead of after `ack_wait` (for partitions guarded by a lease).
    `idle_limit`: seconds without a holder after which the server may delete the consumer; 0 means never. Unsettled
    messages stay in the work queue, and a new consumer receives them as first attempts.
    """

    stream: str
    name: str
    subject: str
    ack_wait: float = 30.0
    max_deliver: int = 5
    max_ack_pending: int = 1024
    takeover: bool = False
    idle_limit: float = 0.0


@dataclass(frozen=True, slots=True)
class BucketSpec:
    """`ttl` in seconds and `max_bytes` of all entries; 0 means no limit. A full bucket refuses writes (`discard`
    "new") or drops its oldest entries ("old")."""

    name: str
    ttl: float = 0.0
    storage: Literal["file", "memory"] = "memory"
    discard: Literal["new", "old"] = "new"
    max_bytes: int = 0


class Broker(Protocol):
    @property
    def max_payload(self) -> int:
        """Most bytes of one message, headers included."""

    @property
    def connected(self) -> bool: ...

    def now(self) -> float:
        """Unix seconds by the broker's clock, which is that of all parts."""
        ...

    @property
    def outages(self) -> int:
        """How often the connection has been lost so far."""

    async def ensure(self, streams: Sequence[StreamSpec], buckets: Sequence[BucketSpec]) -> None:
        """Create missing streams and buckets and leave the others unchanged. Safe to run in several processes at once.

        Raises `Fatal` if a stream exists with another retention or storage.
        """

    async def reconfigure(self, streams: Sequence[StreamSpec], buckets: Sequence[BucketSpec]) -> None:
        """Create missing streams and buckets and change the limits of the others; a shorter age deletes messages.

        Raises as `ensure` does.
        """

    async def remove(self, stream: str) -> None:
        """Delete a stream with its messages; harmless if there is none."""

    async def publish(
        self, subject: str, data: bytes, *, message_id: str, headers: Headers | None = None, expect: int | None = None
    ) -> Published:
        """Store a message, retrying during short outages.

        With `expect`, the broker stores it only if that is the sequence of the last message on `subject` (0 for none),
        and raises `Superseded` otherwise. Use `expect` for whatever must happen only once: `message_id` merely makes
        a retry within the stream's `dedup_window` harmless.

        Raises `StreamFull` (at a limit of a `discard="new"` stream), `PayloadTooLarge`, and `BrokerUnavailable` after
        the broker's timeout.
        """

    async def consume(self, spec: ConsumerSpec, *, prefetch: int) -> Consumer:
        """Open a consumer that buffers at most `prefetch` deliveries."""

    async def forget(self, stream: str, consumer: str) -> None:
        """Delete a consumer and its leases; harmless if there is none. Copies that are open reopen it, and get again
        what they have not settled."""

    async def replay(self, stream: str, subject: str, after: int = 0) -> list[Message]:
        """The stored messages on `subject` (wildcards allowed) with a sequence above `after`, oldest first."""

    async def last(self, stream: str, subject: str) -> Message | None:
        """The newest stored message on exactly `subject`."""

    async def held(self, stream: str, subject: str = ">") -> Held:
        """What is stored on `subject` (wildcards allowed)."""

    async def usage(self) -> list[Usage]:
        """What every stream and bucket holds."""

    async def backlogs(self, streams: Sequence[str]) -> list[Backlog]:
        """The backlog of each of these streams; one that is missing has none and is left out."""

    async def delete(self, stream: str, sequence: int) -> bool:
        """Delete a message from the stream even while it is leased; False if it was gone already."""

    async def notify(self, subject: str, data: bytes) -> None:
        """Send a message to the current listeners; nothing is stored."""

    async def listen(self, subject: str, callback: Callable[[Message], None]) -> Subscription:
        """Call `callback` for every message on `subject` (wildcards allowed), from the time this returns.

        That includes published messages, even those that their stream refuses. The callback runs on the event loop
        and must not block.
        """

    async def refuse(self, subject: str, group: str, why: Callable[[Message], str | None]) -> Subscription:
        """Refuse messages that no stream accepts. For every message on `subject` (wildcards allowed), one copy in
        `group` calls `why`, and the publisher gets the result as an error; None leaves the message alone. The rest is
        as for `listen`.
        """

    async def answer(self, subject: str, group: str, respond: Callable[[Message, Reply], None]) -> Subscription:
        """Answer requests on `subject` (wildcards allowed): for each, one copy in `group` calls `respond` with it and
        with what sends the answer, once and within two minutes. The rest is as for `listen`.
        """

    async def bucket(self, name: str) -> Bucket: ...

    async def close(self) -> None:
        """Flush pending publishes, then disconnect."""


def message_size(data: bytes, headers: Headers) -> int:
    """Bytes that NATS needs for a message with this body and these headers."""
    text = "".join((*headers, *headers.values()))
    num_text = len(text) if text.isascii() else len(text.encode())
    return len(data) + _HEADER_LINES + num_text + _PER_HEADER * len(headers)


def check_size(data: bytes, headers: Headers, most: int) -> int:
    """The bytes that a message needs. Raises `PayloadTooLarge` if they are more than `most`."""
    size = message_size(data, headers)
    if size > most:
        raise PayloadTooLarge(f"The message has {size:,} bytes, but the broker accepts {most:,} at most: send less.")
    return size
