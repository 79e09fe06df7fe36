"""Declared models: what a set-up would change about them, and that their lanes stay."""

from __future__ import annotations

import pytest

from penstock.config.settings import Settings
from penstock.schemas.errors import StartupError
from penstock.schemas.registry import ModelCard
from penstock.streams.lanes import open_lanes, present_lanes
from penstock.streams.port import Broker
from penstock.streams.stores.declared import declaration, declare, declared_models
from penstock.streams.stores.registry import Registry
from penstock.streams.topology import topology


def card(name: str, context_length: int = 100) -> ModelCard:
    return ModelCard(name=name, source=name, backend="echo", context_length=context_length, created=1)


async def test_a_set_up_says_what_changes_and_does_it(broker: Broker, namespace: str) -> None:
    settings = Settings(namespace=namespace)
    await broker.ensure(*topology(namespace, ["queue"]))
    assert await declaration(broker, [card("a"), card("b: ü>")]) == (("a", "b: ü>"), (), ())
    await declare(broker, settings, [card("a"), card("b: ü>")])
    later = card("a").model_copy(update={"created": 9, "revision": 2})
    assert await declaration(broker, [later, card("b: ü>", 50)]) == ((), ("b: ü>",), ())
    await declare(broker, settings, [card("a")])
    assert await declaration(broker, []) == ((), (), ("a",))
    assert [each.name for each in await declared_models(broker)] == ["a"]


async def test_they_are_known_without_a_worker_and_keep_their_lanes(broker: Broker, namespace: str) -> None:
    settings = Settings(namespace=namespace, max_models=2)
    await broker.ensure(*topology(namespace, ["queue"]))
    registry = Registry(broker, interval=1.0)
    await registry.refresh()
    assert registry.missing(["infer"]) == ["infer"]
    await declare(broker, settings, [card("a"), card("b")])
    await registry.refresh()
    assert [*registry.models] == ["a", "b"] and registry.missing(["infer"]) == []
    with pytest.raises(StartupError, match="2 models have lanes already"):
        await open_lanes(broker, settings, "c")
    await declare(broker, settings, [card("a")])
    await open_lanes(broker, settings, "c")
    assert sorted(each.model for each in (await present_lanes(broker)).values()) == ["a", "c"]

    own = card("a", 70).model_copy(update={"source": "/where/it/runs"})
    await registry.announce_model(own)  # by a worker of it
    await registry.refresh()
    assert registry.models["a"] == own and registry.declared["a"] == card("a")
