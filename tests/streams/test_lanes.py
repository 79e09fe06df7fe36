"""Each model has lanes of its own, as many models as the deployment allows."""

from __future__ import annotations

import pytest

from penstock.config.settings import Settings
from penstock.schemas.errors import StartupError
from penstock.schemas.models.catalogue import Catalogue, CatalogueEntry
from penstock.schemas.registry import ModelCard, ModelLanes, WorkerCard
from penstock.streams.lanes import open_lanes, present_lanes, remove_lanes, waiting_in_lanes
from penstock.streams.nats.broker import JetStreamBroker
from penstock.streams.nats.servers.server import EmbeddedServer
from penstock.streams.port import Broker
from penstock.streams.stores.catalogue import CatalogueStore
from penstock.streams.stores.registry import Registry
from penstock.streams.topology import PRIORITIES, Subjects, batch_stream, lanes_of, topology


@pytest.fixture
async def settings(broker: Broker, namespace: str) -> Settings:
    await broker.ensure(*topology(namespace, ["queue"]))
    return Settings(namespace=namespace, max_models=2, store_limit=64 << 20, events_limit=8 << 20)


async def names(broker: Broker) -> set[tuple[str, int]]:
    return {(lanes.model, lanes.revision) for lanes in (await present_lanes(broker)).values()}


async def test_revisions_have_lanes_of_their_own_and_any_name_may_have_some(broker: Broker, settings: Settings) -> None:
    await open_lanes(broker, settings, "org/name: ü.>*", 1)
    await open_lanes(broker, settings, "org/name: ü.>*", 2)
    await open_lanes(broker, settings, "org/name: ü.>*", 1)
    assert await names(broker) == {("org/name: ü.>*", 1), ("org/name: ü.>*", 2)}
    subjects = Subjects(settings.namespace)
    for revision in (1, 2):
        lanes = lanes_of("org/name: ü.>*", revision)
        await broker.publish(subjects.batch(lanes, "low", "t"), b"", message_id=f"m{revision}")
        assert (await broker.held(batch_stream(lanes, "low"))).messages == 1


async def test_an_entry_that_nobody_can_read_stops_nothing(broker: Broker, settings: Settings) -> None:
    await open_lanes(broker, settings, "good")
    for bucket in ("state", "models"):
        await (await broker.bucket(bucket)).put("lanes.0123456789abcdef", b"what is this?")
    assert await names(broker) == {("good", 1)}
    await open_lanes(broker, settings, "second")
    await open_lanes(broker, settings, "third")
    assert ("third", 1) in await names(broker)
    registry = Registry(broker, interval=1.0)
    await registry.refresh()


async def test_empty_lanes_of_a_model_that_is_gone_give_way(broker: Broker, settings: Settings) -> None:
    subjects = Subjects(settings.namespace)
    await open_lanes(broker, settings, "empty")
    await open_lanes(broker, settings, "full")
    await broker.publish(subjects.batch(lanes_of("full"), "high", "t"), b"", message_id="m")
    await open_lanes(broker, settings, "new")
    assert await names(broker) == {("full", 1), ("new", 1)}


async def test_lanes_of_a_model_that_may_be_asked_for_stay(broker: Broker, settings: Settings) -> None:
    for name in ("one", "two"):
        await open_lanes(broker, settings, name)
        model = ModelCard(name=name, source=name, backend="echo", context_length=8, created=0)
        await Registry(broker, interval=1.0).announce_worker(WorkerCard(id=name, model=model, capacity=1, pid=0))
    with pytest.raises(StartupError, match=r"2 models have lanes already, and max_models is 2: raise it with"):
        await open_lanes(broker, settings, "three")
    assert await names(broker) == {("one", 1), ("two", 1)}


async def test_the_lanes_of_what_is_probed_stay(broker: Broker, settings: Settings) -> None:
    store = await CatalogueStore.of(broker)
    catalogue = Catalogue().add(CatalogueEntry(name="m", source="a", backend="echo"))
    await store.change(lambda _: catalogue.swap("m", "b"))
    await open_lanes(broker, settings, "m", 2)
    await open_lanes(broker, settings, "gone")
    await open_lanes(broker, settings, "new")
    assert await names(broker) == {("m", 2), ("new", 1)}


async def test_nothing_waits_in_lanes_that_were_removed(broker: Broker, settings: Settings) -> None:
    lanes, subjects = lanes_of("m"), Subjects(settings.namespace)
    await open_lanes(broker, settings, "m")
    await broker.publish(subjects.batch(lanes, "high", "t"), b"", message_id="m")
    assert await waiting_in_lanes(broker, lanes) == {"high": 1, "normal": 0, "low": 0}
    await remove_lanes(broker, ModelLanes(model="m", revision=1))
    assert await waiting_in_lanes(broker, lanes) == dict.fromkeys(PRIORITIES, 0)


async def test_lanes_of_which_only_the_note_is_left_give_way(namespace: str, server: EmbeddedServer) -> None:
    """A process that died left it: the next one finds nothing waiting there, and makes use of the room."""
    broker = await JetStreamBroker.connect(server.url, namespace=namespace, timeout=2.0)
    await broker.ensure(*topology(namespace, ["queue"]))
    settings = Settings(namespace=namespace, max_models=1, store_limit=64 << 20, events_limit=8 << 20)
    await open_lanes(broker, settings, "m")
    for priority in PRIORITIES:
        await broker.remove(batch_stream(lanes_of("m"), priority))
    await open_lanes(broker, settings, "new")
    assert await names(broker) == {("new", 1)}
    await broker.close()
