"""Objects in the buckets of both brokers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from penstock.schemas.errors import BrokerUnavailable, PayloadTooLarge
from penstock.streams.port import Broker, BucketSpec
from penstock.streams.stores.objects import POLL_INTERVAL, ObjectInfo, Objects
from penstock.streams.topology import OBJECT_DATA

BIG = bytes(range(256)) * 12_000  # 3 MB: more than one message holds


@pytest_asyncio.fixture
async def objects(broker: Broker) -> Objects:
    await broker.ensure([], [BucketSpec("files"), BucketSpec(OBJECT_DATA)])
    return await Objects.of(broker, "files")


async def stream(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


async def broken() -> AsyncIterator[bytes]:
    yield BIG
    raise ValueError("broken on purpose")


async def put(objects: Objects, name: str, *parts: bytes) -> ObjectInfo:
    info = await objects.put(name, stream(*parts), {})
    assert info is not None
    return info


async def content(objects: Objects, info: ObjectInfo) -> bytes:
    return b"".join([piece async for piece in objects.read(info)])


async def pieces_of(broker: Broker) -> int:
    return len(await (await broker.bucket(OBJECT_DATA)).entries())


@pytest.mark.parametrize("parts", [(), (b"",), (b"one", b"", b"two"), (BIG,), (BIG[:1000], BIG[1000:300_000], b"x")])
async def test_gives_back_what_was_put(objects: Objects, parts: tuple[bytes, ...]) -> None:
    info = await objects.put("tenant.name", stream(*parts), {"purpose": "bätch"})
    assert info is not None
    assert (info.name, info.size, info.about) == ("tenant.name", len(b"".join(parts)), {"purpose": "bätch"})
    assert await objects.info("tenant.name") == info
    assert await content(objects, info) == b"".join(parts)


async def test_reads_in_pieces(objects: Objects) -> None:
    sizes = [len(piece) async for piece in objects.read(await put(objects, "big", BIG))]
    assert max(sizes) <= 1 << 20
    assert sum(sizes) == len(BIG)


async def test_lists_in_order_and_by_prefix(objects: Objects) -> None:
    assert await objects.info("none") is None
    assert await objects.infos() == []
    infos = [await put(objects, name, b"x") for name in ("one.b", "two.a", "one.a")]
    assert await objects.infos() == infos
    assert await objects.infos("one.") == [infos[0], infos[2]]


async def test_the_first_of_a_name_stands(objects: Objects, broker: Broker) -> None:
    first = await put(objects, "name", BIG)
    before = await pieces_of(broker)
    assert await objects.put("name", stream(b"second", BIG), {}) is None
    assert await objects.infos() == [first]
    assert await content(objects, first) == BIG
    assert await pieces_of(broker) == before


async def test_deletes(objects: Objects, broker: Broker) -> None:
    gone, kept = await put(objects, "gone", BIG), await put(objects, "kept", b"kept")
    await objects.delete(gone)
    await objects.delete(gone)
    assert await objects.infos() == [kept]
    assert await content(objects, kept) == b"kept"
    assert await pieces_of(broker) == 1
    assert await content(objects, await put(objects, "gone", b"again")) == b"again"


async def test_what_has_its_bytes_elsewhere_is_still_read_and_deleted_where_new_ones_have_them_beside(
    objects: Objects, broker: Broker
) -> None:
    old, kept = await put(objects, "old", b"old"), await put(objects, "kept", BIG)
    now = await Objects.of(broker, "files", beside=True)
    new = await put(now, "new", b"new")
    assert [await content(objects, info) for info in (old, new)] == [b"old", b"new"]
    await now.delete(old)
    await now.renew("kept")
    assert await pieces_of(broker) == 0, "what is renewed moves"
    renewed = await now.info("kept")
    assert renewed is not None and renewed != kept and await content(now, renewed) == BIG
    for info in (new, renewed):
        await now.delete(info)
    assert await (await broker.bucket("files")).entries() == []


async def test_a_source_that_fails_changes_nothing(objects: Objects, broker: Broker) -> None:
    before = await put(objects, "name", b"before")
    for name in ("name", "new"):
        with pytest.raises(ValueError, match="on purpose"):
            await objects.put(name, broken(), {})
    assert await objects.infos() == [before]
    assert await pieces_of(broker) == 1


async def test_a_reader_learns_that_its_object_has_gone(objects: Objects) -> None:
    info = await put(objects, "name", BIG)
    found = objects.read(info)
    await anext(found)
    await objects.delete(info)
    with pytest.raises(BrokerUnavailable):
        await anext(found)


async def test_pieces_that_cannot_be_read_yet_are_waited_for(objects: Objects, broker: Broker) -> None:
    info = await put(objects, "name", BIG)
    data = await broker.bucket(OBJECT_DATA)
    key = f"{info.version}.1"
    entry = await data.get(key)
    assert entry is not None
    await data.delete(key)
    found = objects.read(info)
    first = await anext(found)
    second = asyncio.ensure_future(anext(found))
    await asyncio.wait([second], timeout=2 * POLL_INTERVAL)
    assert not second.done()
    await data.put(key, entry.value)
    assert b"".join([first, await second, *[piece async for piece in found]]) == BIG


async def test_many_at_once(objects: Objects) -> None:
    names = [f"n{index}" for index in range(8)]
    infos = await asyncio.gather(*(put(objects, name, name.encode(), BIG[:200_000]) for name in names))
    read = await asyncio.gather(*(content(objects, info) for info in infos))
    assert read == [name.encode() + BIG[:200_000] for name in names]
    same = await asyncio.gather(*(objects.put("same", stream(bytes([value]) * 300_000), {}) for value in range(8)))
    ((value, info),) = [(value, info) for value, info in enumerate(same) if info is not None]
    assert await content(objects, info) == bytes([value]) * 300_000


async def test_a_bucket_refuses_what_only_an_object_can_hold(broker: Broker, objects: Objects) -> None:
    large = bytes(broker.max_payload)
    values = await broker.bucket("files")
    for write in (values.put, values.create):
        with pytest.raises(PayloadTooLarge):
            await write("key", large)
    assert await values.get("key") is None
    assert await content(objects, await put(objects, "key", large)) == large
