"""Asks a server over HTTP, and goes on with an answer where the connection broke, if the server has given the means."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Generator
from typing import Any

import httpx2
import orjson

from ...config.settings import Settings
from ...schemas.errors import Fatal

ASKING = {"Penstock-Resumable": "true", "Penstock-Events": "true"}
CUTS = 40  # times in a row that a stream may break, with a PAUSE behind each
PAUSE = 0.5


class ChatError(Fatal):
    """`str(error)` says what went wrong and what to do."""


def server_at(url: str | None, api_key: str | None, settings: Settings) -> httpx2.Client:
    """A client of the API at `url`; without one, of that which `serve` listens for under these settings."""
    base = (url or f"http://{settings.host}:{settings.port}").rstrip("/")
    base = base if re.search("://[^/]+/", base) else f"{base}/v1"
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    return httpx2.Client(base_url=base, headers=headers, timeout=60.0)  # Penstock says something every 15 seconds


def models(server: httpx2.Client) -> dict[str, dict[str, Any]]:
    """What is served, by name. Raises `ChatError`."""
    try:
        response = server.get("models")
        if response.is_error:
            raise _refused(response)
        return {str(model["id"]): model for model in response.json()["data"]}
    except (httpx2.HTTPError, ValueError, LookupError) as error:
        raise _silent(server, error) from None


def ask(server: httpx2.Client, body: dict[str, Any]) -> Generator[dict[str, Any] | str]:
    """The chunks of an answer, each once. A text among them says why nothing comes just now.

    Closed before its end, it stops the server too. Raises `ChatError`.
    """
    request = last = None  # the answer's name at the server, and the last id that was sent
    cuts = 0
    try:
        while True:
            try:
                headers = ASKING | ({"Last-Event-ID": last} if last else {})
                with server.stream("POST", "chat/completions", json=body, headers=headers) as response:
                    if response.is_error:
                        response.read()
                        if last and response.status_code >= 500:  # it has only just come back
                            response.raise_for_status()
                        raise _refused(response)
                    request = response.headers.get("x-request-id")
                    for event in httpx2.EventSource(response):
                        last, cuts = event.id or last, 0
                        if not event.data:
                            continue  # it only set `retry`, say
                        if event.data == "[DONE]":
                            return
                        found = orjson.loads(event.data)
                        if "error" in found:
                            raise ChatError(str(found["error"].get("message")))
                        yield f"queued {found.get('position')}" if event.event == "status" else found
                raise httpx2.RemoteProtocolError("the answer was cut off")
            except httpx2.HTTPError as error:
                cuts += 1
                if last is None or cuts > CUTS:
                    raise _silent(server, error) from None
            yield "the connection broke; asking for the rest"
            time.sleep(PAUSE)
    except (GeneratorExit, KeyboardInterrupt):
        if request is not None:  # it would go on, as what is resumable does
            with contextlib.suppress(httpx2.HTTPError):
                server.delete(f"streams/{request}", timeout=5.0)
        raise


def _refused(response: httpx2.Response) -> ChatError:
    try:
        message = str(response.json()["error"]["message"])
    except (ValueError, LookupError, TypeError):
        message = f"HTTP {response.status_code}: {response.text[:500]}"
    if response.status_code in (401, 403):
        message += " Give a key with --api-key, or in PENSTOCK_API_KEY."
    return ChatError(message)


def _silent(server: httpx2.Client, error: Exception) -> ChatError:
    advice = "`penstock serve MODEL` starts a server; --url names one that runs elsewhere."
    return ChatError(f"No answer from {server.base_url} ({error}). {advice}")
