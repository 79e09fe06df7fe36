"""How a request ends that no stage could finish: its client gets an error, a poison message is kept for a person."""

from __future__ import annotations

import json
import re
import traceback
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

import structlog

from ..config import metrics
from ..schemas.bounds import LONG, parse_json
from ..schemas.errors import GenerationFailed, Refusal
from ..schemas.events import ErrorBody, Event, Expired, Failed, Started
from ..schemas.jobs import TOKEN_PATTERN, Priority, ValidatedJob
from ..schemas.wire import codec
from ..streams.outages import through_outages
from ..streams.port import DEAD_ATTEMPTS, DEAD_REASON, DEAD_SUBJECT, MESSAGE_ID, SCHEMA, Delivery, Headers, Message
from ..streams.stores.dead_letters import MOST_REQUESTS, DeadLetters
from ..streams.topology import lane_of
from .contract import Pipe

log = structlog.get_logger(__name__)


class Address(NamedTuple):
    """Where a request's events go."""

    request: str
    tenant: str
    bridge: str
    priority: Priority = "normal"


def ending(request: str, refusal: Refusal) -> Event:
    body = ErrorBody.of(refusal)
    return Expired(request, body) if body.status == 408 else Failed(request, body)


async def refuse(pipe: Pipe, delivery: Delivery, refusal: Refusal) -> None:
    """Send the refusal to the clients of all requests in this message."""
    message = delivery.message
    is_output = codec.is_schema(message.headers.get(SCHEMA), codec.OUTPUTS) and not _is_job(message)
    for address in await _asked(pipe, message.subject) if is_output else addresses(message):
        await pipe.emit(
            ending(address.request, refusal),
            tenant=address.tenant,
            bridge=address.bridge,
            key="end",
            priority=address.priority,
        )


async def bury(
    pipe: Pipe, stage: str, delivery: Delivery, reason: str, attempts: int, refusal: Refusal | None = None
) -> None:
    """Move a message that cannot be handled, after so many attempts, to the dead letters; its clients get `refusal`, or
    hear that it failed; never deliver it again."""
    refusal = refusal or GenerationFailed(f"The request failed in the stage {stage} and was given up.")
    message = delivery.message
    headers = {**message.headers, DEAD_SUBJECT: message.subject, DEAD_ATTEMPTS: str(attempts)}
    name = f"{stage}.{message.subject}.{message.sequence}"
    await _keep(pipe, stage, name, message.data, headers, reason, addresses(message))
    try:
        await refuse(pipe, delivery, refusal)
    finally:
        await delivery.term(reason)


async def give_up(pipe: Pipe, stage: str, job: ValidatedJob, reason: str) -> None:
    """Move one job of several to the dead letters; its client gets an error."""
    headers = {SCHEMA: codec.VALIDATED_JOB, DEAD_SUBJECT: lane_of(pipe.subjects, job)}
    address = Address(job.id, job.tenant, job.bridge)
    name, data = f"{stage}.{job.tenant}.{job.id}", codec.encode(job)
    await through_outages(lambda: _keep(pipe, stage, name, data, headers, reason, [address]), pipe.subjects.dead(stage))
    event = ending(job.id, GenerationFailed(f"The request was given up: {reason}."))
    await pipe.emit(event, tenant=job.tenant, bridge=job.bridge, key="end", priority=job.priority)


async def _keep(
    pipe: Pipe, stage: str, name: str, data: bytes, headers: Headers, reason: str, whom: Sequence[Address]
) -> None:
    """Keep a dead letter, and log it once: whose it was and why, and not a word of what it says."""
    letters = await DeadLetters.of(pipe.broker, pipe.subjects)
    requests = [address.request for address in whom]
    reason = " ".join(reason.split())
    published = await letters.bury(stage, name, data, {**headers, DEAD_REASON: reason}, requests)
    if not published.duplicate:
        metrics.DEAD_LETTERS.labels(stage).inc()
        tenants = sorted({address.tenant for address in whom})
        log.error("buried", stage=stage, reason=reason, requests=requests[:MOST_REQUESTS], tenants=tenants[:10])


def addresses(message: Message) -> list[Address]:
    """The clients of a message, as far as it can be parsed; an unreadable job is named by its message id.

    A client's job names one request, of the tenant in its subject, whatever it says of others.
    """
    body = _body(message.data)
    if isinstance(body, dict) and _is_job(message):
        return [_address({"id": body.get("id"), "bridge": body.get("bridge")}, message)]
    if isinstance(body, dict) and isinstance(body.get("jobs"), list):
        return [_address(job, message) for job in body["jobs"]]
    return [_address(body, message)]


def _is_job(message: Message) -> bool:
    """Whether a client has published the message, who chose its headers, too."""
    return message.subject.split(".")[1:2] == ["jobs"]


def _body(data: bytes) -> Any:
    """What a message says, or None; one that is not in UTF-8 is refused, but names the client who is to hear so."""
    try:
        return parse_json(data)
    except ValueError:
        if len(data) > LONG:
            return None
    try:
        return json.loads(data.decode(json.detect_encoding(data[:4]), "replace"))
    except (ValueError, RecursionError):
        return None


async def _asked(pipe: Pipe, subject: str) -> list[Address]:
    """The client of outputs, read from the first output of the request."""
    for stored in await pipe.broker.replay("STREAM", subject):
        for output in codec.decode_outputs(stored.data):
            if isinstance(output, Started):
                return [Address(output.request, output.tenant, output.bridge, output.priority)]
    # The stream's limits have pushed it out. The events of the request name its bridge too.
    tenant, request = subject.split(".")[-2:]
    told = await pipe.broker.replay("EVENTS", pipe.subjects.events_at(tenant, request))
    return [Address(request, tenant, message.subject.split(".")[-2], "normal") for message in told[-1:]]


def request_id(message: Message) -> str:
    """The id of a request that brought none: its message id, or its lane and its sequence there."""
    given = message.headers.get(MESSAGE_ID, "")
    if re.fullmatch(TOKEN_PATTERN, given):
        return given
    if not message.sequence:  # it is stored nowhere
        return f"job-{uuid.uuid4().hex}"
    lane = message.subject.split(".")[-2:-1]
    return f"job-{lane[0] if lane and lane[0] in get_args(Priority) else 'x'}-{message.sequence}"


def _address(body: Any, message: Message) -> Address:
    def token(name: str, otherwise: str) -> str:
        value = body.get(name) if isinstance(body, dict) else None
        return value if isinstance(value, str) and re.fullmatch(TOKEN_PATTERN, value) else otherwise

    *_, lane, tenant = message.subject.split(".")
    said = token("priority", lane)
    return Address(
        request=token("id", request_id(message)),
        tenant=token("tenant", tenant if re.fullmatch(TOKEN_PATTERN, tenant) else "default"),
        bridge=token("bridge", "default"),
        priority=next((priority for priority in get_args(Priority) if priority == said), "normal"),
    )


def location(error: BaseException) -> str:
    """File and line where an exception arose, without its text."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{'/'.join(Path(frames[-1].filename).parts[-2:])}:{frames[-1].lineno}" if frames else "unknown"
