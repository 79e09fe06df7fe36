"""Reading stored messages without a consumer. A read includes every write that was acknowledged before it began.

A stream's leader, which answers `STREAM.MSG.GET`, has applied every write it acknowledged. A direct get (NATS ADR-31)
returns many messages at a time, but any replica answers it, and a lagging one knows neither the newest messages nor the
deletions. So a read ends only when the leader has no further message, and the leader supplies those a replica lacks.

A replica answers a direct batch with the messages, one by one, and a final `204`; a `404` means that nothing matches.
Servers before 2.11 know no batches and answer with one message, without the count of the remaining ones.

While a restarted server has yet to be given a lost stream again, reads wait for it, up to the link's timeout.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncGenerator
from datetime import datetime

import orjson
from nats.aio.msg import Msg

from ...schemas.errors import StreamMissing
from ..port import Held, Message, Usage
from .connection.link import Link, status
from .management import MESSAGE_MISSING, STREAM_MISSING, ApiError, Json, allowed, call

_BATCH = 512  # messages that are asked for at first
_LARGE_BATCH = 1 << 13  # that it grows to: for each, the server counts what will be left, and writes wait meanwhile
_BATCH_BYTES = 8 << 20
_ANSWER_WAIT = 1.0  # seconds for the next message of a batch, then the leader supplies the rest
_NOTHING = "404"
_END_OF_BATCH = "204"
_NO_ANSWER = "no answer"
_REMAINING = "Nats-Num-Pending"
_SEQUENCE = "Nats-Sequence"


async def last_message(link: Link, stream: str, subject: str) -> Message | None:
    """The newest message on `subject` (wildcards allowed). Raises `BrokerUnavailable`."""
    return await _from_leader(link, stream, {"last_by_subj": subject})


async def stored_messages(link: Link, stream: str, subject: str, after: int = 0) -> list[Message]:
    """All messages on `subject` (wildcards allowed) with a sequence above `after`, oldest first.

    May include deleted messages, from a lagging replica. Raises `BrokerUnavailable`.
    """
    return [message async for batch in batches(link, stream, subject, after) for message in batch]


async def batches(link: Link, stream: str, subject: str, after: int = 0) -> AsyncGenerator[list[Message], None]:
    """`stored_messages`, as they come, for what may be too much to be held at a time."""
    batch = _Batch(after)
    following = await _from_leader(link, stream, {"seq": after + 1, "next_by_subj": subject})
    if following is None:  # true of most new requests
        return
    batch.add(following)
    inbox = link.new_inbox()
    subscription = await link.subscribe(inbox, batch.arrived)
    lags = False  # the replica that answers lags, or none answers
    try:
        while True:
            before = batch.last
            outcome = await batch.read(link, stream, subject, inbox) if not lags else _NOTHING
            if batch.found:
                yield batch.taken()
            if batch.last > before and outcome not in (_NOTHING, _NO_ANSWER):
                continue
            following = await _from_leader(link, stream, {"seq": batch.last + 1, "next_by_subj": subject})
            if following is None:
                yield batch.taken()
                return
            lags = lags or batch.last == before
            batch.add(following)
    finally:
        await link.unsubscribe(subscription)


async def held_subjects(link: Link, stream: str, subject: str) -> Held:
    """What the stream's leader holds on `subject` (wildcards allowed).

    Raises `StreamMissing` if there was none all the time that a call may take, and `BrokerUnavailable`.
    """
    found: dict[str, int] = {}
    while True:  # the server returns pages of 100,000 subjects
        page_wanted = {"subjects_filter": subject, "offset": len(found)}
        try:
            info = await call(link, f"STREAM.INFO.{stream}", page_wanted, retry_on=STREAM_MISSING)
        except ApiError as error:
            if error.code != STREAM_MISSING:
                raise
            raise StreamMissing(f"the stream {stream} does not exist") from error
        page: dict[str, int] = info["state"].get("subjects") or {}
        found |= page
        if not page or len(found) >= info.get("total", 0):
            state = info["state"]
            # A write makes the last sequence higher; without one, the number of messages can only become less. A stream
            # that is made anew, or has lost all in a restart, counts from 1 again, at another time.
            version = info["created"], state["last_seq"], state["last_ts"], state["messages"]
            return Held(found, state["last_seq"], state["messages"], version)


async def used(link: Link, streams: str, buckets: str) -> list[Usage]:
    """What the streams whose names begin with `streams` hold, and the buckets with `buckets`: the prefixes of ours.

    Raises `BrokerUnavailable`.
    """
    found: list[Usage] = []
    seen = 0
    while True:
        answer = await call(link, "STREAM.LIST", {"offset": seen})
        page: list[Json] = answer.get("streams") or []
        seen += len(page)
        for info in page:
            name: str = info["config"]["name"]
            for prefix in (streams, buckets):
                if name.startswith(prefix):
                    found.append(_usage(name.removeprefix(prefix), info))
                    break
        if not page or seen >= answer.get("total", 0):
            return found


async def consumers_of(link: Link, stream: str) -> list[Json]:
    """The server's description of each consumer of a stream. Raises `BrokerUnavailable`."""
    found: list[Json] = []
    while True:
        answer = await call(link, f"CONSUMER.LIST.{stream}", {"offset": len(found)})
        found += answer["consumers"] or []
        if not answer["consumers"] or len(found) >= answer["total"]:
            return found


async def backlog(link: Link, stream: str) -> tuple[int, int, int] | None:
    """The messages that a stream's consumers were not given, have, and have once more; None without the stream."""
    with allowed(STREAM_MISSING):
        found = await consumers_of(link, stream)
        pending, leased, again = (
            sum(consumer[field] for consumer in found)
            for field in ("num_pending", "num_ack_pending", "num_redelivered")
        )
        return pending, leased, again
    return None


def _usage(name: str, info: Json) -> Usage:
    config, state, cluster = info["config"], info["state"], info.get("cluster") or {}
    others: list[Json] = cluster.get("replicas") or []
    limits = max(0, config.get("max_msgs", 0)), max(0, config.get("max_bytes", 0))
    return Usage(
        name,
        state["messages"],
        state["bytes"],
        *limits,
        behind=max((other.get("lag", 0) for other in others), default=0),
        last=state["last_seq"],
        consumers=state["consumer_count"],
        leader=cluster.get("leader", "") if others else "",
        away=sum(bool(other.get("offline")) or not other.get("current") for other in others),
    )


class _Batch:
    """The messages that one replay has found so far, and how its current request ended."""

    def __init__(self, after: int) -> None:
        self.found: list[Message] = []  # that nobody has taken
        self.last = after
        self._size = _BATCH
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def read(self, link: Link, stream: str, subject: str, inbox: str) -> str:
        """Request the messages after `last`; returns the status that ended the batch, or "no answer"."""
        self._ended = asyncio.get_running_loop().create_future()
        wanted = {"batch": self._size, "max_bytes": _BATCH_BYTES, "seq": self.last + 1, "next_by_subj": subject}
        await link.send(f"{link.access.api}DIRECT.GET.{stream}", orjson.dumps(wanted), reply=inbox)
        while not self._ended.done():
            before = self.last
            await asyncio.wait([self._ended], timeout=_ANSWER_WAIT)
            if self.last == before and not self._ended.done():
                self._size = _BATCH
                return _NO_ANSWER
        self._size = min(2 * self._size, _LARGE_BATCH)
        return self._ended.result()

    def taken(self) -> list[Message]:
        found, self.found = self.found, []
        return found

    def add(self, message: Message) -> None:
        # The answer to an abandoned request may still arrive.
        if message.sequence > self.last:
            self.found.append(message)
            self.last = message.sequence

    def arrived(self, answer: Msg) -> None:
        headers = answer.headers or {}
        code = None if _SEQUENCE in headers else status(headers) or "no status"  # a message may have a `Status` too
        if code is None:
            self.add(_direct(answer))
            if _REMAINING not in headers:
                self._end("one message")
        elif code == _END_OF_BATCH and headers.get(_REMAINING) == "0":
            self._end(_NOTHING)
        else:
            self._end(code)

    def _end(self, outcome: str) -> None:
        if not self._ended.done():
            self._ended.set_result(outcome)


def _direct(answer: Msg) -> Message:
    """The stored message in a direct answer, whose subject and sequence are in the server's headers."""
    headers = dict(answer.headers or {})
    subject = headers.pop("Nats-Subject")
    sequence = int(headers.pop(_SEQUENCE))
    time = unix_seconds(headers.pop("Nats-Time-Stamp"))
    for name in ("Nats-Stream", "Nats-Last-Sequence", "Nats-UpTo-Sequence", _REMAINING):
        headers.pop(name, None)
    return Message(subject, answer.data, headers, sequence, time)


async def _from_leader(link: Link, stream: str, request: Json) -> Message | None:
    """One message, or None."""
    try:
        found: Json = (await call(link, f"STREAM.MSG.GET.{stream}", request, retry_on=STREAM_MISSING))["message"]
    except ApiError as error:
        if error.code in MESSAGE_MISSING:
            return None
        raise
    _, *lines = base64.b64decode(found.get("hdrs", "")).decode().split("\r\n")
    headers = {name: value.strip() for name, colon, value in (line.partition(":") for line in lines) if colon}
    data = base64.b64decode(found.get("data", ""))
    return Message(found["subject"], data, headers, found["seq"], unix_seconds(found["time"]))


def unix_seconds(stamp: str) -> float:
    """Unix seconds of a time stamp in RFC 3339, as the server writes it."""
    return datetime.fromisoformat(stamp).timestamp()
