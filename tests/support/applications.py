"""The HTTP application without processes: two bridges over one pipeline, or one whose pipeline is the test."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from asgi import Response, ask
from memory_pipeline import Pipeline
from starlette.types import ASGIApp

from penstock.api.bridge.bridge import Bridge
from penstock.api.http.app import create_app
from penstock.config.settings import Settings
from penstock.schemas.events import Event
from penstock.schemas.jobs import Job
from penstock.schemas.wire.codec import decode_model, encode
from penstock.streams.memory.broker import MemoryBroker
from penstock.streams.port import Message
from penstock.streams.stores.registry import Registry
from penstock.streams.topology import Subjects, topology


class Applications:
    """The same pipeline behind two HTTP applications; `run` drives the loop for plain tests."""

    def __init__(self, pipeline: Pipeline, runner: asyncio.Runner, bridges: list[Bridge]) -> None:
        self.pipeline = pipeline
        self.run = runner.run
        self.bridges = bridges
        pipe = pipeline.pipe
        self.apps: list[ASGIApp] = [
            create_app(bridge, pipe.broker, pipe.registry, pipe.settings, "0") for bridge in bridges
        ]

    @classmethod
    def start(cls, runner: asyncio.Runner) -> Applications:
        pipeline = runner.run(Pipeline.start(relay_interval=0.0))
        pipeline.backend._rate = 1000.0  # tokens a second: slow enough for a message each
        other = Bridge(pipeline.pipe.broker, pipeline.pipe.subjects, "other")
        runner.run(other.start())
        return cls(pipeline, runner, [pipeline.bridge, other])


class Script:
    """A bridge whose pipeline is the test: it sees the jobs, and says what comes of them."""

    def __init__(self, broker: MemoryBroker, **values: Any) -> None:
        self.broker = broker
        self.subjects = Subjects("penstock")
        self.bridge = Bridge(broker, self.subjects, "scripted")
        self.registry = Registry(broker, interval=1.0)
        self.app = create_app(self.bridge, broker, self.registry, Settings(backend="echo", **values), "0")
        self.jobs: list[Message] = []
        self.cancelled: list[str] = []
        self._asked = asyncio.Event()
        self._told = 0

    @classmethod
    async def start(cls, broker: MemoryBroker | None = None, **values: Any) -> Script:
        script = cls(broker or MemoryBroker(), **values)
        await script.topology()
        await script.bridge.start()
        await script.broker.listen(script.subjects.jobs_all(), script._hear)
        await script.broker.listen(script.subjects.cancel_all(), lambda found: script.cancelled.append(found.subject))
        return script

    async def topology(self) -> None:
        await self.broker.ensure(*topology("penstock", ("queue",)))

    async def job(self) -> Job:
        """The next one."""
        await self._asked.wait()
        self._asked.clear()
        return decode_model(Job, self.jobs[-1].data, None)

    async def tell(self, events: Iterable[Event], job: Job, tenant: str = "default") -> None:
        for event in events:
            self._told += 1
            named = encode(replace(event, request=str(job.id)))
            subject = self.subjects.events(tenant, job.bridge, str(job.id))
            await self.broker.publish(subject, named, message_id=f"{self._told}")

    async def answer(self, events: Iterable[Event], *asked: Any, **more: Any) -> Response:
        """Ask, and have the one job that this makes end in these events."""
        asking = asyncio.create_task(ask(self.app, *asked, **more))
        await self.tell(events, await self.job())
        return await asking

    def _hear(self, message: Message) -> None:
        self.jobs.append(message)
        self._asked.set()
