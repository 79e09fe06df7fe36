"""The models as Anthropic's clients list them: a page in Anthropic's form, and its refusals."""

from __future__ import annotations

from datetime import UTC, datetime

import anthropic
import httpx2
import orjson
import pytest
from applications import Script
from asgi import ask

from penstock.schemas.jobs import AdapterSource
from penstock.schemas.registry import ModelCard

NAMES = ["large", "small", "small-law", "vast"]


@pytest.fixture
async def script() -> Script:
    script = await Script.start()
    law = AdapterSource(name="small-law", path="/adapters/law", digest="0" * 64)
    for name, adapters in (("small", (law,)), ("large", ()), ("vast", ())):
        await script.registry.announce_model(
            ModelCard(
                name=name,
                source=f"/models/{name}",
                backend="echo",
                context_length=4096,
                created=1_700_000_000,
                aliases=(f"{name}-latest",),
                adapters=adapters,
            )
        )
    await script.registry.look()
    return script


@pytest.fixture
def client(script: Script) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(
        base_url="http://localhost",
        api_key="none",
        max_retries=0,
        http_client=httpx2.AsyncClient(transport=httpx2.ASGITransport(script.app)),
        _strict_response_validation=True,
    )


async def test_a_client_finds_every_model_in_pages(client: anthropic.AsyncAnthropic) -> None:
    """It asks for the next page by the id of the last model, as long as there are more."""
    page = await client.models.list(limit=3)
    assert (page.has_more, page.first_id, page.last_id) == (True, "large", "small-law")
    assert [model.id async for model in page] == NAMES
    assert [model.id async for model in client.models.list()] == NAMES
    before = await client.models.list(before_id="vast", limit=2)
    assert ([model.id for model in before.data], before.has_more) == (["small", "small-law"], True)
    after = await client.models.list(after_id="vast")
    assert (after.data, after.has_more, after.first_id) == ([], False, None)


async def test_a_model_is_described_by_its_name_and_its_context(client: anthropic.AsyncAnthropic) -> None:
    found = await client.models.retrieve("small-latest")
    assert (found.id, found.display_name, found.type) == ("small", "small", "model")
    assert found.created_at == datetime.fromtimestamp(1_700_000_000, UTC)
    assert (found.max_input_tokens, found.max_tokens) == (4096, 4096)
    assert (await client.models.retrieve("small-law")).id == "small-law"
    assert (await client.beta.models.retrieve("vast")).lifecycle == "active"


async def test_refusals_have_anthropics_form(client: anthropic.AsyncAnthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="'tiny' is not served here") as unknown:
        await client.models.retrieve("tiny")
    assert isinstance(unknown.value.body, dict) and unknown.value.body["error"]["type"] == "not_found_error"
    assert unknown.value.request_id
    for path in ("/v1/skills", "/v1/agents/a1/versions"):
        with pytest.raises(anthropic.NotFoundError, match="no such path") as nowhere:
            await client.get(path, cast_to=object)
        assert nowhere.value.type == "not_found_error" and nowhere.value.request_id
    for query in ({"limit": 0}, {"limit": 1001}, {"after_id": "tiny"}, {"before_id": "tiny"}):
        with pytest.raises(anthropic.BadRequestError, match=r"limit must be|must be the id of a model"):
            await client.models.list(extra_query=query)


async def test_other_clients_get_openais_form(script: Script) -> None:
    listed = orjson.loads((await ask(script.app, "GET", "/v1/models?limit=1")).body)
    assert listed["object"] == "list" and [model["id"] for model in listed["data"]] == NAMES
    assert listed["data"][0]["object"] == "model"
    assert (await ask(script.app, "GET", "/v1/models/tiny")).error["code"] == "model_not_found"
