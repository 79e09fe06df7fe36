"""What is kept for a tenant is counted, whatever it is, and bounded; a neighbour notices nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace

import pytest
import structlog

from penstock.schemas.errors import BrokerUnavailable, QuotaExceeded, StorageFull
from penstock.schemas.openai.batches import Batch
from penstock.streams.port import Broker, Bucket, Entry
from penstock.streams.stores.conversations import Conversation, Conversations
from penstock.streams.stores.objects import Objects
from penstock.streams.stores.quotas import ENTRY, FRESH, REFUSED, SELDOM, SHARE, Quotas
from penstock.streams.topology import BATCH_RESULTS, BATCH_STATES, FILES, OBJECT_DATA, RESPONSES, topology

LARGE = 10_000


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


async def data() -> AsyncIterator[bytes]:
    yield bytes(LARGE)


def batch(status: str) -> Batch:
    given = {"endpoint": "/v1/completions", "input_file_id": "f", "created_at": 0, "expires_at": 1, "tenant": "one"}
    return Batch.model_validate({**given, "id": "batch_x", "output_ttl": 1.0, "status": status})


async def held(broker: Broker, tenant: str = "one") -> int:
    """What is counted for a tenant, as a refusal says."""
    with pytest.raises(QuotaExceeded, match="are stored for you, and the setting tenant_quota allows 1") as refused:
        await Quotas(broker, 1).check(tenant)
    assert refused.value.code == "insufficient_quota" and refused.value.retry_after is None
    return int(str(refused.value).split()[0].replace(",", ""))


async def test_all_that_is_kept_is_counted(broker: Broker, namespace: str) -> None:
    await broker.ensure(*topology(namespace, ["queue"]))
    assert await held(broker) == 0
    kept = 0
    for bucket in (FILES, RESPONSES):
        await (await Objects.of(broker, bucket)).put("one.name", data(), {})
        kept += LARGE + ENTRY
        assert kept < await held(broker) < kept + 3 * ENTRY
    await (await broker.bucket(RESPONSES)).put("one.resp_x.call-1-0", b'["owner", "result"]')
    states, results = await broker.bucket(BATCH_STATES), await Objects.of(broker, BATCH_RESULTS)
    await states.put("one.batch_x", batch("in_progress").model_dump_json().encode())
    await results.put("batch_x.0", data(), {})
    assert kept + LARGE + 3 * ENTRY < await held(broker) < kept + LARGE + 7 * ENTRY
    await states.put("one.batch_x", batch("completed").model_dump_json().encode())
    assert await held(broker) < kept + 6 * ENTRY, "its results are a file by now"
    assert await held(broker, "two") == 0


async def test_what_was_let_in_counts_before_it_is_stored(broker: Broker, namespace: str) -> None:
    await broker.ensure(*topology(namespace, ["queue"]))
    clock = Clock()
    quotas = Quotas(broker, 3 * LARGE, clock)
    await quotas.check("one", LARGE)
    await quotas.check("one", LARGE)
    with pytest.raises(QuotaExceeded):
        await quotas.check("one", LARGE)
    await quotas.check("two", LARGE)
    clock.now += 2 * REFUSED  # nothing was stored, and a refusal looks again
    await quotas.check("one", 2 * LARGE)
    await (await Objects.of(broker, FILES)).put("one.a", data(), {})
    await quotas.check("one")  # the count is good for a while
    clock.now += 2 * FRESH
    with pytest.raises(QuotaExceeded):
        await quotas.check("one", 2 * LARGE)


async def test_ten_thousand_conversations_of_one_tenant(broker: Broker, namespace: str) -> None:
    await broker.ensure(*topology(namespace, ["queue"]))
    quotas, store = Quotas(broker, 1 << 20), await Conversations.of(broker)

    async def begin(tenant: str, number: int) -> None:
        await quotas.check(tenant, 2)
        await store.create(tenant, Conversation(id=f"conv_{number:032x}", created_at=1))

    refused = 0
    for number in range(10_000):
        try:
            await begin("hostile", number)
        except QuotaExceeded:
            refused += 1
        if number % 1_000 == 0:
            await begin("good", number)
    entries = await (await broker.bucket(RESPONSES)).entries("hostile.")
    assert refused == 10_000 - len(entries) and 1_000 < len(entries) < 2_048
    assert len(await (await broker.bucket(RESPONSES)).entries("good.")) == 10


async def test_one_tenant_does_not_fill_what_others_share(broker: Broker, namespace: str) -> None:
    streams, buckets = topology(namespace, ["queue"])
    small = [replace(spec, max_bytes=20 * LARGE) if spec.name in (RESPONSES, OBJECT_DATA) else spec for spec in buckets]
    await broker.ensure(streams, small)
    clock = Clock()
    quotas = Quotas(broker, 1 << 30, clock)
    files, responses = await Objects.of(broker, FILES), await broker.bucket(RESPONSES)

    async def store(bucket: str, name: str) -> None:
        await quotas.check(name.split(".")[0], LARGE, bucket)
        if bucket == RESPONSES:
            await responses.put(name, bytes(LARGE))
        else:
            await files.put(name, data(), {})

    for bucket in (RESPONSES, OBJECT_DATA):
        stored = 0
        with pytest.raises(StorageFull, match="most of it is yours") as refused:
            while True:
                await store(bucket, f"one.{stored}")
                stored += 1
                clock.now += stored % 4 * FRESH  # whether it was counted again or not
        assert refused.value.status == 507 and 15 <= stored < 19
        await store(bucket, "two.0")
        with pytest.raises(StorageFull):
            await store(bucket, "one.next")
    for info in await files.infos("one."):
        await files.delete(info)
    clock.now += 2 * FRESH
    await store(OBJECT_DATA, "one.next")


async def test_one_tenant_does_not_fill_what_describes_files(broker: Broker, namespace: str) -> None:
    streams, buckets = topology(namespace, ["queue"])
    small = [replace(spec, max_bytes=LARGE) if spec.name == FILES else spec for spec in buckets]
    await broker.ensure(streams, small)
    files, made = await Objects.of(broker, FILES), 0

    async def empty() -> AsyncIterator[bytes]:
        return
        yield b""

    with pytest.raises(StorageFull, match="most of it is yours"):
        while True:
            await Quotas(broker, 1 << 30).check("one")
            await files.put(f"one.{made}", empty(), {})
            made += 1
    assert made > 5
    await Quotas(broker, 1 << 30).check("two")
    assert await files.put("two.0", empty(), {})


async def test_one_tenant_does_not_fill_the_room_of_responses(broker: Broker, namespace: str) -> None:
    """Their bytes lie beside what describes them, and are that tenant's there."""
    streams, buckets = topology(namespace, ["queue"])
    small = [replace(spec, max_bytes=20 * LARGE) if spec.name == RESPONSES else spec for spec in buckets]
    await broker.ensure(streams, small)
    responses, made = await Objects.of(broker, RESPONSES, beside=True), 0
    with pytest.raises(StorageFull, match="most of it is yours"):
        while True:
            await Quotas(broker, 1 << 30).check("one", LARGE, RESPONSES)
            await responses.put(f"one.{made}", data(), {})
            made += 1
    assert made > 5
    await Quotas(broker, 1 << 30).check("two", LARGE, RESPONSES)
    assert await responses.put("two.0", data(), {})


async def test_what_was_let_in_takes_room_before_it_is_stored(broker: Broker, namespace: str) -> None:
    streams, buckets = topology(namespace, ["queue"])
    small = [replace(spec, max_bytes=20 * LARGE) if spec.name == RESPONSES else spec for spec in buckets]
    await broker.ensure(streams, small)
    quotas, admitted = Quotas(broker, 1 << 30, Clock()), 0
    with pytest.raises(StorageFull):
        for admitted in range(30):  # noqa: B007
            await quotas.check("one", LARGE, RESPONSES)
    assert 15 <= admitted < 19
    await quotas.check("two", LARGE, RESPONSES)


class Slow:
    """Whose buckets are scanned only as far as the gate is open."""

    def __init__(self, bucket: Bucket, monkeypatch: pytest.MonkeyPatch, patience: float) -> None:
        self.gate, self.scans = asyncio.Event(), 0
        scan = type(bucket).scan

        async def slowly(bucket: Bucket, prefix: str) -> AsyncGenerator[list[Entry], None]:
            self.scans += 1
            await self.gate.wait()
            async for entries in scan(bucket, prefix):
                yield entries

        monkeypatch.setattr(type(bucket), "scan", slowly)
        monkeypatch.setattr("penstock.streams.stores.quotas.PATIENCE", patience)


async def test_no_request_waits_until_very_much_is_counted(
    broker: Broker, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await broker.ensure(*topology(namespace, ["queue"]))
    responses = await broker.bucket(RESPONSES)
    slow, clock = Slow(responses, monkeypatch, 0.01), Clock()
    quotas = Quotas(broker, 3 * LARGE, clock)
    await responses.put("one.stored", bytes(LARGE))
    for _ in range(5):
        await quotas.check("one", 100)
    assert slow.scans == 1, "one count at a time"
    slow.gate.set()
    counting = quotas._counts["one"].counting
    assert counting is not None
    await counting
    stored, admitted = LARGE + ENTRY, 5 * (100 + ENTRY)
    with pytest.raises(QuotaExceeded, match=f"^{stored + admitted:,} bytes are stored for you"):
        await quotas.check("one", 2 * LARGE)
    await quotas.check("one", LARGE)


async def test_who_has_much_left_is_seldom_counted_where_that_takes_long(
    broker: Broker, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await broker.ensure(*topology(namespace, ["queue"]))
    responses = await broker.bucket(RESPONSES)
    slow, clock = Slow(responses, monkeypatch, 60.0), Clock()
    slow.gate.set()
    quotas = Quotas(broker, 3 * LARGE, clock)
    await quotas.check("one")
    quotas._counts["one"].took = 8.0
    await responses.put("one.stored", bytes(2 * LARGE))  # by another bridge
    clock.now += 8.0 / SHARE + 1
    await quotas.check("one")
    assert slow.scans == 3, "the first count has scanned three buckets"
    clock.now += 8.0 / SELDOM
    await quotas.check("one")
    assert slow.scans == 6
    quotas._counts["one"].took = 8.0
    clock.now += 8.0 / SHARE + 1
    await quotas.check("one")
    assert slow.scans == 9, "more than half of it is used"


async def test_a_count_that_fails_is_told_and_begun_anew(
    broker: Broker, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await broker.ensure(*topology(namespace, ["queue"]))
    responses = await broker.bucket(RESPONSES)

    async def fails(bucket: Bucket, prefix: str) -> AsyncGenerator[list[Entry], None]:
        raise BrokerUnavailable("gone")
        yield []

    with monkeypatch.context() as broken, structlog.testing.capture_logs() as logs:
        broken.setattr(type(responses), "scan", fails)
        quotas = Quotas(broker, LARGE)
        with pytest.raises(BrokerUnavailable, match="gone"):
            await quotas.check("one")
    assert [(each["event"], each["reason"]) for each in logs] == [("usage not counted", "gone")]
    await responses.put("one.stored", bytes(LARGE))
    with pytest.raises(QuotaExceeded):
        await quotas.check("one")


async def test_who_has_deleted_something_may_store_again_at_once(broker: Broker, namespace: str) -> None:
    """Though it had taken long to count what there was."""
    await broker.ensure(*topology(namespace, ["queue"]))
    clock = Clock()
    quotas, objects = Quotas(broker, LARGE + 4 * ENTRY, clock), await Objects.of(broker, FILES)
    stored = await objects.put("one.name", data(), {})
    assert stored is not None
    with pytest.raises(QuotaExceeded):
        await quotas.check("one", LARGE)
    quotas._counts["one"].took = 60.0
    await objects.delete(stored)
    with pytest.raises(QuotaExceeded):
        await quotas.check("one", LARGE)
    quotas.freed("one")
    await quotas.check("one", LARGE)
