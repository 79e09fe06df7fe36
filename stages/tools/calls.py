"""The side effects of a response: listing tools and calling them, each call once.

A copy of the stage claims a call in the response's log before it makes it, and stores the result there. If it is
interrupted in between, by the end of its process or by an outage, the effect of the call is unknown: it is repeated
only if its tool declares that to be harmless, and otherwise the model gets an error. A copy that abandons a call
releases its claim.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Mapping, Sequence
from functools import partial
from math import inf
from typing import Any, Protocol, TypeVar
from weakref import WeakValueDictionary

from ...schemas.base import tool_name
from ...schemas.errors import InvalidRequest, ToolFailed
from ...schemas.events import Event, ItemEvent
from ...schemas.loops import Begun, Items, KeepImage, LoopJob, LoopTool, Source, ToolResult, TurnId
from ...schemas.openai.responses.items import Approval
from ...schemas.openai.responses.turns import item_id
from ...streams.gate import FairGate
from ...streams.outages import through_outages
from ...streams.stores.responses import FREE, CallKey, Claim, ResponseLog
from ..contract import Pipe
from ..endings import Address
from ..visits import leave_turn
from .images import ToolImages
from .spans import tool_span

TOGETHER, SHARE = 256, 192  # responses that wait for tools at the same time, of all tenants and of one
POLL_INTERVAL = 0.2  # seconds, while another copy makes a call
RELEASE_TIMEOUT = 1.0  # seconds that an abandoned call waits for the release of its claim
UNKNOWN = ToolResult(
    "The call was interrupted, and it may or may not have taken effect; check before you call again.", True
)
LONGEST = 8192  # characters of a result for a model of unknown context length
TOO_MANY = ToolResult("No more tool calls are allowed in this response; answer with what you know.", True)

Item = dict[str, Any]
Made = TypeVar("Made")


class Toolbox(Protocol):
    """The tools that the stage can list and call."""

    def check(self, source: Source) -> None:
        """Raises `InvalidRequest` for a source that is unknown or not allowed."""

    async def tools(self, source: Source) -> list[LoopTool]:
        """The tools of a source. Raises `ToolFailed`."""

    async def call(self, source: Source, tool: LoopTool, arguments: str, keep: KeepImage | None = None) -> ToolResult:
        """Call a tool. Never raises: a failure is a result for the model. `keep` stores images; without it, they are
        described."""


def list_item(label: str, id: str) -> Item:
    """The item of a source's tools, before they are known."""
    return {"id": id, "type": "mcp_list_tools", "server_label": label, "tools": [], "error": None}


async def listed(toolbox: Toolbox, source: Source, item: Item) -> tuple[Item, list[LoopTool]]:
    """List a source's tools, and complete their item."""
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


@contextlib.contextmanager
def report_unlisted(items: Items) -> Iterator[None]:
    """Add to a refusal of `tool_choice` the faults of servers that could not list their tools."""
    try:
        yield
    except InvalidRequest as refusal:
        faults = [item["error"] for item in items if item["type"] == "mcp_list_tools" and item["error"]]
        if refusal.param != "tool_choice" or not faults:
            raise
        raise InvalidRequest(" ".join([str(refusal), *faults]), code=refusal.code, param=refusal.param) from None


def for_model(tools: Sequence[LoopTool], taken: Sequence[str]) -> tuple[LoopTool, ...]:
    """The tools under unique names, none of them among the functions `taken`."""
    times = Counter([*taken, *(tool.name for tool in tools)])

    def named(tool: LoopTool) -> LoopTool:
        if times[tool.name] == 1:
            return tool
        return tool.model_copy(update={"name": tool_name(f"{tool.label}__{tool.name}")})

    return tuple(map(named, tools))


@contextlib.asynccontextmanager
async def at_once(works: Iterable[Coroutine[Any, Any, Made]]) -> AsyncIterator[list[asyncio.Task[Made]]]:
    """Run all concurrently; leaving the context cancels those that still run. Exceptions are raised without a group."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def publish_event(
    pipe: Pipe, response: Address, event: Event, key: str, notes: Mapping[str, object] | None = None
) -> None:
    await pipe.emit(event, tenant=response.tenant, bridge=response.bridge, key=key, notes=notes)


async def show(
    pipe: Pipe,
    job: LoopJob,
    index: int,
    items: Items,
    *,
    finished: bool = True,
    notes: Mapping[str, object] | None = None,
) -> None:
    """Publish items; the first is the response's event number `index`. The `notes` go into the header of hops."""
    for number, item in enumerate(items, index):
        await publish_event(pipe, address(job), ItemEvent(job.id, number, item, finished), str(number), notes)


def address(job: LoopJob) -> Address:
    return Address(job.id, job.tenant, job.bridge)


def count(items: Items) -> int:
    """The number of calls among the items."""
    return sum(item["type"] == "mcp_call" for item in items)


class Calls:
    """Makes the calls of one copy of the stage, whose id is `owner`."""

    def __init__(self, pipe: Pipe, toolbox: Toolbox, log: ResponseLog, owner: str) -> None:
        self._pipe = pipe
        self._toolbox = toolbox
        self._log = log
        self._owner = owner
        self.images = ToolImages(pipe)
        self._gate = FairGate(TOGETHER, "tools", share=SHARE, bounded=False)
        self._turns: WeakValueDictionary[CallKey, asyncio.Lock] = (
            WeakValueDictionary()
        )  # of the calls that this copy makes
        self._begun: set[CallKey] = set()  # calls that this copy has made, and whose claims have no result yet
        self._releases: set[asyncio.Task[None]] = set()  # releases of claims

    @contextlib.asynccontextmanager
    async def among_slow(self, tenant: str) -> AsyncIterator[None]:
        """Inside, others are waited for: the stage takes on other responses meanwhile, and tenants wait in turns."""
        leave_turn()
        async with self._gate.turn(tenant, 0):
            yield

    async def with_approved(self, begun: Begun, answers: Sequence[Approval]) -> Begun:
        """Make the calls that a person has approved, and add them to the beginning."""
        calls = [
            {
                "id": item_id("mcp_call", TurnId(begun.job.id, 0), len(begun.items) + number),
                "type": "mcp_call",
                "server_label": asked["server_label"],
                "name": asked["name"],
                "arguments": asked["arguments"],
                "approval_request_id": asked["id"],
                "status": "in_progress",
                "output": None,
                "error": None,
            }
            for number, (asked, approved, _) in enumerate(answers)
            if approved
        ]
        await show(self._pipe, begun.job, begun.index, calls, finished=False)
        items = await self.make_all(begun, 0, [*begun.items, *calls], begun.index + len(calls))
        return begun.model_copy(update={"items": items, "index": begun.index + 2 * len(calls)})

    async def make_all(self, begun: Begun, turn: int, items: Items, index: int, *, made: int = 0) -> Items:
        """Make all waiting calls of a turn concurrently and publish them in order; return the items with the
        results."""
        job = begun.job
        most = job.body.get("max_tool_calls") or inf
        card = self._pipe.registry.named(job.body["model"])
        longest = card.context_length // 2 if card else LONGEST
        waiting = [position for position, item in enumerate(items) if waits(item)]
        sealed = await self._log.sealed(job.tenant, job.id) if waiting else {}
        items = list(items)
        works = (
            self._call(
                begun, CallKey(job.tenant, job.id, turn, position), items[position], sealed, made + number < most
            )
            for number, position in enumerate(waiting)
        )
        began = self._pipe.now()
        slow = self.among_slow(job.tenant) if waiting else contextlib.nullcontext()
        async with slow, at_once(map(self._timed, works)) as calls:
            for number, (position, call) in enumerate(zip(waiting, calls, strict=True)):
                given, returned = await call
                result = _cut(given, longest)
                outcome: Item = {"output": result.text}
                if result.is_error:
                    outcome = {"output": None, "error": _error(result.text)}
                if result.images:
                    outcome["images"] = list(result.images)
                items[position] = {**items[position], **outcome, "status": "failed" if result.is_error else "completed"}
                notes = {"call": f"{began:.6f}", "returned": f"{returned:.6f}"}
                await show(self._pipe, job, index + number, [items[position]], notes=notes)
        return items

    async def _timed(self, call: Coroutine[Any, Any, ToolResult]) -> tuple[ToolResult, float]:
        """The result of a call, and when it was there, in Unix seconds."""
        return await call, self._pipe.now()

    async def _call(
        self, begun: Begun, key: CallKey, item: Item, sealed: dict[str, str], is_allowed: bool
    ) -> ToolResult:
        if not is_allowed:
            return TOO_MANY
        label, name = item["server_label"], item["name"]
        source = next((source for source in begun.sources if source.label == label), None)
        tool = next((tool for tool in begun.tools if (tool.label, tool.tool) == (label, name)), None)
        if source is None or tool is None:
            return ToolResult(f"The tool {name} of {label} is no longer available.", True)
        source = source.model_copy(update={"sealed": sealed.get(label)})
        keep = self.images.keeper(key.tenant, begun.job.body["model"])
        return await self._make(key, source, tool, item["arguments"], keep)

    async def _make(
        self, key: CallKey, source: Source, tool: LoopTool, arguments: str, keep: KeepImage | None = None
    ) -> ToolResult:
        """The result of a call: made now, or earlier by the copy that claimed it."""
        claim: Claim | None = None
        result: ToolResult | None = None
        try:
            # A delivery whose lease has expired comes again, perhaps while the call is still running.
            async with self._lock(key):
                claim = await self._claim(key, tool.repeatable)
                if claim.result is not None:
                    return claim.result
                result = None if tool.repeatable else UNKNOWN  # if it is interrupted
                self._begun.add(key)
                with tool_span(self._pipe.tracer, tool):
                    result = await self._toolbox.call(source, tool, arguments, keep)
                result = await through_outages(partial(self._log.settle, key, claim, result), key)
                self._begun.discard(key)
                return result
        except BaseException:
            if claim is None or claim.result is None:
                release = asyncio.create_task(self._release(key, claim, result))
                self._releases.add(release)
                release.add_done_callback(self._releases.discard)
                await asyncio.wait([release], timeout=RELEASE_TIMEOUT)
            raise

    async def _release(self, key: CallKey, claim: Claim | None, result: ToolResult | None) -> None:
        """Release the claim of a call that this copy has abandoned, as soon as the broker is back.

        `claim` is None if it is unknown whether the call was claimed.
        """
        async with self._lock(key):
            if claim is None:
                claim = await through_outages(partial(self._log.claim, key, self._owner), key)
            if claim.owner == self._owner and claim.result is None:
                await through_outages(partial(self._log.leave, key, claim, result), key)
            self._begun.discard(key)

    async def _claim(self, key: CallKey, repeatable: bool) -> Claim:
        """A claim of our own, or one with its result. If repeatable, we take over the claim of a copy that has died."""
        while True:
            claim = await through_outages(partial(self._log.claim, key, self._owner), key)
            if claim.is_new or claim.result is not None:
                return claim
            if claim.owner == self._owner and key not in self._begun:
                return claim  # it was stored, and the answer was lost
            if self._lives(claim.owner):
                await asyncio.sleep(POLL_INTERVAL)
            elif not repeatable and claim.owner != FREE:
                result = await through_outages(partial(self._log.settle, key, claim, UNKNOWN), key)
                return claim._replace(result=result)
            elif ours := await through_outages(partial(self._log.take_over, key, claim, self._owner), key):
                return ours

    def _lock(self, key: CallKey) -> asyncio.Lock:
        return self._turns.setdefault(key, asyncio.Lock())

    def _lives(self, owner: str) -> bool:
        """Whether another copy is known to run, and so may still make its call."""
        cards = self._pipe.registry.stages
        return owner != self._owner and any((card.stage, card.id) == ("tools", owner) for card in cards)


def waits(item: Item) -> bool:
    """Whether the item is a call that was not made yet."""
    return (item["type"], item.get("status")) == ("mcp_call", "in_progress")


def _cut(result: ToolResult, most: int) -> ToolResult:
    """Cut a result to `most` characters: with half as many as its context has tokens, a model can still continue."""
    text = result.text
    if len(text) <= most:
        return result
    note = f"[The result was cut here: these are the first {most} of {len(text)} characters; ask for less at a time.]"
    return result._replace(text=f"{text[:most]}\n{note}")


def _error(text: str) -> Item:
    return {"type": "mcp_tool_execution_error", "content": [{"type": "text", "text": text}]}
