"""Documents that take long to be read: nobody else waits for them, and they end as they should."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import pytest
from memory_pipeline import MODEL, Pipeline

from penstock.api.bridge.reading import Reading
from penstock.engine.preparing.documents import read_documents
from penstock.schemas.events import Cancelled, Done, Event, Expired, Failed
from penstock.schemas.jobs import Job

READS = "penstock.stages.validate.slow_parts.read_documents"
PATIENCE = 20.0  # seconds until a wait counts as endless
DOCUMENT = {"type": "file", "file": {"file_data": base64.b64encode(b"The grass is green.").decode()}}


async def ask(pipeline: Pipeline, name: str, tenant: str, content: Any, **more: Any) -> Reading:
    body = {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 4}
    job = Job(id=name, endpoint="/v1/chat/completions", bridge="test", body=body, **more)
    return await pipeline.bridge.open(job, priority="normal", tenant=tenant)


async def end_of(reading: Reading) -> Event:
    events: list[Event] = []
    async with asyncio.timeout(PATIENCE):
        while not reading.ended:
            events += await reading.take(PATIENCE)
    reading.close()
    return events[-1]


async def test_nobody_waits_for_the_documents_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them than the stage handles at a time wait to be read, and a request without any is answered."""
    read = asyncio.Event()

    async def slowly(*given: Any) -> Any:
        await read.wait()
        return await read_documents(*given)

    monkeypatch.setattr(READS, slowly)
    pipeline = await Pipeline.start()
    try:
        many = [await ask(pipeline, f"m-{number}", "many", [DOCUMENT]) for number in range(100)]
        late = await ask(pipeline, "late", "many", [DOCUMENT], timeout=0.001)
        for number in range(3):
            assert isinstance(await end_of(await ask(pipeline, f"o-{number}", "one", "hello")), Done)
        await many[50].ask_to_stop()
        read.set()
        for number, reading in enumerate(many):
            assert isinstance(await end_of(reading), Cancelled if number == 50 else Done)
        expired = await end_of(late)
        assert isinstance(expired, Expired) and expired.error.status == 408
    finally:
        read.set()
        await pipeline.stop()


async def test_who_sends_too_many_documents_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    read = asyncio.Event()

    async def never(request: Any, *_: object) -> Any:
        await read.wait()
        return request.model_copy(update={"messages": []})

    monkeypatch.setattr(READS, never)
    pipeline = await Pipeline.start()
    try:
        readings = [await ask(pipeline, f"m-{number}", "many", [DOCUMENT]) for number in range(135)]
        refused = await end_of(readings[-1])
        assert isinstance(refused, Failed) and refused.error.status == 503 and refused.error.retry_after
    finally:
        read.set()
        await pipeline.stop()
