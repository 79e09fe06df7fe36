"""Azure's OpenAI client, whose paths name the model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from applications import Script
from asgi import ask
from serving import Served

from penstock.api.http.middleware.azure import openai_path

HELLO: Any = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def client(echo_server: Served) -> Iterator[openai.AzureOpenAI]:
    with openai.AzureOpenAI(
        azure_endpoint=echo_server.url, api_key="none", api_version="2025-04-01-preview", max_retries=0
    ) as client:
        yield client


def test_the_client_asks_as_openais_does(client: openai.AzureOpenAI, echo_server: Served) -> None:
    with openai.OpenAI(base_url=f"{echo_server.url}/v1", api_key="none") as plain:
        expected = plain.chat.completions.create(model="echo", messages=HELLO).choices[0].message.content
    assert client.chat.completions.create(model="echo", messages=HELLO).choices[0].message.content == expected
    stream: Any = client.chat.completions.create(model="echo", messages=HELLO, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices) == expected
    assert client.completions.create(model="echo", prompt="Hi").choices[0].text == "Hi"
    assert client.responses.create(model="echo", input="Hello", store=False).output_text == expected
    assert [model.id for model in client.models.list()] == ["echo"]


def test_the_deployment_is_the_model(echo_server: Served) -> None:
    with openai.AzureOpenAI(
        azure_endpoint=echo_server.url, azure_deployment="echo", api_key="none", api_version="1", max_retries=0
    ) as client:
        assert client.chat.completions.create(model="gpt-4o", messages=HELLO).model == "echo"
    with (
        openai.AzureOpenAI(
            azure_endpoint=echo_server.url, azure_deployment="nix", api_key="none", api_version="1", max_retries=0
        ) as client,
        pytest.raises(openai.NotFoundError, match="'nix' is not served here"),
    ):
        client.chat.completions.create(model="echo", messages=HELLO)


@pytest.mark.parametrize(
    ("rest", "path", "deployment"),
    [
        ("deployments/a/b/chat/completions", "/v1/chat/completions", "a/b"),
        ("deployments/m/embeddings", "/v1/embeddings", "m"),
        ("deployments//completions", "/openai/deployments//completions", None),
        ("deployments/m/images", "/openai/deployments/m/images", None),
        ("v1/responses", "/v1/responses", None),
        ("files", "/v1/files", None),
    ],
)
def test_paths(rest: str, path: str, deployment: str | None) -> None:
    assert openai_path(rest) == (path, deployment)


async def test_its_key_has_a_header_of_its_own() -> None:
    script = await Script.start(api_keys=("team=sk-right",))
    path = "/openai/v1/models"
    assert (await ask(script.app, "GET", path, None, {"api-key": "sk-wrong"})).status == 401
    assert (await ask(script.app, "GET", path, None, {"api-key": "sk-right"})).status == 200
