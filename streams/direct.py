"""Reading stored messages without a consumer: JetStream's direct get, answered by any replica of the stream.

Protocol: NATS ADR-31. The answer to a batch is one message each, then a `204`; a `404` says that nothing matches.
Servers before 2.11 know no batches and answer with one message, without the count of those that remain.
"""

from __future__ import annotations

import asyncio
import contextlib

import orjson
from nats.aio.msg import Msg

from ..schemas.errors import BrokerUnavailable
from .link import NO_RESPONDERS, Link, status
from .port import Message

_BATCH = 512
_ANSWER_WAIT = 1.0  # seconds for a whole batch, after which the rest is asked for again
_RETRY_WAIT = 0.1
_NOTHING = "404"
_END_OF_BATCH = "204"
_REMAINING = "Nats-Num-Pending"
_SEQUENCE = "Nats-Sequence"


async def last_message(link: Link, stream: str, subject: str) -> Message | None:
    """The newest message on exactly `subject`. Raises `BrokerUnavailable`."""
    answer = await link.exchange(f"$JS.API.DIRECT.GET.{stream}.{subject}", b"")
    code = _outcome(answer)
    if code is not None and code != _NOTHING:
        raise BrokerUnavailable(f"NATS at {link.address}: no answer for stream {stream} ({code})")
    return _message(answer) if code is None else None


async def stored_messages(link: Link, stream: str, subject: str, after: int = 0) -> list[Message]:
    """All messages on `subject` (wildcards allowed) with a sequence above `after`, oldest first.

    Raises `BrokerUnavailable` when nothing is heard for the link's time-out.
    """
    clock = asyncio.get_running_loop().time
    batch = _Batch(after)
    inbox = link.new_inbox()
    subscription = await link.subscribe(inbox, batch.arrived)
    try:
        heard = clock()
        while True:
            before = batch.last
            outcome = await batch.read(link, stream, subject, inbox)
            if outcome == _NOTHING:
                return batch.found
            if batch.last > before:
                heard = clock()
            elif clock() - heard > link.timeout:
                raise BrokerUnavailable(f"NATS at {link.address}: no answer for stream {stream} ({outcome})")
            elif outcome == NO_RESPONDERS:
                await asyncio.sleep(_RETRY_WAIT)
    finally:
        await link.unsubscribe(subscription)


class _Batch:
    """What one replay has found so far, and how its current request ended."""

    def __init__(self, after: int) -> None:
        self.found: list[Message] = []
        self.last = after
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def read(self, link: Link, stream: str, subject: str, inbox: str) -> str:
        """Ask for what comes after `last`; returns the status that ended the batch, or "no answer"."""
        self._ended = asyncio.get_running_loop().create_future()
        request = orjson.dumps({"batch": _BATCH, "seq": self.last + 1, "next_by_subj": subject})
        await link.send(f"$JS.API.DIRECT.GET.{stream}", request, reply=inbox)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ANSWER_WAIT):
                return await self._ended
        return "no answer"

    async def arrived(self, answer: Msg) -> None:
        code = _outcome(answer)
        if code is None:
            message = _message(answer)
            # A request that was given up and repeated may still be answered.
            if message.sequence > self.last:
                self.found.append(message)
                self.last = message.sequence
            if _REMAINING not in (answer.headers or {}):
                self._end("one message")
        elif code == _END_OF_BATCH and (answer.headers or {}).get(_REMAINING) == "0":
            self._end(_NOTHING)
        else:
            self._end(code)

    def _end(self, outcome: str) -> None:
        if not self._ended.done():
            self._ended.set_result(outcome)


def _outcome(answer: Msg) -> str | None:
    """The status that stands in place of a message, None for a message (which may have a `Status` of its own)."""
    headers = answer.headers or {}
    return None if _SEQUENCE in headers else status(headers) or "no status"


def _message(answer: Msg) -> Message:
    """The stored message inside a direct answer, which carries its origin in headers of the server's."""
    headers = dict(answer.headers or {})
    subject = headers.pop("Nats-Subject")
    sequence = int(headers.pop(_SEQUENCE))
    for name in ("Nats-Stream", "Nats-Time-Stamp", "Nats-Last-Sequence", "Nats-UpTo-Sequence", _REMAINING):
        headers.pop(name, None)
    return Message(subject, answer.data, headers, sequence)
