"""Fetches the images and documents that chats name by URL, from the addresses that the operator allows and from nowhere
else.

A host is resolved once, and the connection goes to an address that was checked: what a name leads to later does not
matter. Only addresses of the public internet are allowed, no redirect is followed, and no proxy is asked.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import TYPE_CHECKING, Literal, NamedTuple
from urllib.parse import unquote

from ...schemas.errors import InvalidRequest
from ...schemas.openai.completions import ChatRequest
from ...schemas.openai.content import NamedFile, NamedFiles
from ...schemas.urls import UrlLocation
from ..vision.chat import image_parts, is_remote
from ..vision.reading import not_fetched
from .documents import document_not_fetched, document_parts

if TYPE_CHECKING:
    import httpx2

MOST_BYTES = 20 << 20  # of one file
MOST_TOGETHER = 64 << 20  # bytes of the files of one request
PATIENCE = 10.0  # seconds for one file
TOGETHER = 4  # files of one request that are fetched at the same time

_INSTEAD = {
    "image": "send a data: URL with base64",
    "document": "send the document in base64, or upload it and send its id",
}

Address = IPv4Address | IPv6Address


def is_public(address: Address) -> bool:
    """Whether an address belongs to the public internet; one of IPv4 within IPv6 counts as that of IPv4."""
    inner = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    found = inner or address
    return found.is_global and not found.is_multicast


class Wanted(NamedTuple):
    """A file that a request names by its URL: what it should be, and the path of the parameter that names it."""

    kind: Literal["image", "document"]
    path: str

    def refused(self, fault: str) -> InvalidRequest:
        return (not_fetched if self.kind == "image" else document_not_fetched)(self.path, fault)


class RemoteFiles:
    """`images` and `documents` are the beginnings of the URLs from which each may be fetched, as `Settings` has checked
    them."""

    def __init__(
        self,
        images: Iterable[str] = (),
        documents: Iterable[str] = (),
        permits: Callable[[Address], bool] = is_public,
    ) -> None:
        """`permits` says which addresses may be asked."""
        self._permits = permits
        self._allowed = {
            "image": [UrlLocation.prefix(text) for text in images],
            "document": [UrlLocation.prefix(text) for text in documents],
        }

    def wanted(self, request: object, *, sees: bool) -> dict[str, Wanted]:
        """The URLs of a request's remote files, without images unless the model `sees`, each with its first place.
        Raises `InvalidRequest`."""
        if not isinstance(request, ChatRequest):
            return {}
        wanted: dict[str, Wanted] = {}
        images = image_parts(request.messages) if sees else []
        named = [(part.image_url.url, Wanted("image", path)) for path, part in images]
        if any(part.file.file_url is not None for message in request.messages for _, part in message.files):
            documents = document_parts(request.messages)
            named += [(part.file.file_url, Wanted("document", f"{path}.file_url")) for path, part in documents]
        for url, place in named:
            if url is not None and (place.kind == "document" or is_remote(url)):
                self._check(url, place)
                wanted.setdefault(url, place)
        return wanted

    async def fetch(self, wanted: Mapping[str, Wanted]) -> dict[str, bytes]:
        """The files of what is `wanted`, by URL. Raises `InvalidRequest`."""
        turns, room = asyncio.Semaphore(TOGETHER), _Room()

        async def one(url: str, place: Wanted) -> bytes:
            async with turns:
                return await self._fetched(url, place, room)

        files = [asyncio.create_task(one(url, place)) for url, place in wanted.items()]
        try:
            return dict(zip(wanted, await asyncio.gather(*files), strict=True))
        finally:  # where one is refused, the others are left
            for file in files:
                file.cancel()
            await asyncio.gather(*files, return_exceptions=True)

    def _check(self, url: str, place: Wanted) -> None:
        try:
            location = UrlLocation.of(url)
        except ValueError as error:
            raise place.refused(f"the URL cannot be used: {error}") from None
        if not any(location.is_within(prefix) for prefix in self._allowed[place.kind]):
            raise place.refused(
                f"{place.kind}s are not fetched from this address; {_INSTEAD[place.kind]}, or have the operator allow "
                f"the address with {place.kind}_allowed_urls",
            )

    async def _fetched(self, text: str, place: Wanted, room: _Room) -> bytes:
        import httpx2

        url = httpx2.URL(text)
        try:
            async with asyncio.timeout(PATIENCE):
                address = await self._resolved(url, place)
                # The name stays in the header and in the handshake, whose certificate is checked against it.
                extensions = {"sni_hostname": url.host}
                headers = {"Host": _host(url), "Accept-Encoding": "identity"}
                target = url.copy_with(host=address)
                async with (
                    httpx2.AsyncClient(trust_env=False, timeout=PATIENCE) as client,
                    client.stream("GET", target, headers=headers, extensions=extensions) as answer,
                ):
                    return await _body(answer, place, room)
        except TimeoutError:
            raise place.refused(f"the {place.kind} did not arrive within {PATIENCE:g} s") from None
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as error:
            raise place.refused(f"the {place.kind} cannot be fetched ({type(error).__name__})") from None

    async def _resolved(self, url: httpx2.URL, place: Wanted) -> str:
        """An address of the host, if all of them are permitted."""
        port = url.port or (443 if url.scheme == "https" else 80)
        try:
            found = await asyncio.get_running_loop().getaddrinfo(url.host, port, type=socket.SOCK_STREAM)
        except OSError:
            raise place.refused(f"the host {url.host} is not known") from None
        addresses: Sequence[str] = [str(entry[4][0]).partition("%")[0] for entry in found]
        if not addresses or not all(self._permits(ip_address(address)) for address in addresses):
            raise place.refused(f"the host {url.host} is not on the public internet")
        return addresses[0]


class _Room:
    """How many bytes the files of a request may still have."""

    def __init__(self) -> None:
        self.left = MOST_TOGETHER


async def _body(answer: httpx2.Response, place: Wanted, room: _Room) -> bytes:
    if answer.status_code != 200:
        note = "; redirects are not followed" if 300 <= answer.status_code < 400 else ""
        raise place.refused(f"the {place.kind}'s server answered {answer.status_code}{note}")
    if (encoding := answer.headers.get("content-encoding", "identity").lower()) != "identity":
        # A few bytes could become more than memory holds.
        raise place.refused(f"the {place.kind}'s server sends it compressed ({encoding[:20]}), unasked")
    data = bytearray()
    async for chunk in answer.aiter_raw():
        data += chunk
        room.left -= len(chunk)
        if len(data) > MOST_BYTES:
            raise place.refused(f"the {place.kind} is larger than {MOST_BYTES >> 20} MiB")
        if room.left < 0:
            raise place.refused(f"the files behind the URLs of one request have more than {MOST_TOGETHER >> 20} MiB")
    return bytes(data)


def as_named(fetched: Mapping[str, bytes]) -> NamedFiles:
    """What was fetched, as files that a request names by their URLs."""
    return {url: NamedFile(name_of(url), data) for url, data in fetched.items()}


def name_of(url: str) -> str:
    """What the file at a URL is called: the last part of the path, which may be empty."""
    name = unquote(url.split("?")[0].rpartition("/")[2])
    return name if name.isprintable() else ""


def _host(url: httpx2.URL) -> str:
    host = f"[{url.host}]" if ":" in url.host else url.host
    return host if url.port is None else f"{host}:{url.port}"
