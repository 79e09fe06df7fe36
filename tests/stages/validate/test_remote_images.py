"""Images that requests name by URL, from a server in this process."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Sequence
from ipaddress import ip_address
from typing import Any

import pytest
import pytest_asyncio
from vision_models import picture

from penstock.schemas.errors import ConfigurationError, InvalidRequest
from penstock.schemas.openai.completions import ChatRequest
from penstock.stages.validate import remote_images
from penstock.stages.validate.remote_images import RemoteImages, is_public


class Server:
    """Answers by path, and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.tasks: set[asyncio.Task[Any] | None] = set()
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://pictures.example:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.tasks.add(asyncio.current_task())
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
        except (asyncio.IncompleteReadError, ConnectionError):  # who has little patience may leave before it asks
            writer.close()
            return
        self.asked.append(head)
        path = head.split()[1]
        if path == "/silent.png":
            with contextlib.suppress(ConnectionError):
                await reader.read()
            writer.close()
            return
        status, more, body = "200 OK", "", picture()
        if path == "/away.png":
            status, more, body = "302 Found", "Location: http://10.0.0.1/secret\r\n", b""
        elif path == "/none.png":
            status, body = "404 Not Found", b""
        elif path == "/long.png":
            body = b"x" * (remote_images.MOST_BYTES + 1)
        writer.write(f"HTTP/1.1 {status}\r\n{more}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode())
        with contextlib.suppress(ConnectionError):
            writer.write(body)
            await writer.drain()
        writer.close()


@pytest_asyncio.fixture
async def server() -> AsyncIterator[Server]:
    own = Server()
    listening = await asyncio.start_server(own.serve, "127.0.0.1", 0)
    own.port = listening.sockets[0].getsockname()[1]
    yield own
    listening.close()
    await asyncio.gather(*filter(None, own.tasks))


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """What names lead to; each is looked up through the event loop."""
    known = {"pictures.example": ["127.0.0.1"]}
    looked: dict[str, list[str]] = known

    async def getaddrinfo(_: Any, host: str, port: int, **options: Any) -> Sequence[Any]:
        if host not in looked:
            raise OSError("unknown")
        return [(2, 1, 6, "", (address, port)) for address in looked[host]]

    monkeypatch.setattr("asyncio.base_events.BaseEventLoop.getaddrinfo", getaddrinfo)
    return known


def asking(*urls: str) -> ChatRequest:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return ChatRequest.model_validate({"model": "m", "messages": [{"role": "user", "content": parts}]})


async def fetched(images: RemoteImages, *urls: str) -> dict[str, bytes]:
    return await images.fetch(images.wanted(asking(*urls)))


async def test_an_allowed_image_is_fetched_once(server: Server, names: dict[str, list[str]]) -> None:
    images = RemoteImages([f"{server.url}/album"], permits=lambda _: True)
    url = f"{server.url}/album/a.png?size=1"
    assert await fetched(images, url, "data:image/png;base64,AAAA", url) == {url: picture()}
    (head,) = server.asked
    assert head.startswith("GET /album/a.png?size=1 HTTP/1.1") and f"Host: pictures.example:{server.port}" in head
    assert not re.search("(?i)cookie|authorization", head)


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/away.png", "answered 302; redirects are not followed"),
        ("/none.png", "answered 404"),
        ("/long.png", "larger than 20 MiB"),
        ("/%2e%2e/secret", "the URL cannot be used"),
        ("//secret", "the URL cannot be used"),
    ],
)
async def test_what_cannot_be_fetched_is_refused(
    server: Server, names: dict[str, list[str]], path: str, says: str
) -> None:
    images = RemoteImages([server.url], permits=lambda _: True)
    with pytest.raises(InvalidRequest, match=says) as caught:
        await fetched(images, f"{server.url}{path}")
    assert caught.value.param == "messages[0].content[0].image_url.url"


async def test_a_silent_server_is_left(
    server: Server, names: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_images, "PATIENCE", 0.2)
    with pytest.raises(InvalidRequest, match="did not arrive within"):
        await fetched(RemoteImages([server.url], permits=lambda _: True), f"{server.url}/silent.png")


async def test_other_addresses_are_never_asked(server: Server, names: dict[str, list[str]]) -> None:
    for images, url, says in (
        (RemoteImages([]), f"{server.url}/a.png", "not fetched from this address"),
        (RemoteImages([f"{server.url}/album"]), f"{server.url}/albums/a.png", "not fetched from this address"),
        (RemoteImages([server.url]), f"{server.url}/a.png", "not on the public internet"),
        (RemoteImages(["https://nowhere.example"]), "https://nowhere.example/a.png", "is not known"),
    ):
        with pytest.raises(InvalidRequest, match=says):
            await fetched(images, url)
    names["pictures.example"] = ["93.184.215.14", "127.0.0.1"]
    with pytest.raises(InvalidRequest, match="not on the public internet"):
        await fetched(RemoteImages([server.url]), f"{server.url}/a.png")
    assert server.asked == []


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.215.14", True),
        ("2606:4700::1111", True),
        ("10.0.0.1", False),
        ("127.0.0.1", False),
        ("169.254.169.254", False),
        ("100.64.0.1", False),
        ("::1", False),
        ("fe80::1", False),
        ("fd00::1", False),
        ("::ffff:10.0.0.1", False),
        ("::ffff:93.184.215.14", True),
        ("224.0.0.1", False),
        ("0.0.0.0", False),
    ],
)
def test_only_public_addresses_are_public(address: str, public: bool) -> None:
    assert is_public(ip_address(address)) is public


def test_a_prefix_that_is_no_url_is_told_at_once() -> None:
    with pytest.raises(ConfigurationError) as caught:
        RemoteImages(["example.org", "https://a.example/?x=1", "https://a.example/x"])
    assert [fault.split(":")[0] for fault in caught.value.faults] == ["image_allowed_urls"] * 2
