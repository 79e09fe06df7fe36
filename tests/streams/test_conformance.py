"""What `port` promises, asked of both brokers. A broken promise shows as an assertion or as a wait without end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Literal

import pytest

from penstock.schemas.errors import BrokerUnavailable, PayloadTooLarge, StartupError, StreamFull, Superseded
from penstock.streams.port import MESSAGE_ID, Broker, BucketSpec, Consumer, ConsumerSpec, Delivery, Message, StreamSpec

PATIENCE = 10.0  # seconds until a wait counts as endless
LEASE = 0.3
LONG_LEASE = 60.0  # longer than any test: what comes again does so for another reason
POLL = 0.02


@pytest.fixture
def queue(namespace: str) -> Callable[..., StreamSpec]:
    def spec(**limits: Any) -> StreamSpec:
        return StreamSpec("QUEUE", (f"{namespace}.queue.>",), "work_queue", "memory", discard="new", **limits)

    return spec


@pytest.fixture
def relay(namespace: str) -> Callable[..., StreamSpec]:
    def spec(**limits: Any) -> StreamSpec:
        return StreamSpec("RELAY", (f"{namespace}.relay.>",), "limits", "memory", **limits)

    return spec


Spec = Callable[..., StreamSpec]


def reader(namespace: str, *, ack_wait: float = LONG_LEASE, **settings: Any) -> ConsumerSpec:
    return ConsumerSpec("QUEUE", "reader", f"{namespace}.queue.>", ack_wait=ack_wait, **settings)


async def take(consumer: Consumer, count: int) -> list[Delivery]:
    taken: list[Delivery] = []
    async with asyncio.timeout(PATIENCE):
        while len(taken) < count:
            taken += await consumer.take(count - len(taken))
    return taken


async def eventually(condition: Callable[[], Awaitable[bool]]) -> None:
    """For what a broker does in its own time and tells nobody."""
    async with asyncio.timeout(PATIENCE):
        while not await condition():  # noqa: ASYNC110
            await asyncio.sleep(POLL)


async def put(broker: Broker, subject: str, *names: str) -> None:
    for name in names:
        await broker.publish(subject, name.encode(), message_id=name)


def names(deliveries: list[Delivery]) -> list[str]:
    return [delivery.message.data.decode() for delivery in deliveries]


async def test_delivers_what_was_published_in_the_order_of_the_calls(
    broker: Broker, namespace: str, queue: Spec
) -> None:
    await broker.ensure([queue()], [])
    consumer = await broker.consume(reader(namespace), prefetch=16)
    order = [f"m{index}" for index in range(200)]
    published = await asyncio.gather(
        *(broker.publish(f"{namespace}.queue.a", name.encode(), message_id=name) for name in order)
    )
    assert [result.sequence for result in published] == list(range(1, 201))
    received = []
    for _ in order:
        (delivery,) = await take(consumer, 1)
        await delivery.ack()
        received.append(delivery)
    assert names(received) == order
    assert [delivery.message.sequence for delivery in received] == list(range(1, 201))
    assert {delivery.attempt for delivery in received} == {1}


async def test_a_delivery_carries_subject_headers_and_message_id(broker: Broker, namespace: str, queue: Spec) -> None:
    await broker.ensure([queue()], [])
    await broker.publish(f"{namespace}.queue.a", b"data", message_id="one", headers={"Penstock-Next": "there"})
    consumer = await broker.consume(reader(namespace), prefetch=1)
    (delivery,) = await take(consumer, 1)
    assert delivery.message.subject == f"{namespace}.queue.a"
    assert delivery.message.data == b"data"
    assert delivery.message.headers["Penstock-Next"] == "there"
    assert delivery.message.headers[MESSAGE_ID] == "one"


async def test_a_consumer_goes_on_with_a_stream_that_is_removed_and_made_again(
    broker: Broker, namespace: str, queue: Spec
) -> None:
    await broker.ensure([queue()], [])
    consumer = await broker.consume(reader(namespace), prefetch=4)
    await put(broker, f"{namespace}.queue.a", "taken", "unread")
    (taken,) = await take(consumer, 1)
    await broker.remove(queue().name)
    await broker.ensure([queue()], [])
    await taken.ack()  # of a message that is no more
    await put(broker, f"{namespace}.queue.a", "new")
    found = ["unread"]  # some may have arrived before the stream was removed
    while found == ["unread"]:
        (delivery,) = await take(consumer, 1)
        await delivery.ack()
        found = names([delivery])
    assert found == ["new"]
    assert (delivery.message.sequence, delivery.attempt) == (1, 1)


async def test_comes_again_when_the_lease_runs_out(broker: Broker, namespace: str, queue: Spec) -> None:
    await broker.ensure([queue()], [])
    await put(broker, f"{namespace}.queue.a", "m1")
    consumer = await broker.consume(reader(namespace, ack_wait=LEASE), prefetch=1)
    (first,) = await take(consumer, 1)
    (second,) = await take(consumer, 1)
    assert (first.attempt, second.attempt) == (1, 2)
    assert second.message == first.message


async def test_a_lease_that_ran_out_in_the_buffer_is_not_handed_out(
    broker: Broker, namespace: str, queue: Spec
) -> None:
    await broker.ensure([queue()], [])
    idle = await broker.consume(reader(namespace, ack_wait=LEASE), prefetch=1)
    await put(broker, f"{namespace}.queue.a", "m1")
    busy = await broker.consume(reader(namespace, ack_wait=LEASE), prefetch=1)
    # Two leases long, since the first one began at the server, perhaps well before its message was received here.
    for attempt in (2, 3):
        (delivery,) = await take(busy, 1)
        assert (names([delivery]), delivery.attempt >= attempt) == (["m1"], True)
    await delivery.ack()
    waiting = asyncio.create_task(take(idle, 1))
    await put(broker, f"{namespace}.queue.a", "m2", "m3")
    (given,) = await waiting
    # If that lease expired too before its ack arrived, there is another one, which is good.
    assert names([given]) != ["m1"] or given.attempt > delivery.attempt


async def test_is_not_delivered_again_after_an_ack(broker: Broker, namespace: str, queue: Spec) -> None:
    await broker.ensure([queue()], [])
    await put(broker, f"{namespace}.queue.a", "m1", "m2")
    consumer = await broker.consume(reader(namespace, ack_wait=LEASE), prefetch=2)
    first, _ = await take(consumer, 2)
    await first.ack()
    for attempt in (2, 3):
        (again,) = await take(consumer, 1)
        assert (names([again]), again.attempt) == (["m2"], attempt)


async def test_in_progress_extends_the_lease(broker: Broker, namespace: str, queue: Spec) -> None:
    await broker.ensure([queue()], [])
    await put(broker, f"{namespace}.queue.a", "alive", "left")
    consumer = await broker.consume(reader(namespace, ack_wait=LEASE), prefetch=2)
    alive, _ = await take(consumer, 2)

    async def work() -> None:
        while True:
            await alive.in_progress()
            await asyncio.sleep(LEASE / 6)

    working = asyncio.create_task(work())
    again = [delivery for _ in range(3) for delivery in await take(consumer, 1)]
    working.cancel()
    assert names(again) == ["left", "left", "left"]
    while "alive" not in names(await take(consumer, 1)):
        pass


async def test_nak_delivers_again_at_once(broker: Broker, namespace: str, queue: Spec) -> None:
    await broker.ensure([queue()], [])
    await put(broker, f"{namespace}.queue.a", "m1")
    consumer = await broker.consume(reader(namespace), prefetch=1)
    (delivery,) = await take(consumer, 1)
    await delivery.nak()
    (again,) = await take(consumer, 1)
    assert again.attempt == 2


async def test_nak_with_a_delay_lets_others_pass(broker: Broker, namespace: str, queue: Spec) -> None:
    await broker.ensure([queue()], [])
    await put(broker, f"{namespace}.queue.a", "m1")
    consumer = await broker.consume(reader(namespace), prefetch=1)
    (delivery,) = await take(consumer, 1)
    await delivery.nak(delay=1.0)
    others = [f"m{index}" for index in range(2, 12)]
    await put(broker, f"{namespace}.queue.a", *others)
    assert names([delivery for _ in range(11) for delivery in await take(consumer, 1)]) == [*others, "m1"]


async def test_term_ends_a_message(broker: Broker, namespace: str, queue: Spec) -> None:
    await broker.ensure([queue(max_messages=2)], [])
    await put(broker, f"{namespace}.queue.a", "poison", "m2")
    consumer = await broker.consume(reader(namespace, ack_wait=LEASE), prefetch=2)
    poison, _ = await take(consumer, 2)
    await poison.term("cannot be read")
    assert names(await take(consumer, 2)) == ["m2", "m2"]

    async def has_room() -> bool:
        try:
            await put(broker, f"{namespace}.queue.a", "m3")
        except StreamFull:
            return False
        return True

    await eventually(has_room)


async def test_is_delivered_no_more_than_max_deliver_times(broker: Broker, namespace: str, queue: Spec) -> None:
    await broker.ensure([queue()], [])
    await put(broker, f"{namespace}.queue.a", "m1")
    consumer = await broker.consume(reader(namespace, max_deliver=2), prefetch=1)
    for attempt in (1, 2):
        (delivery,) = await take(consumer, 1)
        assert delivery.attempt == attempt
        await delivery.nak()
    others = [f"m{index}" for index in range(2, 12)]
    await put(broker, f"{namespace}.queue.a", *others)
    assert names([delivery for _ in others for delivery in await take(consumer, 1)]) == others


async def test_lends_no_more_than_max_ack_pending(broker: Broker, namespace: str, queue: Spec) -> None:
    await broker.ensure([queue()], [])
    consumer = await broker.consume(reader(namespace, max_ack_pending=2), prefetch=10)
    await put(broker, f"{namespace}.queue.a", "m1", "m2", "m3")
    first, _ = await take(consumer, 2)
    third = asyncio.create_task(take(consumer, 1))
    # What was on its way is here once something sent later has come back.
    await put(broker, f"{namespace}.queue.a", "m4")
    assert not third.done()
    await first.ack()
    assert names(await third) == ["m3"]


async def test_copies_of_a_consumer_share_the_messages(broker: Broker, namespace: str, queue: Spec) -> None:
    await broker.ensure([queue()], [])
    copies = [await broker.consume(reader(namespace), prefetch=1) for _ in range(2)]
    await put(broker, f"{namespace}.queue.a", "m1", "m2", "m3", "m4")
    received = [delivery for copy in (*copies, *copies) for delivery in await take(copy, 1)]
    assert sorted(names(received)) == ["m1", "m2", "m3", "m4"]


async def test_a_consumer_gets_only_its_subject(broker: Broker, namespace: str, queue: Spec) -> None:
    await broker.ensure([queue()], [])
    spec = ConsumerSpec("QUEUE", "of-b", f"{namespace}.queue.*.b", ack_wait=LONG_LEASE)
    consumer = await broker.consume(spec, prefetch=4)
    for place in ("x.a", "x.b", "y.b", "y.c"):
        await put(broker, f"{namespace}.queue.{place}", place)
    assert names(await take(consumer, 2)) == ["x.b", "y.b"]


async def test_two_consumers_cannot_claim_one_subject_of_a_work_queue(
    broker: Broker, namespace: str, queue: Spec
) -> None:
    await broker.ensure([queue()], [])
    await broker.consume(reader(namespace), prefetch=1)
    with pytest.raises(StartupError):
        await broker.consume(ConsumerSpec("QUEUE", "other", f"{namespace}.queue.a"), prefetch=1)


async def test_a_consumer_of_no_stream_is_refused(broker: Broker, namespace: str) -> None:
    with pytest.raises(StartupError, match="not found"):
        await broker.consume(reader(namespace), prefetch=1)


async def test_close_returns_what_nobody_took(broker: Broker, namespace: str, queue: Spec) -> None:
    await broker.ensure([queue()], [])
    await put(broker, f"{namespace}.queue.a", "m1", "m2", "m3", "m4")
    closing = await broker.consume(reader(namespace), prefetch=4)
    (taken,) = await take(closing, 1)
    await taken.ack()
    await closing.close()
    assert await closing.take(1) == []
    other = await broker.consume(reader(namespace), prefetch=4)
    assert sorted(names(await take(other, 3))) == ["m2", "m3", "m4"]


async def test_close_wakes_whoever_waits(broker: Broker, namespace: str, queue: Spec) -> None:
    await broker.ensure([queue()], [])
    consumer = await broker.consume(reader(namespace), prefetch=1)
    waiting = asyncio.create_task(consumer.take(1))
    await asyncio.sleep(0)
    await broker.close()
    async with asyncio.timeout(PATIENCE):
        assert await waiting == []
    assert not broker.connected


async def test_takeover_gives_the_new_holder_what_was_not_acked(broker: Broker, namespace: str, relay: Spec) -> None:
    await broker.ensure([relay()], [])
    spec = ConsumerSpec("RELAY", "share-0", f"{namespace}.relay.>", ack_wait=LONG_LEASE, takeover=True)
    await put(broker, f"{namespace}.relay.a", "m1", "m2", "m3")
    former = await broker.consume(spec, prefetch=8)
    acked, *_ = await take(former, 3)
    await acked.ack()
    successor = await broker.consume(spec, prefetch=8)
    received = await take(successor, 2)
    while names(received)[-1] != "m3":  # m1 may be among them: nobody promises when an ack is heard
        received += await take(successor, 1)
    assert names(received)[-2:] == ["m2", "m3"]
    waiting = asyncio.create_task(former.take(1))
    later = [f"later{index}" for index in range(20)]
    await put(broker, f"{namespace}.relay.a", *later)
    assert sorted(names(await take(successor, 20))) == sorted(later)
    assert not waiting.done()
    await former.close()
    assert await waiting == []


async def test_a_full_stream_refuses(broker: Broker, namespace: str, queue: Spec) -> None:
    await broker.ensure([queue(max_messages=2)], [])
    await put(broker, f"{namespace}.queue.a", "m1", "m2")
    with pytest.raises(StreamFull, match="maximum messages"):
        await put(broker, f"{namespace}.queue.a", "m3")


async def test_a_stream_full_of_bytes_refuses(broker: Broker, namespace: str, queue: Spec) -> None:
    await broker.ensure([queue(max_bytes=2_000)], [])
    await broker.publish(f"{namespace}.queue.a", bytes(1_000), message_id="m1")
    with pytest.raises(StreamFull, match="maximum bytes") as full:
        await broker.publish(f"{namespace}.queue.a", bytes(1_000), message_id="m2")
    assert not full.value.storage, "messages wait, and go by themselves"


async def test_a_full_subject_refuses_and_others_do_not(broker: Broker, namespace: str, queue: Spec) -> None:
    await broker.ensure([queue(max_messages_per_subject=1)], [])
    await put(broker, f"{namespace}.queue.a", "m1")
    with pytest.raises(StreamFull, match="per subject"):
        await put(broker, f"{namespace}.queue.a", "m2")
    await put(broker, f"{namespace}.queue.b", "m3")


async def test_acks_make_room(broker: Broker, namespace: str, queue: Spec) -> None:
    await broker.ensure([queue(max_messages=1)], [])
    await put(broker, f"{namespace}.queue.a", "m1")
    consumer = await broker.consume(reader(namespace), prefetch=1)
    (delivery,) = await take(consumer, 1)
    with pytest.raises(StreamFull):
        await put(broker, f"{namespace}.queue.a", "m2")
    await delivery.ack()

    async def has_room() -> bool:
        try:
            await put(broker, f"{namespace}.queue.a", "m2")
        except StreamFull:
            return False
        return True

    await eventually(has_room)


async def test_an_id_is_stored_once(broker: Broker, namespace: str, queue: Spec) -> None:
    await broker.ensure([queue()], [])
    first = await broker.publish(f"{namespace}.queue.a", b"1", message_id="same")
    consumer = await broker.consume(reader(namespace), prefetch=1)
    (delivery,) = await take(consumer, 1)
    await delivery.ack()
    second = await broker.publish(f"{namespace}.queue.a", b"2", message_id="same")
    assert (first.duplicate, second.duplicate) == (False, True)
    assert second.sequence == first.sequence
    third = await broker.publish(f"{namespace}.queue.a", b"3", message_id="other")
    assert third.sequence == first.sequence + 1


async def test_too_large_a_message_is_refused_with_its_headers_counted(
    broker: Broker, namespace: str, queue: Spec
) -> None:
    await broker.ensure([queue()], [])
    most = broker.max_payload
    with pytest.raises(PayloadTooLarge):
        await broker.publish(f"{namespace}.queue.a", bytes(most), message_id="m1")
    await broker.publish(f"{namespace}.queue.a", bytes(most - 100), message_id="m2")


@pytest.mark.parametrize("patience", [1.0])
async def test_a_subject_of_no_stream_is_unavailable(broker: Broker, namespace: str) -> None:
    with pytest.raises(BrokerUnavailable):
        await put(broker, f"{namespace}.nowhere", "m1")


async def test_old_messages_make_room(broker: Broker, namespace: str, relay: Spec) -> None:
    await broker.ensure([relay(max_messages=2)], [])
    await put(broker, f"{namespace}.relay.a", "m1", "m2", "m3")
    kept = await broker.replay("RELAY", f"{namespace}.relay.a")
    assert [message.data for message in kept] == [b"m2", b"m3"]


async def test_a_subject_keeps_its_newest(broker: Broker, namespace: str, relay: Spec) -> None:
    await broker.ensure([relay(max_messages_per_subject=1)], [])
    await put(broker, f"{namespace}.relay.a", "m1", "m2")
    await put(broker, f"{namespace}.relay.b", "m3")
    assert [message.data for message in await broker.replay("RELAY", f"{namespace}.relay.a")] == [b"m2"]
    assert [message.data for message in await broker.replay("RELAY", f"{namespace}.relay.b")] == [b"m3"]


async def test_messages_age(broker: Broker, namespace: str, relay: Spec) -> None:
    await broker.ensure([relay(max_age=0.3)], [])
    await put(broker, f"{namespace}.relay.a", "m1")

    async def is_gone() -> bool:
        return not await broker.replay("RELAY", f"{namespace}.relay.a")

    await eventually(is_gone)


async def test_replay_returns_one_subject_in_order_after_a_sequence(
    broker: Broker, namespace: str, relay: Spec
) -> None:
    await broker.ensure([relay()], [])
    count = 1_100  # more than two batches
    await asyncio.gather(
        *(
            broker.publish(f"{namespace}.relay.{'ab'[index % 2]}", b"%d" % index, message_id=f"m{index}")
            for index in range(2 * count)
        )
    )
    stored = await broker.replay("RELAY", f"{namespace}.relay.a")
    assert [message.sequence for message in stored] == list(range(1, 2 * count, 2))
    assert stored[7] == Message(f"{namespace}.relay.a", b"14", {MESSAGE_ID: "m14"}, 15)
    assert await broker.replay("RELAY", f"{namespace}.relay.a", after=15) == stored[8:]
    assert await broker.replay("RELAY", f"{namespace}.relay.a", after=2 * count) == []
    assert await broker.replay("RELAY", f"{namespace}.relay.c") == []


async def test_what_no_stream_takes_is_refused_by_one_of_a_group(broker: Broker, namespace: str, relay: Spec) -> None:
    await broker.ensure([relay()], [])
    asked: list[str] = []

    def why(message: Message) -> str | None:
        asked.append(message.subject)
        return None if "relay" in message.subject else "there is no such lane"

    refusers = [await broker.refuse(f"{namespace}.>", "door", why) for _ in range(2)]
    with pytest.raises(BrokerUnavailable, match="there is no such lane"):
        await broker.publish(f"{namespace}.odd", b"", message_id="m1")
    stored = await broker.publish(f"{namespace}.relay.1", b"", message_id="m2")
    await broker.notify(f"{namespace}.odd", b"")
    async with asyncio.timeout(PATIENCE):
        while asked.count(f"{namespace}.odd") < 2:  # noqa: ASYNC110
            await asyncio.sleep(0)
    assert asked.count(f"{namespace}.odd") == 2
    assert [message.sequence for message in await broker.replay("RELAY", f"{namespace}.relay.1")] == [stored.sequence]
    for refuser in refusers:
        await refuser.close()


async def test_listeners_hear_what_is_stored_and_what_is_told(broker: Broker, namespace: str, relay: Spec) -> None:
    await broker.ensure([relay()], [])
    heard: asyncio.Queue[Message] = asyncio.Queue()
    await broker.listen(f"{namespace}.*.x.*", heard.put_nowait)
    silent: list[Message] = []
    closed = await broker.listen(f"{namespace}.>", silent.append)
    await broker.notify(f"{namespace}.control.y.1", b"on its way at the close")
    await closed.close()
    await broker.publish(f"{namespace}.relay.y.1", b"another's", message_id="m0")
    await broker.publish(f"{namespace}.relay.x.1", b"stored", message_id="m1", headers={"traceparent": "t"})
    await broker.notify(f"{namespace}.control.x.2", b"told")
    async with asyncio.timeout(PATIENCE):
        first, second = await heard.get(), await heard.get()
    assert (first.subject, first.data, first.headers["traceparent"]) == (f"{namespace}.relay.x.1", b"stored", "t")
    assert (second.subject, second.data, second.sequence) == (f"{namespace}.control.x.2", b"told", 0)
    assert heard.empty()
    assert not silent


async def test_what_is_stored_has_its_time(broker: Broker, namespace: str, queue: Spec) -> None:
    await broker.ensure([queue()], [])
    before = time.time()
    await put(broker, f"{namespace}.queue.a", "m1")
    consumer = await broker.consume(reader(namespace), prefetch=1)
    (delivery,) = await take(consumer, 1)
    (replayed,) = await broker.replay("QUEUE", f"{namespace}.queue.a")
    last = await broker.last("QUEUE", f"{namespace}.queue.a")
    assert last is not None
    for message in (delivery.message, replayed, last):
        assert int(before) <= message.time <= time.time() + 1


async def test_ensure_changes_nothing_and_reconfigure_does(broker: Broker, namespace: str, queue: Spec) -> None:
    bucket = BucketSpec("state", max_bytes=1_000)
    await broker.ensure([queue(max_messages=1)], [bucket])
    await put(broker, f"{namespace}.queue.a", "m1")
    await broker.ensure([queue(max_messages=1)], [bucket])
    with pytest.raises(StreamFull):
        await put(broker, f"{namespace}.queue.a", "m2")
    large = ([queue(max_messages=2)], [BucketSpec("state"), BucketSpec("more")])
    await broker.ensure(*large)
    with pytest.raises(StreamFull):
        await put(broker, f"{namespace}.queue.a", "m2")
    with pytest.raises(StreamFull):
        await (await broker.bucket("state")).put("key", bytes(2_000))
    await broker.reconfigure(*large)
    await put(broker, f"{namespace}.queue.a", "m2")
    await (await broker.bucket("state")).put("key", bytes(2_000))
    await (await broker.bucket("more")).put("key", b"")


@pytest.mark.parametrize("discard", ["new", "old"])
async def test_a_full_bucket_refuses_or_forgets(broker: Broker, discard: Literal["new", "old"]) -> None:
    await broker.ensure([], [BucketSpec("state", discard=discard, max_bytes=5_000)])
    bucket = await broker.bucket("state")
    for key in "abc":
        await bucket.put(key, bytes(1_200))
    if discard == "old":
        await bucket.put("d", bytes(2_000))
        assert [entry.key for entry in await bucket.entries()] == ["b", "c", "d"]
        return
    with pytest.raises(StreamFull) as full:
        await bucket.put("d", bytes(2_000))
    assert full.value.storage
    await bucket.put("a", bytes(1_200))  # in place of what it held
    await bucket.delete("b")
    await bucket.put("d", bytes(2_000))


async def test_ensure_refuses_what_cannot_be_changed(broker: Broker, namespace: str, queue: Spec) -> None:
    await broker.ensure([queue()], [])
    with pytest.raises(StartupError, match="retention"):
        await broker.ensure([StreamSpec("QUEUE", (f"{namespace}.queue.>",), "limits", "memory")], [])
    with pytest.raises(StartupError, match="storage"):
        await broker.ensure([StreamSpec("QUEUE", (f"{namespace}.queue.>",), "work_queue", "file")], [])


async def test_a_bucket_keeps_values_with_revisions(broker: Broker) -> None:
    await broker.ensure([], [BucketSpec("state")])
    bucket = await broker.bucket("state")
    assert await bucket.get("a.x") is None
    assert await bucket.entries() == []
    first = await bucket.put("a.x", b"1")
    second = await bucket.put("a.x", b"2")
    other = await bucket.put("b", b"3")
    assert first < second < other
    assert await bucket.get("a.x") == ("a.x", b"2", second)
    assert await bucket.entries() == [("a.x", b"2", second), ("b", b"3", other)]
    assert await bucket.entries("a.") == [("a.x", b"2", second)]
    await bucket.delete("a.x")
    await bucket.delete("a.x")
    assert await bucket.get("a.x") is None
    assert await bucket.entries() == [("b", b"3", other)]


async def test_create_writes_only_where_nothing_is(broker: Broker) -> None:
    await broker.ensure([], [BucketSpec("state")])
    bucket = await broker.bucket("state")
    assert await bucket.create("key", b"1") is not None
    assert await bucket.create("key", b"2") is None
    await bucket.delete("key")
    assert await bucket.create("key", b"3") is not None
    entry = await bucket.get("key")
    assert entry is not None and entry.value == b"3"


async def test_update_writes_only_over_its_revision(broker: Broker) -> None:
    await broker.ensure([], [BucketSpec("state")])
    bucket = await broker.bucket("state")
    first = await bucket.put("key", b"1")
    second = await bucket.update("key", b"2", first)
    assert second is not None
    assert await bucket.update("key", b"3", first) is None
    await bucket.delete("key")
    assert await bucket.update("key", b"4", second) is None
    assert await bucket.get("key") is None


async def test_one_of_many_creators_and_updaters_wins(broker: Broker) -> None:
    await broker.ensure([], [BucketSpec("state")])
    bucket = await broker.bucket("state")
    created = await asyncio.gather(*(bucket.create("key", b"%d" % index) for index in range(10)))
    (revision,) = [result for result in created if result is not None]
    updated = await asyncio.gather(*(bucket.update("key", b"%d" % index, revision) for index in range(10)))
    assert len([result for result in updated if result is not None]) == 1


async def test_entries_expire_and_can_be_created_again(broker: Broker) -> None:
    await broker.ensure([], [BucketSpec("leases", ttl=0.4)])
    bucket = await broker.bucket("leases")
    assert await bucket.create("share", b"former") is not None

    async def created() -> bool:
        return await bucket.create("share", b"new") is not None

    await eventually(created)
    assert [entry.value for entry in await bucket.entries()] == [b"new"]

    async def is_gone() -> bool:
        return await bucket.get("share") is None and await bucket.entries() == []

    await eventually(is_gone)


async def test_tells_what_it_holds_by_subject(broker: Broker, namespace: str, queue: Spec) -> None:
    await broker.ensure([queue()], [])
    await put(broker, f"{namespace}.queue.a", "1", "2")
    await put(broker, f"{namespace}.queue.b", "3")
    held = await broker.held("QUEUE")
    assert (held.by_subject, held.messages, held.last) == ({f"{namespace}.queue.a": 2, f"{namespace}.queue.b": 1}, 3, 3)
    for subject, counts in ((f"{namespace}.queue.b", {f"{namespace}.queue.b": 1}), (f"{namespace}.queue.c", {})):
        part = await broker.held("QUEUE", subject)
        assert (part.by_subject, part.messages, part.last, part.total) == (counts, len(counts), 3, 3)
    consumer = await broker.consume(reader(namespace), prefetch=8)
    for delivery in await take(consumer, 3):
        await delivery.ack()
    await eventually(lambda: _is_empty(broker))


async def _is_empty(broker: Broker) -> bool:
    held = await broker.held("QUEUE")
    return held.by_subject == {} and held.last == 3


async def test_tells_what_every_stream_and_bucket_holds(
    broker: Broker, namespace: str, queue: Spec, relay: Spec
) -> None:
    await broker.ensure([queue(max_messages=9), relay(max_bytes=1 << 20)], [BucketSpec("notes", max_bytes=1 << 19)])
    assert {used.name: used.messages for used in await broker.usage()} == {"QUEUE": 0, "RELAY": 0, "notes": 0}
    for number in range(3):
        await broker.publish(f"{namespace}.queue.a", b"x" * 100, message_id=f"m{number}")
    await (await broker.bucket("notes")).put("k", b"v")
    found = {used.name: used for used in await broker.usage()}
    assert (found["QUEUE"].messages, found["QUEUE"].max_messages, found["RELAY"].max_bytes) == (3, 9, 1 << 20)
    assert (found["notes"].messages, found["notes"].max_bytes) == (1, 1 << 19)
    assert 300 < found["QUEUE"].bytes < 1000
    assert (found["QUEUE"].behind, found["QUEUE"].last, found["RELAY"].last) == (0, 3, 0)


async def test_tells_what_waits_for_the_consumers_of_a_stream(broker: Broker, namespace: str, queue: Spec) -> None:
    async def found(*expected: int) -> bool:
        (backlog,) = await broker.backlogs(["QUEUE", "NONE"])
        return backlog == ("QUEUE", *expected)

    await broker.ensure([queue()], [])
    assert await broker.backlogs(["QUEUE"]) == [("QUEUE", 0, 0, 0)]
    await put(broker, f"{namespace}.queue.a", *"12345")
    await put(broker, f"{namespace}.queue.b", *"67")
    one, other = (
        ConsumerSpec("QUEUE", name, f"{namespace}.queue.{name}", LONG_LEASE, max_ack_pending=most)
        for name, most in (("a", 2), ("b", 1))
    )
    consumer = await broker.consume(one, prefetch=8)
    first, second = await take(consumer, 2)
    await eventually(lambda: found(3, 2, 0))
    await take(await broker.consume(other, prefetch=8), 1)
    await eventually(lambda: found(4, 3, 0))
    assert [used.consumers for used in await broker.usage()] == [2]
    await second.nak()
    assert [delivery.attempt for delivery in await take(consumer, 1)] == [2]
    await eventually(lambda: found(4, 3, 1))
    await first.ack()
    await eventually(lambda: found(3, 3, 1))


async def test_a_deleted_message_is_not_delivered_and_may_be_deleted_again(
    broker: Broker, namespace: str, queue: Spec
) -> None:
    await broker.ensure([queue()], [])
    await put(broker, f"{namespace}.queue.a", "1", "2", "3")
    assert [await broker.delete("QUEUE", sequence) for sequence in (2, 2, 99)] == [True, False, False]
    consumer = await broker.consume(reader(namespace), prefetch=8)
    assert [delivery.message.data for delivery in await take(consumer, 2)] == [b"1", b"3"]


async def test_a_deleted_message_is_not_delivered_again(broker: Broker, namespace: str, queue: Spec) -> None:
    await broker.ensure([queue()], [])
    await put(broker, f"{namespace}.queue.a", "1")
    consumer = await broker.consume(reader(namespace), prefetch=8)
    (held,) = await take(consumer, 1)
    await broker.delete("QUEUE", held.message.sequence)
    await held.nak()
    await put(broker, f"{namespace}.queue.a", "2")
    assert [delivery.message.data for delivery in await take(consumer, 1)] == [b"2"]


async def test_a_full_subject_says_so(broker: Broker, namespace: str, queue: Spec) -> None:
    await broker.ensure([queue(max_messages=3, max_messages_per_subject=2)], [])
    await put(broker, f"{namespace}.queue.a", "1", "2")
    with pytest.raises(StreamFull) as of_subject:
        await put(broker, f"{namespace}.queue.a", "3")
    await put(broker, f"{namespace}.queue.b", "4")
    with pytest.raises(StreamFull) as of_stream:
        await put(broker, f"{namespace}.queue.c", "5")
    assert of_subject.value.per_subject
    assert not of_stream.value.per_subject


async def test_replay_takes_wildcards(broker: Broker, namespace: str, relay: Spec) -> None:
    await broker.ensure([relay()], [])
    for name, place in (("1", "a.x"), ("2", "b.y"), ("3", "b.x")):
        await put(broker, f"{namespace}.relay.{place}", name)
    found = await broker.replay("RELAY", f"{namespace}.relay.*.x")
    assert [(message.data, message.sequence) for message in found] == [(b"1", 1), (b"3", 3)]


async def test_a_forgotten_consumer_leaves_its_subject_to_others(broker: Broker, namespace: str, queue: Spec) -> None:
    await broker.ensure([queue()], [])
    consumer = await broker.consume(reader(namespace), prefetch=8)
    await consumer.close()
    await broker.forget("QUEUE", "reader")
    await broker.forget("QUEUE", "reader")
    await put(broker, f"{namespace}.queue.a", "1")
    other = await broker.consume(ConsumerSpec("QUEUE", "other", f"{namespace}.queue.>"), prefetch=8)
    assert [delivery.message.data for delivery in await take(other, 1)] == [b"1"]


async def test_a_forgotten_consumer_that_is_open_is_reopened(broker: Broker, namespace: str, queue: Spec) -> None:
    await broker.ensure([queue()], [])
    consumer = await broker.consume(reader(namespace), prefetch=4)
    await put(broker, f"{namespace}.queue.a", "a")
    await take(consumer, 1)
    await broker.forget("QUEUE", "reader")
    (again,) = await take(consumer, 1)
    assert (again.message.data, again.attempt) == (b"a", 1)
    await again.ack()
    await put(broker, f"{namespace}.queue.a", "b")
    (other,) = await take(consumer, 1)
    assert other.message.data == b"b"
    await other.ack()
    await eventually(lambda: is_empty(broker))


async def is_empty(broker: Broker) -> bool:
    return not (await broker.held("QUEUE")).by_subject


async def test_publishes_where_nothing_has_come_in_between(broker: Broker, namespace: str, relay: Spec) -> None:
    await broker.ensure([relay()], [])
    subject = f"{namespace}.relay.a"
    first = await broker.publish(subject, b"1", message_id="1", expect=0)
    await broker.publish(f"{namespace}.relay.b", b"other", message_id="other")
    second = await broker.publish(subject, b"2", message_id="2", expect=first.sequence)
    for expected in (0, first.sequence, second.sequence + 1):
        with pytest.raises(Superseded):
            await broker.publish(subject, b"late", message_id=f"late after {expected}", expect=expected)
    assert [message.data for message in await broker.replay("RELAY", subject)] == [b"1", b"2"]


async def test_a_fenced_publish_is_harmless_to_repeat(broker: Broker, namespace: str, relay: Spec) -> None:
    await broker.ensure([relay()], [])
    once = await broker.publish(f"{namespace}.relay.a", b"1", message_id="1", expect=0)
    again = await broker.publish(f"{namespace}.relay.a", b"1", message_id="1", expect=0)
    assert again == (once.sequence, True)


async def test_reads_the_newest_message_of_a_subject(broker: Broker, namespace: str, relay: Spec) -> None:
    await broker.ensure([relay()], [])
    assert await broker.last("RELAY", f"{namespace}.relay.a") is None
    await put(broker, f"{namespace}.relay.a", "1", "2")
    await put(broker, f"{namespace}.relay.b", "3")
    newest = await broker.last("RELAY", f"{namespace}.relay.a")
    assert newest is not None
    assert (newest.data, newest.sequence, newest.headers[MESSAGE_ID]) == (b"2", 2, "2")
