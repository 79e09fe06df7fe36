"""The socket of a bridge, and the lines by which people and programs learn that it serves."""

from __future__ import annotations

import errno
import socket
import sys
from typing import TextIO

from ...config.logs.lines import LogLines
from ...schemas.errors import StartupError
from .watching import ready


def listen(host: str, port: int) -> socket.socket:
    """A listening TCP socket. Raises `StartupError` if the address is not available."""
    listener: socket.socket | None = None
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
    except OSError as error:
        if listener is not None:
            listener.close()
        is_host = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
        advice = f"choose another --{'host' if is_host else 'port'}"
        raise StartupError(f"cannot listen on {host} port {port}: {error.strerror}; {advice}") from None
    return listener


def base_url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def announce(url: str, workers: int = 1) -> None:
    """Print one line once the server is ready."""
    await ready(url, workers)
    say(f"penstock ready {url}", sys.stdout)


def say(line: str, stream: TextIO) -> None:
    """Print a line; nobody has to listen any more."""
    LogLines(stream).msg(line)
