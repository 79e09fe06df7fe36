"""The front, bridge and light stages in one, is killed while clients read: those who resume or repeat lose nothing."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import nats
import openai
import psutil
import pytest
from asgi import Sent, messages
from serving import Serve, Served

COMPLETIONS = "/v1/completions"
PROMPT = "abc " * 30
ASKED: dict[str, Any] = {"model": "echo", "prompt": PROMPT, "max_tokens": 120}
BODY = ASKED | {"ignore_eos": True}
RESUMABLE = {"Penstock-Resumable": "true"}


@pytest.fixture
def served(serve: Serve) -> Served:
    return serve("--backend", "echo", "--echo-rate", "40", "--keepalive-interval", "0.01", "--lease", "1")


@pytest.fixture
def client(served: Served) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=served.url, timeout=60, transport=httpx2.HTTPTransport(retries=20)) as client:
        yield client


def kill_front(served: Served) -> None:
    family = psutil.Process(served.process.pid).children(recursive=True)
    (front,) = [child for child in family if "front" in child.cmdline()]
    os.kill(front.pid, signal.SIGKILL)
    psutil.wait_procs([front], timeout=30)


def text(sent: list[Sent]) -> str:
    return "".join(message.data["choices"][0]["text"] for message in sent if message.data != "[DONE]")


def stream(client: httpx2.Client, headers: dict[str, str], victim: Served | None) -> tuple[list[Sent], str]:
    """What came until the end or, where a front is to be killed in mid-stream, until the cut; and the request."""
    received = b""
    with client.stream("POST", COMPLETIONS, json=BODY | {"stream": True}, headers=headers) as response:
        assert response.status_code == 200
        try:
            for piece in response.iter_raw():
                received += piece
                if victim is not None and len(messages(received)) >= 10:
                    kill_front(victim)
                    victim = None
        except httpx2.RemoteProtocolError:
            pass
    return messages(received), response.headers["x-request-id"]


def test_a_stream_goes_on_after_its_front_was_killed(served: Served, client: httpx2.Client) -> None:
    first, request = stream(client, RESUMABLE, served)
    assert 0 < len(text(first)) < 120
    rest, resumed = stream(client, RESUMABLE | {"Last-Event-ID": str(first[-1].id)}, None)
    assert resumed == request
    assert text(first + rest) == PROMPT
    assert [sent.data for sent in first + rest].count("[DONE]") == 1


async def test_a_repeated_key_finds_the_request_of_a_dead_front(served: Served, client: httpx2.Client) -> None:
    connection = await nats.connect(served.nats_url)
    heard = await connection.subscribe("penstock.events.>")
    await connection.flush()
    with ThreadPoolExecutor(1) as pool:

        def ask() -> httpx2.Response:
            return client.post(COMPLETIONS, json=BODY, headers={"Idempotency-Key": "once"})

        asked = pool.submit(ask)
        request = (await heard.next_msg(timeout=60)).subject.rpartition(".")[2]
        kill_front(served)
        with pytest.raises(httpx2.HTTPError):
            asked.result()
        answer = ask()
    assert answer.headers["x-request-id"] == request
    assert answer.json()["choices"][0]["text"] == PROMPT
    await connection.close()


def test_the_official_client_reads_ids_and_keep_alives(served: Served) -> None:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        stream = client.completions.create(
            **ASKED, stream=True, extra_headers=RESUMABLE, extra_body={"ignore_eos": True}
        )
        assert "".join(chunk.choices[0].text for chunk in stream) == PROMPT
        with client.completions.with_streaming_response.create(
            **ASKED, stream=True, extra_headers=RESUMABLE, extra_body={"ignore_eos": True}
        ) as response:
            assert ": ping" in list(response.iter_lines())
