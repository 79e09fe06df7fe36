"""All five stages and a bridge in one event loop, over the in-memory broker and the echo engine."""

from __future__ import annotations

import asyncio
import os
import threading
import time
import uuid
from collections.abc import Sequence
from typing import Any

from opentelemetry.trace import Tracer

from penstock.api.bridge.bridge import Bridge
from penstock.api.bridge.reading import Reading
from penstock.api.tools.toolbox import Toolbox
from penstock.config.settings import Settings
from penstock.engine import EngineConfig, InferenceEngine
from penstock.engine.backends.echo import EchoBackend
from penstock.schemas.events import FINAL, Delta, Event
from penstock.schemas.jobs import Endpoint, Job, ValidatedJob
from penstock.schemas.params import GenerationParams
from penstock.schemas.registry import ModelCard, StageCard, WorkerCard, reserve_of
from penstock.schemas.wire.codec import decode_event
from penstock.stages import Filter, Pipe, Runner, Stage
from penstock.stages.batch.stage import Batch
from penstock.stages.cancellations import Cancellations
from penstock.stages.catalogue import LIGHT, built_in
from penstock.stages.infer.stage import Infer
from penstock.stages.stream import Stream
from penstock.stages.tools.stage import Tools
from penstock.streams.lanes import open_lanes
from penstock.streams.memory.broker import MemoryBroker
from penstock.streams.nats.broker import JetStreamBroker
from penstock.streams.port import Broker, Message
from penstock.streams.stores.registry import Registry
from penstock.streams.topology import Subjects, topology

MODEL = "echo"
TOOLS_CARD = StageCard(stage="tools", id="t0", pid=os.getpid())


class FragileEcho(EchoBackend):
    """Echoes, but fails every choice that has so many tokens, where that is set, and stands still without `goes`."""

    fails_after: int | None = None

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.goes = threading.Event()
        self.goes.set()

    def step(self) -> list[Delta]:
        self.goes.wait()
        deltas = super().step()
        for choice in list(self._running):
            if self.fails_after is not None and len(choice.tokens) >= self.fails_after:
                self.remove(choice)
                deltas.append(choice.fail(RuntimeError("broken on purpose")))
        return deltas


class Pipeline:
    """`ask` runs one request to its end and returns its events; `runner` drives the loop for plain tests."""

    runner: asyncio.Runner
    infer: Infer  # set by start

    def __init__(self, pipe: Pipe, engine: InferenceEngine, backend: FragileEcho) -> None:
        self.pipe = pipe
        self.backend = backend
        self.engine = engine
        self.bridge = Bridge(pipe.broker, pipe.subjects, "test", pipe.tracer, pipe.settings)
        self._runners: list[Runner] = []
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def start(
        cls,
        *more: type[Stage],
        context_length: int = 512,
        nats_url: str | None = None,
        memory: type[MemoryBroker] = MemoryBroker,
        kind: type[FragileEcho] = FragileEcho,
        batch: type[Batch] = Batch,
        toolbox: Toolbox | None = None,
        source: str = MODEL,
        filters: Sequence[type[Filter]] = (),
        catalogued: bool = False,
        tracer: Tracer | None = None,
        **values: Any,
    ) -> Pipeline:
        """Over the in-memory broker, or in a namespace of its own at `nats_url`; `kind` is the engine's backend,
        `batch` the stage of that name, `source` the model whose tokenizer it has. A `catalogued` model is announced
        here as if by its agent."""
        own: dict[str, Any] = {"lease": 0.5, "namespace": f"p{uuid.uuid4().hex}"}
        settings = Settings(backend="echo", **own | values)
        broker: Broker = memory()
        if nats_url is not None:
            broker = await JetStreamBroker.connect(nats_url, namespace=settings.namespace)
        subjects = Subjects(settings.namespace)
        limits = {
            name: getattr(settings, name) for name in ("queue_limit", "tenant_limit", "tools_limit", "batches_limit")
        }
        streams, buckets = topology(settings.namespace, settings.job_stages, **limits)
        await broker.ensure(streams, buckets)
        cancellations = Cancellations()
        await cancellations.listen(broker, subjects)
        registry = Registry(broker, interval=0.05)
        pipe = Pipe(broker, subjects, settings, registry, cancellations, tracer=tracer)
        capacity = settings.max_batch_size or 16
        config = EngineConfig(
            model=source,
            backend="echo",
            max_sequence_length=context_length,
            echo_rate=settings.echo_rate,
            max_batch_size=capacity + reserve_of(capacity),
            reserved_batch_size=reserve_of(capacity),
            stall_timeout=settings.stall_timeout,
        )
        backend = kind(config)
        engine = InferenceEngine(config, backend=backend)
        model = ModelCard(
            name=MODEL,
            source=source,
            backend="echo",
            context_length=context_length,
            created=int(time.time()),
            catalogued=catalogued,
        )
        worker = WorkerCard(id="w0", model=model, capacity=capacity, pid=os.getpid(), incarnation=uuid.uuid4().hex)
        pipeline = cls(pipe, engine, backend)
        tools = Tools(pipe, toolbox or Toolbox({}))
        made: dict[type[Stage], Stage] = {Tools: tools, Stream: Stream(pipe, filters), Batch: batch(pipe)}
        stages = [made.get(stage) or stage(pipe) for stage in (*map(built_in, LIGHT), *more)]
        pipeline.infer = Infer(pipe, engine, worker)
        pipeline._runners = [Runner(stage, pipe) for stage in (*stages, pipeline.infer)]
        pipeline._tasks = [asyncio.create_task(runner.run()) for runner in pipeline._runners]
        pipeline._tasks += [asyncio.create_task(registry.run()), asyncio.create_task(pipeline._announce())]
        await pipeline.bridge.start()
        await open_lanes(broker, settings, MODEL)
        await registry.announce_model(model)
        await registry.announce_worker(worker)
        await registry.announce_stage(TOOLS_CARD)
        await registry.refresh()
        return pipeline

    async def stop(self) -> None:
        self.backend.goes.set()
        for runner in self._runners:
            runner.stop()
        *stages, registry, announcing = self._tasks
        await asyncio.gather(*stages)
        registry.cancel()
        announcing.cancel()
        await self.pipe.broker.close()
        self.engine.close()

    async def _announce(self) -> None:
        """Say that the stage tools lives, as a process would."""
        while True:
            await asyncio.sleep(1.0)
            await self.pipe.registry.announce_stage(TOOLS_CARD)

    async def lose_worker(self) -> None:
        """The worker leaves, and nobody takes its place."""
        self._runners[-1].stop()
        await self._tasks[-3]
        await self.pipe.registry.refresh()

    def ask(self, body: dict[str, Any], endpoint: Endpoint = "/v1/completions", **fields: Any) -> list[Event]:
        return self.runner.run(self.events(body, endpoint, **fields))

    async def events(self, body: dict[str, Any], endpoint: Endpoint = "/v1/completions", **fields: Any) -> list[Event]:
        job = Job(id=f"test-{uuid.uuid4().hex}", endpoint=endpoint, bridge="test", body=body, **fields)
        reading = await self.bridge.open(job, priority="normal", tenant="default")
        events: list[Event] = []
        while not reading.ended:
            events += await reading.take(60.0)
        reading.close()
        return events

    async def raw(self, subject: str, data: bytes, message_id: str) -> Event:
        """Publish bytes as a foreign client would, and wait for the final event whose request is named by them."""
        final: asyncio.Future[Event] = asyncio.get_running_loop().create_future()

        def hear(message: Message) -> None:
            event = decode_event(message.data)
            if event.request == message_id and isinstance(event, FINAL) and not final.done():
                final.set_result(event)

        listening = await self.pipe.broker.listen(f"{self.pipe.subjects.root}.events.>", hear)
        await self.pipe.broker.publish(subject, data, message_id=message_id)
        event = await final
        await listening.close()
        return event


async def events_of(reading: Reading, patience: float = 20.0) -> list[Event]:
    """All that are left of a request, the final one last; `patience` in seconds is when a wait counts as endless."""
    events: list[Event] = []
    async with asyncio.timeout(patience):
        while not reading.ended:
            events += await reading.take(patience)
    reading.close()
    return events


def validated(name: str, pipe: Pipe) -> ValidatedJob:
    return ValidatedJob(
        id=name,
        endpoint="/v1/completions",
        bridge="test",
        tenant="default",
        priority="normal",
        model=MODEL,
        prompts=(tuple(b"hello"),),
        params=GenerationParams(),
        created=pipe.now(),
        deadline=pipe.now() + 600,
        body={"model": MODEL, "prompt": "hello"},
    )
