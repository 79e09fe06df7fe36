"""Who holds a share, and how soon another takes the share of a process that has died."""

from __future__ import annotations

import asyncio
import os
from typing import Any, cast

import pytest

from penstock.config.process import host
from penstock.config.settings import Settings
from penstock.schemas.errors import BrokerUnavailable
from penstock.stages import Pipe, Stage
from penstock.stages.batch.stage import Batch
from penstock.stages.cancellations import Cancellations
from penstock.stages.leases import Leases
from penstock.stages.queue import Queue
from penstock.stages.stream import Stream
from penstock.stages.validate.stage import Validate
from penstock.streams.memory.broker import MemoryBroker
from penstock.streams.port import Bucket, BucketSpec
from penstock.streams.stores.registry import Registry
from penstock.streams.topology import Subjects

LONG = 3600.0  # seconds; nobody waits for a lease to run out here


async def bucket_with(*entries: tuple[str, str]) -> Bucket:
    broker = MemoryBroker()
    await broker.ensure([], [BucketSpec("leases", ttl=LONG)])
    bucket = await broker.bucket("leases")
    for key, value in entries:
        await bucket.put(key, value.encode())
    return bucket


async def held_after_one_look(bucket: Bucket, shares: int) -> set[int]:
    """What a new copy has gained when it has looked once, at all shares."""
    gained: set[int] = set()

    async def gain(share: int) -> None:
        gained.add(share)

    async def lose(share: int) -> None:
        gained.discard(share)

    leases = Leases(bucket, "stream", shares, interval=LONG)
    await leases._renew(gain, lose)
    return gained


async def test_shares_of_a_process_that_died_here_are_free_at_once(dead: int) -> None:
    name = f"one {dead} {host()}"
    bucket = await bucket_with(("stream.member.one", name), *((f"stream.share.{share}", name) for share in range(4)))
    assert await held_after_one_look(bucket, 4) == {0, 1, 2, 3}


@pytest.mark.parametrize("holder", ["one {dead} elsewhere", "one", "one {alive} {host}"])
async def test_shares_of_who_may_live_are_waited_for(dead: int, holder: str) -> None:
    """On another host, of the version before, or alive."""
    name = holder.format(dead=dead, alive=os.getpid(), host=host())
    bucket = await bucket_with(("stream.member.one", name), ("stream.share.0", name), ("stream.share.1", name))
    assert await held_after_one_look(bucket, 4) == {2, 3}


@pytest.mark.parametrize(("kind", "seconds"), [(Validate, 5.0), (Queue, 5.0), (Batch, 15.0), (Stream, 15.0)])
async def test_only_what_may_be_done_twice_is_lent_for_less_than_an_election(kind: type[Stage], seconds: float) -> None:
    settings, broker = Settings(backend="echo", nats_replicas=3), MemoryBroker()
    registry = Registry(broker, interval=1.0)
    pipe = Pipe(broker, Subjects("p"), settings, registry, Cancellations())
    assert kind(pipe).lease == seconds


async def test_no_renewal_is_on_its_way_when_the_next_round_begins() -> None:
    """A second one of the same share would find that somebody has written it, and the share would count as lost."""

    class Slow:
        def __init__(self, bucket: Bucket) -> None:
            self._bucket = bucket
            self.may_answer = asyncio.Event()

        def __getattr__(self, name: str) -> Any:
            return getattr(self._bucket, name)

        async def update(self, key: str, value: bytes, revision: int) -> int | None:
            if key == "stream.share.0":
                raise BrokerUnavailable("no answer")
            await self.may_answer.wait()
            return await self._bucket.update(key, value, revision)

    bucket = await bucket_with()
    lost: list[int] = []

    async def gain(share: int) -> None:
        pass

    async def lose(share: int) -> None:
        lost.append(share)

    leases = Leases(bucket, "stream", 4, interval=LONG)
    await leases._renew(gain, lose)
    slow = Slow(bucket)
    leases._bucket = cast(Bucket, slow)
    renewing = asyncio.create_task(leases._renew(gain, lose))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not renewing.done()
    slow.may_answer.set()
    with pytest.raises(BrokerUnavailable):
        await renewing
    leases._bucket = bucket
    await leases._renew(gain, lose)
    assert lost == [] and set(leases._held) == {0, 1, 2, 3}


async def test_a_dead_holder_s_share_goes_to_one(dead: int) -> None:
    name = f"one {dead} {host()}"
    bucket = await bucket_with(*((f"stream.share.{share}", name) for share in range(8)))
    held = await asyncio.gather(*(held_after_one_look(bucket, 8) for _ in range(3)))
    assert sorted(share for shares in held for share in shares) == sorted(set().union(*held))
