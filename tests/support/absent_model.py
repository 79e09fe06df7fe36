"""A pipeline, and a model in it that has no worker."""

from __future__ import annotations

import uuid
from typing import Any

from memory_pipeline import Pipeline

from penstock.api.bridge.reading import Reading
from penstock.schemas.jobs import Job
from penstock.schemas.registry import ModelCard
from penstock.streams.lanes import open_lanes

PATIENCE = 60.0  # seconds until a wait counts as endless
ABSENT = "absent"


async def with_absent(card_fields: dict[str, Any] | None = None, **values: Any) -> Pipeline:
    """A pipeline in which requests may also wait for a model that has no worker."""
    pipeline = await Pipeline.start(**values)
    pipe = pipeline.pipe
    await open_lanes(pipe.broker, pipe.settings, ABSENT)
    (known,) = pipe.registry.models.values()
    card = ModelCard.model_validate(known.model_dump() | {"name": ABSENT} | (card_fields or {}))
    await (await pipe.broker.bucket("models")).put("absent", card.model_dump_json().encode())
    await pipe.registry.refresh()
    return pipeline


async def asked(pipeline: Pipeline, model: str, **fields: Any) -> Reading:
    body = {"model": model, "prompt": "hello", "max_tokens": 4} | fields
    job = Job(id=f"t-{uuid.uuid4().hex}", endpoint="/v1/completions", bridge="test", body=body)
    return await pipeline.bridge.open(job, priority="normal", tenant="default")
