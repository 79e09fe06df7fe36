"""Uploaded files that jobs name by their ids: those of their tenant alone, and no more than fit."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from memory_pipeline import MODEL, Pipeline

from penstock.schemas.events import Event, Failed, Token
from penstock.schemas.jobs import Job
from penstock.streams.stores.files import find_file, put_file
from penstock.streams.stores.objects import Objects
from penstock.streams.topology import FILES

LIMIT = 1000


@pytest_asyncio.fixture
async def pipeline() -> AsyncIterator[Pipeline]:
    pipeline = await Pipeline.start(context_length=4096, max_body_size=LIMIT)
    yield pipeline
    await pipeline.stop()


async def upload(pipeline: Pipeline, tenant: str, id: str, data: bytes, lifetime: float = 600.0) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield data

    objects = await Objects.of(pipeline.pipe.broker, FILES)
    assert await put_file(objects, f"{tenant}.{id}", pieces(), "lawn.txt", "user_data", lifetime)


def document(id: str, **more: Any) -> dict[str, Any]:
    return {"type": "file", "file": {"file_id": id, **more}}


async def events(pipeline: Pipeline, tenant: str, *parts: dict[str, Any]) -> list[Event]:
    body = {"model": MODEL, "messages": [{"role": "user", "content": list(parts)}], "max_tokens": 3000}
    job = Job(id=f"named-{uuid.uuid4().hex}", endpoint="/v1/chat/completions", bridge="test", body=body)
    reading = await pipeline.bridge.open(job, priority="normal", tenant=tenant)
    found: list[Event] = []
    while not reading.ended:
        found += await reading.take(60.0)
    reading.close()
    return found


async def said(pipeline: Pipeline, tenant: str, *parts: dict[str, Any]) -> str:
    return "".join(event.text for event in await events(pipeline, tenant, *parts) if isinstance(event, Token))


async def refusal(pipeline: Pipeline, tenant: str, *parts: dict[str, Any]) -> tuple[int, str | None, str | None, str]:
    last = (await events(pipeline, tenant, *parts))[-1]
    assert isinstance(last, Failed), last
    return last.error.status, last.error.code, last.error.param, last.error.message


async def test_a_job_names_a_file_of_its_tenant_once_or_twice(pipeline: Pipeline) -> None:
    await upload(pipeline, "anna", "file-1", b"The grass is green.")
    shown = "<document>\n<source>{}</source>\n<content>\nThe grass is green.\n</content>\n</document>"
    text = await said(pipeline, "anna", document("file-1"), document("file-1", filename="own.txt"))
    assert shown.format("lawn.txt") in text and shown.format("own.txt") in text


async def test_what_a_tenant_does_not_have_is_unknown_however_it_is_missing(pipeline: Pipeline) -> None:
    await upload(pipeline, "bert", "file-1", b"The grass is green.")
    at = "messages[0].content[0].file.file_id"
    told = f"{at}: there is no file 'file-1'; upload it, and send the id that it gets."
    wanted = (404, "file_not_found", at, told)
    assert await refusal(pipeline, "anna", document("file-1")) == wanted, "another's"
    await upload(pipeline, "anna", "file-1", b"The grass is green.", lifetime=0)
    assert await refusal(pipeline, "anna", document("file-1")) == wanted, "it has expired"
    deleted = await find_file(pipeline.pipe.broker, "bert", "file-1")
    await (await Objects.of(pipeline.pipe.broker, FILES)).delete(deleted)
    assert await refusal(pipeline, "bert", document("file-1")) == wanted, "it was deleted"
    for odd in ("*", "anna.file-1", ">", "", "x" * 5000):
        assert (await refusal(pipeline, "anna", document(odd)))[:3] == (404, "file_not_found", at)


async def test_files_keep_to_the_limit_of_a_body_together(pipeline: Pipeline) -> None:
    await upload(pipeline, "anna", "file-1", b"x" * (LIMIT - 10))
    await upload(pipeline, "anna", "file-2", b"y" * 11)
    assert "xxx" in await said(pipeline, "anna", document("file-1"))
    status, _, param, message = await refusal(pipeline, "anna", document("file-1"), document("file-2"))
    assert (status, param) == (413, "messages[0].content[1].file.file_id")
    assert "1001 bytes" in message and "1000 together, the limit of the setting max_body_size" in message
    many = [document(f"file-{number}") for number in range(129)]
    assert (await refusal(pipeline, "anna", *many))[:2] == (400, "too_many_files")


@pytest.mark.parametrize(
    ("data", "more", "param", "told"),
    [
        (b"\x89PNG\r\n\x1a\n\0", {}, "file.file_id", "neither a text in UTF-8 nor a PDF"),
        (b"%PDF-1.4 broken", {}, "file.file_id", "this PDF cannot be read"),
        (b"", {}, "file.file_id", "the document has no text"),
        (b"text", {"file_data": "dGV4dA=="}, "file", "there is both file_data and file_id; send one of the two"),
    ],
)
async def test_a_file_that_is_no_document_is_refused_with_its_place(
    pipeline: Pipeline, data: bytes, more: dict[str, str], param: str, told: str
) -> None:
    await upload(pipeline, "anna", "file-1", data)
    text = {"type": "text", "text": "Read it."}
    refused = await refusal(pipeline, "anna", text, document("file-1", **more))
    assert refused[:3] == (400, "invalid_document", f"messages[0].content[1].{param}")
    assert told in refused[3]


async def test_an_image_for_a_model_of_text_is_refused_whoever_has_it(pipeline: Pipeline) -> None:
    await upload(pipeline, "anna", "file-1", b"not looked at")
    image = {"type": "image_url", "image_url": {"file_id": "file-1"}}
    refused = await refusal(pipeline, "anna", image)
    assert refused[:3] == (400, "unsupported_capability", "messages[0].content[0].image_url.file_id")
    assert (await refusal(pipeline, "bert", image))[:2] == (404, "file_not_found")
