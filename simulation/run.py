"""Runs a scenario: the real stages and many workers on one broker in memory, in virtual time."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from random import Random

import orjson

from ..config import metrics
from ..schemas.errors import StreamFull
from ..schemas.registry import ModelCard
from ..schemas.wire import codec
from ..stages import Pipe, Runner, Stage
from ..stages.batch.stage import Batch
from ..stages.cancellations import Cancellations
from ..stages.queue import Queue
from ..stages.stream import Stream
from ..stages.validate.stage import Validate
from ..streams.lanes import open_lanes
from ..streams.memory.broker import MemoryBroker
from ..streams.nats.administration.deployment import layout
from ..streams.port import SCHEMA, Message
from ..streams.stores.registry import Registry
from ..streams.topology import Subjects
from .clock import EPOCH, VirtualLoop
from .engine import token_at
from .found import Found, Moment
from .laws import Ledger, Life, Source
from .scenario import Happening, Loaded, WorkerGroup
from .traffic import Ask, Traffic
from .worker import HOST, Shape, SimulatedWorker

BRIDGE = "simulation"
SETTLING = 60.0  # seconds behind the last deadline, after which what has not ended never will
STAGES: tuple[type[Stage], ...] = (Validate, Queue, Batch, Stream)
IN_A_ROW = 16  # publishes, after which others run: each time costs as much as storing a message
_COLLECT = 20_000_000  # new objects between two garbage collections: requests leave no cycles, and many live objects


def simulate(
    loaded: Loaded, tell: Callable[[Moment], None] = lambda moment: None, stages: tuple[type[Stage], ...] = STAGES
) -> Found:
    """Run a scenario to its end. `tell` hears how it stands about once a second of its own time; `stages` are those of
    the deployment besides infer.

    Raises what ends a stage, `Stuck` where nothing goes on.
    """
    thresholds = gc.get_threshold()
    gc.set_threshold(_COLLECT, 20, 1000)
    try:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            simulation = Simulation(loaded, tell, stages)
            return runner.run(simulation.run())
    finally:
        gc.set_threshold(*thresholds)


class Simulation:
    def __init__(self, loaded: Loaded, tell: Callable[[Moment], None], stages: tuple[type[Stage], ...]) -> None:
        scenario = self._scenario = loaded.scenario
        self._settings = scenario.deployment
        self._costs = dict(zip((group.name for group in scenario.workers), loaded.costs, strict=True))
        self._groups = {group.name: group for group in scenario.workers}
        self._tell = tell
        self._stages = stages
        self._ledger = Ledger(scenario.laws, self._settings.weights, token_at)
        self._found = Found(scenario, self._ledger)
        self._traffic = [Traffic(tenant, scenario.seed, n) for n, tenant in enumerate(scenario.tenants)]
        self._draws = Random(f"{scenario.seed}/workers")
        self._workers: list[SimulatedWorker] = []
        self._made = dict.fromkeys(self._groups, 0)  # workers of each group so far
        self._num_sent = 0
        self._last_deadline = 0.0
        self._all_sent = asyncio.Event()  # as many requests as the scenario names
        self._idle = asyncio.Event()  # what was sent has ended
        self._failure: asyncio.Future[None] | None = None  # of a worker; set by run

    async def run(self) -> Found:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self._failure, takeovers = loop.create_future(), self._takeovers()
        self._broker = MemoryBroker(now=loop.now, publishes_in_a_row=IN_A_ROW)
        async with self._deployment(loop) as self._pipe:
            for group in self._scenario.workers:
                for _ in range(group.count):
                    self._start(group)
            self._broker.watch("EVENTS", self._hear)
            await asyncio.sleep(2 * self._settings.heartbeat_interval)  # until all are known
            self._origin = self._found.began = loop.time()
            background = [asyncio.create_task(self._watch())]
            background += [asyncio.create_task(self._happen(event)) for event in self._scenario.events]
            sending = [asyncio.create_task(self._send_all(traffic)) for traffic in self._traffic]
            ending = asyncio.create_task(self._ended(sending))
            done, _ = await asyncio.wait({ending, self._failure, *background}, return_when=asyncio.FIRST_COMPLETED)
            while ending not in done and not self._failure.done():
                for task in done:
                    task.result()
                background = [task for task in background if not task.done()]
                done, _ = await asyncio.wait({ending, self._failure, *background}, return_when=asyncio.FIRST_COMPLETED)
            for task in (*background, *sending, ending):
                task.cancel()
            if self._failure.done():
                self._failure.result()
            ending.result()
            self._found.seconds = loop.time() - self._origin
            self._ledger.finish()
            self._count()
            await asyncio.gather(*(worker.finish() for worker in self._workers if worker.is_alive))
        self._found.takeovers = self._takeovers() - takeovers
        return self._found

    @asynccontextmanager
    async def _deployment(self, loop: VirtualLoop) -> AsyncIterator[Pipe]:
        settings, broker = self._settings, self._broker
        await broker.ensure(*layout(settings))
        subjects, cancellations = Subjects(settings.namespace), Cancellations()
        await cancellations.listen(broker, subjects)
        registry = Registry(broker, interval=settings.heartbeat_interval)
        pipe = Pipe(broker, subjects, settings, registry, cancellations, now=loop.now)
        for group in self._scenario.workers:
            await open_lanes(broker, settings, group.model)
            await registry.announce_model(_card(group))
        await registry.refresh()
        runners = [Runner(kind(pipe), pipe) for kind in self._stages]
        tasks = [asyncio.create_task(runner.run()) for runner in runners]
        reading = asyncio.create_task(registry.run())
        for task in (*tasks, reading):
            task.add_done_callback(self._part_ended)
        try:
            yield pipe
        finally:
            for runner in runners:
                runner.stop()
            await asyncio.gather(*tasks, return_exceptions=True)
            reading.cancel()
            await broker.close()

    def _part_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if self._failure is not None and not self._failure.done():
            self._failure.set_exception(error)

    # Requests

    async def _send_all(self, traffic: Traffic) -> None:
        """Send the requests of one entry of the tenants, as long as the scenario lasts."""
        loop, scenario = asyncio.get_running_loop(), self._scenario
        for ask in traffic.asks():
            if scenario.seconds is not None and ask.at >= scenario.seconds:
                return
            if (left := self._origin + ask.at - loop.time()) > 0:
                await asyncio.sleep(left)
            if scenario.jobs is not None and self._num_sent >= scenario.jobs:
                return
            await self._send(traffic, ask)

    async def _send(self, traffic: Traffic, ask: Ask) -> None:
        tenant, now, settings = traffic.tenant, asyncio.get_running_loop().time(), self._settings
        self._num_sent += 1
        if self._num_sent == self._scenario.jobs:
            self._all_sent.set()
        request = f"r{self._num_sent}"
        body = {"model": tenant.model, "prompt": ask.prompt, "max_tokens": ask.answer, "seed": ask.answer}
        job = {"id": request, "endpoint": "/v1/completions", "bridge": BRIDGE, "body": body, "timeout": tenant.timeout}
        source = Source(tenant.name, tenant.priority, tenant.model)
        self._ledger.sent(request, Life(source, len(ask.prompt), ask.answer, now))
        timeout = tenant.timeout or min(settings.default_timeout, settings.longest_timeout)
        self._last_deadline = max(self._last_deadline, now + timeout)
        subject = self._pipe.subjects.jobs(tenant.priority, tenant.name)
        try:
            await self._broker.publish(subject, orjson.dumps(job), message_id=request, headers={SCHEMA: codec.JOB})
        except StreamFull:
            self._ledger.refused(request, "jobs_full", now)

    def _hear(self, message: Message) -> None:
        ledger = self._ledger
        ledger.hear(codec.decode_event(message.data), asyncio.get_running_loop().time())
        if not ledger.running:
            self._idle.set()

    async def _ended(self, sending: list[asyncio.Task[None]]) -> None:
        """Return when all requests have been sent and have ended, or never will."""
        loop = asyncio.get_running_loop()
        enough = asyncio.create_task(self._all_sent.wait())
        everything = asyncio.create_task(asyncio.wait(sending, return_when=asyncio.FIRST_EXCEPTION))
        await asyncio.wait({enough, everything}, return_when=asyncio.FIRST_COMPLETED)
        for task in (enough, everything):
            task.cancel()
        for sender in sending:
            if sender.done():
                sender.result()
            sender.cancel()
        while self._ledger.running and (left := self._last_deadline + SETTLING - loop.time()) > 0:
            self._idle.clear()
            try:
                async with asyncio.timeout(left):
                    await self._idle.wait()
            except TimeoutError:
                return

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(1.0)
            self._ledger.look(loop.time())
            self._ledger.see_seats(self._seats(), loop.time())
            moment = self._moment(loop.time() - self._origin)
            self._found.moments.append(moment)
            self._tell(moment)

    def _moment(self, at: float) -> Moment:
        living = [worker for worker in self._workers if worker.is_alive]
        tallies = self._ledger.tallies.values()
        return Moment(
            at=at,
            sent=self._num_sent,
            ended=sum(tally.ended for tally in tallies),
            tokens=sum(tally.tokens for tally in tallies),
            waiting=sum(life.first is None for life in self._ledger.running.values()),
            running=sum(worker.backend.num_running for worker in living),
            workers=len(living),
            busy=sum(worker.busy for worker in self._workers),
        )

    def _seats(self) -> dict[str, tuple[int, int]]:
        """By model, how many workers have that can be reached, and how many of them they have free."""
        seats = Counter[str]()
        free = Counter[str]()
        for worker in self._workers:
            if worker.is_alive and worker.is_connected:
                seats[worker.shape.model.name] += worker.shape.seats
                free[worker.shape.model.name] += worker.free
        return {model: (number, free[model]) for model, number in seats.items()}

    # Workers

    def _start(self, group: WorkerGroup) -> None:
        self._made[group.name] += 1
        shape = Shape(
            _card(group), group.seats, group.kv_tokens, group.prefill_chunk, self._costs[group.name], group.speed
        )
        name = f"{group.name}-{self._made[group.name]:04}"
        worker = SimulatedWorker(name, len(self._workers) + 1, shape, self._pipe, self._broker)
        worker.watch(self._fail)
        self._workers.append(worker)

    async def _happen(self, event: Happening) -> None:
        await asyncio.sleep(event.at)
        count = getattr(event, event.kind)
        if event.burst is not None:
            self._note(f"burst: {count} requests of {event.of}")
            traffic = next(each for each in self._traffic if each.tenant.name == event.of)
            for _ in range(count):
                await self._send(traffic, traffic.ask(event.at))
            return
        if event.start is not None:
            group = self._groups[event.group or next(iter(self._groups))]
            self._note(f"start: {count} of {group.name}")
            for _ in range(count):
                self._start(group)
            return
        await self._befall(event, self._drawn(count, event.group))

    async def _befall(self, event: Happening, workers: list[SimulatedWorker]) -> None:
        """Do to workers what an event says."""
        self._note(f"{event.kind}: {', '.join(worker.name for worker in workers[:5])}{' …' * (len(workers) > 5)}")
        match event.kind:
            case "kill":
                for worker in workers:
                    worker.kill()
                if event.back_after is not None:
                    await asyncio.sleep(event.back_after)
                    for worker in workers:
                        self._start(self._groups[worker.name.rpartition("-")[0]])
                    self._note(f"back: {len(workers)}")
            case "stop":
                await asyncio.gather(*(worker.stop() for worker in workers))
            case "slow":
                for worker in workers:
                    worker.slow_down(event.factor)
                await asyncio.sleep(event.lasts)
                for worker in workers:
                    worker.slow_down(1.0)
            case "cut":
                for worker in workers:
                    worker.cut()
                await asyncio.sleep(event.lasts)
                for worker in workers:
                    worker.mend()

    def _drawn(self, count: int, group: str | None) -> list[SimulatedWorker]:
        """Living workers, of a group or of all."""
        living = [worker for worker in self._workers if worker.is_alive]
        fitting = [worker for worker in living if group in (None, worker.name.rpartition("-")[0])]
        return self._draws.sample(fitting, min(count, len(fitting)))

    def _note(self, text: str) -> None:
        self._found.happened.append((asyncio.get_running_loop().time() - self._origin, text))

    def _count(self) -> None:
        found, now = self._found, asyncio.get_running_loop().time()
        for worker in self._workers:
            stats = worker.backend.cache_stats()
            found.preemptions += stats.num_preemptions
            found.looked_up += stats.num_queried_tokens
            found.cached += stats.num_hit_tokens
            found.busy += worker.busy
            found.lived += (now if worker.ended is None else worker.ended) - max(worker.began, self._origin)
            if worker.is_alive:
                worker.check_integrity()

    def _takeovers(self) -> int:
        models = {group.model for group in self._scenario.workers}
        labels = [{"model_name": model, "engine": HOST} for model in models]
        values = [metrics.REGISTRY.get_sample_value("penstock_takeovers_total", each) for each in labels]
        return int(sum(value or 0.0 for value in values))


def _card(group: WorkerGroup) -> ModelCard:
    return ModelCard(
        name=group.model, source="simulated", backend="echo", context_length=group.context_length, created=int(EPOCH)
    )
