"""Responses where the broker does not show yet what was written: they wait, and lose nothing of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from office import Office, call, functions, results, said

from penstock.schemas.events import Done, Token
from penstock.schemas.wire import codec
from penstock.streams.memory.broker import MemoryBroker, MemoryBucket
from penstock.streams.port import Entry, Message

TIMES = 2  # that a read is stale


class Stale(MemoryBroker):
    """Hides, at first, the newest events of turns, and keys of the bucket `responses` that end as told."""

    def __init__(self) -> None:
        super().__init__()
        self.hides: type[Done] | type[Token] | None = None
        self.hidden_keys: tuple[str, ...] = ()
        self.reads: dict[str, int] = {}

    async def replay(self, stream: str, subject: str, after: int = 0) -> list[Message]:
        found = await super().replay(stream, subject, after)
        is_turn = stream == "EVENTS" and subject.rpartition(".")[2].count("-") == 1
        if self.hides is None or not is_turn or not found or not self._is_stale(subject):
            return found
        hidden = self.hides
        return [one for one in found if not isinstance(codec.decode_event(one.data), hidden)]

    async def bucket(self, name: str) -> MemoryBucket:
        found = await super().bucket(name)
        if name == "responses" and not isinstance(found, StaleBucket):
            found = self._buckets[name] = StaleBucket(self, found)
        return found

    def _is_stale(self, name: str) -> bool:
        self.reads[name] = self.reads.get(name, 0) + 1
        return self.reads[name] <= TIMES


class StaleBucket(MemoryBucket):
    def __init__(self, broker: Stale, bucket: MemoryBucket) -> None:
        self.__dict__.update(vars(bucket))  # it stands in its place from now on
        self._broker = broker

    async def get(self, key: str) -> Entry | None:
        found = await super().get(key)
        is_hidden = found is not None and key.endswith(self._broker.hidden_keys) and self._broker._is_stale(key)
        return None if is_hidden else found


@pytest.fixture
def office() -> Iterator[Office]:
    with asyncio.Runner() as runner:
        office = Office(runner, Stale)
        yield office
        office.close()


def add(office: Office) -> None:
    made = office.create(
        call("add", a=1, b=1), call("add", a=2, b=2), "4.", input="1 + 1, and twice that?", tools=functions()
    )
    assert (made["status"], said(made), results(made)) == ("completed", "4.", [("2", None), ("4", None)])
    assert office.done == [("add", 1, 1), ("add", 2, 2)]
    assert isinstance(office.broker, Stale) and max(office.broker.reads.values()) > TIMES
    assert office.stored(made["id"])["output"] == made["output"]


@pytest.mark.parametrize("hidden", [Done, Token])
def test_an_answer_that_cannot_be_read_yet(office: Office, hidden: type[Done] | type[Token]) -> None:
    assert isinstance(office.broker, Stale)
    office.broker.hides = hidden
    add(office)


def test_a_turn_before_the_one_that_ended_cannot_be_read_yet(office: Office) -> None:
    assert isinstance(office.broker, Stale)
    office.broker.hidden_keys = (".turn-1",)
    add(office)
