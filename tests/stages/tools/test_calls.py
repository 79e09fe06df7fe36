"""Calls that break off while their copy of the stage lives: others go on with them at once, and none is made twice."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, AsyncIterator

import pytest
import pytest_asyncio

from penstock.config.settings import Settings
from penstock.schemas.errors import BrokerUnavailable
from penstock.schemas.loops import KeepImage, LoopTool, Source, ToolResult
from penstock.schemas.registry import StageCard
from penstock.stages import Pipe
from penstock.stages.cancellations import Cancellations
from penstock.stages.tools.calls import UNKNOWN, Calls
from penstock.streams.memory.broker import MemoryBroker
from penstock.streams.port import Bucket, Entry
from penstock.streams.stores.registry import Registry
from penstock.streams.stores.responses import CallKey, ResponseLog
from penstock.streams.topology import Subjects, topology

PATIENCE = 10.0  # seconds until a wait counts as endless
SOURCE = Source(label="functions")


class Away:
    """A bucket of a broker that may be away; writes then arrive all the same where `arrives`, and nobody hears so."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self.is_away = False
        self.arrives = False
        self.asked = asyncio.Event()  # while it is away

    async def get(self, key: str) -> Entry | None:
        self._check()
        return await self._bucket.get(key)

    async def entries(self, prefix: str = "") -> list[Entry]:
        self._check()
        return await self._bucket.entries(prefix)

    def scan(self, prefix: str) -> AsyncGenerator[list[Entry], None]:
        self._check()
        return self._bucket.scan(prefix)

    async def put(self, key: str, value: bytes) -> int:
        self._check()
        return await self._bucket.put(key, value)

    async def create(self, key: str, value: bytes) -> int | None:
        if self.arrives:
            await self._bucket.create(key, value)
        self._check()
        return await self._bucket.create(key, value)

    async def update(self, key: str, value: bytes, revision: int) -> int | None:
        self._check()
        return await self._bucket.update(key, value, revision)

    async def delete(self, key: str) -> None:
        self._check()
        await self._bucket.delete(key)

    async def filled(self) -> tuple[int, int]:
        self._check()
        return await self._bucket.filled()

    def _check(self) -> None:
        if self.is_away:
            self.asked.set()
            raise BrokerUnavailable("away on purpose")


class Tools:
    """A toolbox with one tool, whose calls end when told."""

    def __init__(self) -> None:
        self.calls = 0
        self.called = asyncio.Event()
        self.goes = asyncio.Event()

    def check(self, source: Source) -> None:
        raise NotImplementedError

    async def tools(self, source: Source) -> list[LoopTool]:
        raise NotImplementedError

    async def call(self, source: Source, tool: LoopTool, arguments: str, keep: KeepImage | None = None) -> ToolResult:
        self.calls += 1
        self.called.set()
        await self.goes.wait()
        return ToolResult(f"call {self.calls}")


class Copies:
    """Two copies of the stage, both alive; only the first loses the broker."""

    def __init__(self, pipe: Pipe, toolbox: Tools, ledger: Away, log: ResponseLog) -> None:
        self.toolbox = toolbox
        self.ledger = ledger
        entries = log._entries
        self.first = Calls(pipe, toolbox, ResponseLog(entries, ledger), "t0")
        self.second = Calls(pipe, toolbox, log, "t1")
        self.place = CallKey("default", f"resp_{uuid.uuid4().hex}", 1, 0)

    def make(self, calls: Calls, *, repeatable: bool) -> asyncio.Task[ToolResult]:
        tool = LoopTool(name="f", label="functions", tool="f", parameters={}, repeatable=repeatable)
        return asyncio.create_task(calls._make(self.place, SOURCE, tool, "{}"))

    async def break_off(self, making: asyncio.Task[ToolResult]) -> None:
        making.cancel()
        await asyncio.wait([making])
        assert making.cancelled()


@pytest_asyncio.fixture
async def copies() -> AsyncIterator[Copies]:
    broker, settings = MemoryBroker(), Settings(backend="echo")
    await broker.ensure(*topology(settings.namespace, settings.job_stages))
    registry = Registry(broker, interval=0.05)
    for name in ("t0", "t1"):
        await registry.announce_stage(StageCard(stage="tools", id=name, pid=1))
    await registry.refresh()
    pipe = Pipe(broker, Subjects(settings.namespace), settings, registry, Cancellations())
    yield Copies(pipe, Tools(), Away(await broker.bucket("responses")), await ResponseLog.of(broker))
    await broker.close()


@pytest.mark.parametrize("repeatable", [True, False])
async def test_a_call_that_broke_off_in_an_outage_is_given_back(copies: Copies, repeatable: bool) -> None:
    making = copies.make(copies.first, repeatable=repeatable)
    await copies.toolbox.called.wait()
    copies.ledger.is_away = True
    await copies.break_off(making)
    other = copies.make(copies.second, repeatable=repeatable)
    copies.toolbox.goes.set()
    copies.ledger.is_away = False
    async with asyncio.timeout(PATIENCE):
        result = await other
    assert result == (ToolResult("call 2") if repeatable else UNKNOWN)
    assert copies.toolbox.calls == (2 if repeatable else 1)


@pytest.mark.parametrize("repeatable", [True, False])
async def test_a_result_that_could_not_be_kept_is_kept_later(copies: Copies, repeatable: bool) -> None:
    making = copies.make(copies.first, repeatable=repeatable)
    await copies.toolbox.called.wait()
    copies.ledger.is_away = True
    copies.toolbox.goes.set()
    await copies.ledger.asked.wait()
    await copies.break_off(making)
    other = copies.make(copies.second, repeatable=repeatable)
    copies.ledger.is_away = False
    async with asyncio.timeout(PATIENCE):
        assert await other == ToolResult("call 1")
    assert copies.toolbox.calls == 1


@pytest.mark.parametrize("arrives", [True, False])
@pytest.mark.parametrize("same", [True, False])
async def test_a_claim_of_which_nothing_was_heard_is_given_back(copies: Copies, arrives: bool, same: bool) -> None:
    """No call was made, so that even one that must not be repeated is made now."""
    copies.ledger.is_away, copies.ledger.arrives = True, arrives
    making = copies.make(copies.first, repeatable=False)
    await copies.ledger.asked.wait()
    await copies.break_off(making)
    copies.ledger.is_away = copies.ledger.arrives = False
    copies.toolbox.goes.set()
    while copies.first._releases:  # or the same copy would find a claim of its own, and not know
        await asyncio.wait(copies.first._releases)
    async with asyncio.timeout(PATIENCE):
        assert await copies.make(copies.first if same else copies.second, repeatable=False) == ToolResult("call 1")
    assert copies.toolbox.calls == 1


async def test_a_claim_of_which_nothing_was_heard_is_the_copys_own(copies: Copies) -> None:
    """The broker had stored it, but was away before it said so. The call was not made, so that it is made now."""
    copies.ledger.is_away = copies.ledger.arrives = True
    making = copies.make(copies.first, repeatable=False)
    await copies.ledger.asked.wait()
    copies.ledger.is_away = copies.ledger.arrives = False
    copies.toolbox.goes.set()
    async with asyncio.timeout(PATIENCE):
        assert await making == ToolResult("call 1")
    assert copies.toolbox.calls == 1
