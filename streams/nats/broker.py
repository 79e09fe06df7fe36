"""`Broker` over NATS JetStream: `connection` connects, `pull` consumes, `direct` reads, `buckets` stores keys."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import orjson
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from ...schemas.errors import BrokerAway, BrokerUnavailable, PayloadTooLarge, StartupError, StreamFull, Superseded
from ..port import (
    MESSAGE_ID,
    Backlog,
    Bucket,
    BucketSpec,
    ConsumerSpec,
    Headers,
    Held,
    Message,
    Published,
    Reply,
    StreamSpec,
    Usage,
    check_size,
)
from .answers import Respond, answering
from .buckets import JetStreamBucket
from .checks import check_jetstream, check_version
from .clock import BrokerClock
from .connection.access import Access
from .connection.link import Link
from .direct import backlog, consumers_of, held_subjects, last_message, stored_messages, used
from .management import (
    BUCKET,
    CONSUMER_MISSING,
    EXPECTED_SEQUENCE,
    KEY_VALUE,
    LIMIT_REACHED,
    MESSAGE_MISSING,
    STREAM_EXISTS,
    STREAM_FULL,
    STREAM_MISSING,
    TOO_LARGE,
    WRONG_REVISION,
    ApiError,
    Json,
    allowed,
    ask,
    bucket_config,
    call,
    stream_config,
)
from .pull import PullConsumer
from .shaping import create, present, shape

log = logging.getLogger(__name__)

PUBLISHED = "io.nats.jetstream.api.v1.pub_ack_response"  # the type of an answer to a publish


class JetStreamBroker:
    """Implements `Broker`. Every call waits for the server for `timeout` seconds at most.

    `replicas` is the number of servers that hold each stream. If a restarted server has lost streams in memory, the
    broker creates them again, empty, as soon as it has reconnected.
    """

    def __init__(self, link: Link, again: Callable[[], Awaitable[Link]], *, namespace: str, replicas: int = 1) -> None:
        """`again` opens another connection to the same servers."""
        self.replicas = replicas  # of streams created from now on; set by Deployment
        self._link = link
        self._again = again
        self._aside: list[Link] = []  # connections for what may come faster than it is read; set by refuse
        self._namespace = namespace
        self._configs: dict[str, Json] = {}  # of streams in memory, as `ensure` requested them, by name
        self._consumers: list[PullConsumer] = []
        self._buckets: dict[str, JetStreamBucket] = {}  # by name; set by bucket
        self.clock = BrokerClock.of(link, self._stream("EVENTS"))
        link.on_recover(self._restore)

    @classmethod
    async def connect(
        cls,
        url: str,
        *,
        namespace: str,
        timeout: float = 5.0,  # noqa: ASYNC109  (of every later call)
        name: str = "penstock",
        replicas: int = 1,
        access: Access | None = None,
    ) -> JetStreamBroker:
        """Connect to the server at `url`, or to one of several separated by commas; the broker reconnects by itself.

        Raises `BrokerAway` if no server answers or JetStream does not yet, and `StartupError` if the server refuses us,
        has no JetStream, or is too old.
        """
        again = partial(Link.connect, url, name=name, timeout=timeout, access=access)
        link = await again()
        try:
            check_version(link)
            await check_jetstream(link)
        except BaseException:
            await link.close()
            raise
        return cls(link, again, namespace=namespace, replicas=replicas)

    @property
    def address(self) -> str:
        return self._link.address

    @property
    def in_cluster(self) -> bool:
        return self._link.has("cluster")

    @property
    def max_payload(self) -> int:
        return self._link.max_payload

    @property
    def connected(self) -> bool:
        return self._link.connected

    @property
    def outages(self) -> int:
        return self._link.outages

    def now(self) -> float:
        return self.clock.now()

    async def refused(self) -> StartupError:
        """Return when a server that accepted us goes on refusing to have us back."""
        return await asyncio.shield(self._link.refused)

    async def ensure(self, streams: Sequence[StreamSpec], buckets: Sequence[BucketSpec]) -> None:
        for config in self.configs(streams, buckets):
            await create(self._link, config)
            self._keep(config)

    async def reconfigure(self, streams: Sequence[StreamSpec], buckets: Sequence[BucketSpec]) -> None:
        configs = self.configs(streams, buckets)
        await shape(self._link, configs)
        for config in configs:
            self._keep(config)

    def configs(self, streams: Sequence[StreamSpec], buckets: Sequence[BucketSpec]) -> list[Json]:
        """The configurations that the server is asked for, in its own format."""
        return [
            *(stream_config(self._stream(spec.name), spec, self.replicas) for spec in streams),
            *(bucket_config(self._bucket(spec.name), spec, self.replicas) for spec in buckets),
        ]

    def server_name(self, name: str) -> str:
        """The server's name for a stream (`JOBS`) or for the stream of a bucket (`workers`)."""
        return f"{BUCKET}{self._bucket(name)}" if name == name.lower() else self._stream(name)

    async def consumers(self, stream: str) -> list[Json]:
        """The server's description of each consumer."""
        return await consumers_of(self._link, self._stream(stream))

    async def unsettled(self, stream: str) -> int:
        """The number of messages not yet delivered or acknowledged; 0 if there is no such stream."""
        with allowed(STREAM_MISSING):
            info = await call(self._link, f"STREAM.INFO.{self._stream(stream)}")
            if info["config"]["retention"] == "workqueue":
                return int(info["state"]["messages"])
            return sum(each["num_pending"] + each["num_ack_pending"] for each in await self.consumers(stream))
        return 0

    async def set_aside(self, stream: str) -> bool:
        """Take a stream's subjects away, so that others can have them; its messages stay. False if there is none."""
        name = self._stream(stream)
        config = await self.present(name)
        if config is not None:
            with allowed(STREAM_MISSING):
                await call(self._link, f"STREAM.UPDATE.{name}", config | {"subjects": [f"{name}.moved"]})
        return config is not None

    async def remove(self, stream: str) -> None:
        """Delete a stream with its messages; harmless if there is none."""
        self._configs.pop(self._stream(stream), None)
        with allowed(STREAM_MISSING):
            await call(self._link, f"STREAM.DELETE.{self._stream(stream)}")

    async def present(self, name: str) -> Json | None:
        """The configuration of the stream with the server's name `name`; None if there is none."""
        return await present(self._link, name)

    async def publish(
        self, subject: str, data: bytes, *, message_id: str, headers: Headers | None = None, expect: int | None = None
    ) -> Published:
        fence = {} if expect is None else {EXPECTED_SEQUENCE: str(expect)}
        try:
            return await self._store(subject, data, {**(headers or {}), **fence, MESSAGE_ID: message_id})
        except ApiError as error:
            if error.code not in WRONG_REVISION:
                raise
            # The server checks the sequence before the id, so this may be our own message, whose answer was lost.
            (stream,) = (await call(self._link, "STREAM.NAMES", {"subject": subject}))["streams"]
            newest = await last_message(self._link, stream, subject)
            if newest is None or newest.headers.get(MESSAGE_ID) != message_id:
                raise Superseded(f"{subject}: {error}") from error
            return Published(newest.sequence, True)

    async def consume(self, spec: ConsumerSpec, *, prefetch: int) -> PullConsumer:
        consumer = await PullConsumer.open(self._link, self._stream(spec.stream), spec, prefetch=prefetch)
        self._consumers = [*(open_one for open_one in self._consumers if not open_one.closed), consumer]
        return consumer

    async def replay(self, stream: str, subject: str, after: int = 0) -> list[Message]:
        return await stored_messages(self._link, self._stream(stream), subject, after)

    async def last(self, stream: str, subject: str) -> Message | None:
        return await last_message(self._link, self._stream(stream), subject)

    async def held(self, stream: str, subject: str = ">") -> Held:
        return await held_subjects(self._link, self._stream(stream), subject)

    async def usage(self) -> list[Usage]:
        return await used(self._link, self._stream(""), BUCKET + self._bucket(""))

    async def backlogs(self, streams: Sequence[str]) -> list[Backlog]:
        found = await asyncio.gather(*(backlog(self._link, self._stream(stream)) for stream in streams))
        pairs = zip(streams, found, strict=True)
        return [Backlog(stream, *counts) for stream, counts in pairs if counts is not None]

    async def delete(self, stream: str, sequence: int) -> bool:
        with allowed(*MESSAGE_MISSING):
            request = {"seq": sequence, "no_erase": True}
            await call(self._link, f"STREAM.MSG.DELETE.{self._stream(stream)}", request)
            return True
        return False

    async def forget(self, stream: str, consumer: str) -> None:
        with allowed(CONSUMER_MISSING):
            await call(self._link, f"CONSUMER.DELETE.{self._stream(stream)}.{consumer}")

    async def notify(self, subject: str, data: bytes) -> None:
        await self._link.send(subject, data)

    async def listen(self, subject: str, callback: Callable[[Message], None]) -> _Listening:
        def heard(message: Msg) -> None:
            callback(Message(message.subject, message.data, message.headers or {}))

        return await self._listening(await self._link.subscribe(subject, heard))

    async def refuse(self, subject: str, group: str, why: Callable[[Message], str | None]) -> _Listening:
        def heard(message: Message, reply: Reply) -> Awaitable[None] | None:
            if (reason := why(message)) is None:
                return None
            return reply(orjson.dumps({"type": PUBLISHED, "error": {"code": 400, "description": reason}}))

        return await self._answering(subject, group, heard)

    async def answer(self, subject: str, group: str, respond: Callable[[Message, Reply], None]) -> _Listening:
        return await self._answering(subject, group, respond)

    async def _answering(self, subject: str, group: str, heard: Respond) -> _Listening:
        # A publisher sets the pace of what arrives here, and the server cuts off a connection that lags behind.
        try:
            link = await self._again()
        except BrokerAway as error:  # it has been there already
            raise BrokerUnavailable(str(error)) from error
        arrived = answering(link, self._namespace, heard)
        try:
            listening = await self._listening(await link.subscribe(subject, arrived, group=group), link)
        except BaseException:
            await link.close()
            raise
        self._aside.append(link)
        return listening

    async def _listening(self, subscription: Subscription, link: Link | None = None) -> _Listening:
        link = link or self._link
        listening = _Listening(link, subscription)
        try:
            await link.flush()
            link.check_allowed(subscription)
        except BaseException:
            await listening.close()
            raise
        return listening

    async def bucket(self, name: str) -> Bucket:
        if name not in self._buckets:
            self._buckets[name] = JetStreamBucket(self._link, self._bucket(name), self._store)
        return self._buckets[name]

    async def close(self) -> None:
        for consumer in self._consumers:
            await consumer.close()
        for link in self._aside:
            await link.close()
        await self._link.close()

    async def _store(self, subject: str, data: bytes, headers: dict[str, str]) -> Published:
        """Publish, and return when stored. Raises as `publish` does, and `ApiError`, which a bucket examines."""
        check_size(data, headers, self._link.max_payload)
        try:
            stored = await ask(self._link, subject, data, headers)
        except ApiError as error:
            if error.code in STREAM_FULL:
                # The code is the same for every limit of a stream (server/store.go, ErrMaxMsgsPerSubject).
                raise StreamFull(
                    f"{subject}: {error}",
                    per_subject="per subject" in str(error),
                    storage=error.code != LIMIT_REACHED or KEY_VALUE in subject,
                ) from error
            if error.code == TOO_LARGE:
                raise PayloadTooLarge(f"{subject}: {error}") from error
            raise
        return Published(stored["seq"], stored.get("duplicate", False))

    def _keep(self, config: Json) -> None:
        if config["storage"] == "memory":
            self._configs[config["name"]] = config

    async def _restore(self) -> None:
        """Create the streams that a restarted server has lost; existing ones may be newer than our copy, and stay."""
        for name, config in self._configs.items():
            try:
                await call(self._link, f"STREAM.CREATE.{name}", config, at_once=True)
            except ApiError as error:
                if error.code != STREAM_EXISTS:
                    with allowed(STREAM_MISSING):
                        await call(self._link, f"STREAM.INFO.{name}", at_once=True)
                        continue
                    log.error("stream %s: %s", name, error)

    def _stream(self, name: str) -> str:
        return f"{self._namespace}_{name}".upper()

    def _bucket(self, name: str) -> str:
        return f"{self._namespace}_{name}"


class _Listening:
    """Implements `Subscription`."""

    def __init__(self, link: Link, subscription: Subscription) -> None:
        self._link = link
        self._subscription = subscription

    async def close(self) -> None:
        await self._link.unsubscribe(self._subscription)
