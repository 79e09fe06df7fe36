"""The methods of `penstock.v1.Penstock`, over the same bridge as HTTP's."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, get_args

import grpc
import structlog
from google.protobuf.message import DecodeError
from starlette.datastructures import Headers

from ...config import metrics
from ...config.api_keys import Keys
from ...config.settings import Settings
from ...schemas.bounds import LONG, load_json
from ...schemas.errors import BrokerUnavailable, InvalidRequest, Refusal, StreamFull
from ...schemas.events import Accepted, Cancelled, Done, ErrorBody, Expired, Failed, Queued, Token
from ...schemas.jobs import POOLED, Endpoint, Job
from ...schemas.threads import lacks_threads, threads_exhausted
from ...schemas.wire.protobuf import (
    METHODS,
    CancelRequest,
    CancelResponse,
    Event,
    FollowRequest,
    ListModelsResponse,
    Model,
    SubmitRequest,
)
from ...streams.port import TRACE_PARENT, Broker
from ...streams.stores.registry import Registry
from ..bridge.asking import Caller, check_timeout, complete_body, priority_of
from ..bridge.bridge import Bridge
from ..bridge.idempotency import open_once
from ..bridge.reading import Reading
from ..bridge.resume import Progress
from ..http.middleware.headers import KEYS, check_single
from .messages import FULL_NAME, from_message, message_class, to_message
from .refusals import abort, refusal_of, status_of

log = structlog.get_logger(__name__)

FOR_EVER = 1e9  # seconds
Metadata = Sequence[tuple[str, str | bytes]]
_Method = Callable[[Any, Caller, Any], Awaitable[Any]]


def caller_of(keys: Keys | None, metadata: Metadata) -> Caller:
    """Who asks, by `authorization: Bearer KEY` or `x-api-key`. Raises `Unauthorized` and `InvalidRequest`."""
    if keys is None:
        return Caller()
    headers = Headers(raw=[(name.encode(), value.encode()) for name, value in metadata if isinstance(value, str)])
    check_single(headers, KEYS)
    owner = keys.owner(headers)
    return Caller(owner.tenant, owner.max_priority, owner.admin)


class Service:
    def __init__(
        self, bridge: Bridge, broker: Broker, registry: Registry, settings: Settings, keys: Keys | None
    ) -> None:
        self._bridge = bridge
        self._broker = broker
        self._registry = registry
        self._settings = settings
        self._keys = keys

    def handler(self) -> grpc.GenericRpcHandler:
        """What a server needs to know of the methods."""
        methods: dict[str, tuple[_Method, type[Any] | None]] = {
            "Submit": (self._submit, SubmitRequest),
            "Follow": (self._follow, FollowRequest),
            "Cancel": (self._cancel, CancelRequest),
            "ListModels": (self._list_models, None),
        }
        made: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
        for name, streams in ((method.name, method.streams) for method in METHODS):
            kind = grpc.unary_stream_rpc_method_handler if streams else grpc.unary_unary_rpc_method_handler
            made[name] = kind(
                self._guarded(name, *methods[name]),
                response_serializer=lambda message: message.SerializeToString(),
            )
        return grpc.method_handlers_generic_handler(FULL_NAME, made)

    def _guarded(self, name: str, method: _Method, kind: type[Any] | None) -> Callable[[Any, Any], Any]:
        """The method, whose refusals end the call with a status, and which is logged."""

        async def call(message: bytes, context: Any) -> Any:
            began, error = time.perf_counter(), None
            try:
                caller = caller_of(self._keys, context.invocation_metadata())
                return await method(_decoded(name, kind, message), caller, context)
            except (Refusal, BrokerUnavailable, StreamFull) as refusal:
                error = ErrorBody.of(refusal_of(refusal))
                metrics.REFUSALS.labels(error.code or "unknown").inc()
            except _Ended as ended:
                error = ended.error
            except asyncio.CancelledError:
                error = _cancelled("The client went away.")
                raise
            except Exception as failure:
                log.exception("gRPC call failed", method=name)
                error = (
                    ErrorBody.of(threads_exhausted())
                    if lacks_threads(failure)
                    else ErrorBody(500, "Penstock could not answer because of an internal error; see its log.", "")
                )
            finally:
                if self._settings.access_log:
                    status = status_of(error).name if error else "OK"
                    log.info("gRPC call", method=name, status=status, seconds=round(time.perf_counter() - began, 4))
            await abort(context, error)

        return call

    async def _submit(self, request: SubmitRequest, caller: Caller, context: Any) -> None:
        endpoint = request.endpoint or "/v1/chat/completions"
        if endpoint not in get_args(Endpoint):
            names = ", ".join(get_args(Endpoint))
            raise InvalidRequest(f"endpoint must be one of {names}.", param="endpoint")
        body = await self._body(request.body)
        if endpoint not in POOLED:
            body["stream"] = True
        await complete_body(self._registry, body, caller)
        given, longest = request.timeout, self._settings.longest_timeout
        if given is None and (given := body.get("timeout")) is None:
            left = context.time_remaining()
            given = max(left, 0.001) if left is not None and left < longest else None
        bridge = self._bridge
        deadline = bridge.broker.now() + check_timeout(given, "timeout", self._settings)
        job = Job.model_validate(
            {"id": f"grpc-{uuid.uuid4().hex}", "endpoint": endpoint, "bridge": bridge.name, "body": body}
        )
        priority = priority_of(body, caller, self._settings)
        trace = dict(context.invocation_metadata()).get(TRACE_PARENT)
        if request.idempotency_key is not None:
            reading = await open_once(
                request.idempotency_key,
                bridge,
                self._broker,
                job,
                priority=priority,
                tenant=caller.tenant,
                deadline=deadline,
                events_ttl=self._settings.events_ttl,
                trace=trace,
            )
        else:
            reading = await bridge.open(
                job,
                priority=priority,
                tenant=caller.tenant,
                deadline=deadline,
                kept=request.resumable,
                trace=trace,
            )
        await self._send(reading, Progress(reading.request), context)

    async def _follow(self, request: FollowRequest, caller: Caller, context: Any) -> None:
        progress = Progress.parse(request.after) if request.after else Progress(request.request)
        if progress.request != request.request:
            raise InvalidRequest("after is not an id of this request's events.", code="invalid_event_id", param="after")
        reading = await self._bridge.follow(request.request, caller.tenant)
        await self._send(reading, progress, context)

    async def _cancel(self, request: CancelRequest, caller: Caller, context: Any) -> Any:
        reading = await self._bridge.follow(request.request, caller.tenant)
        try:
            if running := reading.final is None:
                await reading.cancel()
            cancelled = running and isinstance(reading.final, Cancelled | None)
        finally:
            reading.close()
        return to_message(CancelResponse(request.request, cancelled))

    async def _list_models(self, request: None, caller: Caller, context: Any) -> Any:
        models = tuple(
            Model(name, card.name, card.created, card.context_length)
            for card in self._registry.models.values()
            for name in card.names
        )
        return to_message(ListModelsResponse(models))

    async def _body(self, text: str) -> dict[str, Any]:
        try:
            raw = text.encode()
            body = load_json(raw) if len(raw) <= LONG else await asyncio.to_thread(load_json, raw)
        except ValueError as error:
            raise InvalidRequest(f"The body {error}", code="invalid_json", param="body") from None
        if not isinstance(body, dict):
            raise InvalidRequest("The body must be a JSON object.", code="invalid_type", param="body")
        return body

    async def _send(self, reading: Reading, progress: Progress, context: Any) -> None:
        """Send the events after `progress`. Raises `_Ended` where the last one is no success."""
        try:
            await context.send_initial_metadata((("penstock-request", reading.request),))
            while not reading.ended:
                for event in await reading.take(FOR_EVER):
                    await self._send_one(event, progress, context)
        finally:
            reading.leave()

    async def _send_one(self, event: Any, progress: Progress, context: Any) -> None:
        match event:
            case Accepted() | Queued() if progress.resumed:
                return
            case Token():
                _, event = progress.split(event)
                if event is None:
                    return
            case Done() if progress.usage_sent:
                return
            case Done():
                progress.usage_sent = True
            case Failed(error=error) | Expired(error=error):
                raise _Ended(error)
        try:
            async with asyncio.timeout(self._settings.write_timeout):
                await context.write(to_message(Event(progress.id, event)))
        except TimeoutError:
            raise _Ended(
                ErrorBody(499, "The client did not read its events.", "cancelled_error", "cancelled")
            ) from None
        if isinstance(event, Cancelled):
            raise _Ended(ErrorBody(499, "The request was cancelled.", "cancelled_error", "cancelled"))


def _decoded(name: str, kind: type[Any] | None, message: bytes) -> Any:
    try:
        given = message_class(f"{name}Request").FromString(message)
    except DecodeError:
        raise InvalidRequest(f"The message is no {name}Request.", code="invalid_message") from None
    return kind and from_message(kind, given)


def _cancelled(message: str) -> ErrorBody:
    return ErrorBody(499, message, "cancelled_error", "cancelled")


class _Ended(Exception):
    """A request came to an end that is none of success."""

    def __init__(self, error: ErrorBody) -> None:
        super().__init__(error.message)
        self.error = error
