"""Which requests of browsers are allowed.

Any web page can make its visitor's browser send requests to a server on the visitor's machine or network. The browser
names the page in `Origin`, or says in `Sec-Fetch-Site` how it relates to the server. Other programs send neither, so
that only the check of `Host` applies to them.

An attacker can point a name of theirs at this machine, which makes their page look like one of ours (DNS rebinding). So
a server on a loopback address answers only to that address and to `localhost`. A server on the network cannot know its
names: it needs API keys, which no foreign page has.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ....schemas.errors import Forbidden, NotJson, Refusal
from ....schemas.events import ErrorBody
from ..answers import error_response
from .headers import check_single
from .keys import is_open

_DEFAULT_PORTS = {"http": ":80", "https": ":443"}


class Browsers:
    """ASGI middleware: refuses requests of web pages other than ours and those of `origins` (`*`: any page).

    `local`: the server listens on a loopback address.
    """

    def __init__(self, app: ASGIApp, origins: Iterable[str], *, local: bool) -> None:
        self.app = app
        self._origins = frozenset(origin.lower() for origin in origins)
        self._hosts = frozenset(_host(origin.partition("://")[2]) for origin in self._origins)
        self._local = local

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket") and not is_open(scope["path"]):
            try:
                self._check(scope.get("method", "GET"), Headers(scope=scope))
            except Refusal as refusal:
                await error_response(ErrorBody.of(refusal))(scope, receive, send)
                return
        await self.app(scope, receive, send)

    def _check(self, method: str, headers: Headers) -> None:
        """Raises `Forbidden`, `NotJson` and `InvalidRequest`."""
        check_single(headers, ("Host",))
        hosts = headers.getlist("host")
        if self._local and not all(map(self._is_ours, hosts)):
            raise Forbidden(
                f"This server listens on a loopback address and does not answer to the name {hosts[0]!r:.200}. Ask for "
                "localhost, or start it with --cors-origins https://NAME.",
                code="foreign_host",
            )
        origin, site = headers.get("origin"), headers.get("sec-fetch-site")
        if origin is not None:
            self._check_origin(origin.lower(), hosts)
        elif site in ("cross-site", "same-site") and "*" not in self._origins:
            is_link = method == "GET" and headers.get("sec-fetch-mode") == "navigate"
            if not is_link:  # the browser shows the answer to its user, not to the page
                raise _foreign("A web page of another origin", "ORIGIN")
        if (origin is not None or site is not None) and _has_body(headers):
            _check_type(headers.get("content-type", ""))

    def _check_origin(self, origin: str, hosts: list[str]) -> None:
        if origin in self._origins or "*" in self._origins:
            return
        scheme, _, address = origin.partition("://")
        port = _DEFAULT_PORTS.get(scheme, ":")
        # A proxy in front may speak TLS, so the schemes may differ.
        if not address or address.removesuffix(port) not in (host.lower().removesuffix(port) for host in hosts):
            raise _foreign_origin(origin)

    def _is_ours(self, host: str) -> bool:
        name = _host(host)
        if "*" in self._origins or name in self._hosts or name == "localhost" or name.endswith(".localhost"):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True  # an attacker cannot rebind an address


class SharedOrigins(CORSMiddleware):
    """ASGI middleware: lets pages of `origins` (`*`: any page) send what they like and read the headers `exposed`.

    It must be outside of the check of keys, as preflights have none.
    """

    def __init__(self, app: ASGIApp, origins: Sequence[str], exposed: Sequence[str]) -> None:
        super().__init__(
            app,
            allow_origins=origins,
            allow_methods=["*"],
            allow_headers=["*"],
            # A page of the public web may ask a server of the visitor's machine or network, if it is one of `origins`.
            allow_private_network=True,
            expose_headers=exposed,
        )

    def preflight_response(self, request_headers: Headers) -> Response:
        if self.is_allowed_origin(origin := request_headers["origin"]):
            return super().preflight_response(request_headers)
        return error_response(ErrorBody.of(_foreign_origin(origin)))


def headers_unasked(origins: Sequence[str], exposed: Sequence[str], origin: str | None) -> dict[str, str]:
    """Headers with which pages of `origins` may read a refusal that comes before the request's headers have.

    `origin` is the request's, if it is known.
    """
    allowed = "*" if "*" in origins else origin if origin in origins else origins[0] if len(origins) == 1 else None
    if allowed is None:
        return {}
    shared = {"access-control-allow-origin": allowed, "access-control-expose-headers": ", ".join(exposed)}
    return shared if allowed == "*" else shared | {"vary": "Origin"}


def _host(address: str) -> str:
    """The host of `host:port`, an IPv6 address without its brackets."""
    name = address.lower()
    if name.startswith("["):
        return name[1:].partition("]")[0]
    return name.partition(":")[0].removesuffix(".")


def _has_body(headers: Headers) -> bool:
    return headers.get("content-length", "0") != "0" or "transfer-encoding" in headers


def _check_type(given: str) -> None:
    kind = given.partition(";")[0].strip().lower()
    # A form uploads a file as multipart. A browser sends JSON to another origin only after a CORS preflight.
    if kind not in ("application/json", "multipart/form-data") and not (
        kind.startswith("application/") and kind.endswith("+json")
    ):
        raise NotJson("Send JSON from a browser with the header Content-Type: application/json.")


def _foreign_origin(origin: str) -> Forbidden:
    # Browsers send `null` for pages without an address: local files and sandboxed pages.
    page = "A web page without an address" if origin == "null" else f"The web page {origin!r:.200}"
    return _foreign(page, "*" if origin == "null" else origin[:200])


def _foreign(page: str, origin: str) -> Forbidden:
    return Forbidden(
        f"{page} may not use this server. Start it with --cors-origins {origin} to allow that.", code="foreign_origin"
    )
