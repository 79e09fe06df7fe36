"""The side effects of a response: listing what may be called, and calling it, each call once.

A call is claimed in the response's log before it is made, and its result is kept there. Where the process dies in
between, nobody can know whether the call took effect: it is made again only if its tool says that this is harmless, and
else the model is told.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections import Counter
from collections.abc import Sequence
from math import inf
from typing import Any, Protocol

from ..schemas.errors import ToolFailed
from ..schemas.events import Event
from ..schemas.events import Item as Shown
from ..schemas.loops import Begun, Items, LoopJob, LoopTool, Source, ToolResult
from ..streams.response_log import Place, ResponseLog
from .contract import Pipe
from .endings import Address

LOOK = 0.2  # seconds between two looks for the result of a call that another copy makes
UNKNOWN = ToolResult(
    "The call was interrupted. It is not known whether it took effect; check before you call again.", True
)
LONGEST = 8192  # characters of a result for a model whose context is not known
TOO_MANY = ToolResult("No more tools may be called in this response; answer with what is known.", True)

Item = dict[str, Any]


class Toolbox(Protocol):
    """What can be called, as the stage tools sees it."""

    def check(self, source: Source) -> None:
        """Raises `InvalidRequest` for a source that is unknown or not allowed."""

    async def tools(self, source: Source) -> list[LoopTool]:
        """All that may be called there. Raises `ToolFailed`."""

    async def call(self, source: Source, tool: LoopTool, arguments: str) -> ToolResult:
        """Never raises: what goes wrong is told to the model."""


def list_item(label: str, id: str) -> Item:
    """The item that shows a source's tools, before they are known."""
    return {"id": id, "type": "mcp_list_tools", "server_label": label, "tools": [], "error": None}


async def listed(toolbox: Toolbox, source: Source, item: Item, known: Item | None) -> tuple[Item, list[LoopTool]]:
    """A source's tools, and the item that shows them; `known` is the item of an earlier response."""
    if known is not None:
        tools = [_tool(source.label, shown) for shown in known["tools"]]
        tools = [tool for tool in tools if source.allowed is None or tool.tool in source.allowed]
    else:
        try:
            tools = await toolbox.tools(source)
        except ToolFailed as error:
            return {**item, "error": str(error)}, []
    shown = [
        {
            "name": tool.tool,
            "description": tool.description,
            "input_schema": tool.parameters,
            "annotations": {"idempotentHint": tool.repeatable},
        }
        for tool in tools
    ]
    return {**item, "tools": shown}, tools


def for_model(tools: Sequence[LoopTool], sources: Sequence[Source], taken: Sequence[str]) -> tuple[LoopTool, ...]:
    """The tools under names that are each one's own, also beside the functions called `taken`."""
    times = Counter([*taken, *(tool.tool for tool in tools)])
    by_label = {source.label: source for source in sources}

    def named(tool: LoopTool) -> LoopTool:
        name = tool.tool if times[tool.tool] == 1 else f"{tool.label}__{tool.tool}"
        return tool.model_copy(update={"name": name, "approval": by_label[tool.label].needs_approval(tool.tool)})

    return tuple(named(tool) for tool in tools)


async def tell(pipe: Pipe, response: Address, event: Event, place: str) -> None:
    await pipe.emit(event, tenant=response.tenant, bridge=response.bridge, place=place)


async def show(pipe: Pipe, job: LoopJob, index: int, items: Items, *, finished: bool = True) -> None:
    """Tell of items; the first is the response's event number `index`."""
    for place, item in enumerate(items, index):
        await tell(pipe, address(job), Shown(job.id, place, item, finished), str(place))


def address(job: LoopJob) -> Address:
    return Address(job.id, job.tenant, job.bridge)


def count(items: Items) -> int:
    """How many calls are among them."""
    return sum(item["type"] == "mcp_call" for item in items)


class Calls:
    """Makes the calls of one copy of the stage."""

    def __init__(self, pipe: Pipe, toolbox: Toolbox, log: ResponseLog) -> None:
        self._pipe = pipe
        self._toolbox = toolbox
        self._log = log
        self._owner = f"{socket.gethostname()} {os.getpid()}"
        self._making: set[Place] = set()

    async def make_all(self, begun: Begun, turn: int, items: Items, index: int, *, made: int = 0) -> Items:
        """The items of a turn with the calls among them made, all at a time, and told in their order."""
        job = begun.job
        most = job.body.get("max_tool_calls") or inf
        card = self._pipe.registry.models.get(job.body["model"])
        longest = card.context_length // 2 if card else LONGEST
        waiting = [
            place for place, item in enumerate(items) if item["type"] == "mcp_call" and item["status"] == "in_progress"
        ]
        sealed = await self._log.sealed(job.tenant, job.id) if waiting else {}
        items = list(items)
        async with asyncio.TaskGroup() as group:
            calls = [
                group.create_task(self._call(begun, Place(job.tenant, job.id, turn, place), items[place], sealed))
                if made + number < most
                else None
                for number, place in enumerate(waiting)
            ]
            for number, (place, call) in enumerate(zip(waiting, calls, strict=True)):
                result = _cut(await call, longest) if call else TOO_MANY
                said = {"output": None, "error": _error(result.text)} if result.is_error else {"output": result.text}
                items[place] = {**items[place], **said, "status": "failed" if result.is_error else "completed"}
                await show(self._pipe, job, index + number, [items[place]])
        return items

    async def _call(self, begun: Begun, place: Place, item: dict[str, Any], sealed: dict[str, str]) -> ToolResult:
        label, name = item["server_label"], item["name"]
        source = next((source for source in begun.sources if source.label == label), None)
        tool = next((tool for tool in begun.tools if (tool.label, tool.tool) == (label, name)), None)
        if source is None or tool is None:
            return ToolResult(f"There is no tool {name} of {label} any more.", True)
        source = source.model_copy(update={"sealed": sealed.get(label)})
        return await self._make(place, source, tool, item["arguments"])

    async def _make(self, place: Place, source: Source, tool: LoopTool, arguments: str) -> ToolResult:
        """What the call at this place comes to, made now, or before by whoever claimed it."""
        claim = await self._log.claim(place, self._owner)
        while claim.result is None and not claim.is_new and self._is_made(place, claim.owner):
            await asyncio.sleep(LOOK)
            claim = await self._log.claim(place, self._owner)
        if claim.result is not None:
            return claim.result
        result = UNKNOWN
        self._making.add(place)
        try:
            if claim.is_new or tool.repeatable:
                result = await self._toolbox.call(source, tool, arguments)
        finally:
            self._making.discard(place)
            # Also where this is cancelled: whoever comes next need not wait.
            result = await asyncio.shield(self._log.settle(place, claim, result))
        return result

    def _is_made(self, place: Place, owner: str) -> bool:
        """Whether the process that claimed a call is still at it, as far as one can see."""
        if owner == self._owner:
            return place in self._making
        return any(card.stage == "tools" and str(card.pid) == owner.split()[-1] for card in self._pipe.registry.stages)


def _cut(result: ToolResult, most: int) -> ToolResult:
    """No more than `most` characters: with half as many as its context has tokens, a model can still go on."""
    text = result.text
    if len(text) <= most:
        return result
    told = f"[The result was cut here: these are the first {most} of {len(text)} characters; ask for less at a time.]"
    return result._replace(text=f"{text[:most]}\n{told}")


def _error(text: str) -> Item:
    return {"type": "mcp_tool_execution_error", "content": [{"type": "text", "text": text}]}


def _tool(label: str, shown: Item) -> LoopTool:
    repeatable = bool((shown.get("annotations") or {}).get("idempotentHint"))
    return LoopTool(
        name=shown["name"],
        label=label,
        tool=shown["name"],
        description=shown.get("description") or "",
        parameters=shown["input_schema"],
        repeatable=repeatable,
    )
