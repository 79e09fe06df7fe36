"""URLs that requests name and operators allow by their beginnings, and hosts."""

from __future__ import annotations

import ipaddress
import re
from typing import TYPE_CHECKING, NamedTuple, Self
from urllib.parse import urlsplit

from .errors import StartupError

if TYPE_CHECKING:
    import httpx2  # for which the processes of a server need not wait

_plain = re.compile(r"[!-~]+").fullmatch
_hidden_step = re.compile(r"%(2e|2f|5c|25|00)", re.IGNORECASE).search


def parse_url(text: str) -> httpx2.URL:
    """Parse a URL that a request can be sent to. Raises `ValueError`, whose text does not repeat the URL."""
    import httpx2

    if not _plain(text) or "\\" in text:
        raise ValueError("a URL holds neither spaces, backslashes nor characters beyond ASCII")
    try:
        url = httpx2.URL(text)
    except httpx2.InvalidURL:
        raise ValueError("not a URL") from None
    check_server(url)
    if url.userinfo or "@" in text.split("//", 1)[1].split("/", 1)[0]:
        raise ValueError("a URL holds no user name or password; send them as a header")
    if "#" in text:
        raise ValueError("a URL of a server has no fragment")
    return url


def check_server(url: httpx2.URL) -> None:
    """Raise `ValueError` for a URL that no server can have; its text does not repeat the URL."""
    if url.scheme not in ("http", "https") or not url.host:
        raise ValueError("a URL begins with http:// or https:// and a host")
    if url.port is not None and not 0 < url.port < 1 << 16:
        raise ValueError(f"a port is a number from 1 to {(1 << 16) - 1}")


class UrlLocation(NamedTuple):
    """A URL to compare with prefixes, by whole segments of its path."""

    origin: tuple[str, str, int | None]
    path: tuple[bytes, ...]

    @classmethod
    def of(cls, text: str) -> Self:
        """Raises `ValueError` for a URL that a server might interpret as another one."""
        url = parse_url(text)
        path = text.split("?")[0].split("//", 1)[1]
        if _hidden_step(path) or "//" in path or any(step == "." or step.startswith("..") for step in path.split("/")):
            raise ValueError("its path has empty, dotted or escaped segments; write it plainly")
        steps = tuple(step for step in url.raw_path.split(b"?")[0].split(b"/") if step)
        return cls((url.scheme, url.host, url.port), steps)

    @classmethod
    def prefix(cls, text: str) -> Self:
        """An allowed prefix of URLs. Raises `ValueError`."""
        if "?" in text:
            raise ValueError("a prefix has no query")
        return cls.of(text)

    def is_within(self, prefix: UrlLocation) -> bool:
        return self.origin == prefix.origin and self.path[: len(prefix.path)] == prefix.path


def is_loopback(host: str) -> bool:
    """Whether what is at `host` is on this machine, and reached from there alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def goes_through_proxies(url: str) -> bool:
    """Whether requests to `url` take the proxies of the environment, to which this machine's own addresses mean others.

    Raises `StartupError` if `url` is none, or a proxy cannot be used.
    """
    import httpx2

    try:
        host = httpx2.URL(url).host
    except httpx2.InvalidURL as error:
        raise StartupError(f"{url} is not a URL: {error}") from None
    if is_loopback(host) or host in ("0.0.0.0", "::"):
        return False
    check_proxies()
    return True


def by_proxy(url: str) -> str:
    """Words for an error of a request to `url`, which name the proxy of the environment that it went to; "" without."""
    from urllib.request import getproxies_environment, proxy_bypass

    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
    except ValueError:
        return ""
    found = getproxies_environment()
    name = next((name for name in (parts.scheme, "all") if name in found), None)
    if not host or name is None or is_loopback(host) or proxy_bypass(host):
        return ""
    return f", by the proxy that {name.upper()}_PROXY names"


def check_proxies() -> None:
    """Raise `StartupError` if the environment names a proxy that no HTTP client can be made with."""
    import httpx2

    try:
        httpx2.Client().close()
    except (ImportError, ValueError, httpx2.InvalidURL) as error:
        fault = "SOCKS needs `pip install socksio`" if isinstance(error, ImportError) else error
        raise StartupError(
            f"a proxy that the environment names cannot be used: {fault}; correct or unset HTTP_PROXY, "
            "HTTPS_PROXY and ALL_PROXY"
        ) from None
