"""How often a message has failed, or may have ended the process that handled it: counted for all copies of a stage;
and what this copy alone has failed to handle."""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict

from ..streams.port import Bucket, Message

_OFFERS = 3  # to other copies, before the copy that failed tries again
_MOST_FAILED = 10_000  # messages that are remembered


def is_cancelled(error: BaseException) -> bool:
    """Whether Penstock ends the task, and not a user's code by what it awaited or raised itself."""
    if not isinstance(error, asyncio.CancelledError):
        return isinstance(error, GeneratorExit)
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class Count:
    """One number about one message: `kind` says what is counted."""

    def __init__(self, bucket: Bucket, stage: str, message: Message, kind: str) -> None:
        self._bucket = bucket
        location = f"{message.subject} {message.sequence}"  # a subject may hold what a key may not
        self._key = f"{stage}.{kind}.{hashlib.sha256(location.encode()).hexdigest()[:32]}"

    async def read(self) -> int:
        entry = await self._bucket.get(self._key)
        return int(entry.value) if entry else 0

    async def add(self, change: int) -> int:
        """Change the number, whoever else does; returns what it is now."""
        while True:
            entry = await self._bucket.get(self._key)
            number = change + (int(entry.value) if entry else 0)
            data, revision = str(number).encode(), entry.revision if entry else 0
            if await self._bucket.update(self._key, data, revision) is not None:
                return number


class FailedHere:
    """The messages that this copy of a stage has failed to handle, and survived.

    Another copy may be of another version, or reach what this one does not: it is offered each of them a few times
    before this copy tries again, so that one that fails at everything spoils nothing while others work.
    """

    def __init__(self) -> None:
        self._offers: OrderedDict[tuple[str, int], int] = OrderedDict()  # left, by subject and sequence

    def __contains__(self, message: Message) -> bool:
        return (message.subject, message.sequence) in self._offers

    def add(self, message: Message) -> None:
        """Note that the message has failed, once more perhaps."""
        self._offers[message.subject, message.sequence] = _OFFERS
        self._offers.move_to_end((message.subject, message.sequence))
        if len(self._offers) > _MOST_FAILED:
            self._offers.popitem(last=False)

    def discard(self, message: Message) -> None:
        self._offers.pop((message.subject, message.sequence), None)

    def offers(self, message: Message) -> bool:
        """Whether to give the message back for another copy; asked once for each delivery of it."""
        key = message.subject, message.sequence
        left = self._offers.get(key, 0)
        if left:
            self._offers[key] = left - 1
        return left > 0
