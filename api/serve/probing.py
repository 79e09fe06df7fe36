"""Probes: a short request to one revision of a model, through the same lanes, worker and stages as any other.

Its prompt is of token ids, as only the stage validate has tokenizers, and binds what it tokenises to the current
revision. A worker has loaded the tokenizer of its revision by the time it is ready.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from ...config.settings import Settings
from ...engine.adapters.files import check_adapter
from ...schemas.errors import InvalidRequest
from ...schemas.events import FINAL, Done, Event, Expired, Failed
from ...schemas.jobs import AdapterSource, ValidatedJob
from ...schemas.params import GenerationParams
from ...schemas.registry import ModelCard
from ...schemas.wire import codec
from ...streams.outages import through_outages
from ...streams.port import DEADLINE, SCHEMA, Broker
from ...streams.topology import EVENTS, Subjects, lane_of

PAUSE = 0.1  # seconds between two looks for the answer
GRACE = 5.0  # seconds after the deadline in which the pipeline may say why there is no answer; at most the time-out
TENANT = BRIDGE = "probe"
PROMPT, TOKENS = 10, 4  # a token id that every vocabulary has; tokens to generate


async def probe(
    broker: Broker, settings: Settings, card: ModelCard, adapters: Sequence[AdapterSource] = ()
) -> str | None:
    """Why a loaded revision cannot serve, or None if it has answered. Waits through outages of the broker.

    It must also answer with each of the `adapters`, but those that no revision could use, whose files are not in order.
    """
    usable = [each for each in adapters if await asyncio.to_thread(_is_usable, each)]
    faults = await asyncio.gather(*(_probe(broker, settings, card, each) for each in (None, *usable)))
    return next(filter(None, faults), None)


def _is_usable(adapter: AdapterSource) -> bool:
    try:
        return check_adapter(Path(adapter.path), None) == adapter.digest
    except InvalidRequest:
        return False


async def _probe(broker: Broker, settings: Settings, card: ModelCard, adapter: AdapterSource | None) -> str | None:
    job = _job(card, settings.probe_timeout, adapter, broker.now())
    name = f" with the adapter {adapter.name!r}" if adapter else ""
    subjects = Subjects(settings.namespace)
    events = subjects.events(TENANT, BRIDGE, job.id)
    headers = {SCHEMA: codec.VALIDATED_JOB, DEADLINE: f"{job.deadline:.3f}"}
    publish = partial(
        broker.publish, lane_of(subjects, job), codec.encode(job), message_id=f"{TENANT}.{job.id}", headers=headers
    )
    await through_outages(publish, events)
    try:
        while broker.now() < job.deadline + min(GRACE, settings.probe_timeout):
            newest = await through_outages(lambda: broker.last(EVENTS, events), events)
            if newest is not None and isinstance(event := codec.decode_event(newest.data), FINAL):
                return _fault(event, name)
            await asyncio.sleep(PAUSE)
    except asyncio.CancelledError:
        await broker.notify(subjects.cancel(TENANT, job.id), b"")
        raise
    return f"it did not answer a test request{name} within {settings.probe_timeout:g} s"


def _job(card: ModelCard, timeout: float, adapter: AdapterSource | None, now: float) -> ValidatedJob:
    params = GenerationParams(max_tokens=min(TOKENS, card.context_length - 1), temperature=0.0)
    return ValidatedJob(
        id=f"probe-{uuid.uuid4().hex}",
        endpoint=card.endpoint,
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
        adapter=adapter,
    )


def _fault(event: Event, name: str) -> str | None:
    match event:
        case Done():
            return None
        case Failed(error=error) | Expired(error=error) if error.status != 408:
            return f"it failed a test request{name}: {error.message}"
        case Expired(error=error) | Failed(error=error):
            return f"it did not answer a test request{name} in time: {error.message}"
        case _:
            return "its test request was cancelled; try again"
