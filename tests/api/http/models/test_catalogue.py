"""What a server says of its catalogue where nothing could place a model of it."""

from __future__ import annotations

import json

from applications import Script
from asgi import ask

from penstock.schemas.registry import AgentCard, LoadProgress, ModelCard
from penstock.streams.stores.catalogue import CatalogueStore


async def test_a_model_is_added_only_where_an_agent_could_load_it() -> None:
    """Without one `penstock models add` would wait for ever for news of the model."""
    script = await Script.start()
    body = {"model": "small", "source": "no-files", "backend": "echo"}
    refused = await ask(script.app, "POST", "/models/add", body)
    assert (refused.status, refused.error["code"]) == (400, "no_agent")
    assert "--models" in refused.error["message"]
    store = await CatalogueStore.of(script.broker)
    assert (await store.read()).entries == ()
    await script.registry.announce_agent("host", AgentCard())
    assert (await ask(script.app, "POST", "/models/add", body)).status == 200
    assert [entry.name for entry in (await store.read()).entries] == ["small"]
    for verb in ("load", "unload"):  # though the agent has said nothing of it yet
        assert (await ask(script.app, "POST", f"/models/{verb}", {"model": "small"})).status == 200


async def test_an_unknown_name_is_refused_with_the_names_that_are_served() -> None:
    script = await Script.start()
    await script.registry.announce_model(
        ModelCard(name="echo", source="echo", backend="echo", context_length=100, created=0)
    )
    refused = await ask(script.app, "POST", "/models/swap", {"model": "ecko", "source": "/any"})
    assert (refused.status, refused.error["code"]) == (404, "model_not_found")
    assert "Did you mean echo?" in refused.error["message"]
    own = await ask(script.app, "POST", "/models/swap", {"model": "echo", "source": "/any"})
    assert own.status == 400 and "workers of its own" in own.error["message"]


async def test_a_model_whose_worker_has_left_is_loading_only_once_another_loads_it() -> None:
    script = await Script.start()
    card = ModelCard(name="echo", source="echo", backend="echo", context_length=100, created=0)
    await script.registry.announce_model(card)
    await script.registry.refresh()

    async def status() -> str:
        (model,) = json.loads((await ask(script.app, "GET", "/v1/models")).body)["data"]
        return str(model["status"]["value"])

    assert await status() == "unloaded"
    load = LoadProgress(worker="w0", model="echo", percent=10, elapsed=1.0)
    script.bridge.loads.hear(load.model_dump_json().encode())
    assert await status() == "loading"
