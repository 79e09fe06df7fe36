"""What every path of the HTTP bridge shares: who asks, what they send, and how a request of theirs enters the pipeline.

The headers of `open_request` mean the same on every path that uses it: `Penstock-Resumable`, `Last-Event-ID`,
`Idempotency-Key`, `Penstock-Timeout`, `Penstock-Events`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, cast, get_args

from starlette.datastructures import Headers
from starlette.requests import Request

from ...config.settings import Settings
from ...schemas.bounds import LONG, load_json
from ...schemas.errors import DeadlineExceeded, Forbidden, InvalidRequest, PayloadTooLarge
from ...schemas.jobs import Job, JobEndpoint, Priority
from ...schemas.openai.chat import Body
from ...schemas.openai.completions import TIERS, parse_body
from ...streams.port import Broker
from ...streams.stores.quotas import Quotas
from ...streams.stores.registry import Registry
from ..bridge.bridge import Bridge
from ..bridge.idempotency import open_once
from ..bridge.reading import Reading
from ..bridge.resume import Progress, invalid_event_id
from .ignored import known_alone

TENANT = "default"
Kind = TypeVar("Kind", bound=Body)
Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class Gateway:
    """What routes need to reach the pipeline and its stores."""

    bridge: Bridge
    broker: Broker
    registry: Registry
    settings: Settings
    quotas: Quotas


class Opened(NamedTuple):
    """A request that is on its way. `progress`: its client may resume it, and has come so far. `status`: it asked for
    news from the queue as messages."""

    reading: Reading
    progress: Progress | None
    status: bool


def tenant_of(request: Request) -> str:
    """Whose API key the request came with; `default` where none are asked for."""
    return getattr(request.state, "tenant", TENANT)


async def read_object(request: Request, settings: Settings, *kinds: type[Body]) -> dict[str, Any]:
    """The request's body, a JSON object; where `kinds` are given, without the fields that none of them has.

    Raises what `read_body` raises, and `InvalidRequest`.
    """
    body = await read_as(_itself, request, settings)
    return known_alone(body, *kinds, request=request, settings=settings) if kinds else body


async def read_parsed(kind: type[Kind], request: Request, settings: Settings) -> Kind:
    """A body that does not go through the pipeline. Raises what `read_object` and `parse_body` raise."""
    return await read_as(
        lambda body: parse_body(kind, known_alone(body, kind, request=request, settings=settings)), request, settings
    )


async def read_as(make: Callable[[dict[str, Any]], Made], request: Request, settings: Settings) -> Made:
    """What `make` makes of the request's body, a JSON object; in a thread where the body is long.

    Raises what `read_object` and `make` raise.
    """
    raw = await read_body(request, settings.max_body_size, settings.body_timeout)
    return _made(make, raw) if len(raw) <= LONG else await asyncio.to_thread(_made, make, raw)


def _made(make: Callable[[dict[str, Any]], Made], raw: bytes) -> Made:
    try:
        body = load_json(raw)
    except ValueError as error:
        raise InvalidRequest(f"The body {error}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise InvalidRequest("The body must be a JSON object.", code="invalid_type")
    return make(body)


def _itself(body: dict[str, Any]) -> dict[str, Any]:
    return body


async def read_body(request: Request, limit: int, patience: float) -> bytes:
    """The whole body, at most `limit` bytes that arrive within `patience` seconds.

    Raises `PayloadTooLarge`, having read on a while so that the client gets to read the answer, and `DeadlineExceeded`.
    """
    too_large = PayloadTooLarge(f"The body is larger than {limit} bytes; the setting max_body_size allows no more.")
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
    return bytes(body)


async def open_request(
    request: Request, gateway: Gateway, endpoint: JobEndpoint, body: dict[str, Any], prefix: str, *, kept: bool = False
) -> Opened:
    """Publish what `body` asks for, or find the request that the headers speak of; ids begin with `prefix`.

    `kept`: it goes on though its client leaves.

    Raises what `Bridge.open`, `Bridge.follow` and `open_once` raise, `InvalidRequest` for a header, and `Forbidden` for
    a priority.
    """
    headers, bridge, tenant = request.headers, gateway.bridge, tenant_of(request)
    resumable, status = flag(headers, "Penstock-Resumable"), flag(headers, "Penstock-Events")
    streaming = body.get("stream") is True
    deadline = time.time() + _timeout(body, headers, gateway.settings)
    priority = _priority(request, body, gateway.settings)
    job = Job(id=f"{prefix}{uuid.uuid4().hex}", endpoint=endpoint, bridge=bridge.name, body=body)
    progress = None
    if (last := headers.get("last-event-id")) is not None:
        progress = Progress.parse(last)
        if not streaming or not progress.request.startswith(prefix):
            raise invalid_event_id("Last-Event-ID is not that of a stream of this endpoint.")
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
        )
    else:
        kept = kept or (resumable and streaming)
        reading = await bridge.open(job, priority=priority, tenant=tenant, deadline=deadline, kept=kept)
    if resumable and streaming:
        progress = progress or Progress(reading.request)
    return Opened(reading, progress, status)


def flag(headers: Headers, name: str) -> bool:
    value = headers.get(name, "")
    if value and value.lower() not in ("true", "1"):
        raise InvalidRequest(f"The header {name} is `true` or left out.", param=name)
    return bool(value)


def _timeout(body: dict[str, Any], headers: Headers, settings: Settings) -> float:
    """Seconds that the request may take: the body's word, the header's or the setting's."""
    given, param = body.get("timeout"), "timeout"
    if given is None and (text := headers.get("penstock-timeout")) is not None:
        given, param = text, "Penstock-Timeout"
        with contextlib.suppress(ValueError):
            given = float(text)
    longest = settings.longest_timeout
    if given is None:
        return min(settings.default_timeout, longest)
    if type(given) not in (int, float) or not 0 < given <= longest:
        raise InvalidRequest(
            f"{param} is a number of seconds above 0, at most {longest:g}: the setting events_ttl allows no more.",
            param=param,
        )
    return float(given)


def _priority(request: Request, body: dict[str, Any], settings: Settings) -> Priority:
    """The lane of a request, which without a wish gets what it may have.

    Raises `Forbidden` for a wish beyond its key's ceiling. Values that are none go on: validate refuses them, with
    every other fault.
    """
    order = get_args(Priority)
    most = getattr(request.state, "max_priority", None) or settings.max_priority
    priority, tier = body.get("priority"), body.get("service_tier")
    wish: Priority | None = None
    if isinstance(priority, str) and priority in order:
        wish, param = cast(Priority, priority), "priority"
    elif isinstance(tier, str) and tier != "auto":
        wish, param = TIERS.get(tier), "service_tier"
    if wish is not None and order.index(wish) < order.index(most):
        raise Forbidden(
            f"This key's requests have the priority {most} at most: ask for that, or leave {param} out.",
            code="priority_not_allowed",
            param=param,
        )
    if wish is None:
        return "low" if most == "low" else "normal"
    return wish
