"""The lanes of models: for each revision that can be asked for, three streams in which its requests wait.

They are noted in the bucket `state`, so that every copy of a stage finds those of others, and those in which something
waits for a worker that has yet to come back.
"""

from __future__ import annotations

import contextlib
from functools import lru_cache

import structlog

from ..config.settings import Settings
from ..schemas.errors import BrokerDenied, PayloadTooLarge, StartupError, StreamMissing
from ..schemas.jobs import Priority
from ..schemas.models.catalogue import Catalogue
from ..schemas.registry import ModelCard, ModelLanes
from .port import Broker, StreamSpec
from .records import readable
from .topology import (
    BATCHES,
    CATALOGUE,
    DECLARED,
    MODELS,
    OFFERED,
    PRIORITIES,
    STATE,
    batch_stream,
    lanes_of,
    model_lanes,
    topology,
)

log = structlog.get_logger(__name__)

PREFIX = "lanes."
_ENVELOPE = 1 << 10  # bytes that a stored message takes besides its body: headers, subject and record


async def open_lanes(broker: Broker, settings: Settings, model: str, revision: int = 1) -> None:
    """Create the lanes of a model where they are missing.

    Where `max_models` have some already, those of a model that no worker has served lately go if they are empty.
    Raises `StartupError` if there is none.
    """
    key = lanes_of(model, revision)
    if await are_open(broker, key):
        return
    known = await present_lanes(broker)
    for other in list(known):
        if len(known) < settings.max_models:
            break
        if await _is_left(broker, known[other]):
            await remove_lanes(broker, known[other])
            log.info("empty lanes removed", model=known[other].model, revision=known[other].revision)
            del known[other]
    if len(known) >= settings.max_models:
        raise StartupError(
            f"{len(known)} models have lanes already, and max_models is {settings.max_models}: raise it with "
            "`penstock config apply --max-models`, or stop the workers of another model and wait ten minutes"
        )
    try:
        await broker.ensure(streams_of(settings, key), [])
    except BrokerDenied as error:
        raise StartupError(
            f"the model {model!r} is not declared, and this part's user may not create its lanes: declare it with "
            "`penstock nats setup MODEL --apply`, as a user who may create streams, such as admin"
        ) from error
    state = await broker.bucket(STATE)
    await state.create(PREFIX + key, ModelLanes(model=model, revision=revision).model_dump_json().encode())


async def reopen_lanes(broker: Broker, settings: Settings, model: str, revision: int) -> None:
    """Create the lanes of a model that a worker serves where they, or the note of them, have gone, as after a purge of
    the bucket, or while the worker was suspended. What prevents that is logged."""
    if not await are_open(broker, lanes_of(model, revision)):
        try:
            await open_lanes(broker, settings, model, revision)
        except StartupError as error:
            log.warning("lanes cannot be opened again", model=model, revision=revision, reason=str(error))
        else:
            log.warning("lanes were gone, and are open again", model=model, revision=revision)


async def remove_lanes(broker: Broker, lanes: ModelLanes) -> None:
    """Remove the lanes of a model, with what waits there."""
    key = lanes_of(lanes.model, lanes.revision)
    await (await broker.bucket(STATE)).delete(PREFIX + key)
    for priority in PRIORITIES:
        await broker.remove(batch_stream(key, priority))


async def waiting_in_lanes(broker: Broker, lanes: str) -> dict[Priority, int]:
    """The requests that wait in the lanes with this token, by priority; none where another process has removed them."""
    found: dict[Priority, int] = dict.fromkeys(PRIORITIES, 0)
    if await are_open(broker, lanes):
        with contextlib.suppress(StreamMissing):  # while another process removes them, or where it died meanwhile
            for priority in PRIORITIES:
                found[priority] = (await broker.held(batch_stream(lanes, priority))).messages
    return found


async def are_open(broker: Broker, lanes: str) -> bool:
    """Whether there are lanes with this token, now."""
    return await (await broker.bucket(STATE)).get(PREFIX + lanes) is not None


async def present_lanes(broker: Broker) -> dict[str, ModelLanes]:
    """All models that have lanes, by the token of their lanes, oldest first."""
    entries = await (await broker.bucket(STATE)).entries(PREFIX)
    return {key.removeprefix(PREFIX): lanes for key, lanes in readable(ModelLanes, entries)}


def streams_of(settings: Settings, lanes: str) -> list[StreamSpec]:
    """The streams that are the lanes of a model in a deployment with these settings."""
    return model_lanes(
        settings.namespace,
        lanes,
        queue_limit=settings.queue_limit,
        tenant_limit=settings.tenant_limit,
        max_models=settings.max_models,
        store_limit=int(settings.store_limit),
    )


def relay_bytes(settings: Settings) -> int:
    """The bytes that STREAM may hold, and EVENTS as many."""
    return min(int(settings.events_limit), int(settings.store_limit) // 4)


def check_fits(size: int, settings: Settings) -> None:
    """Raises `PayloadTooLarge` for a job of `size` bytes that a queue on its way could not hold even if it were
    empty: waiting until there is room would be in vain."""
    most = _most_of_a_job(int(settings.store_limit), relay_bytes(settings), settings.max_models, settings.job_stages)
    if size > most:
        raise PayloadTooLarge(
            f"The request has {size:,} bytes, and the queues of this deployment hold {most:,} at most: send less, or "
            "have the operator raise store_limit, of which each queue has a share, or lower max_models."
        )


@lru_cache(64)
def _most_of_a_job(store: int, relay: int, max_models: int, stages: tuple[str, ...]) -> int:
    streams = topology("any", stages, relay_bytes=relay, store_limit=store).streams
    lanes = model_lanes("any", "any", max_models=max_models, store_limit=store)
    queues = [each for each in (*streams, *lanes) if each.retention == "work_queue" and each.name != BATCHES]
    return max(0, min(each.max_bytes for each in queues) - _ENVELOPE)


async def _is_left(broker: Broker, lanes: ModelLanes) -> bool:
    """Whether nothing waits there, and nobody can ask for the model, nor probes it."""
    catalogue = await broker.bucket(CATALOGUE)
    known = [*await (await broker.bucket(MODELS)).entries(), *await catalogue.entries(DECLARED)]
    cards = readable(ModelCard, known)
    if any((card.name, card.revision) == (lanes.model, lanes.revision) for _, card in cards):
        return False
    offered = await catalogue.get(OFFERED)
    entries = Catalogue.model_validate_json(offered.value).entries if offered else ()
    if any((entry.name, entry.candidate) == (lanes.model, lanes.revision) for entry in entries):
        return False
    return not any((await waiting_in_lanes(broker, lanes_of(lanes.model, lanes.revision))).values())
