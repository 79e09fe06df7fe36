"""A request's events as the broker holds them, and the laws that they keep."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from dataclasses import replace

from memory_pipeline import MODEL, Pipeline

from penstock.schemas.events import FINAL, Event, Queued, Token
from penstock.schemas.jobs import InferenceBatch, Job, ValidatedJob
from penstock.schemas.wire import codec
from penstock.streams.memory.broker import MemoryBroker
from penstock.streams.port import SCHEMA, BucketSpec, StreamSpec
from penstock.streams.topology import topology

TEXT = "every word of it once"
BODY = {"model": MODEL, "prompt": TEXT, "max_tokens": 64}
PATIENCE = 10.0  # seconds until a wait counts as endless


class Forgetful(MemoryBroker):
    """No stream has a deduplication window."""

    async def ensure(self, streams: Sequence[StreamSpec], buckets: Sequence[BucketSpec]) -> None:
        await super().ensure([replace(spec, dedup_window=0.0) for spec in streams], buckets)


async def stored(pipeline: Pipeline, request: str, tenant: str = "default", bridge: str = "test") -> list[Event]:
    subject = pipeline.pipe.subjects.events(tenant, bridge, request)
    return [codec.decode_event(message.data) for message in await pipeline.pipe.broker.replay("EVENTS", subject)]


async def ended(pipeline: Pipeline, request: str, tenant: str = "default") -> list[Event]:
    """Its events, once the final one is there and nothing is under way any more."""
    async with asyncio.timeout(PATIENCE):
        while not any(isinstance(event, FINAL) for event in await stored(pipeline, request, tenant)):  # noqa: ASYNC110
            await asyncio.sleep(0)
        await idle(pipeline)
    return await stored(pipeline, request, tenant)


async def idle(pipeline: Pipeline) -> None:
    settings = pipeline.pipe.settings
    streams, _ = topology(settings.namespace, settings.job_stages)
    queues = [spec.name for spec in streams if spec.retention == "work_queue"]
    while any([(await pipeline.pipe.broker.held(name)).messages for name in queues]):  # noqa: ASYNC110
        await asyncio.sleep(0)


def check(events: list[Event], *, accepted: bool = True) -> str:
    """The laws of a request's events as they are stored; returns its text."""
    assert [index for index, event in enumerate(events) if event.type == "accepted"] == [0] * accepted
    assert [event for event in events if isinstance(event, FINAL)] == events[-1:]
    tokens = [event for event in events if isinstance(event, Token)]
    answered = events.index(tokens[0]) if tokens else len(events)
    assert not any(isinstance(event, Queued) for event in events[answered:])
    place = 0
    for token in tokens:
        assert token.index == place
        place += len(token.token_ids)
    assert [token.finish_reason is not None for token in tokens] == [False] * (len(tokens) - 1) + [True] * bool(tokens)
    return "".join(token.text for token in tokens)


async def publish(pipeline: Pipeline, job: Job, tenant: str = "default") -> None:
    subject = pipeline.pipe.subjects.jobs("normal", tenant)
    await pipeline.pipe.broker.publish(subject, codec.encode(job), message_id=f"{tenant}.{job.id}")


async def dispatch(pipeline: Pipeline, job: ValidatedJob, epoch: int = 0) -> None:
    batch = InferenceBatch(id=uuid.uuid4().hex, worker="w0", jobs=(job,), epochs=(epoch,), incarnation="x" * epoch)
    subject = pipeline.pipe.subjects.infer("w0")
    await pipeline.pipe.broker.publish(subject, codec.encode(batch), message_id=batch.id, headers={SCHEMA: codec.BATCH})


def job_named(request: str, **body: object) -> Job:
    return Job(id=request, endpoint="/v1/completions", bridge="test", body=BODY | body)
