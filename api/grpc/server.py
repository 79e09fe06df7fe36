"""The gRPC server beside the HTTP bridge: the service, health and reflection on a port of their own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import structlog
from google.protobuf import descriptor_pool, struct_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from ...config.api_keys import Keys
from ...config.settings import Settings
from ...schemas.errors import InvalidRequest, StartupError, Unauthorized
from ...schemas.events import ErrorBody
from ...streams.port import Broker
from ...streams.stores.registry import Registry
from ..bridge.bridge import Bridge
from .messages import FULL_NAME, file_descriptor
from .refusals import abort
from .service import Service, caller_of

log = structlog.get_logger(__name__)

LOOK = 0.5  # seconds between two looks at whether requests would be answered


@contextlib.asynccontextmanager
async def serving(
    bridge: Bridge, is_ready: Callable[[], bool], *, broker: Broker, registry: Registry, settings: Settings
) -> AsyncIterator[None]:
    """Serve on `grpc_port` of `host`; calls that run at the end are cut, so let the bridge drain before.

    Raises `StartupError` where the port is taken.
    """
    has_keys = settings.api_keys is not None or settings.api_keys_file is not None
    keys = Keys(settings.api_keys or (), settings.api_keys_file) if has_keys else None
    server = grpc.aio.server(
        interceptors=[_Gate(keys)],
        options=[
            ("grpc.so_reuseport", 0),  # else a port that another process has would be shared with it
            ("grpc.max_receive_message_length", settings.max_body_size),
            ("grpc.max_metadata_size", settings.max_header_size),
            ("grpc.keepalive_time_ms", int(settings.keepalive_interval * 1000)),
            ("grpc.http2.max_pings_without_data", 0),
        ],
        maximum_concurrent_rpcs=settings.max_connections,
    )
    server.add_generic_rpc_handlers((Service(bridge, broker, registry, settings, keys).handler(),))
    states = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(states, server)
    names = (FULL_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server, pool=_shown())
    address = f"[{settings.host}]" if ":" in settings.host else settings.host
    try:
        port = server.add_insecure_port(f"{address}:{settings.grpc_port}")
    except RuntimeError:
        raise StartupError(
            f"gRPC cannot listen on {address}:{settings.grpc_port}: the port is taken, or the address is not this "
            "host's; choose another --grpc-port"
        ) from None
    await server.start()
    log.info("gRPC listens", address=f"{address}:{port}")
    watching = asyncio.create_task(_watch(states, is_ready))
    try:
        yield
    finally:
        watching.cancel()
        await states.enter_graceful_shutdown()
        await server.stop(1.0)


async def _watch(states: health.aio.HealthServicer, is_ready: Callable[[], bool]) -> None:
    while True:
        response = health_pb2.HealthCheckResponse
        state = response.SERVING if is_ready() else response.NOT_SERVING
        for name in ("", FULL_NAME):
            await states.set(name, state)
        await asyncio.sleep(LOOK)


def _shown() -> descriptor_pool.DescriptorPool:
    """What reflection shows."""
    pool = descriptor_pool.DescriptorPool()
    for library in (struct_pb2, health_pb2, reflection_pb2):
        pool.AddSerializedFile(library.DESCRIPTOR.serialized_pb)
    pool.AddSerializedFile(file_descriptor().SerializeToString())
    return pool


class _Gate(grpc.aio.ServerInterceptor):
    """Refuses calls without a known key, but those that ask for health."""

    def __init__(self, keys: Keys | None) -> None:
        self._keys = keys

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        if not handler_call_details.method.startswith(f"/{health.SERVICE_NAME}/"):
            try:
                caller_of(self._keys, handler_call_details.invocation_metadata)
            except (Unauthorized, InvalidRequest) as refusal:
                log.warning("API key refused", reason=str(refusal))
                error = ErrorBody.of(refusal)

                async def refuse(_: Any, context: Any) -> None:
                    await abort(context, error)

                return grpc.stream_stream_rpc_method_handler(refuse)
        return await continuation(handler_call_details)
