"""What only a real server can do to us: die, come back without its memory, lose a consumer, be two at once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import nats
import nats.errors
import pytest

from penstock.schemas.errors import BrokerUnavailable, StartupError, StreamFull
from penstock.streams.nats import pull
from penstock.streams.nats.broker import JetStreamBroker
from penstock.streams.nats.management import call
from penstock.streams.nats.pull import parse_reply_subject
from penstock.streams.nats.servers.server import EmbeddedServer
from penstock.streams.port import BucketSpec, Consumer, ConsumerSpec, Delivery, Message, Published, StreamSpec

PATIENCE = 20.0  # seconds until a wait counts as endless
PROMPT = 5.0  # seconds; missing heartbeats would have told only later
CLIENTS = 2

QUEUE = StreamSpec("QUEUE", ("p.queue.>",), "work_queue", "file", discard="new")
LEDGER = StreamSpec("LEDGER", ("p.ledger",), "limits", "file")
RELAY = StreamSpec("RELAY", ("p.relay.>",), "limits", "memory")
READER = ConsumerSpec("QUEUE", "reader", "p.queue.>", ack_wait=1.0)


async def crash(server: EmbeddedServer) -> None:
    os.kill(server.pid, signal.SIGKILL)
    await server.wait()
    await server.restart()


async def connect(server: EmbeddedServer) -> JetStreamBroker:
    return await JetStreamBroker.connect(server.url, namespace="p", timeout=10.0)


async def test_nothing_is_lost_or_stored_twice_when_the_server_crashes(own_server: EmbeddedServer) -> None:
    broker = await connect(own_server)
    await broker.ensure([QUEUE, LEDGER], [])
    consumer = await broker.consume(READER, prefetch=32)
    expected = {f"m{index}" for index in range(500)}
    halfway = asyncio.Event()
    received: Counter[str] = Counter()

    async def publish() -> None:
        for index, name in enumerate(sorted(expected)):
            await broker.publish("p.queue.a", name.encode(), message_id=name)
            if index == 200:
                halfway.set()

    async def consume() -> None:
        while set(received) != expected:
            for delivery in await consumer.take(16):
                name = delivery.message.data.decode()
                await broker.publish("p.ledger", delivery.message.data, message_id=name)
                await delivery.ack()
                received[name] += 1

    async with asyncio.timeout(PATIENCE), asyncio.TaskGroup() as tasks:
        tasks.create_task(publish())
        tasks.create_task(consume())
        await halfway.wait()
        await crash(own_server)
    entered = [message.data.decode() for message in await broker.replay("LEDGER", "p.ledger")]
    assert sorted(entered) == sorted(expected)
    await broker.close()


async def test_publishes_around_an_outage_keep_their_order(own_server: EmbeddedServer) -> None:
    broker = await connect(own_server)
    await broker.ensure([LEDGER], [])
    publishing: list[asyncio.Task[Published]] = []

    def start(*numbers: int) -> None:
        for number in numbers:
            data = b"%d" % number
            publishing.append(asyncio.create_task(broker.publish("p.ledger", data, message_id=data.decode())))

    os.kill(own_server.pid, signal.SIGSTOP)
    start(*range(100))  # sent, and never read
    await asyncio.sleep(0.1)
    os.kill(own_server.pid, signal.SIGKILL)
    await own_server.wait()
    async with asyncio.timeout(PATIENCE):
        while broker.connected:  # noqa: ASYNC110  (nobody is told)
            await asyncio.sleep(0.01)
    start(*range(100, 200))  # held
    await own_server.restart()
    async with asyncio.timeout(PATIENCE):
        for number in range(200, 500):  # before, while and after what was held is sent
            start(number)
            await asyncio.sleep(0.002)
        await asyncio.gather(*publishing)
    stored = [int(message.data) for message in await broker.replay("LEDGER", "p.ledger")]
    assert stored == list(range(500))
    await broker.close()


async def test_streams_and_consumers_in_memory_are_made_again(own_server: EmbeddedServer) -> None:
    broker = await connect(own_server)
    await broker.ensure([RELAY], [BucketSpec("leases", ttl=60.0)])
    consumer = await broker.consume(ConsumerSpec("RELAY", "share", "p.relay.0.>", takeover=True), prefetch=4)
    heard: asyncio.Queue[bytes] = asyncio.Queue()
    await broker.listen("p.relay.*.*", lambda message: heard.put_nowait(message.data))
    await broker.publish("p.relay.0.a", b"before", message_id="m1")
    await crash(own_server)
    async with asyncio.timeout(PROMPT):
        await broker.publish("p.relay.0.a", b"after", message_id="m2")
        bucket = await broker.bucket("leases")
        assert await bucket.create("share", b"me") is not None
        received: list[bytes] = []
        while b"after" not in received:
            received += [delivery.message.data for delivery in await consumer.take(1)]
        while await heard.get() != b"after":
            pass
    await broker.close()


async def test_an_outage_is_reported_in_time(own_server: EmbeddedServer) -> None:
    broker = await JetStreamBroker.connect(own_server.url, namespace="p", timeout=2.0)
    await broker.ensure([LEDGER], [])
    os.kill(own_server.pid, signal.SIGKILL)
    await own_server.wait()
    async with asyncio.timeout(PATIENCE):
        with pytest.raises(BrokerUnavailable):
            await broker.publish("p.ledger", b"", message_id="m1")
        with pytest.raises(BrokerUnavailable):
            await broker.replay("LEDGER", "p.ledger")
    assert not broker.connected
    await broker.close()


async def test_answers_to_deliveries_never_raise(own_server: EmbeddedServer) -> None:
    broker = await connect(own_server)
    await broker.ensure([QUEUE], [])
    consumer = await broker.consume(READER, prefetch=1)
    await broker.publish("p.queue.a", b"", message_id="m1")
    (delivery,) = await consumer.take(1)
    os.kill(own_server.pid, signal.SIGKILL)
    await own_server.wait()
    for answer in (delivery.ack, delivery.nak, delivery.in_progress):
        await answer()
    await broker.close()
    await delivery.term("gone")


async def test_a_listener_hears_other_connections_from_the_first_message_on(
    server: EmbeddedServer, jetstream: JetStreamBroker, namespace: str
) -> None:
    other = await JetStreamBroker.connect(server.url, namespace=namespace)
    for index in range(50):
        heard: asyncio.Queue[Message] = asyncio.Queue()
        listening = await jetstream.listen(f"{namespace}.{index}", heard.put_nowait)
        await other.notify(f"{namespace}.{index}", b"")
        async with asyncio.timeout(PATIENCE):
            await heard.get()
        await listening.close()
    await other.close()


async def test_a_publish_waits_for_its_stream(jetstream: JetStreamBroker, namespace: str) -> None:
    publishing = asyncio.create_task(jetstream.publish(f"{namespace}.late", b"", message_id="m1"))
    listening = await jetstream.listen("nothing", print)  # a round trip: by now the publish has found nobody
    await listening.close()
    await jetstream.ensure([StreamSpec("LATE", (f"{namespace}.late",), "limits", "memory")], [])
    async with asyncio.timeout(PATIENCE):
        assert await publishing == (1, False)


async def test_our_headers_are_known_in_the_cases_of_http(jetstream: JetStreamBroker, namespace: str) -> None:
    await jetstream.ensure([StreamSpec("QUEUE", (f"{namespace}.queue.>",), "work_queue", "memory", discard="new")], [])
    consumer = await jetstream.consume(ConsumerSpec("QUEUE", "reader", f"{namespace}.queue.>"), prefetch=1)
    given = {"Traceparent": "t", "penstock-deadline": "1", "PENSTOCK-SCHEMA": "job/1", "X-Own": "a", "x-own": "b"}
    await jetstream.publish(f"{namespace}.queue.a", b"", message_id="m", headers=given)
    async with asyncio.timeout(PROMPT):
        (delivery,) = await consumer.take(1)
    named = {"traceparent": "t", "Penstock-Deadline": "1", "Penstock-Schema": "job/1", "X-Own": "a", "x-own": "b"}
    assert delivery.message.headers == named | {"Nats-Msg-Id": "m"}


async def test_a_deleted_consumer_is_made_again(jetstream: JetStreamBroker, namespace: str) -> None:
    spec = StreamSpec("QUEUE", (f"{namespace}.queue.>",), "work_queue", "memory", discard="new")
    await jetstream.ensure([spec], [])
    consumer = await jetstream.consume(ConsumerSpec("QUEUE", "reader", f"{namespace}.queue.>"), prefetch=4)
    await jetstream.publish(f"{namespace}.queue.a", b"1", message_id="m1")
    async with asyncio.timeout(PROMPT):
        (delivery,) = await consumer.take(1)
        await delivery.ack()
        await call(jetstream._link, f"CONSUMER.DELETE.{namespace.upper()}_QUEUE.reader")
        await jetstream.publish(f"{namespace}.queue.a", b"2", message_id="m2")
        while delivery.message.data != b"2":  # the first may come again: its ack can die with the consumer
            (delivery,) = await consumer.take(1)


async def test_a_stream_that_is_gone_is_told_of_seldom_and_with_what_to_type(
    jetstream: JetStreamBroker, namespace: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pull, "_RETRY_WAIT", 0.001)
    monkeypatch.setattr(pull, "_HEARTBEAT", 0.2)
    spec = StreamSpec("QUEUE", (f"{namespace}.queue.>",), "work_queue", "file", discard="new")
    await jetstream.ensure([spec], [])
    consumer = await jetstream.consume(ConsumerSpec("QUEUE", "reader", f"{namespace}.queue.>"), prefetch=1)
    tried = asyncio.Semaphore(0)

    async def counted(*given: Any, **more: Any) -> Any:
        tried.release()
        return await call(*given, **more)

    monkeypatch.setattr(pull, "call", counted)
    await call(jetstream._link, f"STREAM.DELETE.{jetstream.server_name('QUEUE')}")

    def lines() -> list[str]:
        return [record.getMessage() for record in caplog.records if "stream not found" in record.getMessage()]

    async with asyncio.timeout(PATIENCE):
        for _ in range(4):
            await tried.acquire()
        assert lines() == []  # as long as it may be that of a model that is being removed
        for _ in range(36):
            await tried.acquire()
    told = lines()
    assert 0 < len(told) <= 6 and all("penstock nats setup --apply" in line for line in told)
    await jetstream.ensure([spec], [])
    await jetstream.publish(f"{namespace}.queue.a", b"after", message_id="m1")
    async with asyncio.timeout(PATIENCE):
        (delivery,) = await consumer.take(1)
    assert delivery.message.data == b"after"


async def test_a_former_holder_stays_away_after_an_outage(own_server: EmbeddedServer) -> None:
    """Both come back from the same crash, and only the successor may ask for messages."""
    former, successor = await connect(own_server), await connect(own_server)
    spec = ConsumerSpec("LEDGER", "share", "p.ledger", takeover=True)
    await former.ensure([LEDGER], [])
    old = await former.consume(spec, prefetch=4)
    new = await successor.consume(spec, prefetch=4)
    await crash(own_server)
    waiting = asyncio.create_task(old.take(1))
    received: set[bytes] = set()
    async with asyncio.timeout(PATIENCE):
        await former.publish("p.ledger", b"m0", message_id="m0")
        for index in range(1, 200):
            await successor.publish("p.ledger", b"m%d" % index, message_id=f"m{index}")
        while len(received) < 200:
            received |= {delivery.message.data for delivery in await new.take(4)}
    assert not waiting.done()
    await former.close()
    assert await waiting == []
    await successor.close()


async def test_of_two_that_take_over_at_once_one_gets_everything(
    server: EmbeddedServer, jetstream: JetStreamBroker, namespace: str
) -> None:
    rival = await JetStreamBroker.connect(server.url, namespace=namespace)
    await jetstream.ensure([StreamSpec("RELAY", (f"{namespace}.relay",), "limits", "memory")], [])
    spec = ConsumerSpec("RELAY", "share", f"{namespace}.relay", ack_wait=0.5, takeover=True)
    holders = await asyncio.gather(*(broker.consume(spec, prefetch=2) for broker in (jetstream, rival)))
    expected = {b"%d" % index for index in range(20)}
    received: set[bytes] = set()
    complete = asyncio.Event()

    async def hold(holder: Consumer) -> None:
        while deliveries := await holder.take(4):
            for delivery in deliveries:
                received.add(delivery.message.data)
                await delivery.ack()
            if received == expected:
                complete.set()

    async with asyncio.timeout(PATIENCE), asyncio.TaskGroup() as holding:
        for holder in holders:
            holding.create_task(hold(holder))
        for data in sorted(expected):
            await jetstream.publish(f"{namespace}.relay", data, message_id=data.decode())
        await complete.wait()
        for holder in holders:
            await holder.close()
    await rival.close()


async def test_a_full_stream_does_not_block_others(jetstream: JetStreamBroker, namespace: str) -> None:
    full = StreamSpec("FULL", (f"{namespace}.full",), "work_queue", "memory", discard="new", max_messages=1)
    other = StreamSpec("OTHER", (f"{namespace}.other",), "limits", "memory")
    await jetstream.ensure([full, other], [])
    await jetstream.publish(f"{namespace}.full", b"", message_id="m0")
    results = await asyncio.gather(
        *(
            jetstream.publish(f"{namespace}.{('full', 'other')[index % 2]}", b"", message_id=f"x{index}")
            for index in range(20)
        ),
        return_exceptions=True,
    )
    assert all(isinstance(result, StreamFull) for result in results[::2])
    assert [getattr(result, "sequence", None) for result in results[1::2]] == list(range(1, 11))


async def test_large_messages_do_not_cost_the_connection(jetstream: JetStreamBroker, namespace: str) -> None:
    """The server sends what a consumer asks for at once, and cuts off a connection that cannot read so fast."""
    await jetstream.ensure([StreamSpec("QUEUE", (f"{namespace}.queue.>",), "work_queue", "memory")], [])
    count, data = 40, b"x" * (4 << 20)
    for number in range(count):
        await jetstream.publish(f"{namespace}.queue.a", data, message_id=f"m{number}")
    spec = ConsumerSpec("QUEUE", "reader", f"{namespace}.queue.>", ack_wait=60.0)
    consumer = await jetstream.consume(spec, prefetch=64)
    taken: list[Delivery] = []
    async with asyncio.timeout(60):
        while len(taken) < count:
            taken += await consumer.take(1)
            await taken[-1].ack()
    assert [delivery.attempt for delivery in taken] == [1] * count
    assert [delivery.message.sequence for delivery in taken] == list(range(1, count + 1))
    assert jetstream.outages == 0


def flood(url: str, subject: str, count: int, data: bytes) -> None:
    """Publish without a pause, and without the event loop."""
    at = urlsplit(url)
    with socket.create_connection((at.hostname or "", at.port or 0)) as connection, connection.makefile("rwb") as wire:
        wire.readline()  # INFO
        wire.write(b'CONNECT {"verbose":false,"auth_token":"%s"}\r\n' % (at.username or "").encode())
        for _ in range(count):
            wire.write(b"PUB %s %d\r\n%s\r\n" % (subject.encode(), len(data), data))
        wire.write(b"PING\r\n")
        wire.flush()
        assert wire.readline().startswith(b"PONG")


async def test_who_hears_more_than_it_reads_keeps_its_connection(own_server: EmbeddedServer, namespace: str) -> None:
    """What others publish on the subjects of `refuse` cuts off nothing else."""
    broker = await JetStreamBroker.connect(own_server.url, namespace=namespace)
    await broker.refuse(f"{namespace}.jobs.>", "g", lambda _: "no such lane")
    flood(own_server.url, f"{namespace}.jobs.a", 40, b"x" * (4 << 20))  # the loop reads nothing meanwhile
    publisher = await nats.connect(own_server.url)
    async with asyncio.timeout(PATIENCE):
        while True:  # until the other connection is there again, if it was cut off
            with contextlib.suppress(nats.errors.Error):
                answer = await publisher.request(f"{namespace}.jobs.a", b"", timeout=1)
                break
    assert b"no such lane" in answer.data
    assert broker.outages == 0
    await publisher.close()
    await broker.close()


async def test_no_answer_is_taken_for_a_message_of_ours(
    jetstream: JetStreamBroker, server: EmbeddedServer, namespace: str
) -> None:
    """Whoever asks names the subject of the answer."""
    heard: list[str] = []
    await jetstream.listen(f"{namespace}.>", lambda message: heard.append(message.subject))
    await jetstream.refuse(f"{namespace}.jobs.>", "g", lambda _: "no such lane")
    client = await nats.connect(server.url)
    await client.publish(f"{namespace}.jobs.a", b"", reply=f"{namespace}.events.b.me.r1")
    assert b"no such lane" in (await client.request(f"{namespace}.jobs.a", b"", timeout=PATIENCE)).data
    await client.close()
    await jetstream.notify(f"{namespace}.end", b"")
    async with asyncio.timeout(PATIENCE):
        while f"{namespace}.end" not in heard:  # noqa: ASYNC110
            await asyncio.sleep(0)
    assert heard == [f"{namespace}.jobs.a"] * 2 + [f"{namespace}.end"]


async def test_a_refusal_is_tried_again_where_the_server_stands_still(
    own_server: EmbeddedServer, namespace: str
) -> None:
    """It takes a connection of its own; a part that runs already does not end for want of it."""
    broker = await JetStreamBroker.connect(own_server.url, namespace=namespace)
    own_server.signal(signal.SIGSTOP)  # some of its threads may go on for a moment, and let the connection in
    try:
        with pytest.raises(BrokerUnavailable, match=r"no NATS server answers|no answer within"):
            await broker.refuse(f"{namespace}.jobs.>", "g", lambda _: "no such lane")
    finally:
        own_server.signal(signal.SIGCONT)
    await broker.refuse(f"{namespace}.jobs.>", "g", lambda _: "no such lane")
    await broker.close()


async def test_a_stream_has_more_than_a_thousand_consumers(jetstream: JetStreamBroker, namespace: str) -> None:
    """One a worker on INFER, one a client on EVENTS; nats-server allows 1,000 where a stream names no number."""
    await jetstream.ensure([StreamSpec("RELAY", (f"{namespace}.relay.*",), "limits", "memory")], [])
    stream = f"{namespace}_RELAY".upper()
    for number in range(1_001):
        config = {"durable_name": f"c{number}", "ack_policy": "explicit"}
        request = {"stream_name": stream, "config": config}
        await call(jetstream._link, f"CONSUMER.DURABLE.CREATE.{stream}.c{number}", request)


def test_a_machine_that_cannot_reach_itself() -> None:
    """Its server runs, but its loopback interface is down, as in a new network namespace."""
    code = """
import asyncio
from penstock.streams.nats.broker import JetStreamBroker
asyncio.run(JetStreamBroker.connect("nats://127.0.0.1:4222", namespace="p"))
"""
    alone = ["unshare", "--map-root-user", "--net"]
    if shutil.which("unshare") is None or subprocess.run([*alone, "true"], capture_output=True).returncode:
        pytest.skip("needs a machine where it may make network namespaces")
    done = subprocess.run([*alone, sys.executable, "-c", code], capture_output=True, text=True)
    assert "Network is unreachable; this machine cannot reach itself: bring its loopback interface up" in done.stderr


async def test_nobody_at_the_address() -> None:
    with pytest.raises(StartupError, match=r"no NATS server answers at nats://127\.0\.0\.1:1:") as caught:
        await JetStreamBroker.connect("nats://user:secret@127.0.0.1:1", namespace="p")
    assert "secret" not in str(caught.value)
    assert "user" not in str(caught.value)


async def test_a_wrong_token_is_refused(server: EmbeddedServer) -> None:
    address = server.url.rpartition("@")[2]
    with pytest.raises(StartupError, match=r"(?i)authorization") as caught:
        await JetStreamBroker.connect(f"nats://wrong@{address}", namespace="p")
    assert "wrong@" not in str(caught.value)


async def test_somebody_else_at_the_address() -> None:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 smtp.example.org\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(greet, "127.0.0.1", 0) as impostor:
        port = impostor.sockets[0].getsockname()[1]
        with pytest.raises(StartupError):
            await JetStreamBroker.connect(f"nats://127.0.0.1:{port}", namespace="p")


async def test_a_part_whose_server_has_lost_its_store_says_how_to_create_the_streams(
    jetstream: JetStreamBroker,
) -> None:
    await jetstream.ensure([StreamSpec("WORK", ("work.>",), "work_queue", "file")], [])
    await jetstream.remove("WORK")
    with pytest.raises(StartupError, match=r"_WORK: stream not found; .* `penstock nats setup --apply`$"):
        await jetstream.consume(ConsumerSpec("WORK", "all", "work.>"), prefetch=1)


async def test_processes_may_ensure_at_once(server: EmbeddedServer, namespace: str) -> None:
    script = f"""
import asyncio
from penstock.streams.nats.broker import JetStreamBroker
from penstock.streams.topology import topology
async def main():
    broker = await JetStreamBroker.connect({server.url!r}, namespace={namespace!r})
    await broker.ensure(*topology({namespace!r}, ["queue", "custom"]))
    await broker.close()
asyncio.run(main())
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    children = [
        await asyncio.create_subprocess_exec(sys.executable, "-W", "error", "-c", script, env=environment)
        for _ in range(CLIENTS)
    ]
    async with asyncio.timeout(PATIENCE):
        assert [await child.wait() for child in children] == [0] * CLIENTS


def test_reply_subjects_of_both_versions() -> None:
    assert parse_reply_subject("$JS.ACK.ORDERS.reader.3.17.4.1700000000000000000.5") == (3, 17, 1.7e9)
    assert parse_reply_subject("$JS.ACK._.hash.ORDERS.reader.3.17.4.1700000000000000000.5") == (3, 17, 1.7e9)
    assert parse_reply_subject("$JS.ACK.hub.hash.ORDERS.reader.3.17.4.1700000000000000000.5.random") == (3, 17, 1.7e9)
    with pytest.raises(ValueError, match="reply subject"):
        parse_reply_subject("_INBOX.abc")


@pytest.mark.parametrize("held", [False, True])
async def test_a_consumer_that_nobody_holds_goes_and_its_work_stays(
    jetstream: JetStreamBroker, namespace: str, held: bool
) -> None:
    """Also what a holder had taken and not settled when it died, though no sooner than its lease ends."""
    await jetstream.ensure([StreamSpec("QUEUE", (f"{namespace}.queue.>",), "work_queue", "memory")], [])
    subject = f"{namespace}.queue.one"
    spec = ConsumerSpec("QUEUE", "one", subject, ack_wait=1.0, idle_limit=0.5)
    other = await jetstream.consume(ConsumerSpec("QUEUE", "two", f"{namespace}.queue.two"), prefetch=4)

    async def names() -> set[str]:
        return {info["name"] for info in await jetstream.consumers("QUEUE")}

    await jetstream.publish(subject, b"1", message_id="m1")
    async with asyncio.timeout(PATIENCE):
        consumer = await jetstream.consume(spec, prefetch=1)
        if held:
            await consumer.take(1)
        assert await names() == {"one", "two"}
        await consumer.close()
        while "one" in await names():  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        await jetstream.publish(subject, b"2", message_id="m2")
        consumer = await jetstream.consume(spec, prefetch=4)
        found: list[bytes] = []
        while len(found) < 2:
            for delivery in await consumer.take(4):
                found.append(delivery.message.data)
                await delivery.ack()
        assert found == [b"1", b"2"]
        while (await jetstream.held("QUEUE")).messages:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert await names() == {"one", "two"}
    await consumer.close()
    await other.close()


async def test_a_consumer_in_use_is_not_idle(jetstream: JetStreamBroker, namespace: str) -> None:
    """One that only waits, and one whose holder has all that it wants in hand, for longer than the limit."""
    await jetstream.ensure([StreamSpec("QUEUE", (f"{namespace}.queue.>",), "work_queue", "memory")], [])
    specs = [ConsumerSpec("QUEUE", name, f"{namespace}.queue.{name}", idle_limit=0.5) for name in ("one", "two", "old")]
    waiting, busy, old = [await jetstream.consume(spec, prefetch=1) for spec in specs]
    for place in range(3):
        await jetstream.publish(f"{namespace}.queue.two", b"", message_id=f"m{place}")
    async with asyncio.timeout(PATIENCE):
        (delivery,) = await busy.take(1)
        await old.close()
        while "old" in {info["name"] for info in await jetstream.consumers("QUEUE")}:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        await delivery.ack()
        for _ in range(2):
            (delivery,) = await busy.take(1)
            await delivery.ack()
        await jetstream.publish(f"{namespace}.queue.one", b"", message_id="last")
        (delivery,) = await waiting.take(1)
        await delivery.ack()
        while (await jetstream.held("QUEUE")).messages:  # noqa: ASYNC110
            await asyncio.sleep(0)


async def test_a_consumer_of_an_older_version_becomes_one_that_goes(jetstream: JetStreamBroker, namespace: str) -> None:
    await jetstream.ensure([StreamSpec("QUEUE", (f"{namespace}.queue.>",), "work_queue", "memory")], [])
    spec = ConsumerSpec("QUEUE", "one", f"{namespace}.queue.one")
    await (await jetstream.consume(spec, prefetch=1)).close()
    await (await jetstream.consume(replace(spec, idle_limit=0.5), prefetch=1)).close()
    async with asyncio.timeout(PATIENCE):
        while await jetstream.consumers("QUEUE"):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
