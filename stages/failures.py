"""How often a message has failed, or may have ended the process that handled it: counted for all copies of a stage."""

from __future__ import annotations

import asyncio
import hashlib

from ..streams.port import Bucket, Message


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
