"""The catalogue and the states of models in the broker: what is written is read, and of two writers none is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio

from penstock.schemas.errors import InvalidRequest, StartupError
from penstock.schemas.models.catalogue import Catalogue, CatalogueEntry, RevisionKey
from penstock.schemas.models.model_state import IllegalTransition, ModelState, enqueue, start_loading, unload
from penstock.streams.memory.broker import MemoryBroker
from penstock.streams.nats.broker import JetStreamBroker
from penstock.streams.nats.servers.server import EmbeddedServer
from penstock.streams.port import Broker
from penstock.streams.stores.catalogue import CatalogueStore
from penstock.streams.topology import CATALOGUE, topology

KEY = RevisionKey("org/qwen..>", 1)


@pytest_asyncio.fixture
async def stores(
    broker: Broker, server: EmbeddedServer, namespace: str
) -> AsyncIterator[tuple[CatalogueStore, CatalogueStore]]:
    """Two processes with the same catalogue; of the in-memory broker there is one, which both use."""
    buckets = [spec for spec in topology(namespace, ["queue"]).buckets if spec.name == CATALOGUE]
    await broker.ensure([], buckets)
    if isinstance(broker, MemoryBroker):
        yield await CatalogueStore.of(broker), await CatalogueStore.of(broker)
        return
    other = await JetStreamBroker.connect(server.url, namespace=namespace, timeout=10.0)
    yield await CatalogueStore.of(broker), await CatalogueStore.of(other)
    await other.close()


def adding(name: str, *aliases: str) -> Callable[[Catalogue], Catalogue]:
    return lambda catalogue: catalogue.add(CatalogueEntry(name=name, source="o/m", aliases=aliases))


async def test_what_one_writes_the_other_reads(stores: tuple[CatalogueStore, CatalogueStore]) -> None:
    first, second = stores
    assert await second.read() == Catalogue()
    assert await second.states() == {}
    written = await first.change(adding("qwen", "fast"))
    assert (
        await second.read() == written == Catalogue().add(CatalogueEntry(name="qwen", source="o/m", aliases=("fast",)))
    )
    state = await first.change_state(KEY, lambda state: enqueue(state, 1.0, requested=True))
    assert await second.states() == {KEY: state}
    other = await second.change_state(RevisionKey(KEY.name, 2), lambda state: enqueue(state, 2.0))
    assert await first.states() == {KEY: state, other.key: other}
    await first.change_state(KEY, lambda state: unload(state, 3.0))
    await first.forget(KEY)
    assert await second.states() == {other.key: other}


async def test_all_models_that_writers_add_at_once_are_kept(stores: tuple[CatalogueStore, CatalogueStore]) -> None:
    names = [f"model{index}" for index in range(10)]
    await asyncio.gather(*(stores[index % 2].change(adding(name)) for index, name in enumerate(names)))
    assert sorted(entry.name for entry in (await stores[0].read()).entries) == names


async def test_of_two_models_with_one_alias_one_is_refused(stores: tuple[CatalogueStore, CatalogueStore]) -> None:
    results = await asyncio.gather(
        *(store.change(adding(f"model{index}", "fast")) for index, store in enumerate(stores)), return_exceptions=True
    )
    (refused,) = (result for result in results if isinstance(result, BaseException))
    assert isinstance(refused, InvalidRequest)
    assert len((await stores[0].read()).entries) == 1


async def test_of_two_agents_one_loads(stores: tuple[CatalogueStore, CatalogueStore]) -> None:
    for number in range(1, 11):
        key = RevisionKey("qwen", number)
        await stores[0].change_state(key, lambda state: enqueue(state, 1.0))

        async def load(agent: str, store: CatalogueStore, key: RevisionKey = key) -> ModelState:
            return await store.change_state(key, lambda state: start_loading(state, 2.0, agent=agent, device="cpu"))

        results = await asyncio.gather(*map(load, ("one", "two"), stores), return_exceptions=True)
        (lost,) = (result for result in results if isinstance(result, BaseException))
        (won,) = (result for result in results if isinstance(result, ModelState))
        assert isinstance(lost, IllegalTransition)
        assert (await stores[1].states())[key] == won


async def test_an_update_that_changes_nothing_writes_nothing(broker: Broker, namespace: str) -> None:
    await broker.ensure(*topology(namespace, ["queue"]))
    store = await CatalogueStore.of(broker)
    await store.change(lambda catalogue: catalogue)
    assert await (await broker.bucket(CATALOGUE)).entries() == []


@pytest.mark.parametrize("key", ["models", "state.0123.1"])
async def test_what_another_release_has_written_is_left_alone(broker: Broker, namespace: str, key: str) -> None:
    await broker.ensure(*topology(namespace, ["queue"]))
    bucket = await broker.bucket(CATALOGUE)
    await bucket.put(key, b'{"version": 2, "name": "a"}')
    store = await CatalogueStore.of(broker)
    with pytest.raises(
        StartupError, match=rf"{key} was written by another release of Penstock \(version: Input should"
    ):
        await (store.change(adding("qwen")) if key == "models" else store.states())
    assert (await bucket.entries())[0].value == b'{"version": 2, "name": "a"}'
