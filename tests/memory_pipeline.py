"""All five stages and a bridge in one event loop, over the in-memory broker and the echo engine."""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from typing import Any

from penstock.api.bridge import Bridge
from penstock.config.settings import Settings
from penstock.engine import EngineConfig, InferenceEngine
from penstock.engine.echo import EchoBackend
from penstock.schemas.codec import decode_event
from penstock.schemas.events import FINAL, Delta, Event
from penstock.schemas.jobs import Endpoint, Job
from penstock.schemas.registry import ModelCard, WorkerCard
from penstock.stages import Pipe, Runner, Stage
from penstock.stages.cancellations import Cancellations
from penstock.stages.catalogue import LIGHT
from penstock.stages.infer import Infer
from penstock.streams.memory import MemoryBroker
from penstock.streams.port import Message
from penstock.streams.registry import Registry
from penstock.streams.topology import Subjects, topology

MODEL = "echo"


class FragileEcho(EchoBackend):
    """Echoes, but fails every sequence that has so many tokens, where that is set."""

    fails_after: int | None = None

    def step(self) -> list[Delta]:
        deltas = super().step()
        for sequence in list(self._running):
            if self.fails_after is not None and len(sequence.tokens) >= self.fails_after:
                self.remove(sequence)
                deltas.append(sequence.fail(RuntimeError("broken on purpose")))
        return deltas


class Pipeline:
    """`ask` runs one request to its end and returns its events; `runner` drives the loop for plain tests."""

    runner: asyncio.Runner

    def __init__(self, pipe: Pipe, engine: InferenceEngine, backend: FragileEcho) -> None:
        self.pipe = pipe
        self.backend = backend
        self.engine = engine
        self.bridge = Bridge(pipe.broker, pipe.subjects, "test")
        self._runners: list[Runner] = []
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def start(cls, *more: type[Stage], context_length: int = 512, **values: Any) -> Pipeline:
        settings = Settings(backend="echo", lease=0.5, worker_lease=0.5, batch_window=0.0, **values)
        broker, subjects = MemoryBroker(), Subjects(settings.namespace)
        streams, buckets = topology(settings.namespace, settings.job_stages)
        await broker.ensure(streams, buckets)
        cancellations = Cancellations()
        await cancellations.listen(broker, subjects)
        registry = Registry(broker, interval=0.05)
        pipe = Pipe(broker, subjects, settings, registry, cancellations)
        config = EngineConfig(model=MODEL, backend="echo", max_sequence_length=context_length)
        backend = FragileEcho(config)
        engine = InferenceEngine(config, backend=backend)
        model = ModelCard(
            name=MODEL, source=MODEL, backend="echo", context_length=context_length, created=int(time.time())
        )
        worker = WorkerCard(id="w0", model=model, capacity=16, pid=os.getpid())
        pipeline = cls(pipe, engine, backend)
        stages: list[Stage] = [kind(pipe) for kind in (*LIGHT.values(), *more)]
        pipeline._runners = [Runner(stage, pipe) for stage in (*stages, Infer(pipe, engine, worker))]
        pipeline._tasks = [asyncio.create_task(runner.run()) for runner in pipeline._runners]
        pipeline._tasks.append(asyncio.create_task(registry.run()))
        await pipeline.bridge.start()
        await registry.announce_worker(worker)
        await registry.refresh()
        return pipeline

    async def stop(self) -> None:
        for runner in self._runners:
            runner.stop()
        await asyncio.gather(*self._tasks[:-1])
        self._tasks[-1].cancel()
        await self.pipe.broker.close()
        self.engine.close()

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
