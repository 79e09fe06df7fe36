"""Dead letters of any size: in the stream DEAD, with large bodies as objects beside it, both bounded by age and bytes.

A dead letter is the original message with headers that say why it failed. New letters displace the oldest.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from ...config.settings import Settings
from ...schemas.errors import BrokerUnavailable, Conflict, PayloadTooLarge
from ...schemas.jobs import InferenceBatch, Job, ValidatedJob
from ...schemas.wire import codec
from ..lanes import open_lanes
from ..port import (
    DEAD_ATTEMPTS,
    DEAD_BODY,
    DEAD_REASON,
    DEAD_REQUESTS,
    DEAD_SUBJECT,
    DEADLINE,
    MESSAGE_ID,
    SCHEMA,
    Broker,
    Message,
    Published,
    message_size,
)
from ..topology import DEAD, DEAD_DATA, Subjects, lane_of
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

    async def all(self, after: int = 0) -> list[Message]:
        """The letters with numbers above `after`, oldest first; those with an object for a body come without it."""
        return await self._broker.replay(DEAD, self._subjects.dead_all(), after)

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

    async def retry(self, letter: Message, settings: Settings) -> list[str]:
        """Publish a letter's requests again under new ids, which are returned, and delete the letter.

        Raises `Conflict` if that is impossible for good.
        """
        names = []
        for job, subject, headers in self._again(letter, await self.whole(letter), settings):
            name = str(job.id)
            if isinstance(job, ValidatedJob):  # its model may be gone, and it waits until that is back
                await open_lanes(self._broker, settings, job.model, job.revision)
            try:
                await self._broker.publish(subject, codec.encode(job), message_id=name, headers=headers)
            except PayloadTooLarge as error:
                raise _lost(f"dead letter {letter.sequence} cannot be sent: {error} Drop it.") from None
            names.append(name)
        await self.drop(letter)
        return names

    def _again(
        self, letter: Message, whole: Message | None, settings: Settings
    ) -> list[tuple[Job | ValidatedJob, str, dict[str, str]]]:
        """Each job in a letter with a new id, its subject and headers. Raises `Conflict` if it cannot be read."""
        if whole is None:
            raise _lost(f"the body of dead letter {letter.sequence} has expired; drop the letter")
        try:
            jobs = _jobs(whole)
        except codec.DecodeError as error:
            raise _lost(f"dead letter {letter.sequence} cannot be read: {error}; drop it") from None
        gone = (DEAD_REASON, DEAD_SUBJECT, DEAD_ATTEMPTS, DEAD_BODY, DEAD_REQUESTS, DEADLINE, MESSAGE_ID)
        headers = {name: value for name, value in letter.headers.items() if name not in gone}
        subject = letter.headers[DEAD_SUBJECT]
        again = []
        for index, job in enumerate(jobs):
            name = f"{(job.id or 'job')[:48]}-r{letter.sequence}" + (f"-{index}" if index else "")
            change: dict[str, object] = {"id": name}
            if isinstance(job, ValidatedJob):
                change["deadline"] = self._broker.now() + settings.default_timeout
                if codec.is_schema(letter.headers.get(SCHEMA), codec.BATCH):  # its worker may be gone
                    headers[SCHEMA] = codec.VALIDATED_JOB
                if codec.is_schema(letter.headers.get(SCHEMA), codec.BATCH) or subject.startswith(
                    f"{settings.namespace}.batch."
                ):
                    subject = lane_of(self._subjects, job)  # where it is today: releases before had other lanes
            again.append((job.model_copy(update=change), subject, dict(headers)))
        return again


def summary(letter: Message) -> dict[str, Any]:
    """What a letter says without its payload: its number, the stage, the deliveries, the reason, and the requests."""
    if DEAD_BODY in letter.headers:
        requests = letter.headers.get(DEAD_REQUESTS, "").split()
    else:
        try:
            requests = [str(job.id) for job in _jobs(letter) if job.id]
        except codec.DecodeError:
            requests = []
    return {
        "number": letter.sequence,
        "stage": letter.subject.rpartition(".")[2],
        "deliveries": letter.headers.get(DEAD_ATTEMPTS, ""),
        "reason": letter.headers.get(DEAD_REASON, ""),
        "requests": requests,
    }


def _jobs(letter: Message) -> tuple[Job | ValidatedJob, ...]:
    """The jobs in a letter. Raises `DecodeError` if it is invalid."""
    schema = letter.headers.get(SCHEMA)
    if codec.is_schema(schema, codec.BATCH):
        return codec.decode_model(InferenceBatch, letter.data, schema).jobs
    if codec.is_schema(schema, codec.VALIDATED_JOB):
        return (codec.decode_model(ValidatedJob, letter.data, schema),)
    return (codec.decode_model(Job, letter.data, schema),)


def _lost(reason: str) -> Conflict:
    return Conflict(reason, code="dead_letter")


def _bounded(headers: Mapping[str, str]) -> dict[str, str]:
    kept = {**headers, DEAD_REASON: headers[DEAD_REASON][:SHORT]}
    if message_size(b"", kept) <= HEADERS:
        return kept
    short = {name: value for name, value in kept.items() if len(name) + len(value) <= SHORT}
    return dict(sorted(short.items(), key=lambda item: not item[0].startswith("Penstock-"))[: HEADERS // SHORT // 8])


async def _whole(data: bytes) -> AsyncIterator[bytes]:
    yield data
