"""Probes: a short request to one revision of a model, through the same lanes, worker and stages as any other.

Its prompt is of token ids, as only the stage validate has tokenizers, and binds what it tokenises to the current
revision. A worker has loaded the tokenizer of its revision by the time it is ready.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from functools import partial

from ...config.settings import Settings
from ...schemas import codec
from ...schemas.events import FINAL, Done, Event, Expired, Failed
from ...schemas.jobs import Endpoint, ValidatedJob
from ...schemas.params import GenerationParams
from ...schemas.registry import ModelCard
from ...streams.outages import through_outages
from ...streams.port import DEADLINE, SCHEMA, Broker
from ...streams.topology import EVENTS, Subjects, lane_of

PAUSE = 0.1  # seconds between two looks for the answer
GRACE = 5.0  # seconds after the deadline in which the pipeline may say why there is no answer
TENANT = BRIDGE = "probe"
PROMPT, TOKENS = 10, 4  # a token id that every vocabulary has; tokens to generate


async def probe(broker: Broker, settings: Settings, card: ModelCard) -> str | None:
    """Why a loaded revision cannot serve, or None if it has answered. Waits through outages of the broker."""
    job = _job(card, settings.probe_timeout)
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
    endpoint: Endpoint = "/v1/embeddings" if card.backend == "sentence_transformers" else "/v1/completions"
    params = GenerationParams(max_tokens=min(TOKENS, card.context_length - 1), temperature=0.0)
    now = time.time()
    return ValidatedJob(
        id=f"probe-{uuid.uuid4().hex}",
        endpoint=endpoint,
        bridge=BRIDGE,
        tenant=TENANT,
        priority="high",
        model=card.name,
        revision=card.revision,
        prompts=((PROMPT,),),
        params=params,
        created=now,
        deadline=now + timeout,
        body={"model": card.name},
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
