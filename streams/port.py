"""The broker as the pipeline sees it: durable streams, deliveries with one acknowledgement each, keys and values.

Nothing here knows NATS. `jetstream.py` and `memory.py` implement it and pass one conformance suite
(`tests/streams/test_conformance.py`); no other module imports either, but for the composition root.

Guarantees every implementation gives:

- A publish that returned is stored. Publishes started in one order by one broker object are stored in that order.
- Within a stream's `dedup_window` a message id is stored once; the second publish returns `duplicate=True`.
- A read includes every write that was acknowledged before the read began, whoever made it.
- A work-queue message is delivered until it is acked or terminated: again after `ack_wait` without a sign of life,
  at once after a `nak`, later after `nak(delay)`; `attempt` counts from 1.
- One consumer delivers first attempts in stream order.
- A read (`replay`, `last`, `held`, those of a bucket) includes every write that was acknowledged before it began,
  whoever wrote it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

MESSAGE_ID = "Nats-Msg-Id"
TRACE_PARENT = "traceparent"
SCHEMA = "Penstock-Schema"
DEADLINE = "Penstock-Deadline"
NEXT = "Penstock-Next"
DEAD_REASON = "Penstock-Dead-Reason"  # these three on dead letters: why, where it was, after how many deliveries
DEAD_SUBJECT = "Penstock-Dead-Subject"
DEAD_ATTEMPTS = "Penstock-Dead-Attempts"
DEAD_BODY = "Penstock-Dead-Body"  # these two where the letter's body is an object: its name, and whom it speaks for
DEAD_REQUESTS = "Penstock-Dead-Requests"

Headers = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Message:
    """A message as stored or heard. `sequence` is its place in the stream, from 1; 0 where it was heard live."""

    subject: str
    data: bytes
    headers: Headers
    sequence: int = 0


class Published(NamedTuple):
    sequence: int
    duplicate: bool


class Held(NamedTuple):
    """What a stream holds: messages by subject, and the newest sequence that it has ever given."""

    by_subject: Mapping[str, int]
    last: int

    @property
    def messages(self) -> int:
        return sum(self.by_subject.values())


class Delivery(Protocol):
    """A message lent to one holder, who owes exactly one of `ack`, `nak` and `term`.

    The three never raise for a lost connection: the lease runs out and the message comes again, which is the contract.
    """

    @property
    def message(self) -> Message: ...

    @property
    def attempt(self) -> int:
        """1 for the first delivery."""

    async def ack(self) -> None:
        """Done: what this message caused is stored."""

    async def nak(self, delay: float = 0.0) -> None:
        """Not done: deliver again after `delay` seconds."""

    async def term(self, reason: str) -> None:
        """Never deliver again."""

    async def in_progress(self) -> None:
        """Still at it: start `ack_wait` anew."""


class Consumer(Protocol):
    async def take(self, limit: int) -> list[Delivery]:
        """Wait until at least one delivery is here and return up to `limit` of them, oldest first.

        It returns an empty list only after `close`. An outage of the broker is waited out.
        """

    async def close(self) -> None:
        """Stop asking for messages; what was received and never taken goes back to the stream at once."""


class Subscription(Protocol):
    async def close(self) -> None: ...


class Entry(NamedTuple):
    key: str
    value: bytes
    revision: int


class Bucket(Protocol):
    """Keys and values with a revision each; an entry lives `ttl` seconds after its last write.

    Writing raises `PayloadTooLarge` for what no message can hold, and `StreamFull` where the bucket is full.
    """

    async def get(self, key: str) -> Entry | None: ...

    async def entries(self, prefix: str = "") -> list[Entry]:
        """Those whose keys begin with `prefix`, the longest unwritten first; others are not fetched."""

    async def put(self, key: str, value: bytes) -> int:
        """Write whatever was there; returns the revision."""

    async def create(self, key: str, value: bytes) -> int | None:
        """Write where nothing is; None if something was."""

    async def update(self, key: str, value: bytes, revision: int) -> int | None:
        """Write over exactly `revision`; None if it has changed since."""

    async def delete(self, key: str) -> None: ...


@dataclass(frozen=True, slots=True)
class StreamSpec:
    """`name` is bare (`JOBS`); `subjects` are whole. Limits of 0 mean none; times are in seconds."""

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
    """A durable consumer, shared by every copy that opens it under the same name.

    `takeover`: whoever opens it is its only holder from then on, and what a former holder left unacked is delivered
    at once instead of after `ack_wait` (for partitions guarded by a lease).
    `idle_limit`: seconds without a holder after which the server may forget the consumer; 0 is never. What it has not
    settled stays in its work queue, and comes to whoever opens it again, as if for the first time.
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
    """`ttl` in seconds, `max_bytes` of all its entries; 0 means no end and no limit. A full bucket refuses what is
    written (`discard` new) or forgets what was written longest ago (old)."""

    name: str
    ttl: float = 0.0
    storage: Literal["file", "memory"] = "memory"
    discard: Literal["new", "old"] = "new"
    max_bytes: int = 0


class Broker(Protocol):
    @property
    def max_payload(self) -> int:
        """Bytes that one message may hold, headers included."""

    @property
    def connected(self) -> bool: ...

    @property
    def outages(self) -> int:
        """How often the connection was lost so far."""

    async def ensure(self, streams: Sequence[StreamSpec], buckets: Sequence[BucketSpec]) -> None:
        """Create what is missing; what exists stays as it is. Safe to run in several processes at once.

        Raises `Fatal` where a stream exists with another retention or storage.
        """

    async def reconfigure(self, streams: Sequence[StreamSpec], buckets: Sequence[BucketSpec]) -> None:
        """Create what is missing and change the limits of what exists. For whoever sets a deployment up: a shorter age
        deletes. Raises as `ensure` does.
        """

    async def publish(
        self, subject: str, data: bytes, *, message_id: str, headers: Headers | None = None, expect: int | None = None
    ) -> Published:
        """Store a message, trying again through short outages.

        With `expect`, only where that is the sequence of the last message on `subject` (0: there is none); otherwise
        `Superseded` is raised and nothing is stored. What must happen once hangs on this alone: `message_id` saves
        work, by making a retry within the stream's `dedup_window` harmless.

        Raises `StreamFull` (a limit of a `discard="new"` stream), `PayloadTooLarge`, or `BrokerUnavailable` after
        the broker's time-out.
        """

    async def consume(self, spec: ConsumerSpec, *, prefetch: int) -> Consumer:
        """Open a consumer that holds at most `prefetch` deliveries nobody has taken yet."""

    async def forget(self, stream: str, consumer: str) -> None:
        """Remove a consumer that nobody will open again; harmless where there is none."""

    async def replay(self, stream: str, subject: str, after: int = 0) -> list[Message]:
        """What the stream holds on `subject` (wildcards allowed) with a sequence above `after`, oldest first."""

    async def last(self, stream: str, subject: str) -> Message | None:
        """The newest message that the stream holds on exactly `subject`."""

    async def held(self, stream: str) -> Held: ...

    async def delete(self, stream: str, sequence: int) -> bool:
        """Take a message out of the stream, whoever holds it; False where it was gone."""

    async def notify(self, subject: str, data: bytes) -> None:
        """Tell whoever listens now; nothing is stored."""

    async def listen(self, subject: str, callback: Callable[[Message], None]) -> Subscription:
        """Call back for every message on `subject` (wildcards allowed) from now on, also for what is published to be
        stored, and even where its stream then refuses it.

        The callback runs on the event loop and must not block. Active when this returns.
        """

    async def refuse(self, subject: str, group: str, why: Callable[[Message], str | None]) -> Subscription:
        """Answer what no stream takes. For every message on `subject` (wildcards allowed) one copy in `group` is asked,
        `why`, which goes to the publisher as an error; None leaves the message to its stream. Otherwise as `listen`.
        """

    async def bucket(self, name: str) -> Bucket: ...

    async def close(self) -> None:
        """Flush what was published, then disconnect."""
