"""`/v1/messages/batches` as Anthropic's official client sees it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import httpx2
import orjson
import pytest
from anthropic.types.messages import MessageBatch, MessageBatchIndividualResponse
from asgi import ask
from memory_pipeline import Pipeline
from office import Scripted, call

from penstock.api.batches.runner import BatchRunner
from penstock.api.bridge.bridge import Bridge
from penstock.api.http.app import create_app
from penstock.engine.models import BUNDLED, resolve_model

PATH = "/v1/messages/batches"
PATIENCE = 60.0
POLL = 0.02
HELLO = [{"role": "user", "content": "Hello"}]
TOOL = {"name": "weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}


def request(name: str, **params: Any) -> dict[str, Any]:
    return {"custom_id": name, "params": {"model": "echo", "max_tokens": 100, "messages": HELLO} | params}


class Desk:
    """A pipeline in memory, the application before it, and a runner of batches once it is wanted."""

    def __init__(self, pipeline: Pipeline) -> None:
        pipe = pipeline.pipe
        self.pipeline = pipeline
        self.app = create_app(pipeline.bridge, pipe.broker, pipe.registry, pipe.settings, "0")
        http = httpx2.AsyncClient(transport=httpx2.ASGITransport(self.app))
        client = anthropic.AsyncAnthropic(
            base_url="http://localhost",
            api_key="none",
            max_retries=0,
            http_client=http,
            _strict_response_validation=True,
        )
        self.client = client
        self.api = client.messages.batches
        self._runner: asyncio.Task[None] | None = None

    async def run(self) -> None:
        pipe = self.pipeline.pipe
        bridge = Bridge(pipe.broker, pipe.subjects)
        await bridge.start()
        self._runner = asyncio.create_task(BatchRunner(bridge, pipe.settings).run())

    async def create(self, *requests: dict[str, Any]) -> MessageBatch:
        asked: Any = requests
        return await self.api.create(requests=asked)

    async def end_of(self, id: str) -> MessageBatch:
        async with asyncio.timeout(PATIENCE):
            while (batch := await self.api.retrieve(id)).processing_status != "ended":  # noqa: ASYNC110
                await asyncio.sleep(POLL)  # it runs in its own time and tells nobody
        return batch

    async def results(self, id: str) -> dict[str, MessageBatchIndividualResponse]:
        return {entry.custom_id: entry async for entry in await self.api.results(id)}

    async def stop(self) -> None:
        if self._runner is not None:
            self._runner.cancel()
            await asyncio.gather(self._runner, return_exceptions=True)
        await self.client.close()
        await self.pipeline.stop()


@pytest.fixture
async def desk() -> AsyncIterator[Desk]:
    source = str(resolve_model(BUNDLED))
    desk = Desk(await Pipeline.start(kind=Scripted, source=source, context_length=2048, relay_interval=0.0))
    yield desk
    await desk.stop()


async def test_every_message_is_answered_or_refused(desk: Desk) -> None:
    assert isinstance(desk.pipeline.backend, Scripted)
    desk.pipeline.backend.texts = ["It is so.", "It is so.", call("weather", city="Bern")]
    created = await desk.create(
        request("said", max_tokens=1_000_000),
        request("cut", stop_sequences=["so"]),
        request("called", tools=[TOOL], tool_choice={"type": "any"}),
        request("model", model="nobody"),
        request("value", temperature=9.0),
        request("shape", messages=[{"role": "user", "content": [{"type": "document"}]}]),
    )
    assert (created.processing_status, created.request_counts.processing, created.results_url) == (
        "in_progress",
        6,
        None,
    )
    assert (created.expires_at - created.created_at).total_seconds() == 86400
    with pytest.raises(anthropic.NotFoundError, match="has not ended"):
        await desk.client.get(f"{PATH}/{created.id}/results", cast_to=object)
    await desk.run()
    batch = await desk.end_of(created.id)
    counts = batch.request_counts.to_dict()
    assert counts == {"processing": 0, "succeeded": 3, "errored": 3, "canceled": 0, "expired": 0}
    assert batch.ended_at and batch.ended_at >= batch.created_at
    found = await desk.results(batch.id)
    assert found.keys() == {"said", "cut", "called", "model", "value", "shape"}
    reasons: dict[str, str | None] = {}
    for name, entry in found.items():
        match entry.result.type:
            case "succeeded":
                reasons[name] = entry.result.message.stop_reason
            case "errored":
                reasons[name] = entry.result.error.error.type
    assert reasons.pop("said") == "end_turn"
    assert reasons == {
        "cut": "stop_sequence",
        "called": "tool_use",
        "model": "not_found_error",
        "value": "invalid_request_error",
        "shape": "invalid_request_error",
    }


async def test_a_batch_is_cancelled_and_deleted(desk: Desk) -> None:
    created = await desk.create(request("a"), request("b"))
    with pytest.raises(anthropic.BadRequestError, match="cancel it first"):
        await desk.api.delete(created.id)
    cancelled = await desk.api.cancel(created.id)
    assert cancelled.processing_status == "canceling" and cancelled.cancel_initiated_at
    await desk.run()
    batch = await desk.end_of(created.id)
    assert batch.request_counts.canceled == 2
    assert {entry.result.type for entry in (await desk.results(batch.id)).values()} == {"canceled"}
    assert (await desk.api.cancel(batch.id)).processing_status == "ended"
    assert (await desk.api.delete(batch.id)).type == "message_batch_deleted"
    for gone in (desk.api.retrieve(batch.id), desk.api.cancel(batch.id), desk.api.delete(batch.id)):
        with pytest.raises(anthropic.NotFoundError):
            await gone
    files = await ask(desk.app, "GET", "/v1/files")
    assert b'"data":[]' in files.body


async def test_what_has_ended_cannot_be_cancelled(desk: Desk) -> None:
    assert isinstance(desk.pipeline.backend, Scripted)
    desk.pipeline.backend.texts = ["So."]
    created = await desk.create(request("a"))
    await desk.run()
    await desk.end_of(created.id)
    with pytest.raises(anthropic.BadRequestError, match="cannot be cancelled"):
        await desk.api.cancel(created.id)


@pytest.mark.parametrize(
    ("requests", "says"),
    [
        ([], "requests"),
        ([request("a"), request("a")], "custom_id"),
        ([request("no spaces")], "custom_id"),
        ([request("a", stream=True)], "requests[0].params.stream"),
        ([request("a"), request("b", priority="high")], "requests[1].params.priority"),
        ([{"custom_id": "a"}], "requests[0].params is missing"),
    ],
    ids=str,
)
async def test_a_batch_that_cannot_be_is_refused(desk: Desk, requests: list[Any], says: str) -> None:
    with pytest.raises(anthropic.BadRequestError) as refused:
        await desk.create(*requests)
    assert says in str(refused.value.body)


async def test_batches_are_listed_in_pages(desk: Desk) -> None:
    made = {(await desk.create(request("a"))).id for _ in range(5)}
    pages = await desk.api.list(limit=2)
    ids = [batch.id async for batch in pages]
    assert set(ids) == made and len(ids) == 5
    assert [batch.id for batch in (await desk.api.list(limit=2, before_id=ids[4])).data] == ids[2:4]
    assert not (await desk.api.list(after_id=ids[4])).data
    zeros = "limit=" + "0" * 8
    for query in (
        "limit=0",
        "limit=x",
        f"{zeros}19999",
        f"{zeros}1{'0' * 5_000}",
        "after_id=msgbatch_0",
        "before_id=batch_0",
    ):
        assert (await ask(desk.app, "GET", f"{PATH}?{query}")).status == 400


async def test_a_page_begins_behind_a_batch_that_has_been_deleted_since(desk: Desk) -> None:
    made = [(await desk.create(request("a"))).id for _ in range(5)]
    await desk.run()
    for each in made:
        await desk.end_of(each)
    seen = []
    async for batch in await desk.api.list(limit=2):
        await desk.api.delete(batch.id)
        seen.append(batch.id)
    assert seen == made[::-1]
    kept = [(await desk.create(request("a"))).id for _ in range(3)]
    assert [each.id for each in (await desk.api.list(before_id=made[-1])).data] == kept[::-1]


async def test_a_line_that_outgrows_a_body_is_refused(desk: Desk) -> None:
    """Numbers may be longer as a line than they came; whoever reads the file would stop in their middle."""
    numbers = b"[" + b",".join([b"1e15"] * 400_000) + b"]"
    params = orjson.dumps(request("a")["params"] | {"metadata": "x"}).replace(b'"x"', numbers)
    body = b'{"requests":[{"custom_id":"a","params":' + params + b"}]}"
    assert len(body) < desk.pipeline.pipe.settings.max_body_size
    refused = await ask(desk.app, "POST", PATH, body)
    assert refused.status == 400 and b"requests[0] exceeds" in refused.body


async def test_a_batch_that_is_refused_leaves_no_file() -> None:
    desk = Desk(await Pipeline.start(batches_limit=20))
    for _ in range(18):  # what is left is for other tenants
        await desk.create(request("a"))
    files = await ask(desk.app, "GET", "/v1/files")
    with pytest.raises(anthropic.APIStatusError, match="Too many batches"):
        await desk.create(request("b"))
    assert (await ask(desk.app, "GET", "/v1/files")).body == files.body
    await desk.stop()


async def test_batches_of_files_are_none_of_messages(desk: Desk) -> None:
    created = await desk.create(request("a"))
    for method, path in (("GET", ""), ("POST", "/cancel"), ("DELETE", ""), ("GET", "/results")):
        assert (await ask(desk.app, method, f"{PATH}/batch_0{path}")).status == 404
    shown = await ask(desk.app, "GET", f"/v1/batches/{created.id}")
    assert shown.status == 200 and b'"request_counts":{"total":1,"completed":0,"failed":0}' in shown.body
