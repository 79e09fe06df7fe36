"""Documents that take long to be read: nobody else waits for them, and they end as they should."""

from __future__ import annotations

import asyncio
import base64
import threading
from typing import Any

import pytest
from memory_pipeline import MODEL, Pipeline, events_of

from penstock.api.bridge.reading import Reading
from penstock.engine.grammar.checker import SIMPLE, GrammarChecker
from penstock.engine.models import BUNDLED, resolve_model
from penstock.engine.preparing.documents import read_documents
from penstock.schemas.bounds import LONG
from penstock.schemas.events import Cancelled, Done, Event, Expired, Failed
from penstock.schemas.jobs import Job
from penstock.schemas.openai.completions import parse_request

READS = "penstock.stages.validate.slow_parts.read_documents"
DOCUMENT = {"type": "file", "file": {"file_data": base64.b64encode(b"The grass is green.").decode()}}


async def ask(pipeline: Pipeline, name: str, tenant: str, content: Any, **more: Any) -> Reading:
    body = {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 4, **more}
    job = Job(id=name, endpoint="/v1/chat/completions", bridge="test", body=body)
    return await pipeline.bridge.open(job, priority="normal", tenant=tenant)


async def end_of(reading: Reading) -> Event:
    return (await events_of(reading))[-1]


async def test_nobody_waits_for_the_documents_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them than the stage handles at a time wait to be read, and a request without any is answered."""
    read, reads = asyncio.Event(), list[None]()

    async def slowly(*given: Any) -> Any:
        reads.append(None)
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
        assert len(reads) == len(many) - 1, "neither the cancelled one nor the late one"
    finally:
        read.set()
        await pipeline.stop()


async def test_long_requests_of_tenants_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many of one wait to be parsed, the first of another comes next."""
    parsed, begun = threading.Event(), list[str]()

    def slowly(endpoint: Any, body: dict[str, Any]) -> Any:
        is_beside = threading.current_thread() is not threading.main_thread()  # the event loop must not wait here
        if len(content := body["messages"][0]["content"]) > LONG and is_beside:
            begun.append(content[:3])
            parsed.wait()
        return parse_request(endpoint, body)

    monkeypatch.setattr("penstock.stages.validate.stage.parse_request", slowly)
    pipeline = await Pipeline.start()
    try:
        many = [await ask(pipeline, f"m-{number}", "many", "all" + "x" * LONG) for number in range(20)]
        own = await ask(pipeline, "own", "one", "own" + "x" * LONG)
        assert isinstance(await end_of(await ask(pipeline, "plain", "one", "hello")), Done)
        parsed.set()
        for reading in (own, *many):
            await end_of(reading)
        assert begun.index("own") <= 2 and begun.count("all") == len(many)
    finally:
        parsed.set()
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


async def test_nobody_waits_for_the_grammars_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither do requests without any, nor, for more than the one that is compiled, those of another tenant."""
    compiled, begun, judge = asyncio.Event(), list[str](), GrammarChecker._judge

    async def slowly(checker: GrammarChecker, job: Any) -> str:
        begun.append(job[-1])
        await compiled.wait()
        return await judge(checker, job)

    monkeypatch.setattr(GrammarChecker, "_judge", slowly)
    pipeline = await Pipeline.start(source=str(resolve_model(BUNDLED)), context_length=2048)
    try:
        grammars: list[Any] = [{"guided_regex": f"a{{{number}}}"} for number in range(1, 81)]
        many = [await ask(pipeline, f"m-{number}", "many", "hello", **each) for number, each in enumerate(grammars)]
        own = await ask(pipeline, "own", "one", "hello", guided_regex="b")
        assert isinstance(await end_of(await ask(pipeline, "plain", "one", "hello")), Done)
        compiled.set()
        for reading in (own, *many):
            await end_of(reading)
        regexes = [text for text in begun if text != SIMPLE.text]
        assert any('"b"' in text for text in regexes[:3])
    finally:
        compiled.set()
        await pipeline.stop()
