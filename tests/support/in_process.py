"""Agents of models whose workers are tasks instead of processes, over the in-memory pipeline."""

from __future__ import annotations

import asyncio
import os
import signal
import uuid
from collections.abc import Callable
from inspect import isawaitable
from typing import Any

from memory_pipeline import FragileEcho, Pipeline

from penstock.api.bridge.reading import Reading
from penstock.api.serve.agent import ModelAgent
from penstock.api.serve.processes import FATAL_EXIT, Ending, Part, ProcessKeeper
from penstock.engine import EngineConfig, InferenceEngine
from penstock.engine.backends.echo import _Row
from penstock.schemas.events import Accepted, Done, Event, Token
from penstock.schemas.jobs import Job
from penstock.schemas.models.catalogue import Catalogue, CatalogueEntry, RevisionKey
from penstock.schemas.models.model_state import ModelState
from penstock.schemas.registry import ModelCard, WorkerCard
from penstock.stages import Runner
from penstock.stages.infer.stage import Infer
from penstock.streams.stores.catalogue import CatalogueStore

MODEL = "m"
TOKENS = 20
PATIENCE = 30.0  # seconds until a wait counts as endless
BROKEN = ("dead", "fatal", "faulty", "mute")  # sources whose swap fails, each in its own way


class Lettered(FragileEcho):
    """Answers with one letter, the first of its source, again and again."""

    letter = "?"

    def _next_token(self, row: _Row) -> int:
        return ord(self.letter)


class Tasks(ProcessKeeper):
    """Runs workers in this process."""

    def __init__(self, pipeline: Pipeline, store: CatalogueStore) -> None:
        super().__init__(drain=1.0)
        self._pipe = pipeline.pipe
        self._store = store

    async def run(self, part: Part, environment: dict[str, str], until: asyncio.Event) -> Ending:
        worker, revision = part.arguments[2], int(part.arguments[4])
        source = (await self._store.read()).find(MODEL).sources[revision]
        if source in ("dead", "killed"):
            return Ending(1 if source == "dead" else -signal.SIGKILL)
        if source == "endless":  # it loads for ever
            await until.wait()
            return Ending(0)
        if source == "fatal":
            await self._pipe.registry.leave_word(worker, "its weights are broken")
            return Ending(FATAL_EXIT)
        config = EngineConfig(model="echo", backend="echo", max_sequence_length=512, max_batch_size=16, echo_rate=100.0)
        backend = Lettered(config)
        backend.letter = source[0]
        backend.fails_after = 0 if source == "faulty" else None
        if source == "mute":
            backend.goes.clear()
        engine = InferenceEngine(config, backend=backend)
        model = ModelCard(
            name=MODEL,
            source="echo",
            backend="echo",
            context_length=512,
            created=0,
            revision=revision,
            catalogued=True,
        )
        card = WorkerCard(id=worker, model=model, capacity=12, pid=os.getpid(), incarnation=uuid.uuid4().hex)
        runner = Runner(Infer(self._pipe, engine, card), self._pipe)
        running = asyncio.create_task(runner.run())
        await until.wait()
        backend.goes.set()
        runner.stop()
        await running
        engine.close()
        return Ending(0)


class Asked:
    """A request for the model, which was accepted before the next one was made."""

    def __init__(self, reading: Reading, oldest: int, newest: int) -> None:
        self.oldest, self.newest = oldest, newest  # the current revision before it was made, and once it was accepted
        self.text = ""
        self.end: Event | None = None
        self._reading = reading

    async def answer(self) -> str:
        """Its whole text. Fails where it ends otherwise than well."""
        async with asyncio.timeout(PATIENCE):
            while not self._reading.ended:
                for event in await self._reading.take(PATIENCE):
                    if isinstance(event, Token):
                        self.text += event.text
                    self.end = event
        self._reading.close()
        assert isinstance(self.end, Done), self.end
        return self.text


class Hosting:
    """The model `MODEL`, whose first revision comes from the source `a`, and the agents of one or more hosts for it."""

    def __init__(self, pipeline: Pipeline, store: CatalogueStore) -> None:
        self.pipeline = pipeline
        self.store = store
        self.asked: list[Asked] = []
        self._agents: dict[str, tuple[asyncio.Event, asyncio.Task[None]]] = {}

    @classmethod
    async def start(cls, entry: dict[str, Any] | None = None, *, runs: bool = True, **values: Any) -> Hosting:
        """With an agent that `runs`, and further fields of the model's `entry`."""
        own: dict[str, Any] = {"heartbeat_interval": 0.05, "probe_timeout": 0.5, "least_residency": 0.2}
        pipeline = await Pipeline.start(**own | values)
        hosting = cls(pipeline, await CatalogueStore.of(pipeline.pipe.broker))
        model = CatalogueEntry.model_validate({"name": MODEL, "source": "a", "backend": "echo"} | (entry or {}))
        await hosting.change(lambda catalogue: catalogue.add(model))
        if runs:
            hosting.start_agent()
            await hosting.until(lambda: hosting.revision == 1)
        return hosting

    def start_agent(self, name: str = "host", **values: Any) -> None:
        """Start the agent of a host, with settings of its own."""
        settings, until = self.pipeline.pipe.settings.model_copy(update=values), asyncio.Event()
        keeper = Tasks(self.pipeline, self.store)
        agent = ModelAgent(self.pipeline.pipe.broker, self.store, settings, name, keeper, lambda _: {})
        self._agents[name] = until, asyncio.create_task(agent.run(until))

    async def stop_agent(self, name: str = "host") -> None:
        until, agent = self._agents.pop(name)
        until.set()
        await agent

    async def stop(self) -> None:
        for name in list(self._agents):
            await self.stop_agent(name)
        await self.pipeline.stop()

    @property
    def workers(self) -> list[str]:
        """The names of the workers that serve the current revision."""
        return [card.id for card in self.pipeline.pipe.registry.workers_for(MODEL, self.revision)]

    @property
    def revision(self) -> int:
        """What the stage validate takes for the current revision."""
        card = self.pipeline.pipe.registry.models.get(MODEL)
        return card.revision if card else 0

    async def change(self, update: Any) -> Catalogue:
        return await self.store.change(update)

    async def swap(self, source: str) -> int:
        """Begin a swap; returns the new revision."""
        found = (await self.change(lambda catalogue: catalogue.swap(MODEL, source))).find(MODEL)
        assert found.candidate is not None
        return found.candidate

    async def entry(self) -> CatalogueEntry:
        return (await self.store.read()).find(MODEL)

    async def state(self, revision: int) -> ModelState | None:
        return (await self.store.states()).get(RevisionKey(MODEL, revision))

    async def only(self, statuses: set[str]) -> bool:
        """Whether all revisions and replicas are in one of them: an agent notes it a moment after a worker is seen."""
        return {state.status for state in (await self.store.states()).values()} <= statuses

    async def is_in(self, revision: int, *statuses: str) -> bool:
        state = await self.state(revision)
        return state is not None and state.status in statuses

    async def settled(self) -> CatalogueEntry:
        """The entry once no swap is going on, and the stage validate knows what is current."""
        async with asyncio.timeout(PATIENCE):
            while (entry := await self.entry()).candidate is not None or self.revision != entry.revision:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        return entry

    async def until(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(PATIENCE):
            while not (await met if isawaitable(met := condition()) else met):  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def ask(self, **fields: Any) -> Asked:
        oldest = self.revision
        body = {"model": MODEL, "prompt": "x", "max_tokens": TOKENS, "stream": True} | fields
        job = Job(id=f"t-{uuid.uuid4().hex}", endpoint="/v1/completions", bridge="test", body=body)
        reading = await self.pipeline.bridge.open(job, priority="normal", tenant="default")
        events: list[Event] = []
        async with asyncio.timeout(PATIENCE):
            while not any(isinstance(event, Accepted) for event in events):
                assert not reading.ended, events
                events += await reading.take(PATIENCE)
        asked = Asked(reading, oldest, self.revision)
        asked.text = "".join(event.text for event in events if isinstance(event, Token))
        asked.end = events[-1]
        self.asked.append(asked)
        return asked
