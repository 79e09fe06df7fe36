"""What responses follow: kept by reference, whole though some of it is deleted, and read a chain at a time."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from typing import Any

import orjson
import pytest
import pytest_asyncio

from penstock.schemas.errors import InvalidRequest, StreamNotFound
from penstock.schemas.loops import Begun, Ended, Items, LoopJob, Turned
from penstock.schemas.openai.responses.request import parse_responses
from penstock.simulation.clock import VirtualLoop
from penstock.streams.memory.broker import MemoryBroker
from penstock.streams.stores import history
from penstock.streams.stores.conversations import Conversation, Conversations
from penstock.streams.stores.history import COPY_AFTER, MAX_LINKS, History
from penstock.streams.stores.objects import ObjectInfo, Objects
from penstock.streams.stores.responses import ResponseLog
from penstock.streams.topology import OBJECT_DATA, RESPONSES, topology

TTL = 30 * 86400.0
TEXT = "x" * 2000
USAGE = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}


class Archive:
    """Responses that are made and deleted without a model; `time` is what their clocks say."""

    def __init__(self, broker: MemoryBroker, log: ResponseLog, conversations: Conversations) -> None:
        self.broker = broker
        self.log = log
        self.conversations = conversations
        self.time = 1e9
        self.history = self.reader()

    def reader(self) -> History:
        """Another copy of the stage, which has read nothing yet."""
        return History(self.log, self.conversations, TTL, lambda: self.time)

    def job(self, **body: Any) -> LoopJob:
        id = f"resp_{uuid.uuid4().hex}"
        asked = {"model": "m", "input": f"{id} {TEXT}", **body}
        return LoopJob(
            id=id, tenant="t", priority="normal", bridge="b", created=self.time, deadline=self.time + 60, body=asked
        )

    async def begin(self, **body: Any) -> Begun:
        job = self.job(**body)
        request = parse_responses(job.body)
        origin, input = await self.history.origin(job, request), await self.history.input(job, request)
        begun = Begun(**dict(origin), job=job, sources=(), tools=(), input=input, items=[], index=0)
        return await self.history.keep(begun)

    async def make(self, **body: Any) -> Begun:
        begun = await self.begin(**body)
        id = begun.job.id
        item = {"id": f"msg_{id[5:]}_1", "type": "message", "role": "assistant", "content": [], "status": "completed"}
        await self.log.write("t", id, Turned(turn=1, items=[item], reason="stop", usage=USAGE, index=0))
        await self.log.write("t", id, Ended(status="completed", at=self.time))
        return begun

    async def chain(self, length: int) -> list[Begun]:
        made = [await self.make()]
        for _ in range(length - 1):
            made.append(await self.make(previous_response_id=made[-1].job.id))
        return made

    async def delete(self, begun: Begun) -> None:
        stored = await self.log.read("t", begun.job.id)
        assert stored is not None
        await self.log.delete("t", stored)

    async def kept(self) -> int:
        """Bytes of it all."""
        buckets = [await self.broker.bucket(name) for name in (RESPONSES, OBJECT_DATA)]
        return sum([len(entry.value) for bucket in buckets for entry in await bucket.entries()])

    async def keys(self) -> set[str]:
        """Of all that is kept of responses and conversations, but for the fact that responses are over."""
        entries = {entry.key: entry.value for entry in await (await self.broker.bucket(RESPONSES)).entries()}
        ends = {orjson.loads(value)["version"] for key, value in entries.items() if key.endswith(".ended")}
        return {key for key in entries if not key.endswith(".ended") and key.partition(".")[0] not in ends}

    async def told(self, begun: Begun) -> list[str]:
        """The responses whose items are in its history, asked twice."""
        items = await self.reader().items(begun.job, begun)
        assert await self.history.items(begun.job, begun) == items
        return owners(items)


def owners(items: Items) -> list[str]:
    return list(dict.fromkeys(f"resp_{item['id'].split('_')[1][:32]}" for item in items))


def ids(chain: list[Begun]) -> list[str]:
    return [begun.job.id for begun in chain]


@pytest_asyncio.fixture
async def archive() -> AsyncIterator[Archive]:
    broker = MemoryBroker()
    await broker.ensure(*topology("p", ()))
    yield Archive(broker, await ResponseLog.of(broker), await Conversations.of(broker))
    await broker.close()


async def test_a_chain_takes_room_in_proportion_to_its_length(archive: Archive) -> None:
    sizes = [0]
    for _ in range(3):
        await archive.chain(40)
        sizes.append(await archive.kept())
    await archive.chain(120)
    assert await archive.kept() - sizes[-1] < 1.2 * sizes[-1]


@pytest.mark.parametrize("length", [1, 2, MAX_LINKS, MAX_LINKS + 1, MAX_LINKS + 2, 3 * MAX_LINKS])
async def test_a_history_is_the_whole_chain_in_its_order(archive: Archive, length: int) -> None:
    *before, last = await archive.chain(length)
    assert await archive.told(last) == ids(before)
    assert len(await archive.reader().items(last.job, last)) == 2 * len(before)


async def test_a_chain_is_read_many_at_a_time(archive: Archive) -> None:
    *_, last = await archive.chain(MAX_LINKS)
    reading, most = 0, 0

    class Counting(ResponseLog):
        async def read(self, tenant: str, id: str, *, hidden: bool = False) -> Any:
            nonlocal reading, most
            reading += 1
            most = max(most, reading)
            await asyncio.sleep(0)
            reading -= 1
            return await super().read(tenant, id, hidden=hidden)

    log = Counting(archive.log._entries, archive.log._ledger)
    await History(log, archive.conversations, TTL).items(last.job, last)
    assert most == MAX_LINKS - 1


async def test_short_responses_in_memory_count_for_what_they_take(
    archive: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As objects they are several times as large as they are stored."""
    monkeypatch.setattr(history, "CACHED_BYTES", 120_000)
    chains = [await archive.chain(2) for _ in range(20)]
    stored = await archive.log.read("t", chains[0][0].job.id)
    assert stored is not None and 20 * stored.size < 120_000
    read: list[str] = []

    class Noting(ResponseLog):
        async def read(self, tenant: str, id: str, *, hidden: bool = False) -> Any:
            read.append(id)
            return await super().read(tenant, id, hidden=hidden)

    reader = History(Noting(archive.log._entries, archive.log._ledger), archive.conversations, TTL)
    for _, last in (*chains, chains[0]):
        await reader.items(last.job, last)
    assert read.count(chains[0][0].job.id) == 2 and len(read) == 21


async def test_what_is_deleted_within_a_chain_stays_in_the_history_of_what_follows(archive: Archive) -> None:
    chain = await archive.chain(4)
    for deleted in (chain[1], chain[0], chain[2]):
        await archive.delete(deleted)
        assert await archive.log.read("t", deleted.job.id) is None
        with pytest.raises(StreamNotFound, match="has expired"):
            await archive.begin(previous_response_id=deleted.job.id)
    assert await archive.told(chain[3]) == ids(chain[:3])
    more = await archive.make(previous_response_id=chain[3].job.id)
    assert await archive.told(more) == ids(chain)


async def test_nothing_of_a_deleted_chain_is_kept(archive: Archive) -> None:
    chain = await archive.chain(MAX_LINKS + 3)
    branch = await archive.make(previous_response_id=chain[1].job.id)
    for deleted in chain:
        await archive.delete(deleted)
    assert await archive.told(branch) == ids(chain[:2])
    await archive.delete(branch)
    assert await archive.keys() == set()


async def test_a_response_that_is_not_stored_leaves_no_trace_at_the_one_before(archive: Archive) -> None:
    first = await archive.make()
    other = await archive.make(previous_response_id=first.job.id, store=False)
    with pytest.raises(StreamNotFound, match="has expired"):
        await archive.begin(previous_response_id=other.job.id)
    await archive.delete(other)
    await archive.delete(first)
    assert await archive.keys() == set()


async def test_of_a_deletion_and_a_response_that_follows_at_once_one_wins(archive: Archive) -> None:
    for _ in range(20):
        first = await archive.make()
        following = archive.begin(previous_response_id=first.job.id)
        begun, _ = await asyncio.gather(following, archive.delete(first), return_exceptions=True)
        if isinstance(begun, Begun):
            assert await archive.told(begun) == [first.job.id]
        else:
            assert isinstance(begun, StreamNotFound)


async def test_what_was_deleted_before_the_following_response_begins_is_not_followed(archive: Archive) -> None:
    first, second = await archive.chain(2)
    job = archive.job(previous_response_id=first.job.id)
    origin = await archive.history.origin(job, parse_responses(job.body))
    await archive.delete(first)  # hidden, for the second
    with pytest.raises(StreamNotFound, match="has expired"):
        await archive.history.keep(Begun(**dict(origin), job=job, sources=(), tools=(), input=[], items=[], index=0))
    await archive.delete(second)
    assert await archive.keys() == set()


async def test_a_chain_that_grows_old_is_copied(archive: Archive) -> None:
    first, second = await archive.chain(2)
    archive.time += TTL * COPY_AFTER + 1
    third = await archive.make(previous_response_id=second.job.id)
    assert owners(third.history) == ids([first, second]) and third.follows == ()
    fourth = await archive.make(previous_response_id=third.job.id)
    assert fourth.follows == (third.job.id,)
    for begun in (first, second):  # as if they had expired
        await archive.delete(begun)
    assert await archive.told(fourth) == ids([first, second, third])


async def test_a_history_that_was_copied_by_an_earlier_version_is_read(archive: Archive) -> None:
    job, items = archive.job(), [{"id": "msg_old_1", "type": "message", "role": "user", "content": []}]
    old = Begun(job=job, sources=(), tools=(), history=items, input=[], items=[], index=0)
    data = old.model_dump(exclude={"parts", "follows", "since"})

    async def stored() -> AsyncIterator[bytes]:
        yield orjson.dumps(data)

    await (await Objects.of(archive.broker, RESPONSES)).put(f"t.{job.id}.begun", stored(), {})
    await archive.log.write("t", job.id, Ended(status="completed", at=archive.time))
    new = await archive.make(previous_response_id=job.id)
    assert (await archive.history.items(new.job, new))[:1] == items


async def test_a_response_that_was_lost_from_a_chain_is_named(archive: Archive) -> None:
    chain = await archive.chain(3)
    info = await archive.log._entries.info(f"t.{chain[1].job.id}.begun")
    assert info is not None
    await archive.log._entries.delete(info)
    with pytest.raises(StreamNotFound, match=chain[1].job.id):
        await archive.reader().items(chain[2].job, chain[2])


def test_nothing_of_a_response_and_of_a_conversation_outlives_it() -> None:
    """Their bytes had the lifetime of files, and filled the store with what nobody could read any more."""

    async def kept() -> tuple[int, int]:
        broker = MemoryBroker()
        await broker.ensure(*topology("p", (), responses_ttl=3600.0, files_ttl=86400.0))
        archive = Archive(broker, await ResponseLog.of(broker), await Conversations.of(broker))
        await archive.make()
        await talk(archive, 2)
        before = await archive.kept()
        await asyncio.sleep(3600.0)
        return before, await archive.kept()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        before, after = runner.run(kept())
    assert before > 3 * len(TEXT) and after == 0


async def talk(archive: Archive, parts: int) -> str:
    name = f"conv_{uuid.uuid4().hex}"
    await archive.conversations.create("t", Conversation(id=name, created_at=0))
    for number in range(parts):
        item = {"id": f"msg_{number}_1", "type": "message", "role": "user", "content": TEXT}
        await archive.conversations.add("t", name, f"part{number}", [item])
    return name


async def test_the_items_of_a_conversation_are_not_copied(archive: Archive) -> None:
    name = await talk(archive, 5)
    begun = await archive.make(conversation=name)
    assert begun.history == [] and await archive.told(begun) == [f"resp_{number}" for number in range(5)]
    later = {"id": "msg_later_1", "type": "message"}
    await archive.conversations.add("t", name, "later", [later])
    assert await archive.told(begun) == [f"resp_{number}" for number in range(5)]


async def test_a_conversation_in_use_keeps_its_beginning(archive: Archive) -> None:
    """Each item expired for itself, and the model was told the rest without a word."""
    name = await talk(archive, 3)
    buckets = [await archive.broker.bucket(bucket) for bucket in (RESPONSES, OBJECT_DATA)]
    before = [(bucket, entry) for bucket in buckets for entry in await bucket.entries()]
    archive.time += TTL * COPY_AFTER + 1
    begun = await archive.make(conversation=name)
    size = await archive.kept()
    for bucket, entry in before:  # as if they had expired
        now = await bucket.get(entry.key)
        if now is not None and now.revision == entry.revision:
            await bucket.delete(entry.key)
    assert await archive.told(begun) == ["resp_0", "resp_1", "resp_2"]
    assert await archive.kept() == size, "nothing of it is stored twice"


async def test_a_conversation_is_read_while_it_is_renewed(archive: Archive) -> None:
    name, parts = await talk(archive, 1), archive.conversations._parts
    conversation, key = await archive.conversations.read("t", name), f"t.{name}.part0"
    seen = [await parts.info(key)]
    await parts.renew(key)

    class Slow(Objects):
        async def info(self, name: str) -> ObjectInfo | None:
            return seen.pop() if seen else await super().info(name)

    slow = Slow(parts._infos, parts._data, parts._chunk, parts.now)
    assert conversation is not None
    (item,) = await Conversations(archive.conversations._heads, slow).items("t", conversation)
    assert item["content"] == TEXT


async def test_a_deleted_conversation_is_kept_for_its_responses(archive: Archive) -> None:
    name, unused = await talk(archive, 3), await talk(archive, 1)
    begun = await archive.make(conversation=name)
    await archive.conversations.add("t", name, "later", [{"id": "msg_later_1"}])
    for one in (name, unused):
        found = await archive.conversations.read("t", one)
        assert found is not None
        await archive.conversations.delete("t", found)
        assert await archive.conversations.read("t", one) is None
        with pytest.raises(InvalidRequest, match="no conversation"):
            await archive.begin(conversation=one)
        await archive.conversations.add("t", one, "late", [{"id": "msg_late_1"}])
    follower = await archive.make(previous_response_id=begun.job.id)
    assert await archive.told(follower) == ["resp_0", "resp_1", "resp_2", begun.job.id]
    assert {key for key in await archive.keys() if ".conv_" in key} == {
        f"t.{name}",
        *(f"t.{name}.part{number}" for number in range(3)),
    }
