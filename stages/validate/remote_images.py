"""Fetches the images that chats name by URL, from the addresses that the operator allows and from nowhere else.

A host is resolved once, and the connection goes to an address that was checked: what a name leads to later does not
matter. Only addresses of the public internet are allowed, no redirect is followed, and no proxy is asked.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import TYPE_CHECKING

from ...engine.vision.chat import has_images, image_parts, is_remote
from ...engine.vision.reading import not_fetched
from ...schemas.errors import ConfigurationError
from ...schemas.openai.completions import ChatRequest
from ...schemas.urls import UrlLocation

if TYPE_CHECKING:
    import httpx2

MOST_BYTES = 20 << 20  # of one image
PATIENCE = 10.0  # seconds for one image
TOGETHER = 4  # images of one request that are fetched at the same time

Address = IPv4Address | IPv6Address


def is_public(address: Address) -> bool:
    """Whether an address belongs to the public internet; one of IPv4 within IPv6 counts as that of IPv4."""
    inner = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    found = inner or address
    return found.is_global and not found.is_multicast


class RemoteImages:
    """`allowed` are the beginnings of URLs. Raises `ConfigurationError` for one that is none."""

    def __init__(self, allowed: Iterable[str], permits: Callable[[Address], bool] = is_public) -> None:
        """`permits` says which addresses may be asked."""
        self._permits = permits
        self._allowed: list[UrlLocation] = []
        faults = []
        for text in allowed:
            try:
                self._allowed.append(UrlLocation.prefix(text))
            except ValueError as error:
                faults.append(f"image_allowed_urls: {text!r}: {error}")
        if faults:
            raise ConfigurationError(faults)

    def wanted(self, request: object) -> dict[str, str]:
        """The URLs of a request's remote images, and where each stands. Raises `InvalidRequest`."""
        wanted: dict[str, str] = {}
        if not isinstance(request, ChatRequest) or not has_images(request):
            return wanted
        for path, part in image_parts(request.messages):
            if (url := part.image_url.url) is not None and is_remote(url):
                self._check(url, path)
                wanted.setdefault(url, path)
        return wanted

    async def fetch(self, wanted: Mapping[str, str]) -> dict[str, bytes]:
        """The files of what is `wanted`, by URL. Raises `InvalidRequest`."""
        turns = asyncio.Semaphore(TOGETHER)

        async def one(url: str, path: str) -> bytes:
            async with turns:
                return await self._fetched(url, path)

        files = await asyncio.gather(*(one(url, path) for url, path in wanted.items()))
        return dict(zip(wanted, files, strict=True))

    def _check(self, url: str, path: str) -> None:
        try:
            location = UrlLocation.of(url)
        except ValueError as error:
            raise not_fetched(path, f"the URL cannot be used: {error}") from None
        if not any(location.is_within(prefix) for prefix in self._allowed):
            raise not_fetched(
                path,
                "images are not fetched from this address; send a data: URL with base64, or have the operator allow "
                "the address with image_allowed_urls",
            )

    async def _fetched(self, text: str, path: str) -> bytes:
        import httpx2

        url = httpx2.URL(text)
        try:
            async with asyncio.timeout(PATIENCE):
                address = await self._resolved(url, path)
                # The name stays in the header and in the handshake, whose certificate is checked against it.
                extensions = {"sni_hostname": url.host}
                target = url.copy_with(host=address)
                async with (
                    httpx2.AsyncClient(trust_env=False, timeout=PATIENCE) as client,
                    client.stream("GET", target, headers={"Host": _host(url)}, extensions=extensions) as answer,
                ):
                    return await _body(answer, path)
        except TimeoutError:
            raise not_fetched(path, f"the image did not arrive within {PATIENCE:g} s") from None
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as error:
            raise not_fetched(path, f"the image cannot be fetched ({type(error).__name__})") from None

    async def _resolved(self, url: httpx2.URL, path: str) -> str:
        """An address of the host, if all of them are permitted."""
        port = url.port or (443 if url.scheme == "https" else 80)
        try:
            found = await asyncio.get_running_loop().getaddrinfo(url.host, port, type=socket.SOCK_STREAM)
        except OSError:
            raise not_fetched(path, f"the host {url.host} is not known") from None
        addresses: Sequence[str] = [str(entry[4][0]).partition("%")[0] for entry in found]
        if not addresses or not all(self._permits(ip_address(address)) for address in addresses):
            raise not_fetched(path, f"the host {url.host} is not on the public internet")
        return addresses[0]


async def _body(answer: httpx2.Response, path: str) -> bytes:
    if answer.status_code != 200:
        note = "; redirects are not followed" if 300 <= answer.status_code < 400 else ""
        raise not_fetched(path, f"the image's server answered {answer.status_code}{note}")
    data = bytearray()
    async for chunk in answer.aiter_bytes():
        data += chunk
        if len(data) > MOST_BYTES:
            raise not_fetched(path, f"the image is larger than {MOST_BYTES >> 20} MiB")
    return bytes(data)


def _host(url: httpx2.URL) -> str:
    host = f"[{url.host}]" if ":" in url.host else url.host
    return host if url.port is None else f"{host}:{url.port}"
