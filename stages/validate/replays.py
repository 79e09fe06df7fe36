"""Answers clients that ask for the stored events of a request, on `control.replay.<tenant>.<bridge>.<request>`.

Whoever may not read the stream of events only hears them as they are published. That is less than the truth: an event
that is sent again is heard twice, one that the stream refuses is heard as well, and one that was missed does not come
again. What is stored has each event once and in order, so a client that asks for what follows the last one it has
loses nothing.
"""

from __future__ import annotations

import asyncio
from collections import Counter

import orjson
import structlog
from pydantic import ValidationError

from ...schemas.errors import Fatal, GenerationFailed, InvalidRequest, Overloaded, Refusal
from ...schemas.events import ErrorBody, ItemEvent, Token, Turn
from ...schemas.jobs import ReplayRequest
from ...schemas.wire import codec
from ...schemas.wire.codec import DecodeError
from ...streams.outages import outage_logged, through_outages
from ...streams.port import Broker, Message, Reply
from ...streams.topology import EVENTS, Subjects

log = structlog.get_logger(__name__)

PAGE = 1 << 20  # bytes of events in one answer, unless the first of them is larger
MOST = 4_000  # questions at a time
MOST_OF_TENANT = 1_000
_TOGETHER = 8  # that read the stream at the same time
_LOOK = 5.0  # seconds between looks while nothing is heard
_SOON = 0.002  # until the first look after something was; it is stored about then


class Replays:
    """The answers of one process; `ask` is called for each question."""

    def __init__(self, broker: Broker, subjects: Subjects) -> None:
        self._broker = broker
        self._subjects = subjects
        self._reading = asyncio.Semaphore(_TOGETHER)
        self._asked = Counter[str]()  # questions that wait, by tenant
        self._tasks: set[asyncio.Task[None]] = set()
        self._news = set[asyncio.Event]()  # one for each answer that waits
        self._is_closing = False  # set by close

    async def listen(self, group: str) -> None:
        """Answer from now on; copies in `group` share the questions."""
        subject = self._subjects.replay_all()
        await through_outages(lambda: self._broker.answer(subject, group, self.ask), subject)

    def ask(self, message: Message, reply: Reply) -> None:
        """Answer a question, beside others."""
        tenant = message.subject.split(".")[-3]
        task = asyncio.get_running_loop().create_task(self._answer(tenant, message, reply))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Let no answer wait any longer: whoever asks again finds another copy."""
        self._is_closing = True
        for news in self._news:
            news.set()
        await asyncio.gather(*self._tasks)

    async def _answer(self, tenant: str, message: Message, reply: Reply) -> None:
        self._asked[tenant] += 1
        with outage_logged("events not replayed", subject=message.subject):
            try:
                if self._asked[tenant] > MOST_OF_TENANT or self._asked.total() > MOST:
                    raise Overloaded("Too many questions wait for events; ask again later.", retry_after=1.0)
                answer = await self._events(message)
            except Refusal as refusal:
                answer = orjson.dumps({"error": ErrorBody.of(refusal)})
            except Fatal as error:  # the broker's users are of a version that knew nothing of this
                log.error("events not replayed", subject=message.subject, reason=str(error))
                answer = orjson.dumps({"error": ErrorBody.of(GenerationFailed(str(error)))})
            finally:
                self._asked[tenant] -= 1
                if not self._asked[tenant]:
                    del self._asked[tenant]
            await reply(answer)

    async def _events(self, message: Message) -> bytes:
        try:
            subject = self._subjects.events(*message.subject.split(".")[-3:])
        except ValueError as error:
            raise InvalidRequest(f"{error}.", param="subject") from None
        try:
            question = ReplayRequest.model_validate_json(codec.plain(message.data) or b"{}")
        except DecodeError as error:
            raise InvalidRequest(f"The question is malformed: {str(error).rstrip('.')}.") from None
        except ValidationError as error:
            raise InvalidRequest(f"The question is malformed: {codec.faults(error)}.") from None
        stored = await self._stored(subject, question.after)
        if not stored and question.wait:
            stored = await self._first(subject, question)
        return _page(stored, min(PAGE, self._broker.max_payload // 2))

    async def _first(self, subject: str, question: ReplayRequest) -> list[Message]:
        """What is stored first from now on; nothing if that is too late."""
        news = asyncio.Event()
        listening = await self._broker.listen(subject, lambda _: news.set())
        self._news.add(news)
        clock = asyncio.get_running_loop().time
        until, pause = clock() + question.wait, _LOOK
        try:
            while not (stored := await self._stored(subject, question.after)):
                if clock() >= until or self._is_closing:
                    break
                try:
                    async with asyncio.timeout(min(pause, until - clock())):
                        await news.wait()
                    news.clear()
                    pause = _SOON
                except TimeoutError:
                    pause = min(2 * pause, _LOOK)
        finally:
            self._news.discard(news)
            await listening.close()
        return stored

    async def _stored(self, subject: str, after: int) -> list[Message]:
        """The stored events behind the one of sequence `after`.

        Raises `GenerationFailed` if some of them are gone, and `InvalidRequest` if all are there but that one.
        """
        async with self._reading:
            # The oldest leave the stream first, so where the one before is stored, all that follow are.
            found = await self._broker.replay(EVENTS, subject, max(0, after - 1))
            if after and found and found[0].sequence == after:
                return found[1:]
            whole = await self._broker.replay(EVENTS, subject) if after else found
        if not (whole or after):
            return []
        if not whole or _follows(whole[0]) or 0 < after < whole[0].sequence:
            raise GenerationFailed("Part of the answer is no longer stored; send the request again.")
        if after:
            raise InvalidRequest(
                f"after is {after}, which is no event of this request: its first is {whole[0].sequence}, its newest"
                f" {whole[-1].sequence}. Ask with the sequence of an event that you have, or 0.",
                param="after",
            )
        return whole


def _follows(message: Message) -> bool:
    """Whether it holds an event that others of its request came before."""
    event = codec.decode_event(message.data)
    return isinstance(event, Token | ItemEvent | Turn) and event.index > 0


def _page(stored: list[Message], most: int) -> bytes:
    """The first of these events, as JSON of `most` bytes, or the first one alone."""
    parts: list[bytes] = []
    size = 0
    for message in stored:
        part = b'{"sequence":%d,"event":%b}' % (message.sequence, message.data)
        size += len(part) + 1
        if parts and size > most:
            break
        parts.append(part)
    return b'{"events":[%b]}' % b",".join(parts)
