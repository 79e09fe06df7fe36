"""Whenever a consumer of a stream in memory comes, it gets the messages on its subject, in order, each once."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.schemas.errors import Superseded
from penstock.streams.memory.broker import MemoryBroker
from penstock.streams.memory.stream import matcher
from penstock.streams.port import Consumer, ConsumerSpec, StreamSpec

SUBJECTS = ("s.a.x", "s.a.y", "s.b.x", "s.c")
PATTERNS = ("s.a.x", "s.b.x", "s.c", "s.*.x", "s.a.*", "s.>")
steps = st.lists(
    st.one_of(
        st.tuples(st.just("publish"), st.sampled_from(SUBJECTS)),
        st.tuples(st.just("open"), st.sampled_from(PATTERNS)),
        st.tuples(st.just("take"), st.sampled_from(PATTERNS)),
        st.tuples(st.just("forget"), st.sampled_from(PATTERNS)),
        st.tuples(st.just("delete"), st.integers(1, 12)),
    ),
    max_size=50,
)


async def follow(happenings: list[tuple[str, object]]) -> None:
    broker = MemoryBroker()
    await broker.ensure([StreamSpec("S", ("s.>",), "limits", "memory", max_messages=8)], [])
    stored: dict[int, str] = {}
    opened: dict[str, Consumer] = {}
    owed: dict[str, list[int]] = {}  # what each consumer has not had, by pattern

    async def take(pattern: str) -> None:
        wanted = [sequence for sequence in owed[pattern] if sequence in stored]
        got: list[int] = []
        while len(got) < len(wanted):
            async with asyncio.timeout(10):
                for delivery in await opened[pattern].take(64):
                    if delivery.message.sequence in stored:  # else it was deleted behind the consumer's back
                        got.append(delivery.message.sequence)
                    await delivery.ack()
        assert got == wanted
        owed[pattern] = []

    for number, (what, value) in enumerate(happenings):
        match what, value:
            case "publish", str():
                published = await broker.publish(value, b"", message_id=str(number))
                stored[published.sequence] = value
                for sequence in sorted(stored)[:-8]:
                    del stored[sequence]
                for pattern, sequences in owed.items():
                    if matcher(pattern).fullmatch(value):
                        sequences.append(published.sequence)
            case "open", str() if value not in opened:
                name = str(PATTERNS.index(value))
                opened[value] = await broker.consume(ConsumerSpec("S", name, value), prefetch=1)
                owed[value] = [sequence for sequence in sorted(stored) if matcher(value).fullmatch(stored[sequence])]
            case "take", str() if value in opened:
                await take(value)
            case "forget", str() if value in opened:
                await broker.forget("S", str(PATTERNS.index(value)))
                owed[value] = [sequence for sequence in sorted(stored) if matcher(value).fullmatch(stored[sequence])]
            case "delete", int():
                await broker.delete("S", value)
                stored.pop(value, None)
    for pattern in opened:
        await take(pattern)
    await broker.close()


@settings(max_examples=200, deadline=None)
@given(steps)
def test_each_consumer_gets_what_is_on_its_subject(happenings: list[tuple[str, object]]) -> None:
    asyncio.run(follow(happenings))


async def test_a_watcher_sees_what_is_stored_and_listeners_all_that_is_sent() -> None:
    broker = MemoryBroker()
    await broker.ensure([StreamSpec("S", ("s.>",), "limits", "memory")], [])
    heard: list[bytes] = []
    watched: list[tuple[int, bytes]] = []
    await broker.listen("s.>", lambda message: heard.append(message.data))
    broker.watch("S", lambda message: watched.append((message.sequence, message.data)))
    await broker.publish("s.c", b"first", message_id="1")
    await broker.publish("s.c", b"again", message_id="1")
    with pytest.raises(Superseded):
        await broker.publish("s.c", b"late", message_id="2", expect=0)
    await broker.publish("s.c", b"next", message_id="3", expect=1)
    await asyncio.sleep(0)
    assert heard == [b"first", b"again", b"late", b"next"]
    assert watched == [(1, b"first"), (2, b"next")]
