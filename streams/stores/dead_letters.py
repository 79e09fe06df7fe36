"""Dead letters of any size: in the stream DEAD, with large bodies as objects beside it, both bounded by age and bytes.

A dead letter is the original message with headers that say why it failed. New letters displace the oldest.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from ...schemas.errors import BrokerUnavailable
from ..port import DEAD_BODY, DEAD_REASON, DEAD_REQUESTS, Broker, Message, Published, message_size
from ..topology import DEAD, DEAD_DATA, Subjects
from .objects import Objects

LARGE = 256 << 10  # bytes above which a body becomes an object, so that listing letters does not read all bodies
HEADERS = 64 << 10  # bytes above which only short headers are kept
SHORT = 512  # characters of a header's value
MOST_REQUESTS = 100  # named in the headers of a letter whose body is an object


@dataclass(frozen=True, slots=True)
class DeadLetters:
    _broker: Broker
    _subjects: Subjects
    _bodies: Objects

    @classmethod
    async def of(cls, broker: Broker, subjects: Subjects) -> Self:
        return cls(broker, subjects, await Objects.of(broker, DEAD_DATA, DEAD_DATA))

    async def bury(
        self, stage: str, message_id: str, data: bytes, headers: Mapping[str, str], requests: Sequence[str]
    ) -> Published:
        """Store a message that `stage` has given up, with the `requests` inside it. Repeating it changes nothing."""
        kept = _bounded(headers)
        if len(data) > LARGE or message_size(data, kept) > self._broker.max_payload // 2:
            body = hashlib.sha256(message_id.encode()).hexdigest()
            await self._bodies.put(body, _whole(data), {})
            kept |= {DEAD_BODY: body, DEAD_REQUESTS: " ".join(requests[:MOST_REQUESTS])}
            data = b""
        return await self._broker.publish(self._subjects.dead(stage), data, message_id=message_id, headers=kept)

    async def all(self) -> list[Message]:
        """The letters, oldest first; those with an object for a body come without it."""
        return await self._broker.replay(DEAD, self._subjects.dead_all())

    async def whole(self, letter: Message) -> Message | None:
        """The letter with its body; None if the body has expired. Raises `BrokerUnavailable`."""
        if (body := letter.headers.get(DEAD_BODY)) is None:
            return letter
        if (info := await self._bodies.info(body)) is None:
            return None
        try:
            data = b"".join([piece async for piece in self._bodies.read(info)])
        except BrokerUnavailable:
            if self._broker.connected:  # the oldest pieces have been displaced
                return None
            raise
        return replace(letter, data=data)

    async def drop(self, letter: Message) -> None:
        body = letter.headers.get(DEAD_BODY)
        if body is not None and (info := await self._bodies.info(body)) is not None:
            await self._bodies.delete(info)
        await self._broker.delete(DEAD, letter.sequence)


def _bounded(headers: Mapping[str, str]) -> dict[str, str]:
    kept = {**headers, DEAD_REASON: headers[DEAD_REASON][:SHORT]}
    if message_size(b"", kept) <= HEADERS:
        return kept
    short = {name: value for name, value in kept.items() if len(name) + len(value) <= SHORT}
    return dict(sorted(short.items(), key=lambda item: not item[0].startswith("Penstock-"))[: HEADERS // SHORT // 8])


async def _whole(data: bytes) -> AsyncIterator[bytes]:
    yield data
