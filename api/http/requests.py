"""What the paths of the HTTP bridge share: the tenant of a request, its body, and its way into the pipeline.

`open_request` reads the same headers on every path that uses it: `Penstock-Resumable`, `Last-Event-ID`,
`Idempotency-Key`, `Penstock-Timeout`, `Penstock-Events`.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from starlette.datastructures import Headers
from starlette.requests import Request

from ...config import metrics
from ...config.settings import Settings
from ...schemas.bounds import LONG, load_json
from ...schemas.errors import DeadlineExceeded, Forbidden, InvalidRequest, NotJson, PayloadTooLarge, Refusal
from ...schemas.jobs import TOKEN_PATTERN, Job, JobEndpoint
from ...schemas.openai.body import Body
from ...schemas.openai.completions import parse_body
from ...streams.port import TRACE_PARENT, Broker
from ...streams.stores.quotas import Quotas
from ...streams.stores.registry import Registry
from ..bridge.asking import TENANT, Caller, check_timeout, complete_body, priority_of
from ..bridge.bridge import Bridge
from ..bridge.idempotency import open_once
from ..bridge.reading import Reading
from ..bridge.resume import Progress, invalid_event_id
from .middleware.access import note
from .middleware.azure import DEPLOYMENT
from .middleware.headers import check_single, flag
from .middleware.ignored import known_fields, name_ignored
from .preparers import Preparers

Kind = TypeVar("Kind", bound=Body)
Made = TypeVar("Made")

_SINGLE = ("Penstock-Resumable", "Penstock-Events", "Penstock-Timeout", "Last-Event-ID", "Idempotency-Key")


@dataclass(frozen=True, slots=True)
class Gateway:
    """What the routes need to reach the pipeline, its stores and the models."""

    bridge: Bridge
    broker: Broker
    registry: Registry
    settings: Settings
    quotas: Quotas
    preparers: Preparers


class Routes:
    """Base of a class whose methods answer a group of paths."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._broker = gateway.broker
        self._settings = gateway.settings


class Opened(NamedTuple):
    """A request in the pipeline. `progress`: how far its client has read, if the client may resume it. `status`: the
    client wants the queue position as events."""

    reading: Reading
    progress: Progress | None
    status: bool


def caller_of(request: Request) -> Caller:
    """Who asks; anybody if the server needs no keys."""
    state = request.state
    return Caller(tenant_of(request), getattr(state, "max_priority", None), getattr(state, "admin", True))


def size_of(request: Request) -> int:
    """How many bytes the body of a request had that has been read."""
    return getattr(request.state, "size", 0)


def tenant_of(request: Request) -> str:
    """The tenant of the request's API key; `default` if the server needs no keys."""
    return getattr(request.state, "tenant", TENANT)


def tenant_meant(request: Request) -> str:
    """The tenant whose request is meant: that of the key, or with an admin's key the one that `?tenant=` names.

    Raises `Forbidden` and `InvalidRequest`.
    """
    tenant = request.query_params.get("tenant", tenant_of(request))
    if re.fullmatch(TOKEN_PATTERN, tenant) is None:
        raise InvalidRequest("tenant must be the name of a tenant.", param="tenant")
    if tenant != tenant_of(request) and not getattr(request.state, "admin", True):
        raise Forbidden(
            "This key may not reach another tenant's requests; use one with the word admin.",
            code="not_admin",
            param="tenant",
        )
    return tenant


async def read_object(request: Request, settings: Settings, kind: type[Body] | None = None) -> dict[str, Any]:
    """The request's body, a JSON object; with `kind`, without the fields that it lacks.

    Raises what `read_body` raises, and `InvalidRequest`.
    """
    body = await read_as(lambda body: body, request, settings)
    return body if kind is None else known_fields(body, kind, request, settings)


async def read_parsed(kind: type[Kind], request: Request, settings: Settings) -> Kind:
    """A body that does not go through the pipeline. Raises what `read_object` and `parse_body` raise."""
    return await read_as(lambda body: parse_body(kind, known_fields(body, kind, request, settings)), request, settings)


async def read_as(make: Callable[[dict[str, Any]], Made], request: Request, settings: Settings) -> Made:
    """The result of `make` for the request's body, a JSON object; in a thread if the body is long.

    Raises what `read_object` and `make` raise.
    """
    return await made_of(make, await read_body(request, settings.max_body_size, settings.body_timeout))


async def made_of(make: Callable[[dict[str, Any]], Made], raw: bytes, what: str = "body") -> Made:
    """What `make` makes of a JSON object, in a thread if that is long. Raises as `make` does, and `InvalidRequest`."""
    return _made(make, raw, what) if len(raw) <= LONG else await asyncio.to_thread(_made, make, raw, what)


def _made(make: Callable[[dict[str, Any]], Made], raw: bytes, what: str) -> Made:
    try:
        body = load_json(raw)
    except ValueError as error:
        raise InvalidRequest(f"The {what} {error}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise InvalidRequest(f"The {what} must be a JSON object.", code="invalid_type")
    return make(body)


async def read_body(request: Request, limit: int, patience: float) -> bytes:
    """The whole body, at most `limit` bytes that arrive within `patience` seconds.

    Raises `DeadlineExceeded`, `NotJson` where it is compressed, and `PayloadTooLarge`, the last after reading on a
    while, so that the client can read the response.
    """
    encoding = request.headers.get("content-encoding", "")
    if encoding.strip().lower() not in ("", "identity"):
        raise NotJson(f"The body's Content-Encoding is {encoding[:40]!r}; send it without compression.")
    too_large = PayloadTooLarge(f"The body exceeds {limit} bytes, the limit of the setting max_body_size.")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > limit:
        raise too_large
    body = bytearray()
    size = 0
    try:
        async with asyncio.timeout(patience):
            async for chunk in request.stream():
                size += len(chunk)
                if size <= limit:
                    body += chunk
                elif size > 16 * limit:
                    break
    except TimeoutError:
        raise DeadlineExceeded(f"The body did not arrive within {patience:g} seconds.", code="body_timeout") from None
    if size > limit:
        raise too_large
    request.state.size = size
    return bytes(body)


async def open_request(
    request: Request, gateway: Gateway, endpoint: JobEndpoint, body: dict[str, Any], prefix: str, *, kept: bool = False
) -> Opened:
    """Publish a job for `body`, or follow the request that the headers name; ids begin with `prefix`.

    `body` gets the model that Azure's client has in the path, or the name of the only model where it names none, and
    loses a `keep_alive` that is ignored.
    `kept`: the request continues if its client disconnects.

    Raises what `Bridge.open`, `Bridge.follow` and `open_once` raise, `InvalidRequest` for a header, and `Forbidden` for
    a priority.
    """
    try:
        opened = await _opened(request, gateway, endpoint, body, prefix, kept)
    except Refusal as refusal:
        metrics.REQUESTS.labels("refused").inc()
        metrics.REFUSALS.labels(refusal.code or "unknown").inc()
        raise
    note(request.scope, reading=opened.reading)
    return opened


async def _opened(
    request: Request, gateway: Gateway, endpoint: JobEndpoint, body: dict[str, Any], prefix: str, kept: bool
) -> Opened:
    caller = caller_of(request)
    if (deployment := getattr(request.state, DEPLOYMENT, None)) is not None:
        body["model"] = deployment
    if dropped := await complete_body(gateway.registry, body, caller):
        name_ignored(request, dropped)
    headers, bridge, tenant = request.headers, gateway.bridge, tenant_of(request)
    request.state.metered = tenant
    check_single(headers, _SINGLE)
    resumable, status = flag(headers, "Penstock-Resumable"), flag(headers, "Penstock-Events")
    streaming = body.get("stream") is True
    deadline = bridge.broker.now() + _timeout(body, headers, gateway.settings)
    priority = priority_of(body, caller, gateway.settings)
    job = Job(id=f"{prefix}{uuid.uuid4().hex}", endpoint=endpoint, bridge=bridge.name, body=body)
    progress, trace = None, headers.get(TRACE_PARENT)
    if (last := headers.get("last-event-id")) is not None:
        progress = Progress.parse(last)
        if not streaming or not progress.request.startswith(prefix):
            raise invalid_event_id("Last-Event-ID does not belong to a stream of this endpoint.")
        reading = await bridge.follow(progress.request, tenant, deadline=deadline)
    elif (key := headers.get("idempotency-key")) is not None:
        reading = await open_once(
            key,
            bridge,
            gateway.broker,
            job,
            priority=priority,
            tenant=tenant,
            deadline=deadline,
            events_ttl=gateway.settings.events_ttl,
            trace=trace,
        )
    else:
        kept = kept or (resumable and streaming)
        reading = await bridge.open(job, priority=priority, tenant=tenant, deadline=deadline, kept=kept, trace=trace)
    if resumable and streaming:
        progress = progress or Progress(reading.request)
    return Opened(reading, progress, status)


def _timeout(body: dict[str, Any], headers: Headers, settings: Settings) -> float:
    """Seconds that the request may take: from the body, the header or the settings, in this order."""
    given, param = body.get("timeout"), "timeout"
    if given is None and (text := headers.get("penstock-timeout")) is not None:
        given, param = text, "Penstock-Timeout"
        with contextlib.suppress(ValueError):
            given = float(text)
    return check_timeout(given, param, settings)
