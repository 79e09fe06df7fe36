"""What a stream does while nothing comes, and what happens to the work of a client that leaves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import nats
import pytest
from nats.aio.client import Client
from nats.aio.subscription import Subscription
from serving import Serve, Served, Start
from setting_up import set_up_now
from websockets.sync.client import connect

BODY = {"model": "echo", "prompt": "abc " * 100, "max_tokens": 400, "ignore_eos": True}


@pytest.fixture
async def events(slow: Served) -> AsyncIterator[Client]:
    """A NATS client of the server's own broker."""
    client = await nats.connect(slow.nats_url)
    yield client
    await client.close()


@pytest.fixture
def slow(serve: Serve) -> Served:
    return serve("--backend", "echo", "--echo-rate", "50")


async def test_a_client_that_leaves_a_stream_cancels_its_request(slow: Served, events: Client) -> None:
    heard = await events.subscribe("penstock.events.>")
    await events.flush()
    seen = 0
    async with (
        httpx2.AsyncClient(timeout=60) as client,
        client.stream("POST", f"{slow.url}/v1/completions", json=BODY | {"stream": True}) as response,
    ):
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                seen += len(json.loads(line[6:])["choices"][0]["text"])
            if seen >= 10:
                break
    final = await _final(heard)
    assert final["type"] == "cancelled"
    assert seen <= final["usage"]["completion_tokens"] < 100


async def test_a_client_that_leaves_before_the_answer_cancels_it_too(slow: Served, events: Client) -> None:
    heard = await events.subscribe("penstock.events.>")
    await events.flush()
    async with httpx2.AsyncClient(timeout=60) as client:
        asking = asyncio.create_task(client.post(f"{slow.url}/v1/completions", json=BODY))
        await heard.next_msg(timeout=60)
        asking.cancel()
        await asyncio.wait([asking])
    final = await _final(heard)
    assert final["type"] == "cancelled"
    assert final["usage"]["completion_tokens"] < 200


def test_a_silent_stream_is_kept_alive(serve: Serve) -> None:
    served = serve("--backend", "echo", "--echo-rate", "1", "--keepalive-interval", "0.1")
    with httpx2.stream("POST", f"{served.url}/v1/completions", json=BODY | {"stream": True}, timeout=60) as response:
        assert response.status_code == 200
        assert next(line for line in response.iter_lines() if line.startswith(":")) == ": ping"
        assert "no-transform" in response.headers["cache-control"]
    with connect(f"{served.url.replace('http', 'ws')}/v1/responses", proxy=None) as socket:
        asked = {"type": "response.create", "model": "echo", "input": "a b", "max_output_tokens": 2}
        socket.send(json.dumps(asked))
        last = next(event for event in map(json.loads, socket) if event["type"] == "response.incomplete")
    assert last["response"]["output"]


def test_readiness_says_what_is_missing(start: Start, serve: Serve) -> None:
    served = serve("--backend", "echo")
    environment = {"PENSTOCK_NATS_URL": served.nats_url, "PENSTOCK_NAMESPACE": "other"}
    set_up_now(environment)
    lonely = start("bridge", "--port", "0", environment=environment)
    url = lonely.wait_for(r"listening.*(http://\S+)")[1].rstrip("'\"")
    response = httpx2.get(f"{url}/health/ready")
    assert response.status_code == 503
    assert set(response.json()["missing"]) == {"validate", "queue", "batch", "infer", "stream"}
    assert httpx2.get(f"{url}/health/live").status_code == 200


async def _final(heard: Subscription) -> dict[str, Any]:
    async for message in heard.messages:
        event: dict[str, Any] = json.loads(message.data)
        if event["type"] in ("done", "failed", "cancelled", "expired"):
            return event
    raise AssertionError("the subscription ended")
