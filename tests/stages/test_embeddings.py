"""Embeddings through the pipeline: jobs like any other, whose choices are their inputs and whose texts are vectors."""

from __future__ import annotations

import asyncio
import base64
import threading
import uuid
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from memory_pipeline import MODEL, FragileEcho, Pipeline, validated

from penstock.engine import EmbeddingBackend, EngineConfig
from penstock.engine.planning.manifests import ECHO
from penstock.schemas.events import FINAL, Accepted, Cancelled, Delta, Done, Event, Expired, Failed, Started, Token
from penstock.schemas.jobs import Endpoint, InferenceBatch, Job, ValidatedJob
from penstock.schemas.registry import Room
from penstock.schemas.wire import codec
from penstock.stages.infer.stage import Infer
from penstock.streams.port import SCHEMA, Message

PATH: Endpoint = "/v1/embeddings"


class Vectors(EmbeddingBackend, FragileEcho):
    """Embeds a text as its length and its first byte, one input at a time; fails where an "x" is."""

    manifest = ECHO.model_copy(update={"modes": ("embeddings",)})
    room = 1
    embedding_size = 2

    def __init__(self, config: EngineConfig) -> None:
        FragileEcho.__init__(self, config)
        EmbeddingBackend.__init__(self)
        self.entered = threading.Semaphore(0)
        self.passes = 0

    def embed(self, prompts: Any) -> np.ndarray[Any, Any]:
        self.passes += 1
        self.entered.release()
        self.goes.wait()
        if any(ord("x") in prompt for prompt in prompts):
            raise RuntimeError("broken on purpose")
        return np.array([[len(prompt), prompt[0]] for prompt in prompts], np.float32)


@pytest.fixture
def pipeline() -> Iterator[Pipeline]:
    with asyncio.Runner() as runner:
        pipeline = runner.run(Pipeline.start(kind=Vectors))
        pipeline.runner = runner
        yield pipeline
        runner.run(pipeline.stop())


def backend_of(pipeline: Pipeline) -> Vectors:
    assert isinstance(pipeline.backend, Vectors)
    return pipeline.backend


def body(*inputs: str, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "input": list(inputs), **more}


def vectors(events: list[Event]) -> dict[int, tuple[float, ...]]:
    found = {}
    for event in events:
        if isinstance(event, Token):
            assert (event.index, event.token_ids, event.finish_reason) == (0, (), "stop")
            assert event.choice not in found
            found[event.choice] = tuple(map(float, np.frombuffer(base64.b64decode(event.text), "<f4")))
    return found


async def held(pipeline: Pipeline, *inputs: str) -> asyncio.Task[list[Event]]:
    """A request whose first input is being embedded until the backend goes on."""
    backend = backend_of(pipeline)
    backend.goes.clear()
    asking = asyncio.create_task(pipeline.events(body(*inputs), PATH))
    await asyncio.to_thread(backend.entered.acquire)
    return asking


def test_choice_i_is_input_i(pipeline: Pipeline) -> None:
    events = pipeline.ask(body("a", "ccc", "bb"), PATH)
    assert isinstance(events[0], Accepted) and events[0].prompt_tokens == 6
    assert vectors(events) == {0: (1, ord("a")), 1: (3, ord("c")), 2: (2, ord("b"))}
    done = events[-1]
    assert isinstance(done, Done) and done.finish_reasons == ("stop",) * 3
    assert (done.usage.prompt_tokens, done.usage.completion_tokens, done.usage.total_tokens) == (6, 0, 6)


def test_dimensions_and_token_ids_reach_the_engine(pipeline: Pipeline) -> None:
    events = pipeline.ask({"model": MODEL, "input": [[7, 8], [9]], "dimensions": 1}, PATH)
    assert vectors(events) == {0: (1,), 1: (1,)}


@pytest.mark.parametrize(
    ("change", "param", "message"),
    [
        ({"dimensions": 3}, "dimensions", "from 1 to 2"),
        ({"input": ["a", ""]}, "input[1]", "blank"),
        ({"input": "a" * 513}, "input", "513 tokens"),
        ({"input": [[259]]}, "input", "outside the vocabulary"),
        ({"input": ["a"] * 2049}, "input", "2049 inputs; send at most 2048"),
        ({"input": ["a" * 512] * 586}, "input", "300032 tokens together"),
    ],
)
def test_what_cannot_be_embedded_is_refused(
    pipeline: Pipeline, change: dict[str, Any], param: str, message: str
) -> None:
    (failed,) = [event for event in pipeline.ask(body("a") | change, PATH) if isinstance(event, FINAL)]
    assert isinstance(failed, Failed)
    assert (failed.error.status, failed.error.param) == (400, param) and message in failed.error.message
    assert backend_of(pipeline).passes == 0


def test_the_last_token_of_the_context_is_an_input_s_to_use(pipeline: Pipeline) -> None:
    assert vectors(pipeline.ask(body("a" * 512), PATH)) == {0: (512, ord("a"))}


def test_text_is_refused_where_only_embeddings_are_served(pipeline: Pipeline) -> None:
    failed = pipeline.ask({"model": MODEL, "prompt": "hello"})[-1]
    assert isinstance(failed, Failed) and failed.error.status == 400
    assert "serves only embeddings" in failed.error.message


def test_a_failure_leaves_others_alone(pipeline: Pipeline) -> None:
    async def scene() -> None:
        good = await held(pipeline, "a", "b")
        bad = asyncio.create_task(pipeline.events(body("a", "x"), PATH))
        await asyncio.sleep(0)
        pipeline.backend.goes.set()
        failed = (await bad)[-1]
        assert isinstance(failed, Failed) and failed.error.status == 500
        assert len(vectors(await good)) == 2

    pipeline.runner.run(scene())


def test_many_inputs_take_one_seat(pipeline: Pipeline) -> None:
    async def scene() -> None:
        rooms: asyncio.Queue[Room] = asyncio.Queue()

        def hear(message: Message) -> None:
            rooms.put_nowait(Room.model_validate_json(message.data))

        await pipeline.pipe.broker.listen(pipeline.pipe.subjects.room_all(), hear)
        asking = [await held(pipeline, *"abc" * 20)]
        asking += [asyncio.create_task(pipeline.events(body(*"abc" * 20), PATH)) for _ in range(2)]
        async with asyncio.timeout(30):
            while (room := await rooms.get()).active < 3:
                assert room.free > 0
        assert room.active == 3
        pipeline.backend.goes.set()
        assert [len(vectors(events)) for events in await asyncio.gather(*asking)] == [60] * 3

    pipeline.runner.run(scene())


def test_a_cancelled_request_embeds_no_more(pipeline: Pipeline) -> None:
    async def scene() -> None:
        job = Job(id="cancelled", endpoint=PATH, bridge="test", body=body(*"abcdef"))
        backend = backend_of(pipeline)
        backend.goes.clear()
        reading = await pipeline.bridge.open(job, priority="normal", tenant="default")
        await asyncio.to_thread(backend.entered.acquire)
        await reading.ask_to_stop()
        await asyncio.sleep(0)
        backend.goes.set()
        events: list[Event] = []
        while not reading.ended:
            events += await reading.take(30)
        reading.close()
        final = events[-1]
        assert isinstance(final, Cancelled) and final.usage.completion_tokens == 0
        assert backend.passes < 6

    pipeline.runner.run(scene())


def test_half_a_result_is_none_at_the_deadline(pipeline: Pipeline) -> None:
    async def scene() -> None:
        asking = await held(pipeline, *"abc")
        (infer,) = [runner._stage for runner in pipeline._runners if isinstance(runner._stage, Infer)]
        (publisher,) = infer._publishers.values()
        publisher.expire()
        pipeline.backend.goes.set()
        final = (await asking)[-1]
        assert isinstance(final, Expired) and final.error.status == 408

    pipeline.runner.run(scene())


def test_a_successor_embeds_only_what_is_left(pipeline: Pipeline) -> None:
    async def scene() -> None:
        job = job_of(pipeline, "a", "bb", "ccc")
        text = base64.b64encode(np.array([9, 9], "<f4").tobytes()).decode()
        begun = Started(job.id, 1, uuid.uuid4().hex, job.tenant, job.bridge, job.choices, job.prompt_tokens)
        said = Delta(job.id, 1, 1, 0, (), text, finish_reason="stop")
        subject = pipeline.pipe.outputs_of(job.tenant, job.id)
        await pipeline.pipe.store(subject, codec.encode_outputs([begun, said]), uuid.uuid4().hex, codec.OUTPUTS)
        batch = InferenceBatch(id=uuid.uuid4().hex, worker="w0", jobs=(job,), epochs=(0,), incarnation="gone")
        await pipeline.pipe.broker.publish(
            pipeline.pipe.subjects.infer("w0"),
            codec.encode(batch),
            message_id=batch.id,
            headers={SCHEMA: codec.BATCH},
        )
        reading = await follow(pipeline, job)
        events: list[Event] = []
        while not reading.ended:
            events += await reading.take(30)
        reading.close()
        assert vectors(events) == {0: (1, ord("a")), 1: (9, 9), 2: (3, ord("c"))}
        assert backend_of(pipeline).passes == 2

    pipeline.runner.run(scene())


async def follow(pipeline: Pipeline, job: ValidatedJob) -> Any:
    subject = pipeline.pipe.subjects.events(job.tenant, job.bridge, job.id)
    async with asyncio.timeout(30):
        while not await pipeline.pipe.broker.replay("EVENTS", subject):  # noqa: ASYNC110
            await asyncio.sleep(0)
    return await pipeline.bridge.follow(job.id, job.tenant)


def job_of(pipeline: Pipeline, *inputs: str) -> ValidatedJob:
    job = validated(f"r-{uuid.uuid4().hex}", pipeline.pipe)
    return job.model_copy(update={"endpoint": PATH, "prompts": tuple(tuple(text.encode()) for text in inputs)})
