"""A streaming chat client, which resumes an answer after a broken connection if the server supports that."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Generator
from typing import Any

import httpx2
import orjson

from ....config.settings import Settings
from ....schemas.errors import Fatal
from ....schemas.urls import by_proxy, goes_through_proxies

ASKING = {"Penstock-Resumable": "true", "Penstock-Events": "true"}
MAX_RECONNECTS = 40  # in a row
RECONNECT_DELAY = 0.5  # seconds


class ChatError(Fatal):
    """`str(error)` tells what failed and what to do."""


def server_at(url: str | None, api_key: str | None, settings: Settings) -> httpx2.Client:
    """A client of the API at `url`; without one, at the address on which `serve` listens with these settings.

    Raises `StartupError`.
    """
    base = (url or f"http://{settings.host}:{settings.port}").rstrip("/")
    base = base if re.search("://[^/]+/", base) else f"{base}/v1"
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    proxies = goes_through_proxies(base)
    # Penstock sends something at least every 15 seconds.
    return httpx2.Client(base_url=base, headers=headers, timeout=60.0, trust_env=proxies)


def answer_of(server: httpx2.Client, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
    """The server's answer, from JSON. Raises `ChatError`."""
    try:
        response = server.request(method, path, json=body)
        if response.is_error:
            raise _refused(response)
        return response.json()
    except (httpx2.HTTPError, ValueError) as error:
        raise silent(server, error) from None


def models(server: httpx2.Client) -> dict[str, dict[str, Any]]:
    """The models of the server, by name. Raises `ChatError`."""
    found = answer_of(server, "GET", "models")
    try:
        return {str(model["id"]): model for model in found["data"]}
    except (LookupError, TypeError) as error:
        raise silent(server, error) from None


def ask(server: httpx2.Client, body: dict[str, Any]) -> Generator[dict[str, Any] | str]:
    """The chunks of an answer, each once. A string among them tells why the next chunk is late.

    Closing the generator early cancels the request at the server. Raises `ChatError`.
    """
    request = last = None  # the id of the request, and the last event id
    breaks = 0
    try:
        while True:
            try:
                headers = ASKING | ({"Last-Event-ID": last} if last else {})
                with server.stream("POST", "chat/completions", json=body, headers=headers) as response:
                    if response.is_error:
                        response.read()
                        if last and response.status_code >= 500:  # the server has just restarted
                            response.raise_for_status()
                        raise _refused(response)
                    request = response.headers.get("x-request-id")
                    for event in httpx2.EventSource(response):
                        last, breaks = event.id or last, 0
                        if not event.data:
                            continue  # a message without data, such as `retry`
                        if event.data == "[DONE]":
                            return
                        found = orjson.loads(event.data)
                        if "error" in found:
                            raise ChatError(str(found["error"].get("message")))
                        yield _waiting(found) if event.event == "status" else found
                raise httpx2.RemoteProtocolError("the answer ended early")
            except httpx2.HTTPError as error:
                breaks += 1
                if last is None or breaks > MAX_RECONNECTS:
                    raise silent(server, error) from None
            yield "the connection broke; reconnecting"
            time.sleep(RECONNECT_DELAY)
    except (GeneratorExit, KeyboardInterrupt):
        if request is not None:  # a resumable request would continue
            with contextlib.suppress(httpx2.HTTPError):
                server.delete(f"streams/{request}", timeout=5.0)
        raise


def _waiting(status: dict[str, Any]) -> str:
    """Why there is no answer yet, for a person."""
    position = status.get("position")
    match status.get("type"):
        case "loading":
            return f"the model loads, {status.get('progress', 0)} %; queued {position}"
        case "waiting_for_model":
            return f"waiting for the model; queued {position}"
        case _:
            return f"queued {position}"


def _refused(response: httpx2.Response) -> ChatError:
    try:
        message = str(response.json()["error"]["message"])
    except (ValueError, LookupError, TypeError):
        message = f"HTTP {response.status_code}: {response.text[:500]}"
    if response.status_code in (401, 403):
        message += " Give a key with --api-key, or in PENSTOCK_API_KEY."
    return ChatError(message)


def silent(server: httpx2.Client, error: Exception) -> ChatError:
    """The error of a request that got no answer."""
    advice = "Start a server with `penstock serve MODEL`, or name one with --url."
    return ChatError(f"No answer from {server.base_url} ({error}{by_proxy(str(server.base_url))}). {advice}")
