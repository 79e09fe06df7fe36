"""Images and documents that requests name by URL, from a server in this process."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import re
from collections.abc import AsyncIterator, Sequence
from functools import partial
from ipaddress import ip_address
from typing import Any

import pytest
import pytest_asyncio
from memory_pipeline import MODEL, Pipeline, events_of
from pdf_files import pdf
from vision_models import picture

from penstock.api.http.preparers import Preparers
from penstock.engine.preparing import remote_files
from penstock.engine.preparing.remote_files import RemoteFiles, is_public, name_of
from penstock.schemas.errors import InvalidRequest
from penstock.schemas.events import Done, Event, Failed, Token
from penstock.schemas.jobs import Job
from penstock.schemas.openai.completions import ChatRequest
from penstock.streams.stores.named_files import NamedFileStore


class Server:
    """Answers by path, and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.tasks: set[asyncio.Task[Any] | None] = set()
        self.port = 0
        self.gives_up = asyncio.Event()  # whom it never answered it leaves

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
        if path == "/silent":
            both = {asyncio.create_task(reader.read()), asyncio.create_task(self.gives_up.wait())}
            _, pending = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            for task in pending:
                task.cancel()
            await asyncio.gather(*both, return_exceptions=True)
            writer.close()
            return
        status, more, body = "200 OK", "", picture()
        if path == "/away":
            status, more, body = "302 Found", "Location: http://10.0.0.1/secret\r\n", b""
        elif path == "/packed":
            more, body = "Content-Encoding: gzip\r\n", gzip.compress(bytes(1000))
        elif path == "/none":
            status, body = "404 Not Found", b""
        elif path == "/long":
            body = b"x" * (remote_files.MOST_BYTES + 1)
        elif path.startswith("/lawn.pdf"):
            body = pdf("The grass is green.")
        elif path.startswith("/lawn.txt"):
            body = b"The grass is tall."
        elif path == "/lawn.zip":
            body = b"PK\x03\x04\0\0"
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


def document(url: str) -> dict[str, Any]:
    return {"type": "file", "file": {"file_url": url}}


async def fetched(files: RemoteFiles, *urls: str) -> dict[str, bytes]:
    return await files.fetch(files.wanted(asking(*urls), sees=True))


def reading(*urls: str) -> ChatRequest:
    """A chat with documents."""
    message = {"role": "user", "content": [document(url) for url in urls]}
    return ChatRequest.model_validate({"model": "m", "messages": [message]})


async def test_an_allowed_image_is_fetched_once(server: Server, names: dict[str, list[str]]) -> None:
    images = RemoteFiles([f"{server.url}/album"], permits=lambda _: True)
    url = f"{server.url}/album/a.png?size=1"
    assert await fetched(images, url, "data:image/png;base64,AAAA", url) == {url: picture()}
    (head,) = server.asked
    assert head.startswith("GET /album/a.png?size=1 HTTP/1.1") and f"Host: pictures.example:{server.port}" in head
    assert not re.search("(?i)cookie|authorization", head)


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/away", "answered 302; redirects are not followed"),
        ("/none", "answered 404"),
        ("/packed", r"sends it compressed \(gzip\), unasked"),
        ("/long", "larger than 20 MiB"),
        ("/%2e%2e/secret", "the URL cannot be used"),
        ("//secret", "the URL cannot be used"),
    ],
)
async def test_what_cannot_be_fetched_is_refused(
    server: Server, names: dict[str, list[str]], path: str, says: str
) -> None:
    files = RemoteFiles([server.url], [server.url], permits=lambda _: True)
    url = f"{server.url}{path}"
    for request, code, param in (
        (asking(url), "remote_image", "image_url.url"),
        (reading(url), "remote_document", "file.file_url"),
    ):
        with pytest.raises(InvalidRequest, match=says) as caught:
            await files.fetch(files.wanted(request, sees=True))
        assert (caught.value.code, caught.value.param) == (code, f"messages[0].content[0].{param}")


async def test_a_silent_server_is_left(
    server: Server, names: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_files, "PATIENCE", 0.2)
    with pytest.raises(InvalidRequest, match="did not arrive within"):
        await fetched(RemoteFiles([server.url], permits=lambda _: True), f"{server.url}/silent")


async def test_other_addresses_are_never_asked(server: Server, names: dict[str, list[str]]) -> None:
    for images, url, says in (
        (RemoteFiles([]), f"{server.url}/a.png", "not fetched from this address"),
        (RemoteFiles([f"{server.url}/album"]), f"{server.url}/albums/a.png", "not fetched from this address"),
        (RemoteFiles([server.url]), f"{server.url}/a.png", "not on the public internet"),
        (RemoteFiles(["https://nowhere.example"]), "https://nowhere.example/a.png", "is not known"),
    ):
        with pytest.raises(InvalidRequest, match=says):
            await fetched(images, url)
    names["pictures.example"] = ["93.184.215.14", "127.0.0.1"]
    with pytest.raises(InvalidRequest, match="not on the public internet"):
        await fetched(RemoteFiles([server.url]), f"{server.url}/a.png")
    with pytest.raises(InvalidRequest, match=r"documents are not fetched from this address.* document_allowed_urls"):
        RemoteFiles([server.url]).wanted(reading(f"{server.url}/lawn.pdf"), sees=True)
    for url in ("ftp://pictures.example/lawn.pdf", "lawn.pdf", "data:application/pdf;base64,AAAA"):
        with pytest.raises(InvalidRequest, match="the URL cannot be used"):
            RemoteFiles(documents=[server.url]).wanted(reading(url), sees=True)
    assert server.asked == []


async def test_the_files_of_a_request_are_bounded_together(
    server: Server, names: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_files, "MOST_TOGETHER", 40)
    files = RemoteFiles(documents=[server.url], permits=lambda _: True)
    urls = [f"{server.url}/lawn.txt?{number}" for number in range(3)]
    assert len(await files.fetch(files.wanted(reading(*urls[:2], urls[0]), sees=False))) == 2
    with pytest.raises(InvalidRequest, match="the files behind the URLs of one request have more than"):
        await files.fetch(files.wanted(reading(*urls), sees=False))


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("https://a.example/b/My%20report.pdf?page=2", "My report.pdf"),
        ("https://a.example/b/", ""),
        ("https://a.example/a%0Ab.pdf", ""),
    ],
)
def test_a_document_is_called_what_its_url_says(url: str, name: str) -> None:
    assert name_of(url) == name


async def ask(pipeline: Pipeline, name: str, tenant: str, *parts: dict[str, Any]) -> list[Event]:
    message = {"role": "user", "content": [*parts, {"type": "text", "text": "What colour?"}]}
    body = {"model": MODEL, "messages": [message], "max_tokens": 200}
    job = Job(id=name, endpoint="/v1/chat/completions", bridge="test", body=body)
    return await events_of(await pipeline.bridge.open(job, priority="normal", tenant=tenant))


async def test_documents_are_fetched_and_one_slow_server_holds_up_no_other_tenant(
    server: Server, names: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.stages.validate.slow_parts.RemoteFiles", partial(RemoteFiles, permits=lambda _: True))
    pipeline = await Pipeline.start(document_allowed_urls=(server.url,))
    try:
        slow = document(f"{server.url}/silent")
        waiting = [asyncio.create_task(ask(pipeline, f"s-{number}", "slow", slow)) for number in range(20)]
        events = await ask(
            pipeline, "a", "one", document(f"{server.url}/lawn.pdf?x=1"), document(f"{server.url}/lawn.txt")
        )
        said = "".join(event.text for event in events if isinstance(event, Token))
        assert "<source>lawn.pdf</source>\n<content>\nThe grass is green.\n</content>" in said
        assert "<source>lawn.txt</source>\n<content>\nThe grass is tall.\n</content>" in said
        assert isinstance(events[-1], Done)
        refused = (await ask(pipeline, "b", "one", document(f"{server.url}/lawn.zip")))[-1]
        assert isinstance(refused, Failed) and refused.error.code == "invalid_document"
        assert refused.error.param == "messages[0].content[0].file.file_url"
        assert not any(task.done() for task in waiting)
        for task in waiting:
            task.cancel()
    finally:
        server.gives_up.set()
        await pipeline.stop()


async def test_what_is_counted_is_fetched_as_for_a_request(
    server: Server, names: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.stages.validate.slow_parts.RemoteFiles", partial(RemoteFiles, permits=lambda _: True))
    pipeline = await Pipeline.start(document_allowed_urls=(server.url,))
    try:
        url = f"{server.url}/lawn.pdf"
        done = (await ask(pipeline, "a", "one", document(url)))[-1]
        assert isinstance(done, Done)
        remote = RemoteFiles(documents=[server.url], permits=lambda _: True)
        preparers = Preparers(pipeline.pipe.registry, NamedFileStore(pipeline.pipe.broker, 0), remote=remote)
        parts = [document(url), {"type": "text", "text": "What colour?"}]
        chat = ChatRequest.model_validate({"model": MODEL, "messages": [{"role": "user", "content": parts}]})
        assert len(await preparers.prompt(await preparers.card(MODEL), chat, "one", 0)) == done.usage.prompt_tokens
    finally:
        await pipeline.stop()


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
