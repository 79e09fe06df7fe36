"""Probes: a short request to one revision of a model, through the same lanes, worker and stages as any other."""

from __future__ import annotations

import asyncio
import time
import uuid
from functools import partial
from typing import Any

from ...config.settings import Settings
from ...engine.prepare import load_preparer
from ...engine.text.tokenizer import EmbeddingTokenizer
from ...schemas import codec
from ...schemas.errors import Fatal, Refusal
from ...schemas.events import FINAL, Done, Event, Expired, Failed
from ...schemas.jobs import Endpoint, ValidatedJob
from ...schemas.openai.completions import parse_request
from ...schemas.registry import ModelCard
from ...streams.outages import through_outages
from ...streams.port import DEADLINE, SCHEMA, Broker
from ...streams.topology import EVENTS, Subjects, lane_of

PAUSE = 0.1  # seconds between two looks for the answer
GRACE = 5.0  # seconds after the deadline in which the pipeline may say why there is no answer
TENANT = BRIDGE = "probe"
TOKENS = 4


async def probe(broker: Broker, settings: Settings, card: ModelCard) -> str | None:
    """Why a loaded revision cannot serve, or None if it has answered. Waits through outages of the broker.

    The prompt is tokenised here, since the stage validate binds requests to the current revision.
    """
    try:
        job = await asyncio.to_thread(_job, card, settings.probe_timeout)
    except (Fatal, Refusal) as error:
        return f"no request can be prepared for it: {error}"
    subjects = Subjects(settings.namespace)
    events = subjects.events(TENANT, BRIDGE, job.id)
    headers = {SCHEMA: codec.VALIDATED_JOB, DEADLINE: f"{job.deadline:.3f}"}
    publish = partial(
        broker.publish, lane_of(subjects, job), codec.encode(job), message_id=f"{TENANT}.{job.id}", headers=headers
    )
    await through_outages(publish, events)
    try:
        while time.time() < job.deadline + GRACE:
            newest = await through_outages(lambda: broker.last(EVENTS, events), events)
            if newest is not None and isinstance(event := codec.decode_event(newest.data), FINAL):
                return _fault(event)
            await asyncio.sleep(PAUSE)
    except asyncio.CancelledError:
        await broker.notify(subjects.cancel(TENANT, job.id), b"")
        raise
    return _late(settings.probe_timeout)


def _job(card: ModelCard, timeout: float) -> ValidatedJob:
    preparer = load_preparer(card.source, card.backend, card.tool_format, card.reasoning_format)
    embeds = isinstance(preparer.tokenizer, EmbeddingTokenizer)
    endpoint: Endpoint = "/v1/embeddings" if embeds else "/v1/completions"
    body: dict[str, Any] = {"model": card.name}
    body |= {"input": "Hello"} if embeds else {"prompt": "Hello", "max_tokens": TOKENS, "temperature": 0}
    request = parse_request(endpoint, body)
    prepared = preparer.prepare(request, context_length=card.context_length, name=card.name, seed=0)
    now = time.time()
    return ValidatedJob(
        id=f"probe-{uuid.uuid4().hex}",
        endpoint=endpoint,
        bridge=BRIDGE,
        tenant=TENANT,
        priority="high",
        model=card.name,
        revision=card.revision,
        prompts=tuple(map(tuple, prepared.prompts)),
        params=prepared.params,
        created=now,
        deadline=now + timeout,
        body=body,
        form=prepared.form,
    )


def _fault(event: Event) -> str | None:
    match event:
        case Done():
            return None
        case Failed(error=error) | Expired(error=error) if error.status != 408:
            return f"it failed a test request: {error.message}"
        case Expired(error=error) | Failed(error=error):
            return f"it did not answer a test request in time: {error.message}"
        case _:
            return "its test request was cancelled; try again"


def _late(timeout: float) -> str:
    return f"it did not answer a test request within {timeout:g} s"
