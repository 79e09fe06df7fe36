"""Tells a request's life from its stored messages: its events, its outputs and their headers."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict

from ...schemas.errors import StreamNotFound
from ...schemas.events import (
    FINAL,
    Accepted,
    Cancelled,
    Delta,
    Done,
    ErrorBody,
    Event,
    Expired,
    Failed,
    ItemEvent,
    Queued,
    Started,
    Token,
    Turn,
    outcome_of,
)
from ...schemas.jobs import TOKEN_PATTERN
from ...schemas.request_trace import Mark, RequestTrace, StageVisit, Status, ToolCall
from ...schemas.wire import codec
from ...schemas.wire.hops import PREEMPTED, Hop, parse_hops
from ...streams.port import HOPS, Broker, Message
from ...streams.topology import EVENTS, STREAM, Subjects, partition


async def read_trace(broker: Broker, subjects: Subjects, partitions: int, tenant: str, id: str) -> RequestTrace:
    """The trace of a tenant's request, with those of its turns.

    Raises `StreamNotFound` where no event is stored, and `BrokerUnavailable`.
    """
    events: list[Message] = []
    if re.fullmatch(TOKEN_PATTERN, id) and re.fullmatch(TOKEN_PATTERN, tenant):
        events = await broker.replay(EVENTS, subjects.events_at(tenant, id))
    if not events:
        raise StreamNotFound("There is no such request, or its events have expired, or it has no event yet.")
    outputs = await broker.replay(STREAM, subjects.stream(partition(tenant, id, partitions), tenant, id))
    trace, turns = await asyncio.to_thread(_traced, id, events, outputs, broker.now())  # which may be long
    found = []
    for turn in turns:
        try:
            found.append(await read_trace(broker, subjects, partitions, tenant, turn))
        except StreamNotFound:
            continue  # it has not come so far
    return trace.model_copy(update={"turns": tuple(found)})


def _traced(
    id: str, events: Sequence[Message], outputs: Sequence[Message], now: float
) -> tuple[RequestTrace, list[str]]:
    life = _Life(id)
    for message in outputs:
        life.add_outputs(message)
    for message in events:
        life.add_event(message)
    return life.trace(now), life.turns


class _Run:
    """A worker's time with the request: one epoch."""

    def __init__(self, started: Started, message: Message, hops: Sequence[Hop], from_token: int) -> None:
        self.started, self.at, self.from_token = started, message.time, from_token
        self.hop = next((hop for hop in reversed(hops) if hop.stage == "infer"), None)
        self.worker = self.hop.more.get("worker") if self.hop else None
        self.batch = next((hop for hop in reversed(hops) if hop.stage == "batch"), None)
        self.told = _told_of_the_last(self.hop, self.batch)
        self.tokens = 0  # set by add, like these
        self.first: float | None = None
        self.last: float | None = None
        self.unfinished = started.choices
        self.preemptions = 0

    def add(self, delta: Delta, at: float) -> None:
        if delta.token_ids:
            self.first = self.first or at
            self.tokens += len(delta.token_ids)
        self.last = at
        self.unfinished -= delta.finish_reason is not None

    def visit(self, following: _Run | None, ended: float | None) -> StageVisit:
        left, ending = ended, None
        if self.unfinished <= 0:
            left, ending = self.last, "finished"
        elif following is not None:
            left, ending = self.last or self.at, "returned" if "returned" in following.told else "lost"
        return StageVisit.model_validate(
            {
                "stage": "infer",
                "entered": self.hop and self.hop.at,
                "began": self.hop and self.hop.began,
                "left": left,
                "attempt": self.hop.attempt if self.hop else 1,
                "worker": self.worker,
                "batch_size": _size(self.batch),
                "epoch": self.started.epoch,
                "first_token": self.first,
                "last_token": self.last,
                "from_token": self.from_token,
                "tokens": self.tokens,
                "preemptions": self.preemptions,
                "ending": ending,
            }
        )


class _Life:
    """Collects what messages tell of one request; `trace` puts it in order."""

    def __init__(self, id: str) -> None:
        self.turns: list[str] = []
        self._id = id
        self._hops: dict[tuple[str, float], Hop] = {}  # by stage and when it began; the last one known
        self._marks: list[Mark] = []
        self._runs: list[_Run] = []
        self._counts: dict[int, int] = {}  # tokens by choice
        self._finished: set[int] = set()  # choices
        self._calls: dict[str, ToolCall] = {}  # by their items
        self._accepted: tuple[Accepted, float] | None = None
        self._first_token: float | None = None
        self._final: tuple[Event, float] | None = None
        self._earliest = float("inf")

    def add_outputs(self, message: Message) -> None:
        hops = self._note(message)
        for output in codec.decode_outputs(message.data):
            if isinstance(output, Started):
                self._start(output, message, hops)
            elif self._runs and self._counts_too(output, self._runs[-1]):
                self._counts[output.choice] = output.index + len(output.token_ids)
                if output.finish_reason is not None:
                    self._finished.add(output.choice)
                self._runs[-1].add(output, message.time)
        for hop in hops:
            if hop.stage == PREEMPTED and self._runs:
                self._pause(hop, self._runs[-1])

    def _start(self, started: Started, message: Message, hops: Sequence[Hop]) -> None:
        if self._runs and started.epoch <= self._runs[-1].started.epoch:
            return
        before = self._runs[-1] if self._runs else None
        run = _Run(started, message, hops, sum(self._counts.values()))
        if before is not None:
            run.unfinished -= len(self._finished)
        self._runs.append(run)
        if started.epoch > 1:
            self._mark(message.time, "takeover", _taken_over(before, run), token=run.from_token, worker=run.worker)

    def _counts_too(self, delta: Delta, run: _Run) -> bool:
        is_next = delta.index == self._counts.get(delta.choice, 0) and delta.choice not in self._finished
        return delta.epoch == run.started.epoch and is_next

    def _pause(self, hop: Hop, run: _Run) -> None:
        run.preemptions += 1
        choice, of = int(hop.more.get("choice", "0")), f" at {run.worker}" if run.worker else ""
        self._mark(hop.at, "preempted", f"the engine preempted it{of}: no memory", choice=choice, worker=run.worker)
        if hop.left is not None:
            self._mark(hop.left, "resumed", f"resumed{of}", choice=choice, worker=run.worker)

    def add_event(self, message: Message) -> None:
        hops = self._note(message)
        event, at = codec.decode_event(message.data), message.time
        match event:
            case Accepted():
                self._accepted = self._accepted or (event, at)
                self._mark(at, "accepted", "accepted")
            case Queued():
                self._mark(at, "position", _position(event), position=event.position)
            case Token():
                self._first_token = self._first_token or at
            case ItemEvent():
                self._call(event, at, hops)
            case Turn():
                self.turns.append(event.job)
                self._mark(at, "turn", f"turn {len(self.turns)} of the model")
            case _ if isinstance(event, FINAL) and self._final is None:
                self._final = event, at
                self._mark(at, "end", _ending(event))

    def _call(self, event: ItemEvent, at: float, hops: Sequence[Hop]) -> None:
        item = event.item
        if item.get("type") not in ("mcp_call", "mcp_list_tools"):
            return
        id = str(item.get("id"))
        known = self._calls.get(id)
        told = hops[-1].more if hops else {}
        began = float(told["call"]) if "call" in told else known.began if known else None
        ended = float(told["returned"]) if "returned" in told else at
        if not event.finished:
            began = began or at
        status = "failed" if item.get("error") else "completed"
        self._calls[id] = ToolCall.model_validate(
            {
                "label": str(item.get("server_label")),
                "name": item.get("name"),
                "began": began,
                "ended": ended if event.finished else None,
                "status": status if event.finished else "in_progress",
            }
        )

    def trace(self, now: float) -> RequestTrace:
        accepted, accepted_at = self._accepted or (None, None)
        final, ended = self._final or (None, None)
        started = self._runs[-1].started if self._runs else None
        visits = sorted(self._visits(ended), key=lambda visit: visit.entered or visit.began or visit.first_token or 0.0)
        is_running = bool(self._runs or self._first_token or self.turns)
        status: Status = "running" if is_running else "waiting"
        if final is not None:
            status = outcome_of(final) or status
        elif not is_running and accepted is not None:
            last = max((visit.left for visit in visits if visit.left), default=accepted_at)
            visits.append(StageVisit(stage="batch", entered=last))
        first = next((run for run in self._runs if run.first), None)
        first_token = first.first if first and first.first else self._first_token
        if first_token is not None:
            worker = first.worker if first else None
            text = f"first token, by {worker}" if worker else "first token"
            self._mark(first_token, "first_token", text, worker=worker)
        prompt = started.prompt_tokens if started else accepted.prompt_tokens if accepted else None
        return RequestTrace(
            id=self._id,
            status=status,
            model=accepted.model if accepted else None,
            endpoint=started.endpoint or None if started else None,
            priority=started.priority if started else None,
            began=self._earliest,
            now=now,
            accepted=accepted_at,
            first_token=first_token,
            ended=ended,
            prompt_tokens=prompt,
            finish_reasons=final.finish_reasons if isinstance(final, Done) else (),
            usage=asdict(final.usage) if isinstance(final, Done | Cancelled) else None,
            error=asdict(final.error) if isinstance(final, Failed | Expired) else None,
            stages=tuple(visits),
            marks=tuple(sorted(self._marks, key=lambda mark: mark.at)),
            calls=tuple(self._calls.values()),
        )

    def _visits(self, ended: float | None) -> Iterator[StageVisit]:
        for run, after in zip(self._runs, [*self._runs[1:], None], strict=False):
            yield run.visit(after, ended)
        told = {(run.hop.stage, run.hop.began) for run in self._runs if run.hop}
        for key, hop in self._hops.items():
            if key not in told and hop.stage != PREEMPTED:
                worker = hop.more.get("worker")
                yield StageVisit(
                    stage=hop.stage,
                    entered=hop.at,
                    began=hop.began,
                    left=hop.left,
                    attempt=hop.attempt,
                    worker=worker,
                    batch_size=_size(hop),
                )

    def _note(self, message: Message) -> list[Hop]:
        hops = parse_hops(message.headers.get(HOPS))
        for hop in hops:
            self._hops[hop.stage, hop.began] = hop
            self._earliest = min(self._earliest, hop.at)
        self._earliest = min(self._earliest, message.time)
        return hops

    def _mark(self, at: float, kind: str, text: str, **more: object) -> None:
        self._marks.append(Mark.model_validate({"at": at, "kind": kind, "text": text, **more}))


def _size(batch: Hop | None) -> int | None:
    size = batch.more.get("size", "") if batch else ""
    return int(size) if size.isdecimal() else None


def _told_of_the_last(infer: Hop | None, batch: Hop | None) -> Mapping[str, str]:
    """What the hops tell of the worker before: a new process of its name says so itself, for another one the batch
    stage does."""
    return infer.more if infer and "lost" in infer.more else batch.more if batch else {}


def _taken_over(before: _Run | None, run: _Run) -> str:
    told = run.told
    former = (before.worker if before else None) or told.get("lost") or told.get("returned") or "its worker"
    worker = run.worker or "another worker"
    if worker == former and "lost" in told:
        worker = f"{worker} (restarted)"
    how = "was stopping" if "returned" in told else "died" if "lost" in told else "was no longer heard"
    if before is None or not run.from_token:
        return f"{former} {how} before the first token, {worker} began"
    return f"{former} {how} here, {worker} continued at token {run.from_token}"


def _position(event: Queued) -> str:
    match event.model:
        case "waiting":
            return f"position {event.position}, waiting for the model"
        case "loading":
            return f"position {event.position}, the model loads: {event.progress or 0} %"
        case _:
            return f"position {event.position}"


def _ending(event: Event) -> str:
    match event:
        case Done(finish_reasons=reasons, usage=usage):
            return f"completed ({', '.join(reasons)}): {usage.completion_tokens} tokens"
        case Cancelled():
            return "cancelled"
        case Expired(error=error) | Failed(error=error):
            return f"{outcome_of(event)}: {_named(error)}"
        case _:
            return ""


def _named(error: ErrorBody) -> str:
    return error.code or error.type
