"""The stage `tools`: begins a response, runs the tools that a turn calls, asks for turns until the model has finished.

The state of a response is only in its log; a message means that the response may continue. So any copy of the stage can
continue it, and a duplicate message has no effect.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from dataclasses import asdict, astuple, replace
from math import inf
from typing import Any, Literal

from ...schemas.errors import BrokerUnavailable, DeadlineExceeded, GenerationFailed, Refusal, Transient
from ...schemas.events import Accepted, Cancelled, Done, ErrorBody, Event, Expired, Failed, FinishReason, Turn, Usage
from ...schemas.jobs import Job
from ...schemas.loops import Begun, Ended, Items, LoopJob, LoopTool, Step, TurnId
from ...schemas.openai.responses.built_in_items import TOOLS as BUILT_IN_TOOLS
from ...schemas.openai.responses.files import files_named
from ...schemas.openai.responses.items import approved_calls
from ...schemas.openai.responses.messages import chat_messages
from ...schemas.openai.responses.paths import in_response
from ...schemas.openai.responses.request import ResponsesRequest, parse_responses
from ...schemas.openai.responses.turns import item_id
from ...schemas.wire import codec
from ...schemas.wire.codec import DecodeError
from ...streams.port import DEADLINE, SCHEMA, Delivery
from ...streams.stores.conversations import Conversations
from ...streams.stores.history import History
from ...streams.stores.named_files import NamedFileStore
from ...streams.stores.responses import ResponseLog, Stored
from ...streams.topology import EVENTS, TOOLS
from ..contract import Intake, Pipe, Stage
from ..endings import Address
from ..visits import leave_turn, traceparent
from .answer import answer_of, ended_turn, items_said, turned_by, was_accepted
from .calls import (
    Calls,
    Toolbox,
    address,
    at_once,
    count,
    for_model,
    list_item,
    listed,
    publish_event,
    report_unlisted,
    show,
    waits,
)
from .spans import link_response

MAX_TURNS = 10
INCOMPLETE = ("length", "content_filter")  # finish reasons
REFUSED = (400, 404, 413, 429, 503)  # statuses with which the first turn may be refused
# Items that the client answers.
_CLIENTS = {"function_call", "custom_tool_call", "mcp_approval_request", *BUILT_IN_TOOLS}
MAX_PAUSE = 30.0  # seconds before a turn that the server had no capacity for is requested again

Status = Literal["completed", "failed", "incomplete", "cancelled"]


class Tools(Stage):
    """Consumes responses to begin and turns that have ended; publishes turns to run."""

    name = "tools"
    concurrency = 256

    def __init__(self, pipe: Pipe, toolbox: Toolbox) -> None:
        super().__init__(pipe)
        self._toolbox = toolbox
        self._files = NamedFileStore(pipe.broker, pipe.settings.max_body_size)
        self._log: ResponseLog  # set by run, like these
        self._conversations: Conversations
        self._history: History
        self._calls: Calls

    @property
    def most_unsettled(self) -> int:
        """All that may wait: a response whose tools are slow stays in hand, and must keep nobody else's from coming."""
        return self.pipe.settings.tools_limit + 2 * self.concurrency

    async def run(self, intake: Intake) -> None:
        self._log = await ResponseLog.of(self.pipe.broker)
        self._conversations = await Conversations.of(self.pipe.broker)
        self._history = History(self._log, self._conversations, self.pipe.settings.responses_ttl, self.pipe.now)
        self._calls = Calls(self.pipe, self._toolbox, self._log, self.copy)
        await intake.consume_lanes(TOOLS, self.name, self.pipe.subjects.tools_of)

    async def handle(self, delivery: Delivery) -> None:
        message = delivery.message
        job: LoopJob | None
        schema = message.headers.get(SCHEMA)
        if codec.is_schema(schema, codec.LOOP_JOB):
            job = codec.decode_model(LoopJob, message.data, schema)
            response, work = address(job), self._begin(job)
        elif codec.is_schema(schema, codec.STEP):
            step, job = codec.decode_model(Step, message.data, schema), None
            response, work = Address(step.id, step.tenant, step.bridge), self._step(step)
        else:
            raise DecodeError(f"the stage tools does not read {schema}")
        try:
            await self._cancellable(response, work, job)
        except (Refusal, Transient):
            raise
        except Exception:
            stored = await self._log.read(response.tenant, response.request)
            if stored is not None and delivery.attempt >= self.pipe.settings.max_attempts:
                fault = GenerationFailed("The response failed repeatedly in the stage tools; its log says why.")
                await self._end(stored, "failed", ErrorBody.of(fault))
            raise

    async def _cancellable(self, response: Address, work: Coroutine[Any, Any, None], job: LoopJob | None) -> None:
        """Do the work. A response that is cancelled before or meanwhile ends as cancelled, and is stored with its
        request."""
        task = asyncio.create_task(work)
        stopped = False

        def stop() -> None:
            nonlocal stopped
            stopped = True
            task.cancel()

        try:
            with self.pipe.cancellations.calling(response.tenant, response.request, stop):
                await task
        except asyncio.CancelledError:
            if not stopped:  # this process is shutting down
                raise
            stored = await self._log.read(response.tenant, response.request)
            if stored is None and job is not None and not await self._log.is_over(job.tenant, job.id):
                begun = await self._asked(job, parse_responses(job.body))
                stored = Stored(await self._history.keep(begun))
            if stored is not None:
                await self._end(stored, "cancelled")

    async def _begin(self, job: LoopJob) -> None:
        stored = await self._log.read(job.tenant, job.id)
        if stored is None:
            if await self._log.is_over(job.tenant, job.id):
                return
            try:
                async with asyncio.timeout(job.deadline - self.pipe.now()):
                    begun = await self._prepare(job)
            except BaseException as error:
                await self._log.drop_sealed(job.tenant, job.id)
                if isinstance(error, TimeoutError):
                    raise DeadlineExceeded("The deadline passed while the servers listed their tools.") from None
                raise
            stored = Stored(await self._history.keep(begun))
        if not stored.turns:
            await self._advance(stored, self._continue(stored))

    async def _step(self, step: Step) -> None:
        turn, stored = TurnId.of(step.turn), await self._log.read(step.tenant, step.id)
        if turn is None or stored is None or turn.turn < len(stored.turns):
            return  # the response was deleted, or has passed this turn
        if turn.turn > len(stored.turns) + 1 and stored.ended is None:
            raise BrokerUnavailable(f"{step.turn} has ended, and turn {len(stored.turns) + 1} cannot be read yet")
        if turn.turn > len(stored.turns) and stored.ended is None:
            await self._advance(stored, self._take(stored, turn), turn)
        else:
            await self._advance(stored, self._continue(stored))

    async def _advance(self, stored: Stored, work: Coroutine[Any, Any, None], turn: TurnId | None = None) -> None:
        """Do the work, which takes the `turn` if there is one; a fault of a response that has begun ends it as failed.

        What the turn has said is kept, also past the deadline.
        """
        link_response(stored.begun.job)
        if stored.is_unwanted and stored.ended is None:
            work.close()
            await self._end(stored, "cancelled")
            return
        try:
            async with asyncio.timeout(stored.begun.job.deadline - self.pipe.now()):
                await work
        except TimeoutError:
            await self._continue(await self._with_ended(stored, turn), is_late=True)
        except Refusal as refusal:
            await self._end(stored, "failed", ErrorBody.of(refusal))

    async def _prepare(self, job: LoopJob) -> Begun:
        """Check a response's request, list its tools and make the calls that a person has approved.

        Raises `InvalidRequest` and `StreamNotFound`.
        """
        request = parse_responses(job.body)
        sources = request.sources(job.tenant)
        for source in sources:
            self._toolbox.check(source)
        begun = await self._asked(job, request)
        history = await self._history.items(job, begun)
        await self._files.check(job.tenant, files_named(history, begun.input, request))
        answers = approved_calls(history, begun.input)
        chat_messages([*history, *begun.input], request.instructions, before=len(history))  # raises `InvalidRequest`
        await publish_event(self.pipe, address(job), Accepted(job.id, request.model, int(job.created), 0), "accepted")

        ids = [item_id("mcp_list_tools", TurnId(job.id, 0), number) for number in range(len(sources))]
        empty = [list_item(source.label, id) for source, id in zip(sources, ids, strict=True)]
        await show(self.pipe, job, 0, empty, finished=False)
        items: Items = []
        found: list[LoopTool] = []
        works = (listed(self._toolbox, source, item) for source, item in zip(sources, empty, strict=True))
        slow = self._calls.among_slow(job.tenant) if sources else contextlib.nullcontext()
        async with slow, at_once(works) as listings:
            for listing in listings:
                item, tools = await listing
                await show(self.pipe, job, len(sources) + len(items), [item])
                items.append(item)
                found += tools
        sealed = {source.label: source.sealed for source in sources if source.sealed}
        if sealed:
            await self._log.keep_sealed(job.tenant, job.id, sealed)
        known = {
            "sources": tuple(source.model_copy(update={"sealed": None}) for source in sources),
            "tools": for_model(found, [tool.name for tool in request.client_tools]),
            "items": items,
            "index": 2 * len(items),
        }
        return await self._calls.with_approved(begun.model_copy(update=known), answers)

    async def _asked(self, job: LoopJob, request: ResponsesRequest) -> Begun:
        """The beginning, with the request's items but no tools. Raises `InvalidRequest` and `StreamNotFound`."""
        origin, input = await self._history.origin(job, request), await self._history.input(job, request)
        return Begun(**dict(origin), job=job.unsealed(), sources=(), tools=(), input=input, items=[], index=0)

    async def _continue(self, stored: Stored, *, is_late: bool = False) -> None:
        """Request the next turn, unless it `is_late` for that, or end the response."""
        request = parse_responses(stored.begun.job.body)
        last = stored.turns[-1] if stored.turns else None
        kinds = {item["type"] for item in last.items} if last else set()
        if stored.ended is not None:
            await self._publish_end(stored)
        elif last is not None and last.reason == "deadline":
            await self._end(stored, "failed", ErrorBody.of(DeadlineExceeded("The deadline passed in a turn.")))
        elif last is not None and (last.reason in INCOMPLETE or stored.spent >= (request.max_output_tokens or inf)):
            await self._end(stored, "incomplete")
        elif last is not None and ("mcp_call" not in kinds or kinds & _CLIENTS):
            await self._end(stored, "completed")
        elif is_late:
            error = ErrorBody.of(DeadlineExceeded("The deadline passed between two turns."))
            await self._end(stored, "failed", error)
        else:
            with report_unlisted(stored.begun.items):
                await self._ask(stored, TurnId(stored.begun.job.id, len(stored.turns) + 1))

    async def _ask(self, stored: Stored, turn: TurnId) -> None:
        """Publish the request of a turn, unless it has events already."""
        begun, job, id = stored.begun, stored.begun.job, str(turn)
        request = parse_responses(job.body)
        may_call = turn.turn < (request.max_turns or MAX_TURNS) and count(stored.output) < (
            request.max_tool_calls or inf
        )
        history = await self._history.items(job, begun)
        items = [*history, *begun.input, *stored.output]
        given: dict[str, Any] = {"tools": begun.tools, "namespaced": request.namespaced, "before": len(history)}
        if self._calls.images.are_seen(request.model):
            given["images"] = await self._files.shown(job.tenant, items)
        messages = chat_messages(items, request.instructions, **given)
        first = _is_first(turn, begun)
        body = request.chat_body(messages, begun.tools, first=first, spent=stored.spent, tools_allowed=may_call)
        if await self.pipe.broker.replay(EVENTS, self.pipe.subjects.events_at(job.tenant, id)):
            return
        index = stored.index + turn.attempt
        await publish_event(self.pipe, address(job), Turn(job.id, index, id, begun.callable), str(index))
        asked = Job(id=id, endpoint="/v1/chat/completions", bridge=job.bridge, body=body)
        subject = self.pipe.subjects.jobs(job.priority, job.tenant)
        headers = {DEADLINE: f"{job.deadline:.3f}", **traceparent()}
        await self.pipe.store(subject, self.pipe.encoded(asked), f"{job.tenant}.{id}", codec.JOB, headers)

    async def _take(self, stored: Stored, turn: TurnId) -> None:
        """Continue after a turn that has ended."""
        begun, job = stored.begun, stored.begun.job
        asked = parse_responses(job.body)
        tokens, final = await answer_of(self.pipe, job.tenant, str(turn))
        match final:
            case Failed(error=error) if error.status in (429, 503) and (turn.turn > 1 or count(begun.items)):
                # The response was accepted, so its turns wait for capacity.
                leave_turn()
                await asyncio.sleep(min(error.retry_after or 1.0, MAX_PAUSE))
                await self._ask(stored, turn._replace(attempt=turn.attempt + 1))
            case Failed(error=error) | Expired(error=error):
                await self._end(stored, "failed", in_response(error, asked, begun.tools, first=_is_first(turn, begun)))
            case Cancelled():
                await self._end(stored, "cancelled")
            case Done():
                said = items_said(asked, begun, turn, tokens, final)
                index = stored.index + turn.attempt + 1
                items = await self._calls.make_all(begun, turn.turn, said, index, made=count(stored.output))
                turned = turned_by(turn, final, items, index + sum(map(waits, said)))
                turned = await self._log.write(job.tenant, job.id, turned)
                await self._continue(replace(stored, turns=(*stored.turns, turned)))
            case _:
                raise GenerationFailed("The broker has lost the answer of a turn; send the request again.")

    async def _with_ended(self, stored: Stored, turn: TurnId | None) -> Stored:
        """The response with the turn, if that had ended when the deadline passed and no calls would follow."""
        job = stored.begun.job
        stored = await self._log.read(job.tenant, job.id) or stored
        if turn is None or turn.turn != len(stored.turns) + 1:
            return stored
        if (turned := await ended_turn(self.pipe, stored, turn)) is None:
            return stored
        return replace(stored, turns=(*stored.turns, await self._log.write(job.tenant, job.id, turned)))

    async def _end(self, stored: Stored, status: Status, error: ErrorBody | None = None) -> None:
        """End the response: store it, append its items to its conversation, and publish the final event."""
        job = stored.begun.job
        stored = await self._log.read(job.tenant, job.id) or stored
        if stored.ended is None:
            ended = Ended(status=status, at=self.pipe.now(), error=asdict(error) if error else None)
            conversation = parse_responses(job.body).conversation
            if conversation is not None and status in ("completed", "incomplete"):
                items = [*stored.begun.input, *stored.output]
                await self._conversations.add(job.tenant, conversation, job.id, items)
            stored = replace(stored, ended=await self._log.write(job.tenant, job.id, ended))
        await self._publish_end(stored)

    async def _publish_end(self, stored: Stored) -> None:
        job, ended = stored.begun.job, stored.ended
        assert ended is not None
        usages = [Usage(**turn.usage) for turn in stored.turns]
        usage = Usage(*map(sum, zip(*map(astuple, usages), strict=True))) if usages else Usage(0, 0, 0)
        error = ErrorBody(**ended.error) if ended.error else None
        final: Event
        if error is not None:
            final = Expired(job.id, error) if error.status == 408 else Failed(job.id, error)
        elif ended.status == "cancelled":
            final = Cancelled(job.id, usage)
        else:
            is_filtered = bool(stored.turns) and stored.turns[-1].reason == "content_filter"
            cut: FinishReason = "content_filter" if is_filtered else "length"
            fallback = next((turn.fallback for turn in stored.turns if turn.fallback), None)
            final = Done(job.id, (cut if ended.status == "incomplete" else "stop",), usage, ended.at, fallback)
        await publish_event(self.pipe, address(job), final, "end")
        await self._log.drop_sealed(job.tenant, job.id)
        # A client whose first turn was not accepted gets a refusal and never learns its id.
        is_refusal = error is not None and error.status in REFUSED and not stored.output and not stored.turns
        is_refusal = is_refusal and not await was_accepted(self.pipe, job.tenant, str(TurnId(job.id, 1)))
        if job.body.get("store") is False or is_refusal:
            await self._log.delete(job.tenant, stored)


def _is_first(turn: TurnId, begun: Begun) -> bool:  # nothing has been generated or called before
    return turn.turn == 1 and not count(begun.items)
