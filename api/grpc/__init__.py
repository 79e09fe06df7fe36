"""gRPC: the service `penstock.v1.Penstock`, another way to the same pipeline. Needs the extra `grpc`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING

from ...config.settings import Settings
from ...schemas.errors import StartupError

if TYPE_CHECKING:
    from ...streams.port import Broker
    from ...streams.stores.registry import Registry
    from ..bridge.bridge import Bridge

_PACKAGES = ("grpc", "grpc_health", "grpc_reflection")


def check_grpc(settings: Settings) -> None:
    """Raise `StartupError` where gRPC is wanted and a package for it is not installed."""
    if settings.grpc_port is not None and not all(map(find_spec, _PACKAGES)):
        raise StartupError(
            "gRPC needs packages that are not installed: `pip install 'penstock[grpc]'`, or leave --grpc-port out"
        )


def beside_http(
    broker: Broker, registry: Registry, settings: Settings
) -> Callable[[Bridge, Callable[[], bool]], AbstractAsyncContextManager[None]] | None:
    """What serves gRPC over a bridge, where a port for it is given; nothing else imports gRPC's packages."""
    if settings.grpc_port is None:
        return None
    from .server import serving

    return partial(serving, broker=broker, registry=registry, settings=settings)
