"""Servers of tools that take long: no other response waits for them."""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from typing import Any

from memory_pipeline import MODEL, Pipeline, events_of

from penstock.api.bridge.reading import Reading
from penstock.schemas.errors import ToolFailed
from penstock.schemas.jobs import Job
from penstock.schemas.loops import KeepImage, LoopTool, Source, ToolResult
from penstock.stages.tools.calls import SHARE, TOGETHER

PATIENCE = 30.0  # seconds until a wait counts as endless


class Slow:
    """A toolbox whose servers list their tools when told, and have none."""

    def __init__(self) -> None:
        self.goes = asyncio.Event()
        self.asked = Counter[str]()  # by the label of a server

    def check(self, source: Source) -> None:
        pass

    async def tools(self, source: Source) -> list[LoopTool]:
        self.asked[source.label] += 1
        await self.goes.wait()
        raise ToolFailed("has none")

    async def call(self, source: Source, tool: LoopTool, arguments: str, keep: KeepImage | None = None) -> ToolResult:
        raise NotImplementedError


async def respond(pipeline: Pipeline, tenant: str, *servers: str) -> Reading:
    tools = [{"type": "mcp", "server_label": each, "server_url": f"https://{each}.example/mcp"} for each in servers]
    body: dict[str, Any] = {"model": MODEL, "input": "hello", "max_output_tokens": 16, "tools": tools}
    job = Job(id=f"resp_{uuid.uuid4().hex}", endpoint="/v1/responses", bridge="test", body=body)
    return await pipeline.bridge.open(job, priority="normal", tenant=tenant)


async def kinds_of(reading: Reading) -> list[str]:
    return [event.type for event in await events_of(reading)]


async def test_nobody_waits_for_the_servers_of_others() -> None:
    toolbox: Any = Slow()
    pipeline = await Pipeline.start(toolbox=toolbox, lease=60.0)
    try:
        many = [await respond(pipeline, "many", "slow") for _ in range(TOGETHER + 64)]
        async with asyncio.timeout(PATIENCE):
            while toolbox.asked["slow"] < SHARE:  # noqa: ASYNC110
                await asyncio.sleep(0)
        assert (await kinds_of(await respond(pipeline, "one")))[-1] == "done"
        own = await respond(pipeline, "one", "own")
        async with asyncio.timeout(PATIENCE):
            while not toolbox.asked["own"]:  # noqa: ASYNC110
                await asyncio.sleep(0)
        assert toolbox.asked["slow"] == SHARE
        toolbox.goes.set()
        for reading in (own, *many):
            assert (await kinds_of(reading))[-1] == "done"
    finally:
        toolbox.goes.set()
        await pipeline.stop()
