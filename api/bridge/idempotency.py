"""`Idempotency-Key`: the same key is the same request, on whichever bridge it is repeated.

A bridge stores a claim to the key before it publishes the job, and may die in between. So where a request is repeated
and none of its events is stored, the bridge publishes it again under the same id, and it remains one request. A request
that failed for a passing reason (overload, deadline, an error of the server) has no answer to repeat: the next request
with its key is a new attempt.
"""

from __future__ import annotations

import hashlib
from typing import Any

import orjson

from ...schemas.errors import Conflict, InvalidRequest, StreamNotFound
from ...schemas.events import Cancelled, Event, Expired, Failed
from ...schemas.jobs import Job, Priority
from ...streams.port import Broker
from ...streams.stores.responses import ResponseLog
from .bridge import Bridge
from .reading import Reading

MOST_CHARACTERS = 255


async def open_once(
    key: str,
    bridge: Bridge,
    broker: Broker,
    job: Job,
    *,
    priority: Priority,
    tenant: str,
    deadline: float,
    events_ttl: float,
    trace: str | None = None,
) -> Reading:
    """Open the request of this key, or follow it where it was opened before. `job` must have a new id, which it gets if
    it is the first. `events_ttl` is how many seconds events are stored, and a repetition is the same request. `trace`
    is the client's traceparent.

    Raises `InvalidRequest` for a bad key, `Conflict` where the key belongs to another body, and as `Bridge.open` does.
    """
    if not 0 < len(key) <= MOST_CHARACTERS:
        raise InvalidRequest(
            f"Idempotency-Key must have 1 to {MOST_CHARACTERS} characters, not {len(key)}.", param="Idempotency-Key"
        )
    name = hashlib.sha256(f"{tenant} {key}".encode()).hexdigest()
    body = orjson.dumps(job.body, option=orjson.OPT_SORT_KEYS)
    fingerprint = hashlib.sha256(f"{job.endpoint} ".encode() + body).hexdigest()
    mine = orjson.dumps({"request": job.id, "fingerprint": fingerprint, "created": broker.now()})
    claims = await broker.bucket("idempotency")
    while True:
        entry = await claims.get(name)
        if entry is None:
            bridge.admit(job, priority, tenant)  # before it costs a claim
            await claims.create(name, mine)
            continue
        claim: dict[str, Any] = orjson.loads(entry.value)
        if claim["fingerprint"] != fingerprint:
            raise Conflict(
                "This Idempotency-Key was used for another request; a new request needs a new key.",
                param="Idempotency-Key",
            )
        try:
            reading = await bridge.follow(claim["request"], tenant, deadline=deadline)
        except StreamNotFound:
            if await _is_kept(broker, job, tenant, claim["request"]):
                raise Conflict(
                    f"This Idempotency-Key already made the response {claim['request']}; retrieve that.",
                    code="idempotency_key_spent",
                    param="Idempotency-Key",
                ) from None
            if broker.now() - claim["created"] < events_ttl:
                first = job.model_copy(update={"id": claim["request"]})
                return await bridge.open(
                    first, priority=priority, tenant=tenant, deadline=deadline, shared=True, trace=trace
                )
        else:
            if not _came_to_nothing(reading.final) or await _is_kept(broker, job, tenant, claim["request"]):
                return reading
            reading.close()
        await claims.update(name, mine, entry.revision)


async def _is_kept(broker: Broker, job: Job, tenant: str, request: str) -> bool:
    """Whether the request is a response that has begun: its tools may have run, so it must not begin again."""
    if job.endpoint != "/v1/responses":
        return False
    return await (await ResponseLog.of(broker)).read(tenant, request) is not None


def _came_to_nothing(final: Event | None) -> bool:
    match final:
        case Failed(error=error) | Expired(error=error):
            return error.status in (408, 429) or error.status >= 500
        case _:
            return isinstance(final, Cancelled)
