"""Ports for servers that must know theirs before they start."""

from __future__ import annotations

import atexit
import contextlib
import socket

_reserved = contextlib.ExitStack()
atexit.register(_reserved.close)


def reserved_port() -> int:
    """A port of 127.0.0.1 that the system gives to nobody else while this process lives.

    A socket that is bound to it and does not listen keeps it from those who ask for any port; who asks for this one,
    and lets addresses be used again as servers do, may listen there.
    """
    one = _reserved.enter_context(socket.socket())
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    one.bind(("127.0.0.1", 0))
    port: int = one.getsockname()[1]
    return port
