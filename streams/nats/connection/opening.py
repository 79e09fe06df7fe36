"""Opens a connection to NATS, and says why a server refuses it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import re
import ssl
from typing import NamedTuple, Protocol
from urllib.parse import urlsplit

from nats.errors import Error, SecureConnWantedError

from ....schemas.errors import BrokerAway, StartupError
from ....schemas.urls import is_loopback
from .access import Access, AccessError
from .client import ClosedAfterHandshake, DirectClient

_CONNECT_TIMEOUT = 2  # seconds for one server to accept the connection
_RECONNECT_WAIT = 0.2  # seconds between two attempts at one server
_PING_INTERVAL = 3  # seconds; a server that misses two pongs is given up after the third, so within 6 to 9 s
_FLUSH_TIMEOUT = 1.0  # seconds that a sender waits for nats-py's full buffer; otherwise until a reconnect

_denied = re.compile(r'permissions violation for (publish|subscription) to "([^"]*)"', re.IGNORECASE).search


class Denial(NamedTuple):
    """What a server does not allow: to `publish to` or `subscribe to` a subject, which nats-py gives in lower case."""

    action: str
    subject: str

    def text(self, address: str, subject: str = "") -> str:
        return (
            f"NATS at {address} does not allow us to {self.action} {subject or self.subject}: give this user the "
            "permissions of its role, which `penstock nats config` prints"
        )


class Listener(Protocol):
    """Hears what becomes of the connection later."""

    async def disconnected(self) -> None: ...

    async def reconnected(self) -> None: ...

    def report(self, error: Exception) -> None: ...


def public_address(url: str) -> str:
    """`url` (or several, separated by commas) without credentials, fit for logs and error messages."""
    servers = (urlsplit(server if "://" in server else f"nats://{server}") for server in url.split(","))
    return ",".join(f"{server.scheme}://{server.netloc.rpartition('@')[2]}" for server in servers)


def _is_own(server: str) -> bool:
    """Whether the address of a server is this machine's own."""
    return is_loopback(urlsplit(server if "://" in server else f"nats://{server}").hostname or "")


async def open_client(client: DirectClient, url: str, access: Access, name: str, listener: Listener) -> None:
    """Connect to the first server that answers. Raises as `Link.connect` does."""
    try:
        options = access.options()
    except AccessError as error:
        raise StartupError(str(error)) from error
    servers = url.split(",")
    failed: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
    failures: list[Exception] = []

    async def on_error(error: Exception) -> None:
        if connecting.done():
            listener.report(error)
            return
        failures.append(error)
        if len(failures) >= len(servers) and not failed.done():
            # Of several servers, one that refuses us says more than one that is away.
            failed.set_result(next((each for each in failures if refusal(each, url, access)), error))

    # nats-py would retry for minutes, so its first round of errors ends the attempt.
    connecting = asyncio.create_task(
        client.connect(
            servers,
            name=name,
            error_cb=on_error,
            disconnected_cb=listener.disconnected,
            reconnected_cb=listener.reconnected,
            connect_timeout=_CONNECT_TIMEOUT,
            reconnect_time_wait=_RECONNECT_WAIT,  # type: ignore[arg-type]  # declared int, but only slept for
            max_reconnect_attempts=-1,
            ping_interval=_PING_INTERVAL,
            flush_timeout=_FLUSH_TIMEOUT,
            **options,
        )
    )
    try:
        await asyncio.wait((connecting, failed), return_when=asyncio.FIRST_COMPLETED)
        if failed.done():
            raise failed.result()
        await connecting
    except (OSError, Error, TimeoutError) as error:
        if why := refusal(error, url, access):
            raise StartupError(why) from error
        reason = str(error) or type(error).__name__
        if not failed.done():
            raise StartupError(f"NATS at {public_address(url)}: {reason}; correct --nats-url") from error
        advice = "start one or leave --nats-url out to use the built-in one"
        if isinstance(error, OSError) and error.errno == errno.ENETUNREACH and all(map(_is_own, servers)):
            advice = "this machine cannot reach itself: bring its loopback interface up, as by `ip link set lo up`"
        raise BrokerAway(f"no NATS server answers at {public_address(url)}: {reason}; {advice}") from error
    finally:
        if not connecting.done():
            connecting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await connecting
            await close_client(client)


async def close_client(client: DirectClient) -> None:
    # nats-py tries to flush its buffer to a socket that may be closed.
    with contextlib.suppress(OSError):
        await client.close()


def refusal(error: Exception, url: str, access: Access) -> str | None:
    """Why trying again would not help; None if it may."""
    reason = str(error).removeprefix("nats: ").strip("'") or type(error).__name__
    where = f"NATS at {public_address(url)}"
    match error:
        case AccessError():
            return str(error)
        case SecureConnWantedError():
            return f"{where} offers no TLS: set it up there, or leave out what asks for it here"
        case ssl.SSLCertVerificationError():
            return (
                f"the certificate of {where} is not accepted ({error.verify_message}): name the certificate of its CA "
                "with --nats-ca, and the server as its certificate does"
            )
        case ssl.SSLError() if error.reason == "WRONG_VERSION_NUMBER" and access.tls_first:
            return f"{where} does not begin with TLS: leave out --nats-tls-first"
        case ssl.SSLError() | ClosedAfterHandshake():
            return f"{where} refuses {access.proof_of_tls}: {reason}"
        case Error() if "auth" in reason.lower():  # every authorization error says so
            given = access.proof if access.proves or "@" in url else "us without credentials"
            return f"{where} refuses {given}: {reason}; correct it, or the server's configuration"
    return None


def denial(error: Exception) -> Denial | None:
    """What the server has denied, if the error says so."""
    if (found := _denied(str(error))) is None:
        return None
    return Denial("publish to" if found[1].lower() == "publish" else "subscribe to", found[2].lower())
