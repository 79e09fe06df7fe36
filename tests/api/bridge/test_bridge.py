"""A reading gives every event once and in order, though live messages are lost and repeated on their way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.api.bridge.bridge import Bridge
from penstock.schemas.errors import BrokerUnavailable
from penstock.schemas.events import Accepted, Done, Event, FinishReason, Token, Usage
from penstock.schemas.jobs import Job
from penstock.schemas.wire import codec
from penstock.streams.memory.broker import MemoryBroker
from penstock.streams.port import Headers, Message, Published, Subscription
from penstock.streams.topology import Subjects, topology

TEXT = "every token once, and in order"


class LossyBroker(MemoryBroker):
    """Hears each live message as many times as `copies` says, one number after the other; then once each."""

    copies: list[int]

    async def listen(self, subject: str, callback: Callable[[Message], None]) -> Subscription:
        remaining = list(self.copies)

        def hear(message: Message) -> None:
            for _ in range(remaining.pop(0) if remaining else 1):
                callback(message)

        return await super().listen(subject, hear)


async def read(copies: list[int], sizes: list[int], *, ends_alone: bool) -> list[Event]:
    sent: list[Event] = [Accepted("r", "m", 0, 1)]
    place = 0
    for size in [*sizes, len(TEXT)]:
        part = TEXT[place : place + size]
        if part:
            ends: FinishReason | None = "stop" if place + len(part) == len(TEXT) and not ends_alone else None
            sent.append(Token("r", 0, place, tuple(range(len(part))), part, finish_reason=ends))
        place += len(part)
    if ends_alone:
        sent.append(Token("r", 0, place, (), "", finish_reason="stop"))
    sent.append(Done("r", ("stop",), Usage(1, len(TEXT), 1 + len(TEXT))))
    broker, subjects = LossyBroker(), Subjects("penstock")
    # The last message is heard, so that no example has to wait for the silence after which a reading asks by itself.
    broker.copies = copies[: len(sent) - 1]
    await broker.ensure(*topology("penstock", ("queue",)))
    bridge = Bridge(broker, subjects, "b")
    await bridge.start()
    job = Job(id="r", bridge="b", body={})
    reading = await bridge.open(job, priority="normal", tenant="default")
    for number, event in enumerate(sent):
        subject = subjects.events("default", "b", "r")
        await broker.publish(subject, codec.encode(event), message_id=f"r.{number}")
    events: list[Event] = []
    while not reading.ended:
        events += await reading.take(60.0)
    reading.close()
    await broker.close()
    return events


@settings(max_examples=150, deadline=None)
@given(
    copies=st.lists(st.integers(0, 2), max_size=12).map(lambda copies: [*copies, 1] if copies else copies),
    sizes=st.lists(st.integers(1, 6), max_size=8),
    ends_alone=st.booleans(),
)
def test_every_event_once_whatever_is_lost_or_repeated(copies: list[int], sizes: list[int], ends_alone: bool) -> None:
    events = asyncio.run(read(copies, sizes, ends_alone=ends_alone))
    tokens = [event for event in events if isinstance(event, Token)]
    assert "".join(token.text for token in tokens) == TEXT
    assert [token.finish_reason for token in tokens if token.finish_reason] == ["stop"]
    assert [event.type for event in events].count("accepted") <= 1
    assert [event.type for event in events].count("done") == 1
    assert isinstance(events[-1], Done)


class OvertakenBroker(MemoryBroker):
    """Replays what was stored when it was asked, and `meanwhile` is published before it answers."""

    meanwhile: list[tuple[str, Event]]

    async def replay(self, stream: str, subject: str, after: int = 0) -> list[Message]:
        stored = await super().replay(stream, subject, after)
        while self.meanwhile:
            name, event = self.meanwhile.pop(0)
            await self.publish(name, codec.encode(event), message_id=f"r.late.{event.type}")
        for _ in range(5):  # they are heard
            await asyncio.sleep(0)
        return stored


async def test_what_is_heard_during_a_replay_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a gap, which the replay fills; nothing comes later, and nobody waits for a silence to notice it."""
    monkeypatch.setattr("penstock.api.bridge.reading.SILENCE", 3600.0)
    broker, subjects = OvertakenBroker(), Subjects("penstock")
    broker.meanwhile = []
    await broker.ensure(*topology("penstock", ("queue",)))
    bridge = Bridge(broker, subjects, "b")
    await bridge.start()
    subject = subjects.events("default", "b", "r")
    stored: list[Event] = [Accepted("r", "m", 0, 1), Token("r", 0, 0, (7,), "o")]
    for number, event in enumerate(stored):
        await broker.publish(subject, codec.encode(event), message_id=f"r.{number}")
    reading = await bridge.open(Job(id="r", bridge="b", body={}), priority="normal", tenant="default")
    reading.look_back()
    broker.meanwhile = [
        (subject, Token("r", 0, 1, (8,), "k", finish_reason="stop")),
        (subject, Done("r", ("stop",), Usage(1, 2, 3))),
    ]
    events: list[Event] = []
    async with asyncio.timeout(10):
        while not reading.ended:
            events += await reading.take(60.0)
    assert "".join(event.text for event in events if isinstance(event, Token)) == "ok"
    reading.close()
    await broker.close()


class UnansweredBroker(MemoryBroker):
    """Stores, and the answer that says so is lost."""

    async def publish(
        self, subject: str, data: bytes, *, message_id: str, headers: Headers | None = None, expect: int | None = None
    ) -> Published:
        await super().publish(subject, data, message_id=message_id, headers=headers, expect=expect)
        raise BrokerUnavailable("no answer")


@pytest.mark.parametrize("named", [False, True])
async def test_a_request_that_was_refused_for_want_of_an_answer_does_not_run_for_nobody(named: bool) -> None:
    broker, subjects = UnansweredBroker(), Subjects("penstock")
    await broker.ensure(*topology("penstock", ("queue",)))
    cancelled: list[str] = []
    await broker.listen(subjects.cancel_all(), lambda message: cancelled.append(message.subject))
    bridge = Bridge(broker, subjects, "b")
    await bridge.start()
    with pytest.raises(BrokerUnavailable):
        job = Job(id="r", bridge="b", body={})
        await bridge.open(job, priority="normal", tenant="default", kept=True, named=named)
    for _ in range(5):
        await asyncio.sleep(0)
    assert set(cancelled) == (set() if named else {subjects.cancel("default", "r")})
    await broker.close()
