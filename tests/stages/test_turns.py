"""Turns of lanes that share a stage: how many at once, who is first, and that nobody waits for ever."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_pipeline import validated

from penstock.config.settings import Settings
from penstock.schemas.jobs import ValidatedJob
from penstock.schemas.wire import codec
from penstock.stages import JobStage, Pipe, Runner
from penstock.stages.cancellations import Cancellations
from penstock.stages.turns import PASSED_OVER, Turns
from penstock.streams.memory.broker import MemoryBroker
from penstock.streams.nats.broker import JetStreamBroker
from penstock.streams.nats.servers.server import EmbeddedServer
from penstock.streams.port import NEXT, Broker
from penstock.streams.stores.registry import Registry
from penstock.streams.topology import PRIORITIES, Subjects, topology


class Users:
    """Those who want a turn, as tasks: `had` are the lanes in the order of their turns."""

    def __init__(self, turns: Turns) -> None:
        self.turns = turns
        self.had: list[int] = []
        self.most = 0
        self._running = 0

    async def use(self, lane: int) -> None:
        await self.turns.take(lane)
        self.had.append(lane)
        self._running += 1
        self.most = max(self.most, self._running)
        try:
            await asyncio.sleep(0)
        finally:
            self._running -= 1
            self.turns.give_back()


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 4), st.lists(st.integers(0, 2), max_size=80), st.data())
def test_turns_are_bounded_and_everybody_gets_one(most: int, lanes: list[int], data: st.DataObject) -> None:
    given_up = data.draw(st.sets(st.sampled_from(range(len(lanes))))) if lanes else set[int]()

    async def run() -> Users:
        users = Users(Turns(most, 3))
        tasks = [asyncio.create_task(users.use(lane)) for lane in lanes]
        await asyncio.sleep(0)
        for number in given_up:
            tasks[number].cancel()
        async with asyncio.timeout(60):
            await asyncio.gather(*tasks, return_exceptions=True)
        assert users.turns.free == most
        return users

    users = asyncio.run(run())
    assert users.most <= most
    assert len(users.had) >= len(lanes) - len(given_up)


async def test_who_gives_up_waiting_takes_no_turn_away() -> None:
    turns = Turns(1)
    await turns.take(0)
    waiting = [asyncio.create_task(turns.take(0)) for _ in range(2)]
    await asyncio.sleep(0)
    turns.give_back()  # the first has it, and has not seen it yet
    waiting[0].cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert waiting[0].cancelled() and not waiting[1].cancelled()
    turns.give_back()
    assert turns.free == 1


async def test_high_goes_first_and_low_is_not_forgotten() -> None:
    users = Users(Turns(1, 3))
    await users.turns.take(0)
    tasks = [asyncio.create_task(users.use(lane)) for lane in [2] * 3 + [1] * 3 + [0] * 3 * PASSED_OVER]
    await asyncio.sleep(0)
    users.turns.give_back()
    await asyncio.gather(*tasks)
    assert users.had[: PASSED_OVER + 3] == [0] * PASSED_OVER + [2, 1, 0]
    assert users.had.count(0) == 3 * PASSED_OVER and sorted(set(users.had)) == [0, 1, 2]


class OneByOne(JobStage):
    """Handles one job at a time, each when it is let."""

    name = "one"
    concurrency = 1

    def __init__(self, pipe: Pipe) -> None:
        super().__init__(pipe)
        self.seen: asyncio.Queue[str] = asyncio.Queue()
        self.let = asyncio.Semaphore(0)

    async def process(self, job: ValidatedJob) -> ValidatedJob:
        self.seen.put_nowait(job.id)
        await self.let.acquire()
        return job


@pytest.fixture(params=["memory", "jetstream"])
async def broker(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Broker]:
    if request.param == "memory":
        yield MemoryBroker()
        return
    server = await EmbeddedServer.start(tmp_path)
    broker = await JetStreamBroker.connect(server.url, namespace="penstock")
    yield broker
    await broker.close()
    await server.stop()


async def test_a_stage_handles_high_before_what_came_earlier(broker: Broker) -> None:
    """The job in hand is finished; of those that wait the highest is next, whatever came first."""
    settings = Settings(pipeline=("validate", "one", "queue", "batch", "infer", "stream"))
    subjects = Subjects("penstock")
    await broker.ensure(*topology("penstock", settings.job_stages))
    pipe = Pipe(broker, subjects, settings, Registry(broker, interval=1.0), Cancellations())
    stage = OneByOne(pipe)
    runner = Runner(stage, pipe)

    async def publish(name: str, priority: str) -> None:
        headers = {NEXT: subjects.stage("queue", priority, "default")}
        data = codec.encode(validated(name, pipe).model_copy(update={"priority": priority}))
        await broker.publish(subjects.stage("one", priority, "default"), data, message_id=name, headers=headers)

    running = asyncio.create_task(runner.run())
    await publish("first", "low")
    assert await stage.seen.get() == "first"
    for name in ("low-1", "low-2", "low-3"):
        await publish(name, "low")
    await publish("normal", "normal")
    await publish("high", "high")
    async with asyncio.timeout(60):
        while len(runner._in_hand) < 4:  # one is handled, and of each lane the first is seen to wait
            await broker.held("STAGE_ONE_HIGH")
        order = []
        for _ in range(5):
            stage.let.release()
            order.append(await stage.seen.get())
    stage.let.release()
    assert order == ["high", "normal", "low-1", "low-2", "low-3"]
    runner.stop()
    await running
    for priority in PRIORITIES:
        assert (await broker.held(f"STAGE_ONE_{priority.upper()}")).messages == 0
