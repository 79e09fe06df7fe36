"""What a bridge answers while it has no broker, over a real socket; the broker of a real one comes late in
tests/serve."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import httpx
import ollama
import openai
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from penstock.api.http.waiting import answering
from penstock.config.settings import Settings

MESSAGES: Any = [{"role": "user", "content": "hello"}]
URL = str


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


@asynccontextmanager
async def waiting(listener: socket.socket) -> AsyncIterator[URL]:
    async with answering(listener, Settings()):
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


async def test_its_health_says_that_it_lives_and_what_is_missing(listener: socket.socket) -> None:
    async with waiting(listener) as url, httpx.AsyncClient(base_url=url) as http:
        assert (await http.get("/health/live")).json() == {"status": "live"}
        for path in ("/health", "/health/ready"):
            ready = await http.get(path)
            assert (ready.status_code, ready.json()["missing"]) == (503, ["broker"])


async def test_clients_hear_of_it_in_the_form_of_their_api_and_when_to_try_again(listener: socket.socket) -> None:
    async with waiting(listener) as url:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            with pytest.raises(openai.InternalServerError) as refused:
                await client.chat.completions.create(model="m", messages=MESSAGES)
            assert (refused.value.status_code, refused.value.code) == (503, "broker_away")
            assert int(refused.value.response.headers["retry-after"]) > 0
        async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client:
            with pytest.raises(anthropic.APIStatusError) as overloaded:
                await client.messages.create(model="m", max_tokens=9, messages=MESSAGES)
            assert overloaded.value.status_code == 529
            assert overloaded.value.body["error"]["type"] == "overloaded_error"  # type: ignore[index]
        with pytest.raises(ollama.ResponseError) as told:
            await ollama.AsyncClient(url).chat("m", MESSAGES)
        assert (told.value.status_code, told.value.error) == (
            503,
            "The message broker does not answer; try again later.",
        )
        with pytest.raises(InvalidStatus) as denied:
            await connect(f"{url.replace('http', 'ws')}/v1/responses")
        assert denied.value.response.status_code == 503


async def test_pages_of_other_origins_read_it(listener: socket.socket) -> None:
    async with answering(listener, Settings(cors_origins=("https://a.example",))), httpx.AsyncClient() as http:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1/models"
        answer = await http.get(url, headers={"origin": "https://a.example"})
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (503, "https://a.example")


async def test_who_has_connected_is_answered_and_who_connects_then_waits_for_the_bridge(
    listener: socket.socket,
) -> None:
    async with waiting(listener) as url:
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        async with httpx.AsyncClient() as http:
            await http.get(f"{url}/health/live")  # it accepts in order
        writer.write(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (await reader.read()).startswith(b"HTTP/1.1 503 ")
    writer.close()
    with socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        accepted.close()


async def test_a_broker_that_is_there_at_once_is_not_waited_for(listener: socket.socket) -> None:
    async with answering(listener, Settings()):
        pass  # it has not even started
    with socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        accepted.close()
