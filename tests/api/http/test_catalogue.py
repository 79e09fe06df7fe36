"""What a server says of its catalogue where nothing could place a model of it."""

from __future__ import annotations

from applications import Script
from asgi import ask

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
    await script.registry.announce_agent("host")
    assert (await ask(script.app, "POST", "/models/add", body)).status == 200
    assert [entry.name for entry in (await store.read()).entries] == ["small"]
