"""`/v1/batches` as the official client sees it: every line answered once, whoever runs the batch, however it ends."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any, Literal

import httpx2
import openai
import psutil
import pytest
from applications import Script
from memory_pipeline import TOOLS_CARD, Pipeline
from openai.types import Batch
from openai.types.chat import ChatCompletion
from openai.types.responses import Response
from serving import Serve, Served

from penstock.api.batches.input import check_lines, read_line
from penstock.api.batches.runner import AT_ONCE, BatchRunner
from penstock.api.bridge.bridge import Bridge
from penstock.api.http.app import create_app
from penstock.config.settings import Settings
from penstock.schemas.errors import InvalidRequest
from penstock.schemas.events import Accepted, Delta, Done, ErrorBody, Event, Failed, ItemEvent, Token, Usage
from penstock.schemas.jobs import Job
from penstock.schemas.openai.batches import Batch as Kept
from penstock.schemas.wire.codec import decode_model, decode_outputs
from penstock.streams.memory.broker import MemoryBroker
from penstock.streams.port import ConsumerSpec, Message
from penstock.streams.stores.objects import Objects
from penstock.streams.topology import BATCH_RESULTS, BATCH_STATES, BATCHES, FILES

CHAT: Literal["/v1/chat/completions"] = "/v1/chat/completions"
RESPONSES: Literal["/v1/responses"] = "/v1/responses"
ENDED = ("completed", "failed", "expired", "cancelled")
PATIENCE = 60.0
POLL = 0.02
SETTINGS = Settings(backend="echo", lease=0.5)


def line(name: str, text: str = "hello", endpoint: str = CHAT, **body: Any) -> dict[str, Any]:
    asked: dict[str, Any] = {"input": text} if endpoint == RESPONSES else {"prompt": text}
    if endpoint == CHAT:
        asked = {"messages": [{"role": "user", "content": text}]}
    return {"custom_id": name, "method": "POST", "url": endpoint, "body": {"model": "echo", **asked, **body}}


def jsonl(lines: Iterable[Any]) -> bytes:
    return "".join(one if isinstance(one, str) else json.dumps(one) + "\n" for one in lines).encode()


def client(app: Any, key: str = "no-key-at-all") -> openai.AsyncOpenAI:
    http: Any = httpx2.AsyncClient(transport=httpx2.ASGITransport(app))
    return openai.AsyncOpenAI(
        base_url="http://localhost/v1",
        api_key=key,
        max_retries=0,
        http_client=http,
        _strict_response_validation=True,
    )


async def eventually(condition: Callable[[], Awaitable[Any]]) -> Any:
    """For what runs in its own time and tells nobody."""
    async with asyncio.timeout(PATIENCE):
        while not (found := await condition()):  # noqa: ASYNC110
            await asyncio.sleep(POLL)
    return found


async def submit(api: openai.AsyncOpenAI, lines: Iterable[Any], endpoint: Any = CHAT, **more: Any) -> Batch:
    file = await api.files.create(file=("input.jsonl", jsonl(lines)), purpose="batch")
    return await api.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **more)


async def end_of(api: openai.AsyncOpenAI, id: str) -> Batch:
    async def ended() -> Batch | None:
        batch = await api.batches.retrieve(id)
        return batch if batch.status in ENDED else None

    found: Batch = await eventually(ended)
    return found


async def entries(api: openai.AsyncOpenAI, file: str | None) -> list[dict[str, Any]]:
    if file is None:
        return []
    return [json.loads(row) for row in (await api.files.content(file)).text.splitlines()]


def counts(batch: Batch) -> tuple[int, int, int]:
    assert batch.request_counts is not None
    return batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed


class Office:
    """A pipeline in memory, the application before it, and runners that can be started and stopped."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self.broker = pipeline.pipe.broker
        self.api = client(self._app(pipeline.bridge))
        self.jobs: list[str] = []  # ids, as often as they were stored or repeated
        self._runners: list[asyncio.Task[None]] = []

    @classmethod
    async def start(cls, memory: type[MemoryBroker] = MemoryBroker, rate: float = 0.0, **values: Any) -> Office:
        office = cls(await Pipeline.start(relay_interval=0.0, memory=memory, echo_rate=rate, **values))

        def heard(message: Message) -> None:
            assert message.subject.split(".")[-2:] == ["low", "default"]
            office.jobs.append(message.headers["Nats-Msg-Id"].removeprefix("default."))

        await office.broker.listen(office.pipeline.pipe.subjects.jobs_all(), heard)
        return office

    async def run(self, *, settings: Settings | None = None, **more: Any) -> asyncio.Task[None]:
        """Start a runner beside a bridge of its own, as another process would have it, perhaps with other settings."""
        bridge = Bridge(self.broker, self.pipeline.pipe.subjects)
        await bridge.start()
        runner = asyncio.create_task(BatchRunner(bridge, settings or self.pipeline.pipe.settings, **more).run())
        self._runners.append(runner)
        return runner

    async def end(self, runner: asyncio.Task[None]) -> None:
        self._runners.remove(runner)
        runner.cancel()
        with pytest.raises(asyncio.CancelledError):
            await runner

    async def times_begun(self) -> list[int]:
        """In how many holds of a worker each request was spoken of; a hold of a finished one adds nothing."""
        spoken: dict[str, set[int]] = {}
        root = self.pipeline.pipe.subjects.root
        for message in await self.broker.replay("STREAM", f"{root}.stream.>"):
            for output in decode_outputs(message.data):
                if isinstance(output, Delta):
                    spoken.setdefault(output.request, set()).add(output.epoch)
        return [len(epochs) for epochs in spoken.values()]

    async def left_behind(self) -> tuple[int, int]:
        """Results of lines that are still kept, and messages of batches."""
        results = await (await self.broker.bucket(BATCH_RESULTS)).entries()
        return len(results), (await self.broker.held(BATCHES)).messages

    async def stop(self) -> None:
        for runner in tuple(self._runners):
            await self.end(runner)
        await self.api.close()
        await self.pipeline.stop()

    def _app(self, bridge: Bridge) -> Any:
        pipe = self.pipeline.pipe
        return create_app(bridge, pipe.broker, pipe.registry, pipe.settings, "0")


@pytest.fixture
async def opened() -> AsyncIterator[list[Office]]:
    offices: list[Office] = []
    yield offices
    for office in offices:
        await office.stop()


@pytest.fixture
async def office(opened: list[Office]) -> Office:
    opened.append(await Office.start())
    return opened[0]


async def test_every_line_is_answered_once(office: Office) -> None:
    names = [f"request {number} ü" for number in range(40)]
    created = await submit(office.api, [line(name, name, max_tokens=50) for name in names], metadata={"for": "test"})
    assert (created.status, counts(created), created.metadata) == ("validating", (0, 0, 0), {"for": "test"})
    assert created.expires_at == created.created_at + 86400
    await office.run()
    batch = await end_of(office.api, created.id)
    assert (batch.status, counts(batch), batch.errors, batch.error_file_id) == ("completed", (40, 40, 0), None, None)
    assert batch.in_progress_at and batch.finalizing_at and batch.completed_at
    answered = await entries(office.api, batch.output_file_id)
    assert [entry["custom_id"] for entry in answered] == names
    assert len({entry["id"] for entry in answered}) == 40
    for name, entry in zip(names, answered, strict=True):
        assert entry.keys() == {"id", "custom_id", "response", "error"}
        assert (entry["error"], entry["response"]["status_code"]) == (None, 200)
        answer = ChatCompletion.model_validate(entry["response"]["body"], strict=True)
        assert name in str(answer.choices[0].message.content)
    assert sorted(office.jobs) == sorted(entry["response"]["request_id"] for entry in answered)
    file = await office.api.files.retrieve(str(batch.output_file_id))
    assert (file.purpose, file.filename) == ("batch_output", f"{batch.id}_output.jsonl")
    await eventually(lambda: _is(office.left_behind(), (0, 0)))


async def test_responses_are_answered_and_can_be_continued(office: Office) -> None:
    names = [f"request {number}" for number in range(6)]
    await office.run()
    lines = [line(name, name, RESPONSES, max_output_tokens=50) for name in names]
    batch = await end_of(office.api, (await submit(office.api, lines, RESPONSES)).id)
    assert (batch.status, counts(batch), batch.error_file_id) == ("completed", (6, 6, 0), None)
    answered = await entries(office.api, batch.output_file_id)
    assert [entry["custom_id"] for entry in answered] == names
    for name, entry in zip(names, answered, strict=True):
        answer = Response.model_validate(entry["response"]["body"], strict=True)
        assert (answer.status, answer.id) == ("completed", entry["response"]["request_id"])
        assert name in answer.output_text
        kept = await office.api.responses.retrieve(answer.id)
        assert (kept.output, kept.usage) == (answer.output, answer.usage)
    (last,) = [
        line("next", "and on", RESPONSES, previous_response_id=answered[0]["response"]["body"]["id"], store=False)
    ]
    batch = await end_of(office.api, (await submit(office.api, [last], RESPONSES)).id)
    (entry,) = await entries(office.api, batch.output_file_id)
    answer = Response.model_validate(entry["response"]["body"], strict=True)
    assert "request 0" in answer.output_text and "and on" in answer.output_text
    with pytest.raises(openai.NotFoundError):
        await office.api.responses.retrieve(answer.id)


async def test_a_refused_response_is_in_the_error_file(office: Office) -> None:
    await office.run()
    lines = [
        line("cut", "long", RESPONSES, max_output_tokens=16),
        line("model", "two", RESPONSES, model="unknown"),
        line("value", "three", RESPONSES, temperature=-1),
        line("gone", "four", RESPONSES, previous_response_id="resp_unknown"),
    ]
    batch = await end_of(office.api, (await submit(office.api, lines, RESPONSES)).id)
    assert (batch.status, counts(batch)) == ("completed", (4, 1, 3))
    (cut,) = await entries(office.api, batch.output_file_id)
    assert cut["response"]["body"]["status"] == "incomplete"
    bad = await entries(office.api, batch.error_file_id)
    assert [(entry["custom_id"], entry["response"]["status_code"]) for entry in bad] == [
        ("model", 404),
        ("value", 400),
        ("gone", 404),
    ]


async def _is(found: Awaitable[Any], expected: Any) -> bool:
    return bool(await found == expected)


async def test_refused_lines_are_in_the_error_file(office: Office) -> None:
    completions = "/v1/completions"
    lines = [
        line("good", "one", completions, max_tokens=3),
        line("model", "two", completions, model="unknown"),
        line("value", "three", completions, temperature=-1),
        line("deep", "four", completions, n=2, max_tokens=3, service_tier="flex"),
    ]
    await office.run()
    batch = await end_of(office.api, (await submit(office.api, lines, completions)).id)
    assert (batch.status, counts(batch)) == ("completed", (4, 2, 2))
    good = await entries(office.api, batch.output_file_id)
    assert [(entry["custom_id"], len(entry["response"]["body"]["choices"])) for entry in good] == [
        ("good", 1),
        ("deep", 2),
    ]
    bad = await entries(office.api, batch.error_file_id)
    assert [(entry["custom_id"], entry["response"]["status_code"], entry["error"]) for entry in bad] == [
        ("model", 404, None),
        ("value", 400, None),
    ]
    assert [entry["response"]["body"]["error"]["param"] for entry in bad] == ["model", "temperature"]


async def test_a_batch_of_refusals_alone_has_no_output(office: Office) -> None:
    await office.run()
    batch = await end_of(office.api, (await submit(office.api, [line("a", model="unknown")])).id)
    assert (batch.status, counts(batch), batch.output_file_id) == ("completed", (1, 0, 1), None)
    assert len(await entries(office.api, batch.error_file_id)) == 1


@pytest.mark.parametrize(
    ("raw", "code", "param"),
    [
        ("{", "invalid_json_line", None),
        ("[]", "invalid_json_line", None),
        ('{"custom_id": NaN}', "invalid_json_line", None),
        (line("a") | {"custom_id": ""}, "invalid_value", "custom_id"),
        (line("a") | {"custom_id": 3}, "invalid_value", "custom_id"),
        ({}, "missing_required_parameter", "custom_id"),
        ({"custom_id": "a", "method": "POST", "url": CHAT}, "missing_required_parameter", "body"),
        (line("a") | {"body": []}, "invalid_value", "body"),
        (line("a") | {"method": "GET"}, "invalid_method", "method"),
        (line("a") | {"url": "/v1/completions"}, "invalid_url", "url"),
        (line("a", stream=True), "invalid_value", "body.stream"),
        (line("a", keep_alive=0), "unsupported_parameter", "body.keep_alive"),
        (line("a") | {"temperature": 0, "note": "mine"}, "unsupported_parameter", "temperature"),
        (line("a") | {"model": "echo"}, "unsupported_parameter", "model"),
        (line("a", background=True), "unsupported_parameter", "body.background"),
        (line("a", deep=json.loads("[" * 600 + "]" * 600)), "invalid_json_line", None),
    ],
)  # fmt: skip
def test_a_malformed_line_is_told(raw: Any, code: str, param: str | None) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_line(jsonl([raw]), CHAT)
    assert (caught.value.code, caught.value.param) == (code, param)


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"tools": [{"type": "web_search"}]}, "web_search are run by OpenAI's servers alone"),
        (
            {"tools": [{"type": "mcp", "server_label": "a", "server_url": "https://a.example", "headers": {"x": "y"}}]},
            "a file would keep headers and authorization as they are",
        ),
        ({"background": True}, "background has no effect in a batch"),
    ],
)
def test_a_response_that_a_batch_cannot_have_is_told(body: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidRequest, match=told) as caught:
        read_line(jsonl([line("a", "text", RESPONSES, **body)]), RESPONSES)
    assert str(caught.value.param).startswith("body.")


def test_notes_may_stand_beside_a_body() -> None:
    given = line("a") | {"note": "mine", "metadata": {"run": 7}}
    assert read_line(jsonl([given]), CHAT) == given


@pytest.mark.parametrize(
    ("lines", "faults"),
    [
        ([], [("empty_file", None)]),
        (["\n", "  \n"], [("empty_file", None)]),
        ([line("a"), "\n", "{\n", line("b"), line("a")], [("invalid_json_line", 3), ("duplicate_custom_id", 5)]),
        (["{}\n"] * 150, [("missing_required_parameter", number) for number in range(1, 101)]),
        ([line("a"), line("b", "x" * (8 << 20)), line("a")], [("line_too_long", 2)]),
        ([line("a"), '{"custom_id": "b"'], [("invalid_json_line", 2)]),
    ],
)
async def test_a_malformed_file_fails_with_its_lines(
    office: Office, lines: list[Any], faults: list[tuple[str, int | None]]
) -> None:
    await office.run()
    batch = await end_of(office.api, (await submit(office.api, lines)).id)
    assert batch.errors is not None and batch.errors.data is not None
    assert (batch.status, batch.errors.object, batch.output_file_id) == ("failed", "list", None)
    assert [(fault.code, fault.line) for fault in batch.errors.data] == faults
    assert office.jobs == []


async def test_a_batch_has_no_more_lines_than_may_be() -> None:
    async def data() -> AsyncIterator[bytes]:
        yield jsonl([line("a"), line("b"), line("c"), line("d")])

    total, faults = await check_lines(data(), 1000, CHAT, most=2)
    assert (total, [(fault.code, fault.line) for fault in faults]) == (3, [("too_many_requests", 3)])
    assert await check_lines(data(), 1000, CHAT) == (4, [])


@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"input_file_id": "file-none"}, 404, "input_file_id"),
        ({"input_file_id": "*"}, 404, "input_file_id"),
        ({"input_file_id": 1}, 400, "input_file_id"),
        ({"endpoint": "/v1/moderations"}, 400, "endpoint"),
        ({"endpoint": RESPONSES}, 503, None),  # no stage tools runs
        ({"completion_window": "1h"}, 400, "completion_window"),
        ({"metadata": {"a": 1}}, 400, "metadata.a"),
        ({"metadata": {str(number): "" for number in range(17)}}, 400, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, 400, "output_expires_after.seconds"),
    ],
)
async def test_a_bad_batch_is_refused(change: dict[str, Any], status: int, param: str | None) -> None:
    async with client((await Script.start()).app) as api:
        file = await api.files.create(file=b"{}", purpose="batch")
        body = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"} | change
        with pytest.raises(openai.APIStatusError) as caught:
            await api.post("/batches", body=body, cast_to=Batch)
        assert (caught.value.status_code, caught.value.param) == (status, param)
        assert [batch async for batch in api.batches.list()] == []


async def test_a_file_for_another_purpose_is_refused() -> None:
    async with client((await Script.start()).app) as api:
        file = await api.files.create(file=b"{}", purpose="user_data")
        with pytest.raises(openai.BadRequestError, match="purpose"):
            await api.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")


async def test_a_tenant_sees_only_its_own_batches() -> None:
    script = await Script.start(api_keys=["one=key-of-one", "two=key-of-two"])
    async with client(script.app, "key-of-one") as one, client(script.app, "key-of-two") as two:
        batches = [await submit(one, [line("a")]) for _ in range(3)]
        assert {batch.id async for batch in one.batches.list(limit=2)} == {batch.id for batch in batches}
        assert [batch async for batch in two.batches.list()] == []
        for id in (batches[0].id, "batch_none", "*"):
            for ask in (two.batches.retrieve, two.batches.cancel):
                with pytest.raises(openai.NotFoundError):
                    await ask(id)
        assert (await one.batches.retrieve(batches[0].id)).status == "validating"


async def test_a_file_that_a_batch_needs_stays(office: Office) -> None:
    batch = await submit(office.api, [line("a")])
    with pytest.raises(openai.BadRequestError, match="needs this file"):
        await office.api.files.delete(batch.input_file_id)
    await office.run()
    await end_of(office.api, batch.id)
    await office.api.files.delete(batch.input_file_id)


async def test_a_batch_whose_file_is_gone_fails(office: Office) -> None:
    batch = await submit(office.api, [line("a")])
    objects = await Objects.of(office.broker, FILES)
    input = await objects.info(f"default.{batch.input_file_id}")
    assert input is not None
    await objects.delete(input)
    await office.run()
    batch = await end_of(office.api, batch.id)
    assert batch.errors is not None and batch.errors.data is not None
    assert (batch.status, batch.errors.data[0].code) == ("failed", "input_file_not_found")


def test_an_ended_batch_stays_as_it_is() -> None:
    batch = Kept(
        id="batch_a", endpoint=CHAT, input_file_id="file-a", created_at=0, expires_at=1, tenant="one", output_ttl=1.0
    )
    ended = batch.after({"validating": "completed"}, 2.0, output_file_id="file-b")
    assert (ended.status, ended.completed_at, ended.output_file_id) == ("completed", 2, "file-b")
    assert ended.after({"completed": "failed"}, 3.0, output_file_id=None) == ended


async def half_done(office: Office, id: str) -> bool:
    return counts(await office.api.batches.retrieve(id))[1] >= 3


@pytest.mark.parametrize("endpoint", [CHAT, RESPONSES])
async def test_cancelled_it_keeps_what_is_done(opened: list[Office], endpoint: str) -> None:
    office = await Office.start(rate=100.0, batch_concurrency=4)
    opened.append(office)
    most = {"max_tokens" if endpoint == CHAT else "max_output_tokens": 20}
    created = await submit(
        office.api, [line(str(number), "x" * 10, endpoint, **most) for number in range(40)], endpoint
    )
    await office.run()
    await eventually(lambda: half_done(office, created.id))
    cancelling = await office.api.batches.cancel(created.id)
    assert (cancelling.status, bool(cancelling.cancelling_at)) == ("cancelling", True)
    batch = await end_of(office.api, created.id)
    total, completed, failed = counts(batch)
    assert (batch.status, total, completed + failed) == ("cancelled", 40, 40)
    assert 3 <= completed < 40
    done, rest = await entries(office.api, batch.output_file_id), await entries(office.api, batch.error_file_id)
    assert sorted(int(entry["custom_id"]) for entry in done + rest) == list(range(40))
    assert len(done) == completed
    assert {(entry["response"], entry["error"]["code"]) for entry in rest} == {(None, "batch_cancelled")}
    assert len(set(office.jobs)) < 40
    assert (await office.api.batches.cancel(created.id)).status == "cancelled"


async def test_an_ended_batch_cannot_be_cancelled(office: Office) -> None:
    await office.run()
    batch = await end_of(office.api, (await submit(office.api, [line("a")])).id)
    with pytest.raises(openai.BadRequestError, match="completed cannot be cancelled"):
        await office.api.batches.cancel(batch.id)


async def test_cancelled_before_it_began(office: Office) -> None:
    created = await submit(office.api, [line("a"), line("b")])
    await office.api.batches.cancel(created.id)
    await office.run()
    batch = await end_of(office.api, created.id)
    assert (batch.status, counts(batch), office.jobs) == ("cancelled", (2, 0, 2), [])


async def test_lines_that_nobody_runs_are_stored_together(office: Office) -> None:
    """Storing each of them, and reading it again, took minutes where there were 50,000."""
    names = [str(number) for number in range(200)]
    created = await submit(office.api, [line(name) for name in names])
    await office.api.batches.cancel(created.id)
    await office.run()
    batch = await end_of(office.api, created.id)
    assert [entry["custom_id"] for entry in await entries(office.api, batch.error_file_id)] == names
    assert await (await office.broker.bucket(BATCH_RESULTS)).put("newest", b"") < 10  # writes so far


async def test_where_lines_were_left_another_runner_leaves_the_same(opened: list[Office]) -> None:
    """One that has lost its lease without knowing may answer a line that the other has given up."""
    office = await Office.start(rate=100.0, batch_concurrency=4)
    opened.append(office)
    created = await submit(office.api, [line(str(number)) for number in range(6)])
    results = await Objects.of(office.broker, BATCH_RESULTS)

    async def answer() -> AsyncIterator[bytes]:
        yield b"{}\n"

    await results.put(f"{created.id}.rest", answer(), {"first": 2, "ending": "cancelled"})
    await results.put(f"{created.id}.3", answer(), {"ending": "completed"})
    await office.run()
    batch = await end_of(office.api, created.id)
    assert counts(batch) == (6, 2, 4)
    rest = await entries(office.api, batch.error_file_id)
    assert [(entry["custom_id"], entry["error"]["code"]) for entry in rest] == [
        (name, "batch_cancelled") for name in "2345"
    ]


async def test_its_window_ends(office: Office) -> None:
    created = await submit(office.api, [line("a"), line("b")])
    await office.run(now=lambda: time.time() + 86401)
    batch = await end_of(office.api, created.id)
    assert (batch.status, counts(batch), office.jobs) == ("expired", (2, 0, 2), [])
    rest = await entries(office.api, batch.error_file_id)
    assert [(entry["custom_id"], entry["error"]["code"]) for entry in rest] == [
        ("a", "batch_expired"),
        ("b", "batch_expired"),
    ]


async def test_a_checked_batch_goes_on_where_less_is_allowed_meanwhile(opened: list[Office]) -> None:
    """A runner with a smaller `max_body_size` found a line cut short, and tried the batch again for ever."""
    office = await Office.start(Small, rate=100.0, batch_concurrency=2)
    opened.append(office)
    more: dict[str, Any] = {"metadata": {"note": "x" * 500}, "max_tokens": 20, "ignore_eos": True}
    created = await submit(office.api, [line(str(number), **more) for number in range(12)])
    runner = await office.run()
    await eventually(lambda: half_done(office, created.id))
    await office.end(runner)
    await office.run(settings=office.pipeline.pipe.settings.model_copy(update={"max_body_size": 100}))
    batch = await end_of(office.api, created.id)
    assert (batch.status, counts(batch)) == ("completed", (12, 12, 0))


@pytest.mark.parametrize("endpoint", [CHAT, RESPONSES])
async def test_another_runner_goes_on_and_no_line_runs_twice(opened: list[Office], endpoint: str) -> None:
    office = await Office.start(rate=200.0, batch_concurrency=6)
    opened.append(office)
    most = {"max_tokens" if endpoint == CHAT else "max_output_tokens": 20}
    lines = [line(str(number), "x" * 10, endpoint, **most) for number in range(40)]
    created = await submit(office.api, lines, endpoint)
    for _ in range(3):
        before = counts(await office.api.batches.retrieve(created.id))[1]
        runner = await office.run()

        async def further(before: int = before) -> bool:
            return counts(await office.api.batches.retrieve(created.id))[1] > before + 4

        await eventually(further)
        await office.end(runner)
    await office.run()
    batch = await end_of(office.api, created.id)
    assert (batch.status, counts(batch)) == ("completed", (40, 40, 0))
    answered = await entries(office.api, batch.output_file_id)
    assert [entry["custom_id"] for entry in answered] == [str(number) for number in range(40)]
    assert await office.times_begun() == [1] * 40
    asked = [job for job in office.jobs if job in {entry["response"]["request_id"] for entry in answered}]
    assert len(set(asked)) == 40
    assert len(asked) < 40 + 12  # what was under way was followed, and not published again


async def test_a_batch_that_was_finished_and_not_acknowledged_is_not_run_again(office: Office) -> None:
    runner = await office.run()
    created = await submit(office.api, [line("a"), line("b")])
    batch = await end_of(office.api, created.id)
    await eventually(lambda: _is(office.left_behind(), (0, 0)))
    state = await (await office.broker.bucket(BATCH_STATES)).get(f"default.{created.id}")
    assert state is not None
    await office.broker.publish(office.pipeline.pipe.subjects.batches("default"), state.value, message_id="again")
    await eventually(lambda: _is(office.left_behind(), (0, 0)))
    assert await office.api.batches.retrieve(created.id) == batch
    assert len(office.jobs) == 2
    assert not runner.done()


class Small(MemoryBroker):
    """Takes messages of 8 KB, and not what several answers make together."""

    def __init__(self) -> None:
        super().__init__(max_payload=8192)


async def test_an_answer_that_no_message_holds_is_kept(opened: list[Office]) -> None:
    office = await Office.start(memory=Small)
    opened.append(office)
    await office.run()
    text = "y" * 100
    lines = [line("large", text, n=32, max_tokens=300, ignore_eos=True), line("small", text), line("job", "z" * 9000)]
    batch = await end_of(office.api, (await submit(office.api, lines)).id)
    assert (batch.status, counts(batch)) == ("completed", (3, 2, 1))
    large, small = await entries(office.api, batch.output_file_id)
    assert [len(choice["message"]["content"]) for choice in large["response"]["body"]["choices"]] == [300] * 32
    assert small["custom_id"] == "small"
    (refused,) = await entries(office.api, batch.error_file_id)
    assert (refused["custom_id"], refused["response"]["status_code"]) == ("job", 413)
    await eventually(lambda: _is(office.left_behind(), (0, 0)))
    assert len(await (await Objects.of(office.broker, FILES)).infos()) == 3


BUSY = Failed("", ErrorBody(503, "Busy.", "overloaded_error", "server_busy", retry_after=0.01))
ANSWER: list[Event] = [
    Accepted("", "echo", 1, 1),
    Token("", 0, 0, (1,), "ok", finish_reason="stop"),
    Done("", ("stop",), Usage(1, 1, 2)),
]


@pytest.fixture
async def script() -> AsyncIterator[Script]:
    """A runner's pipeline is the test."""
    script = await Script.start()
    runner = asyncio.create_task(BatchRunner(script.bridge, SETTINGS, patience=0.05).run())
    yield script
    runner.cancel()
    with pytest.raises(asyncio.CancelledError):
        await runner


async def test_refused_for_want_of_room_it_asks_again(script: Script) -> None:
    async with client(script.app) as api:
        created = await submit(api, [line("a")])
        for attempt in ("", "-1", "-2"):
            job = await script.job()
            assert job.id == f"{created.id}-0{attempt}"
            await script.tell(ANSWER if attempt == "-2" else [BUSY], job)
        batch = await end_of(api, created.id)
        assert (batch.status, counts(batch)) == ("completed", (1, 1, 0))
        (entry,) = await entries(api, batch.output_file_id)
        assert entry["response"]["body"]["choices"][0]["message"]["content"] == "ok"


async def test_a_response_is_asked_for_again_until_it_has_called_a_tool(script: Script) -> None:
    """What the tool did must not be done twice: its result is kept, with the reason for the end."""
    await script.registry.announce_stage(TOOLS_CARD)
    await script.registry.refresh()
    call = {"id": "mcp_1", "type": "mcp_call", "server_label": "files", "name": "delete", "arguments": "{}"}
    called = ItemEvent("", 0, call | {"output": "deleted", "error": None, "status": "completed"})
    async with client(script.app) as api:
        created = await submit(api, [line("a", endpoint=RESPONSES)], RESPONSES)
        first = await script.job()
        await script.tell([BUSY], first)
        second = await script.job()
        assert second.id != first.id
        await script.tell([Accepted("", "echo", 1, 1), called, BUSY], second)
        batch = await end_of(api, created.id)
        assert (batch.status, counts(batch), len(script.jobs)) == ("completed", (1, 0, 1), 2)
        (entry,) = await entries(api, batch.error_file_id)
        assert (entry["response"]["status_code"], entry["response"]["request_id"]) == (200, second.id)
        answer = Response.model_validate(entry["response"]["body"], strict=True)
        assert (answer.status, answer.error and answer.error.message) == ("failed", "Busy.")
        assert [item.type for item in answer.output] == ["mcp_call"]


async def test_what_was_begun_and_says_nothing_is_begun_anew(script: Script) -> None:
    async with client(script.app) as api:
        created = await submit(api, [line("a")])
        first = await script.job()
        held = await script.broker.consume(
            ConsumerSpec(BATCHES, "batches-default", script.subjects.batches("default"), takeover=True), prefetch=1
        )
        (delivery,) = await held.take(1)  # as if its runner had died
        await held.close()
        other = Bridge(script.broker, script.subjects, "other")
        await other.start()
        runner = asyncio.create_task(BatchRunner(other, SETTINGS, patience=0.05).run())
        await delivery.nak()
        while (job := await script.job()).id == first.id:
            pass
        assert job.id == f"{created.id}-0-1"
        await script.tell(ANSWER, job)
        batch = await end_of(api, created.id)
        assert (batch.status, counts(batch)) == ("completed", (1, 1, 0))
        runner.cancel()
        with pytest.raises(asyncio.CancelledError):
            await runner


async def test_tenants_take_turns() -> None:
    script = await Script.start(api_keys=["one=key-of-one", "two=key-of-two"])
    async with client(script.app, "key-of-one") as one, client(script.app, "key-of-two") as two:
        ids = [(await submit(one, [line("a")])).id for _ in range(2 * AT_ONCE)]
        ids += [(await submit(two, [line("a")])).id for _ in range(2)]
        patient = SETTINGS.model_copy(update={"lease": 30.0})
        runner = asyncio.create_task(BatchRunner(script.bridge, patient).run())
        begun: list[int] = []
        for ended in range(len(ids)):

            async def all_begin(ended: int = ended) -> bool:
                return len(script.jobs) == min(ended + AT_ONCE, len(ids))

            await eventually(all_begin)
            job = decode_model(Job, script.jobs[ended].data, None)
            begun.append(ids.index(str(job.id).removesuffix("-0")))
            await script.tell(ANSWER, job, "one" if begun[-1] < 2 * AT_ONCE else "two")
        assert sorted(begun) == list(range(len(ids)))
        assert [place for place in begun if place < 2 * AT_ONCE] == list(range(2 * AT_ONCE))
        # The second may come when the first has all the room and waits for more: then they alternate from there.
        assert {2 * AT_ONCE, 2 * AT_ONCE + 1} <= set(begun[: AT_ONCE + 4]), begun
        runner.cancel()
        with pytest.raises(asyncio.CancelledError):
            await runner


def kill(served: Served, name: str) -> None:
    family = psutil.Process(served.process.pid).children(recursive=True)
    (victim,) = [child for child in family if name in (*child.cmdline(), child.name())]
    victim.send_signal(signal.SIGKILL)
    psutil.wait_procs([victim], timeout=30)


async def test_a_batch_outlives_every_part(serve: Serve) -> None:
    served = serve("--backend", "echo", "--echo-rate", "50", "--lease", "1", "--batch-concurrency", "8")
    async with openai.AsyncOpenAI(
        base_url=f"{served.url}/v1", api_key="none", max_retries=20, _strict_response_validation=True
    ) as api:
        lines = [line(f"line {number}", f"say {number} " * 5, max_tokens=20) for number in range(60)]
        created = await submit(api, lines)
        asked = [line(f"{number}", f"tell {number} " * 5, RESPONSES, max_output_tokens=20) for number in range(30)]
        responses = await submit(api, asked, RESPONSES)
        for other in ("*", ">", "batch_*"):
            with pytest.raises(openai.NotFoundError):
                await api.batches.retrieve(other)
        with pytest.raises(openai.NotFoundError):
            await api.files.retrieve("file-" + "x" * 5000)
        told: list[int] = []
        for least, victim in ((5, "front"), (20, "worker"), (35, "nats-server")):

            async def reached(least: int = least) -> bool:
                told.append(counts(await api.batches.retrieve(created.id))[1])
                return told[-1] >= least

            await eventually(reached)
            kill(served, victim)
        batch = await end_of(api, created.id)
        assert (batch.status, counts(batch)) == ("completed", (60, 60, 0))
        assert told == sorted(told)
        answered = await entries(api, batch.output_file_id)
        beside = await end_of(api, responses.id)
        assert (beside.status, counts(beside)) == ("completed", (30, 30, 0))
        responded = await entries(api, beside.output_file_id)
    assert [entry["custom_id"] for entry in responded] == [f"{number}" for number in range(30)]
    for number, entry in enumerate(responded):
        told_back = Response.model_validate(entry["response"]["body"], strict=True)
        assert f"tell {number}" in told_back.output_text
    assert [entry["custom_id"] for entry in answered] == [f"line {number}" for number in range(60)]
    for number, entry in enumerate(answered):
        answer = ChatCompletion.model_validate(entry["response"]["body"], strict=True)
        assert f"say {number}" in str(answer.choices[0].message.content)
        assert entry["response"]["request_id"] == f"{batch.id}-{number}"  # nothing was asked a second time


@pytest.mark.parametrize(("name", "kind"), [("custom_id", "a string"), ("url", "a string"), ("body", "an object")])
def test_what_a_line_lacks_is_told_in_words_of_json(name: str, kind: str) -> None:
    line: dict[str, Any] = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}}
    with pytest.raises(InvalidRequest, match=f"^{name} must be {kind} that is not empty"):
        read_line(json.dumps(line | {name: 5}).encode(), "/v1/completions")
