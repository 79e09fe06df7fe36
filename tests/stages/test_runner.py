"""What becomes of a delivery: acknowledged, refused, retried, buried; and what of the requests it speaks for."""

from __future__ import annotations

import asyncio
import sys
import time
import uuid
from collections.abc import Iterator
from typing import ClassVar

import pytest
from memory_pipeline import MODEL, Pipeline, validated
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from structlog.testing import capture_logs

from penstock.config.settings import Settings
from penstock.config.tracing import REASON
from penstock.schemas.errors import InvalidRequest, ModelLoadError, Transient
from penstock.schemas.events import Done, Event, Expired, Failed, Token
from penstock.schemas.jobs import InferenceBatch, Job, ValidatedJob
from penstock.schemas.wire import codec
from penstock.stages import JobStage, Pipe, Runner
from penstock.stages.cancellations import Cancellations
from penstock.stages.failures import Count
from penstock.streams.memory.broker import MemoryBroker
from penstock.streams.port import NEXT, Delivery, Message
from penstock.streams.stores.registry import Registry
from penstock.streams.topology import Subjects, batch_stream, lanes_of, topology

BODY = {"model": MODEL, "prompt": "hello"}
IN_VAIN = (
    "in the body, which has no effect: change the job's prompts or params; notes for other stages belong in the "
    "body's metadata"
)
PIPELINE = ("validate", "odd", "queue", "batch", "infer", "stream")


class PanicException(BaseException):
    """What a panic in Rust is in Python, as of tokenizers that cannot start a thread."""


NO_THREAD = RuntimeError("can't start new thread")  # as Python says it
NO_POOL = PanicException(
    "The global thread pool has not been initialized.: ThreadPoolBuildError { kind: IOError(Os { code: 11, kind: "
    'WouldBlock, message: "Resource temporarily unavailable" }) }'
)


class Odd(JobStage):
    """Does what the prompt says."""

    name = "odd"
    attempts = 0
    begun: ClassVar[list[int]] = []  # as noted before each attempt

    async def handle(self, delivery: Delivery) -> None:
        bucket = await self.pipe.broker.bucket("failures")
        Odd.begun.append(await Count(bucket, self.name, delivery.message, "begun").read())
        if b'"panic"' in delivery.message.data:
            raise PanicException("secret words of a prompt")
        if b'"starve"' in delivery.message.data:
            raise NO_POOL if b'"pool"' in delivery.message.data else NO_THREAD
        await super().handle(delivery)

    async def process(self, job: ValidatedJob) -> ValidatedJob:
        Odd.attempts += 1
        match job.body["prompt"]:
            case "refuse":
                raise InvalidRequest("not today", code="policy")
            case "crash":
                raise ZeroDivisionError("secret words of a prompt")
            case "load":
                raise ModelLoadError("its tokenizer is broken")
            case "wait" if Odd.attempts == 1:
                raise Transient("not yet", delay=0.01)
            case "wait long" if Odd.attempts < 60:
                raise Transient("not yet", delay=0.0)
            case "wait long and crash" if Odd.attempts < 61:
                raise Transient("not yet", delay=0.0) if Odd.attempts < 60 else ZeroDivisionError()
            case "leave":
                sys.exit(3)
            case "cancel":
                asyncio.get_running_loop().call_soon((inner := asyncio.ensure_future(asyncio.Event().wait())).cancel)
                await inner
            case "nothing":
                return None  # type: ignore[return-value]
            case "rename":
                return job.model_copy(update={"id": "other", "tenant": "other"})
            case "misspell":
                return job.model_copy(update={"params": job.params.model_copy(update={"temprature": 1.0})})
            case "lose params":
                return job.model_copy(update={"params": job.params.model_dump()})
            case "lose body":
                return job.model_copy(update={"body": None})
            case "rewrite":
                return job.model_copy(update={"body": job.body | {"prompt": "else", "temperature": 0.5}})
            case "rewrite in place":
                job.body["prompt"] = "else"
            case "note":
                return job.model_copy(update={"body": job.body | {"metadata": {"seen": "yes"}}})
            case "send elsewhere":
                return job.model_copy(update={"model": "nowhere"})
            case "freeze":
                return job.model_copy(update={"params": job.params.model_copy(update={"temperature": -1.0})})
        return job


@pytest.fixture
def odd() -> Iterator[Pipeline]:
    Odd.attempts, Odd.begun = 0, []
    with asyncio.Runner() as runner:
        pipeline = runner.run(Pipeline.start(Odd, pipeline=PIPELINE, max_attempts=2))
        pipeline.runner = runner
        yield pipeline
        runner.run(pipeline.stop())


def dead(pipeline: Pipeline) -> list[Message]:
    return pipeline.runner.run(pipeline.pipe.broker.replay("DEAD", pipeline.pipe.subjects.dead("odd")))


def test_a_custom_stage_passes_refuses_and_retries(odd: Pipeline) -> None:
    assert isinstance(odd.ask(BODY)[-1], Done)
    assert isinstance(odd.ask(BODY | {"prompt": "note"})[-1], Done)
    refused = odd.ask(BODY | {"prompt": "refuse"})[-1]
    assert isinstance(refused, Failed)
    assert (refused.error.status, refused.error.message, refused.error.code) == (400, "not today", "policy")
    Odd.attempts = 0
    assert isinstance(odd.ask(BODY | {"prompt": "wait"})[-1], Done)
    assert Odd.attempts == 2
    assert dead(odd) == []


def test_a_retry_is_a_line_and_a_span_that_links_what_it_repeats() -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    Odd.attempts, Odd.begun = 0, []
    with asyncio.Runner() as runner, capture_logs() as logs:
        pipeline = runner.run(Pipeline.start(Odd, pipeline=PIPELINE, tracer=provider.get_tracer("test")))
        pipeline.runner = runner
        assert isinstance(pipeline.ask(BODY | {"prompt": "wait"})[-1], Done)
        runner.run(pipeline.stop())
    (line,) = (entry for entry in logs if entry["event"] == "will retry")
    told = {name: line[name] for name in ("stage", "reason", "delay", "log_level")}
    assert told == {"stage": "odd", "reason": "not yet", "delay": 0.01, "log_level": "warning"}
    first, second = (dict(span.attributes or {}) for span in exporter.get_finished_spans() if span.name == "odd")
    assert (first["penstock.attempt"], first["error.type"], second["penstock.attempt"]) == (1, "retry", 2)
    before, again = (span for span in exporter.get_finished_spans() if span.name == "odd")
    assert (before.status.is_ok, before.links, before.parent) == (False, (), again.parent)
    (link,) = again.links
    assert again.parent is not None
    assert (link.context.span_id, dict(link.attributes or {})) == (again.parent.span_id, {REASON: "redelivery"})


def test_a_job_that_cannot_be_handled_is_buried_and_its_client_told(
    odd: Pipeline, capsys: pytest.CaptureFixture[str]
) -> None:
    events = odd.ask(BODY | {"prompt": "crash"})
    assert len(events) == 1
    failed = events[0]
    assert isinstance(failed, Failed)
    assert failed.error.status == 500
    assert Odd.attempts == 2
    letter = dead(odd)[0]
    assert letter.headers["Penstock-Dead-Attempts"] == "2"
    assert letter.headers["Penstock-Dead-Reason"] == "ZeroDivisionError"
    assert codec.decode_model(ValidatedJob, letter.data, None).id == failed.request
    logged = capsys.readouterr()
    assert "ZeroDivisionError" in logged.out + logged.err
    assert "secret words" not in logged.out + logged.err


def test_a_panic_in_a_library_fails_a_job_as_any_error_does(odd: Pipeline, capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody settled the message, and its client heard nothing."""
    (failed,) = odd.ask(BODY | {"prompt": "panic"})
    assert isinstance(failed, Failed) and failed.error.status == 500
    (letter,) = dead(odd)
    assert letter.headers["Penstock-Dead-Attempts"] == "2"
    assert letter.headers["Penstock-Dead-Reason"] == "PanicException"
    logged = capsys.readouterr()
    assert "secret words" not in logged.out + logged.err


def test_a_model_that_cannot_be_loaded_is_told_to_its_clients(odd: Pipeline) -> None:
    (failed,) = odd.ask(BODY | {"prompt": "load"})
    assert isinstance(failed, Failed)
    assert (failed.error.status, failed.error.code) == (503, "model_unavailable")
    assert failed.error.message == "The model cannot be served here: its tokenizer is broken"


@pytest.mark.parametrize("user", ["pool", "python"])
def test_where_there_are_no_more_threads_the_limits_are_named(odd: Pipeline, user: str) -> None:
    with capture_logs() as logs:
        (failed,) = odd.ask(BODY | {"prompt": "starve", "user": user})
    assert isinstance(failed, Failed)
    assert (failed.error.status, failed.error.code, failed.error.retry_after) == (503, "threads_exhausted", 5.0)
    (letter,) = dead(odd)
    told = [letter.headers["Penstock-Dead-Reason"], *(line["reason"] for line in logs if line["event"] == "failed")]
    assert len(told) == 3
    for reason in told:
        assert all(limit in reason for limit in ("ulimit -u", "pids.max", "TasksMax"))


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ("leave", "process raised SystemExit"),
        ("cancel", "process raised CancelledError"),
        ("nothing", "process returned a NoneType, not a ValidatedJob"),
        ("rename", "process changed id, tenant, by which the request is known"),
        ("rewrite", f"process changed prompt, temperature {IN_VAIN}"),
        ("rewrite in place", f"process changed prompt {IN_VAIN}"),
        ("send elsewhere", "process changed model to 'nowhere' in revision 1, which is not served here"),
        ("misspell", "process set temprature, which a job does not have"),
        ("lose params", "process set params to a dict, not a GenerationParams"),
        ("lose body", "process set body to a NoneType, not a dict"),
        (
            "freeze",
            "process returned a job that is not valid: params.temperature: Input should be greater than or equal to 0",
        ),
    ],
)
def test_a_stage_that_breaks_its_contract_is_named_and_goes_on(odd: Pipeline, prompt: str, reason: str) -> None:
    (failed,) = odd.ask(BODY | {"prompt": prompt})
    assert isinstance(failed, Failed)
    assert (failed.error.status, failed.error.message) == (500, "The request failed in the stage odd and was given up.")
    assert [letter.headers["Penstock-Dead-Reason"] for letter in dead(odd)] == [reason]
    assert Odd.attempts == 2
    assert isinstance(odd.ask(BODY)[-1], Done)


def test_of_two_copies_the_one_that_works_gets_what_the_other_fails_at() -> None:
    """As with two versions of a stage, of which the new one fails at every request."""

    class Old(JobStage):
        name = "odd"

        async def process(self, job: ValidatedJob) -> ValidatedJob:
            return job

    class New(JobStage):
        name = "odd"
        failures = 0

        async def process(self, job: ValidatedJob) -> ValidatedJob:
            New.failures += 1
            raise KeyError("a bug")

    with asyncio.Runner() as runner:
        pipeline = runner.run(Pipeline.start(New, Old, pipeline=PIPELINE, max_attempts=2))
        pipeline.runner = runner

        async def together() -> list[list[Event]]:
            return await asyncio.gather(*(pipeline.events(BODY) for _ in range(9)))

        ends = [events[-1] for events in runner.run(together())]
        letters = dead(pipeline)
        runner.run(pipeline.stop())
    assert {type(end) for end in ends} == {Done} and not letters
    assert New.failures  # it has had some of them


def test_a_stage_whose_process_is_no_coroutine_is_told_so() -> None:
    class Blunt(JobStage):
        name = "odd"

        def process(self, job: ValidatedJob) -> ValidatedJob:  # type: ignore[override]
            return job

    with asyncio.Runner() as runner:
        pipeline = runner.run(Pipeline.start(Blunt, pipeline=PIPELINE, max_attempts=1))
        pipeline.runner = runner
        assert isinstance(pipeline.ask(BODY)[-1], Failed)
        (letter,) = dead(pipeline)
        runner.run(pipeline.stop())
    assert letter.headers["Penstock-Dead-Reason"] == "process is no coroutine function: define it with async def"


def test_deliveries_are_no_failures(odd: Pipeline) -> None:
    """However often a message was put off, by outages or by a full stream, it is handled once that is over."""
    assert isinstance(odd.ask(BODY | {"prompt": "wait long"})[-1], Done)
    assert Odd.attempts == 60
    assert Odd.begun == [0, 0, *[1] * 58]  # and not one of them has ended the process
    Odd.attempts = 0
    assert isinstance(odd.ask(BODY | {"prompt": "wait long and crash"})[-1], Done)
    assert Odd.attempts == 61
    assert dead(odd) == []


def test_what_may_have_ended_processes_is_handled_alone_and_given_up_at_last(odd: Pipeline) -> None:
    """Each death of a process that handled the message alone is counted by what it had noted before."""
    broker = odd.pipe.broker
    noted: list[int] = []

    async def note(message: Message) -> None:
        bucket = await broker.bucket("failures")
        deaths = Count(bucket, "odd", message, "begun")
        noted.append(await deaths.add(2 - await deaths.read()))

    async def scene() -> list[Event]:
        stored: list[Message] = []
        subject = odd.pipe.subjects.stage("odd", "normal", "default")
        job = Job(id=uuid.uuid4().hex, endpoint="/v1/completions", bridge="test", body=BODY | {"prompt": "wait long"})
        reading = await odd.bridge.open(job, priority="normal", tenant="default")
        while not stored:
            await asyncio.sleep(0)
            stored = await broker.replay("STAGE_ODD_NORMAL", subject)
        await note(stored[0])
        events: list[Event] = []
        while not reading.ended:
            events += await reading.take(60.0)
        reading.close()
        return events

    (failed,) = odd.runner.run(scene())
    assert isinstance(failed, Failed) and failed.error.status == 500
    assert Odd.attempts <= 3
    (letter,) = dead(odd)
    assert letter.headers["Penstock-Dead-Reason"] == "2 processes ended while they handled it"


def test_the_same_job_twice_runs_once(pipeline: Pipeline) -> None:
    async def twice() -> list[Token]:
        job = Job(id=uuid.uuid4().hex, endpoint="/v1/completions", bridge="test", body=BODY)
        reading = await pipeline.bridge.open(job, priority="normal", tenant="default")
        subject = pipeline.pipe.subjects.jobs("normal", "default")
        # Another message id, as from a client that lost its own: the request's id makes it harmless all the same.
        await pipeline.pipe.broker.publish(subject, codec.encode(job), message_id=uuid.uuid4().hex)
        events = []
        while not reading.ended:
            events += await reading.take(60.0)
        reading.close()
        stored = await pipeline.pipe.broker.replay(
            "EVENTS", pipeline.pipe.subjects.events("default", "test", job.id or "")
        )
        decoded = [codec.decode_event(message.data) for message in stored]
        assert [event.type for event in decoded].count("done") == 1
        return [event for event in decoded if isinstance(event, Token)]

    assert "".join(token.text for token in pipeline.runner.run(twice())) == "hello"


def test_a_job_dispatched_twice_is_told_once(pipeline: Pipeline) -> None:
    heard: list[Event] = []

    async def dispatch() -> None:
        job = validated("twice", pipeline.pipe)
        subjects = pipeline.pipe.subjects
        await pipeline.pipe.broker.listen(
            subjects.events_of("test"), lambda message: heard.append(codec.decode_event(message.data))
        )
        for batch in ("one", "two"):
            data = codec.encode(InferenceBatch(id=batch, worker="w0", jobs=(job,)))
            await pipeline.pipe.broker.publish(subjects.infer("w0"), data, message_id=batch)

    pipeline.runner.run(dispatch())
    while pipeline.runner.run(pipeline.pipe.broker.replay("INFER", pipeline.pipe.subjects.infer("w0"))):
        pass  # both are in hand
    while not any(isinstance(event, Done) for event in heard):
        pipeline.runner.run(asyncio.sleep(0))
    assert "".join(event.text for event in heard if isinstance(event, Token)) == "hello"
    assert [event.type for event in heard if not isinstance(event, Token)] == ["accepted", "done"]


def test_a_worker_refuses_what_is_past_its_deadline(pipeline: Pipeline) -> None:
    async def final() -> Event:
        heard: asyncio.Future[Event] = asyncio.get_running_loop().create_future()
        job = validated(uuid.uuid4().hex, pipeline.pipe).model_copy(update={"deadline": time.time() - 1})
        listening = await pipeline.pipe.broker.listen(
            pipeline.pipe.subjects.events_of("test"), lambda message: heard.set_result(codec.decode_event(message.data))
        )
        data = codec.encode(InferenceBatch(id=job.id, worker="w0", jobs=(job,)))
        await pipeline.pipe.broker.publish(pipeline.pipe.subjects.infer("w0"), data, message_id=job.id)
        event = await heard
        await listening.close()
        return event

    late = pipeline.runner.run(final())
    assert isinstance(late, Expired) and late.error.status == 408


def test_nothing_is_left_in_any_work_queue(pipeline: Pipeline) -> None:
    for _ in range(20):
        pipeline.ask(BODY)
    subjects = pipeline.pipe.subjects
    for stream, subject in (
        ("JOBS_NORMAL", subjects.jobs("normal", "default")),
        ("STAGE_QUEUE_NORMAL", subjects.stage("queue", "normal", "default")),
        (batch_stream(lanes_of(MODEL), "normal"), subjects.batch(lanes_of(MODEL), "normal", "default")),
        ("INFER", subjects.infer("w0")),
    ):
        while pipeline.runner.run(pipeline.pipe.broker.replay(stream, subject)):
            pass  # the last acknowledgement may still be on its way


class Slow(JobStage):
    """Holds every job until it is released."""

    name = "slow"

    def __init__(self, pipe: Pipe) -> None:
        super().__init__(pipe)
        self.holding = asyncio.Event()
        self.released = asyncio.Event()

    async def process(self, job: ValidatedJob) -> ValidatedJob:
        self.holding.set()
        await self.released.wait()
        return job


async def held(drain_timeout: float) -> tuple[Pipe, Slow, Runner, asyncio.Task[None]]:
    """A runner with one job in the hands of its stage."""
    settings = Settings(pipeline=("validate", "slow", *PIPELINE[2:]), drain_timeout=drain_timeout)
    broker, subjects = MemoryBroker(), Subjects("penstock")
    await broker.ensure(*topology("penstock", settings.job_stages))
    pipe = Pipe(broker, subjects, settings, Registry(broker, interval=1.0), Cancellations())
    job = validated("held", pipe)
    headers = {NEXT: subjects.stage("queue", "normal", "default")}
    subject = subjects.stage("slow", "normal", "default")
    await broker.publish(subject, codec.encode(job), message_id="held", headers=headers)
    slow = Slow(pipe)
    runner = Runner(slow, pipe)
    running = asyncio.create_task(runner.run())
    await slow.holding.wait()
    return pipe, slow, runner, running


async def test_a_drain_finishes_what_is_in_hand() -> None:
    pipe, slow, runner, running = await held(drain_timeout=60.0)
    runner.stop()
    slow.released.set()
    await running
    subject = pipe.subjects.stage("queue", "normal", "default")
    assert len(await pipe.broker.replay("STAGE_QUEUE_NORMAL", subject)) == 1
    assert await pipe.broker.replay("STAGE_SLOW_NORMAL", pipe.subjects.stage("slow", "normal", "default")) == []


async def test_what_a_drain_cannot_finish_goes_to_another_copy_at_once() -> None:
    pipe, _, runner, running = await held(drain_timeout=0.0)
    runner.stop()
    await running
    other = Slow(pipe)
    taking_over = Runner(other, pipe)
    running = asyncio.create_task(taking_over.run())
    await other.holding.wait()
    other.released.set()
    taking_over.stop()
    await running


def test_a_custom_stage_that_never_ends_is_left_at_the_deadline() -> None:
    async def scene() -> list[Event]:
        pipeline = await Pipeline.start(Slow, pipeline=("validate", "slow", *PIPELINE[2:]))
        events = await pipeline.events(BODY, timeout=1.0)
        await pipeline.stop()
        return events

    with asyncio.Runner() as runner:
        (expired,) = runner.run(scene())
    assert isinstance(expired, Expired)
    assert expired.error.message == "The deadline passed while the stage slow had the request."
