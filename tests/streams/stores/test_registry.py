"""Models and workers as every process reads them."""

from __future__ import annotations

import asyncio
import signal

import pytest

from penstock.schemas.registry import ModelCard, StageCard, WorkerCard
from penstock.streams.nats.broker import JetStreamBroker
from penstock.streams.nats.servers.server import EmbeddedServer
from penstock.streams.port import Broker
from penstock.streams.stores import registry as registry_module
from penstock.streams.stores.registry import Registry
from penstock.streams.topology import topology


def worker(name: str) -> WorkerCard:
    model = ModelCard(name=name, source=name, backend="echo", context_length=100, created=0)
    return WorkerCard(id=name, model=model, capacity=1, pid=0)


async def test_a_model_is_found_as_soon_as_its_worker_is_ready(broker: Broker, namespace: str) -> None:
    """The registry reads every 1,000 seconds here: only a look of its own finds what has come since."""
    await broker.ensure(*topology(namespace, ["queue"]))
    reader, writer = Registry(broker, interval=1000.0), Registry(broker, interval=1000.0)
    await reader.refresh()
    await writer.announce_worker(worker("new"))
    found = await reader.find("new")
    assert found is not None and found.name == "new"


async def test_after_an_outage_a_stage_has_time_to_write_its_card_again(
    own_server: EmbeddedServer, namespace: str
) -> None:
    """A broker that comes back without the cards: what runs calls would be taken for dead, and made them twice."""
    shape = topology(namespace, ["queue"])
    broker = await JetStreamBroker.connect(own_server.url, namespace=namespace)
    try:
        await broker.ensure(*shape)
        patient, hasty = (Registry(broker, interval=1000.0, lifetime=each) for each in (1000.0, 0.0))
        cards = [StageCard(stage="tools", id=name, pid=0) for name in ("a", "b")]
        for card in cards:
            await patient.announce_stage(card)
        for registry in (patient, hasty):
            await registry.refresh()
            assert [*registry.stages] == cards
        own_server.signal(signal.SIGKILL)
        await own_server.wait()
        await own_server.restart()
        await broker.ensure(*shape)
        await patient.announce_stage(cards[1])
        for registry in (patient, hasty):
            await registry.refresh()
        assert {card.id for card in patient.stages} == {"a", "b"} and not patient.missing(["tools"])
        assert [*hasty.stages] == cards[1:], "there was time enough"
    finally:
        await broker.close()


async def test_many_that_ask_for_what_is_not_there_share_two_looks(
    jetstream: JetStreamBroker, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await jetstream.ensure(*topology(namespace, ["queue"]))
    registry, looks = Registry(jetstream, interval=1000.0), 0
    refresh = registry.refresh

    async def counted() -> None:
        nonlocal looks
        looks += 1
        await refresh()

    monkeypatch.setattr(registry, "refresh", counted)
    assert await asyncio.gather(*(registry.find(f"none{number}") for number in range(100))) == [None] * 100
    assert looks <= 2, "that under way when they ask, and one for all of them"


async def test_who_asks_for_what_is_not_there_again_and_again_reads_no_more_often(
    jetstream: JetStreamBroker, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await jetstream.ensure(*topology(namespace, ["queue"]))
    registry = Registry(jetstream, interval=1000.0)
    assert await registry.find("none") is None
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def pause(seconds: float) -> None:
        if seconds < 900:  # that of a call whose answer is late, for one
            await sleep(seconds)
            return
        pauses.append(seconds)
        await Registry(jetstream, interval=1000.0).announce_worker(worker("new"))

    with monkeypatch.context() as patched:
        patched.setattr(registry_module, "LOOK_PAUSE", 1000.0)
        patched.setattr(asyncio, "sleep", pause)
        found = await registry.find("new")
    assert found is not None and found.name == "new", "it reads after the pause, not before"
    assert len(pauses) == 1 and 900 < pauses[0] < 1000


async def test_heartbeats_write_the_card_of_a_model_only_where_it_says_something_new(
    broker: Broker, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Models are kept on disk: an idle server would write there each second."""
    await broker.ensure(*topology(namespace, ["queue"]))
    card, models = worker("one"), await broker.bucket("models")
    first, second = Registry(broker, interval=1000.0), Registry(broker, interval=1000.0)

    async def revision(registry: Registry, card: WorkerCard) -> int:
        for _ in range(3):
            await registry.announce_worker(card)
        (entry,) = await models.entries()
        return entry.revision

    written = await revision(first, card)
    other = card.model_copy(update={"id": "w1", "model": card.model.model_copy(update={"created": 9})})
    beside = await revision(second, other)  # each writes once, as it begins
    assert beside > written and await revision(first, card) == beside == await revision(second, other)
    larger = card.model_copy(update={"model": card.model.model_copy(update={"context_length": 200})})
    changed = await revision(first, larger)
    assert changed > beside
    await first.withdraw_model(card.model)
    assert await revision(first, larger) > changed, "it is back with the next heartbeat"
    kept = await revision(first, larger)
    monkeypatch.setattr(registry_module, "AGAIN", 0.0)
    assert await revision(first, larger) > kept, "before it expires"
