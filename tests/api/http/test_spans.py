"""The spans of requests, as OpenTelemetry's SDK exports them: their names, parents, links, attributes and events."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from asgi import ask
from memory_pipeline import Pipeline, validated
from office import Scripted, call, functions
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from starlette.types import ASGIApp
from structlog.testing import capture_logs

from penstock.api.http.app import create_app
from penstock.api.tools.functions import tool
from penstock.api.tools.policy import ToolPolicy
from penstock.api.tools.toolbox import Toolbox
from penstock.config.tracing import REASON
from penstock.engine.models import BUNDLED, resolve_model
from penstock.engine.request import Preemption
from penstock.schemas.events import Delta, Output, Started, Token
from penstock.schemas.jobs import InferenceBatch, Job
from penstock.schemas.wire import codec
from penstock.streams.port import SCHEMA, TRACE_PARENT

PATIENCE = 30.0  # seconds
CLIENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
BODY: dict[str, Any] = {"model": "echo", "prompt": "a secret", "max_tokens": 5, "ignore_eos": True, "temperature": 0}


class Noticing(SpanExporter):
    """The SDK's exporter, which also sets `news`."""

    def __init__(self, inner: InMemorySpanExporter) -> None:
        self.news = asyncio.Event()
        self._inner = inner

    def export(self, spans: Any) -> Any:
        self.news.set()
        return self._inner.export(spans)

    def shutdown(self) -> None: ...

    def force_flush(self, timeout_millis: int = 0) -> bool:
        return True


class Traced:
    """A pipeline with its bridge and application; `spans` are those that have ended since the last look."""

    def __init__(self, runner: asyncio.Runner) -> None:
        self.run = runner.run
        self.exporter = InMemorySpanExporter()
        self._noticing = Noticing(self.exporter)
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._noticing))

        @tool
        def add(a: int, b: int) -> int:
            "Add two numbers."
            return a + b

        self.pipeline = runner.run(
            Pipeline.start(
                kind=Scripted,
                source=str(resolve_model(BUNDLED)),
                context_length=2048,
                toolbox=Toolbox({}, [add], policy=ToolPolicy(["default=*"], ["functions"])),
                tracer=provider.get_tracer("penstock"),
                lease=10.0,  # nothing is delivered twice, however slow the machine is
            )
        )
        pipe = self.pipeline.pipe
        self.app: ASGIApp = create_app(self.pipeline.bridge, pipe.broker, pipe.registry, pipe.settings, "0")

    @property
    def model(self) -> Scripted:
        assert isinstance(self.pipeline.backend, Scripted)
        return self.pipeline.backend

    def ask(self, path: str, body: dict[str, Any], *says: str, **headers: str) -> str:
        """The id of an answered request."""
        self.model.texts = list(says)
        self.exporter.clear()
        response = self.run(ask(self.app, "POST", path, body, headers=headers))
        assert response.status == 200, response.body
        return response.headers["x-request-id"]

    async def until(self, name: str, count: int = 1) -> None:
        """Return when so many spans of this name have ended: a worker's may end after its client has its answer."""
        async with asyncio.timeout(PATIENCE):
            while sum(span.name == name for span in self.exporter.get_finished_spans()) < count:
                self._noticing.news.clear()
                await self._noticing.news.wait()

    def spans(self, *names: str) -> list[ReadableSpan]:
        """Those of these names, in the order of their beginnings."""
        found = [span for span in self.exporter.get_finished_spans() if span.name in names]
        return sorted(found, key=lambda span: span.start_time or 0)

    def one(self, name: str) -> ReadableSpan:
        (span,) = self.spans(name)
        return span


@pytest.fixture(scope="module")
def traced() -> Iterator[Traced]:
    with asyncio.Runner() as runner:
        traced = Traced(runner)
        yield traced
        runner.run(traced.pipeline.stop())


def id_of(span: ReadableSpan) -> int:
    assert span.context is not None
    found: int = span.context.span_id
    return found


def parent_of(span: ReadableSpan) -> int | None:
    return span.parent.span_id if span.parent else None


def links_of(span: ReadableSpan) -> dict[str, int]:
    """The linked spans by the reasons."""
    return {str((link.attributes or {})[REASON]): link.context.span_id for link in span.links}


def events_of(span: ReadableSpan) -> list[str]:
    return [event.name for event in span.events]


def attributes_of(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def test_a_request_is_one_trace_from_the_client_through_every_stage(traced: Traced) -> None:
    id = traced.ask("/v1/completions", BODY, "an answer of its own", traceparent=CLIENT)
    traced.run(traced.until("infer"))
    request = traced.one("text_completion echo")
    chain = [request, *(traced.one(name) for name in ("validate", "queue", "batch", "infer", "stream"))]
    assert [parent_of(span) for span in chain] == [0xB7AD6B7169203331, *map(id_of, chain[:-1])]
    assert {span.context.trace_id for span in chain if span.context} == {0x0AF7651916CD43DD8448EB211C80319C}
    told = attributes_of(request)
    assert told["gen_ai.operation.name"] == "text_completion"
    assert (told["gen_ai.request.model"], told["gen_ai.request.max_tokens"], told["gen_ai.response.id"]) == (
        "echo",
        5,
        id,
    )
    assert (told["gen_ai.usage.output_tokens"], told["gen_ai.response.finish_reasons"]) == (5, ("length",))
    infer = attributes_of(traced.one("infer"))
    assert (infer["penstock.worker"], infer["gen_ai.usage.output_tokens"]) == ("w0", 5)
    assert infer["gen_ai.usage.input_tokens"] == told["gen_ai.usage.input_tokens"]
    assert events_of(request) == events_of(traced.one("infer")) == ["first_token"]
    dispatch, batch = traced.one("dispatch"), traced.one("batch")
    assert (links_of(dispatch), links_of(batch)) == ({"batched": id_of(batch)}, {"batch": id_of(dispatch)})
    assert "secret" not in str([span.to_json() for span in traced.exporter.get_finished_spans()])


def test_all_jobs_of_a_batch_and_the_batch_are_linked(traced: Traced) -> None:
    count = 12
    traced.model.texts = ["an answer"] * count
    traced.exporter.clear()

    async def asked() -> None:
        bodies = [BODY | {"prompt": f"job {job}"} for job in range(count)]
        answers = await asyncio.gather(*(ask(traced.app, "POST", "/v1/completions", body) for body in bodies))
        assert [answer.status for answer in answers] == [200] * count
        await traced.until("batch", count)

    traced.run(asked())
    dispatches = traced.spans("dispatch")
    sent = [(link.context.span_id, id_of(span)) for span in dispatches for link in span.links]
    batched = [(id_of(span), link.context.span_id) for span in traced.spans("batch") for link in span.links]
    assert len(batched) == count and sorted(sent) == sorted(batched)
    assert sum(int(attributes_of(span)["penstock.batch_size"]) for span in dispatches) == count


def test_a_refusal_is_an_error(traced: Traced) -> None:
    traced.exporter.clear()
    response = traced.run(ask(traced.app, "POST", "/v1/completions", BODY | {"max_tokens": 100_000}))
    assert response.status == 400
    for name in ("validate", "text_completion echo"):
        span = traced.one(name)
        assert (span.status.is_ok, attributes_of(span)["error.type"]) == (False, "context_length_exceeded")


def test_two_calls_of_tools_are_one_trace(traced: Traced) -> None:
    body = {"model": "echo", "input": "2 + 3, and 4?", "tools": functions()}
    traced.ask("/v1/responses", body, call("add", a=2, b=3), call("add", a=5, b=4), "It is 9.")
    traced.run(traced.until("tools", 4))
    traced.run(traced.until("infer", 3))
    root = traced.one("chat echo")
    begins, *steps = traced.spans("tools")
    assert [len(traced.spans(name)) for name in ("infer", "stream", "execute_tool add")] == [3, 3, 2]
    # The first span of tools begins the response; the others follow the ends of its turns.
    first = traced.spans("validate")[0]
    assert (parent_of(first), parent_of(begins)) == (id_of(root), id_of(first))
    assert [parent_of(step) for step in steps] == [id_of(stream) for stream in traced.spans("stream")]
    asking = [begins, *steps[:-1]]
    assert [parent_of(turn) for turn in traced.spans("validate")[1:]] == [id_of(span) for span in asking]
    assert [parent_of(made) for made in traced.spans("execute_tool add")] == [id_of(step) for step in steps[:2]]
    assert {links_of(step)["response"] for step in steps} == {id_of(first)}
    rest = [span for span in traced.exporter.get_finished_spans() if span.name != "dispatch"]
    assert len({span.context.trace_id for span in rest if span.context}) == 1


def test_a_takeover_links_the_former_worker(traced: Traced) -> None:
    """`w9` said so much, and died; its batch lies with nobody."""
    pipe = traced.pipeline.pipe
    traced.model.texts = ["an answer"]
    traced.exporter.clear()

    async def scene() -> str:
        job = validated(f"r-{uuid.uuid4().hex}", pipe)
        former = {TRACE_PARENT: CLIENT.replace("b7ad", "beef")}
        outputs: list[tuple[Output, dict[str, str]]] = [
            (Started(job.id, 1, "x", job.tenant, job.bridge, 1, job.prompt_tokens), former),
            (Delta(job.id, 1, 0, 0, tuple(b"hel"), "hel"), {}),
        ]
        for output, headers in outputs:
            data, name = codec.encode_outputs([output]), uuid.uuid4().hex
            await pipe.store(pipe.outputs_of(job.tenant, job.id), data, name, codec.OUTPUTS, headers)
        batch = InferenceBatch(id="b", worker="w9", jobs=(job,), incarnation="x")
        headers = {SCHEMA: codec.BATCH, TRACE_PARENT: CLIENT}
        await pipe.broker.publish(pipe.subjects.infer("w9"), codec.encode(batch), message_id=job.id, headers=headers)
        await traced.until("infer")
        return job.id

    with capture_logs() as logs:
        request = traced.run(scene())
    (line,) = (entry for entry in logs if entry["event"] == "request taken over")
    assert (line["request"], line["tenant"], line["tokens"], line["log_level"]) == (request, "default", 3, "warning")
    infer, batch = traced.one("infer"), traced.one("batch")
    assert (parent_of(infer), parent_of(batch)) == (id_of(batch), 0xB7AD6B7169203331)
    assert links_of(infer)["takeover"] == 0xBEEF6B7169203331
    assert attributes_of(infer)["penstock.from_token"] == 3


def test_preemptions_are_events(traced: Traced) -> None:
    traced.model.texts, traced.pipeline.backend._rate = ["a long answer"], 20.0
    traced.exporter.clear()

    async def scene() -> None:
        job = Job(id=f"r-{uuid.uuid4().hex}", endpoint="/v1/completions", bridge="test", body=BODY)
        reading = await traced.pipeline.bridge.open(job, priority="normal", tenant="default")
        async with asyncio.timeout(PATIENCE):
            while not any(isinstance(event, Token) for event in await reading.take(PATIENCE)):
                pass
            (choice,) = traced.pipeline.backend._running
            choice.preemptions.append(Preemption(0, at=1.7e9, resumed=1.7e9 + 1))
            while not reading.ended:
                await reading.take(PATIENCE)
        reading.close()
        await traced.until("infer")

    traced.run(scene())
    events = traced.one("infer").events
    assert [event.name for event in events] == ["first_token", "preempted", "resumed"]
    assert [event.timestamp for event in events[1:]] == [1_700_000_000_000_000_000, 1_700_000_001_000_000_000]


def test_without_a_tracer_the_clients_trace_is_passed_on(applications: Any) -> None:
    heard: list[str | None] = []
    pipe = applications.pipeline.pipe

    async def scene() -> None:
        listening = await pipe.broker.listen(
            f"{pipe.subjects.root}.infer.*", lambda message: heard.append(message.headers.get(TRACE_PARENT))
        )
        for trace in (CLIENT, "not a trace\r\nat all"):
            headers = {"traceparent": trace}
            assert (await ask(applications.apps[0], "POST", "/v1/completions", BODY, headers=headers)).status == 200
        await listening.close()

    applications.run(scene())
    assert heard == [CLIENT, None]
