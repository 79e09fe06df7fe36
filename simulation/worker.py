"""A simulated worker process: the real stage infer, over an engine that computes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..engine import EngineConfig
from ..schemas.jobs import ValidatedJob
from ..schemas.registry import ModelCard, WorkerCard, reserve_of
from ..stages import Pipe, Runner
from ..stages.infer.request_metrics import RequestMetrics, Unmeasured, WorkerMetrics
from ..stages.infer.stage import Infer
from ..streams.memory.broker import MemoryBroker
from ..streams.port import Delivery
from ..streams.stores.registry import Registry
from .costs import StepClock, StepCosts
from .engine import LoopDriver, SimulatedBackend, simulated_engine
from .link import Link

CORES = 64  # of each worker's machine: a scenario is the same on any of ours
HOST = "simulated"  # no host of this name answers whether a process has ended


class Shape(NamedTuple):
    """What a worker is: its cache holds `kv_tokens`, and a step computes `prefill_chunk` tokens at most."""

    model: ModelCard
    seats: int
    kv_tokens: int
    prefill_chunk: int
    costs: StepCosts
    speed: float


class _TakeoversAlone(Unmeasured):
    """The simulation counts all else for itself."""

    def continued(self, token_ids: Sequence[Sequence[int]]) -> None:
        self._worker.takeovers.inc()


class SimulatedInfer(Infer):
    way = 0.0  # seconds that a request is on its way, besides its time in the engine

    async def handle(self, delivery: Delivery) -> None:
        if self.way:
            await asyncio.sleep(self.way)
        await super().handle(delivery)

    def _measured(self, job: ValidatedJob) -> RequestMetrics:
        return _TakeoversAlone(job, self._metrics, self.pipe.now)

    async def _expose(self) -> None:
        """To nobody."""


class SimulatedWorker:
    """Runs from its construction on, until it is stopped or killed. `number` is its process id."""

    def __init__(self, name: str, number: int, shape: Shape, shared: Pipe, broker: MemoryBroker) -> None:
        loop, capacity = asyncio.get_running_loop(), shape.seats
        reserve = reserve_of(capacity)
        config = EngineConfig(
            model="simulated",
            max_batch_size=capacity + reserve,
            reserved_batch_size=reserve,
            max_sequence_length=shape.model.context_length,
            prefill_chunk_size=max(shape.prefill_chunk, capacity + reserve),
            speculation="off",
            stall_timeout=shared.settings.stall_timeout,
        )
        self.name = name
        self.shape = shape
        self.backend = SimulatedBackend(config, StepClock(shape.costs, shape.speed), shape.kv_tokens, shared.now)
        self.began = loop.time()
        self.ended: float | None = None  # loop time; set by kill and stop
        self._engine = simulated_engine(config, self.backend)
        self._link = Link(broker)
        registry = Registry(self._link, interval=shared.settings.heartbeat_interval)
        pipe = Pipe(self._link, shared.subjects, shared.settings, registry, shared.cancellations, now=shared.now)
        card = WorkerCard(
            id=name, model=shape.model, capacity=capacity, pid=number, incarnation=f"{name}.{number}", host=HOST
        )
        # One set of metrics for all: a thousand workers' would take more memory than the rest.
        infer = SimulatedInfer(pipe, self._engine, card, WorkerMetrics(shape.model.name, HOST, loop.time))
        infer.cores, infer.way = CORES, shape.costs.request_ms / 1000
        self._infer = infer
        self._runner = Runner(infer, pipe)
        self._task = asyncio.create_task(self._runner.run())

    @property
    def is_alive(self) -> bool:
        return self.ended is None

    @property
    def is_connected(self) -> bool:
        return self._link.connected

    @property
    def free(self) -> int:
        """Seats for more requests, as it reports them."""
        return max(0, self._infer.room.free(self.backend.blocks.usage).others)

    @property
    def busy(self) -> float:
        """Seconds for which it has computed."""
        driver = self._engine._driver
        assert isinstance(driver, LoopDriver)
        return driver.busy

    def watch(self, failed: Callable[[BaseException], None]) -> None:
        """Call back if the process dies of an error of its own."""

        def done(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None and self.is_alive:
                failed(error)

        self._task.add_done_callback(done)

    def kill(self) -> None:
        """End at once, as a machine that loses power: its card and its leases expire."""
        self.ended = asyncio.get_running_loop().time()
        self._link.sever()
        self._engine.close()
        self._task.cancel()

    async def stop(self) -> None:
        """Drain, as after SIGTERM: finish what runs, take nothing new."""
        self._runner.stop()
        await asyncio.wait([self._task])  # it may be killed meanwhile, and whoever waits for it be cancelled
        if self.is_alive:
            self.ended = asyncio.get_running_loop().time()
            self._engine.close()

    async def finish(self) -> None:
        """Stop at the end of the simulation, after which nothing would mend the link."""
        self.mend()
        await self.stop()

    def cut(self) -> None:
        """Lose the connection to the broker, and go on computing."""
        self._link.cut()

    def mend(self) -> None:
        if self.is_alive:
            self._link.mend()

    def slow_down(self, factor: float) -> None:
        """Take so many times as long for each step as it would otherwise."""
        self.backend.clock.speed = self.shape.speed / factor

    def check_integrity(self) -> None:
        """Raises `AssertionError` unless the engine accounts for every row and block."""
        self.backend.scheduler.check_integrity()
