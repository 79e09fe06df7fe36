"""The requests of all tenants and bridges, as their events tell of them: those that wait, run, and have just ended.

Nothing is heard, and nothing kept, while nobody watches. What happened before is read from the newest stored events.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from ....schemas.canaries import CANARY
from ....schemas.events import Accepted, Cancelled, Done, Event, Expired, Failed, Queued, Started, Token
from ....schemas.wire import codec
from ....schemas.wire.hops import parse_hops
from ....streams.port import HOPS, Broker, Message
from ....streams.topology import EVENTS, STREAM, Subjects

BACK = 3_000  # stored messages of a stream that are read when somebody begins to watch
MOST_OPEN = 20_000  # requests that are remembered until they end
MOST_ENDED = 100
MOST_SHOWN = 100  # of those that wait, and of those that run
_STARTED = b'"started"'  # without it, a message of outputs holds only tokens

State = Literal["waiting", "running", "completed", "failed", "cancelled", "expired"]
Key = tuple[str, str]  # a request's tenant and id


@dataclass(slots=True)
class RequestRow:
    """What is known of a request. `created` is in Unix seconds; `first_token` and `took` are seconds since then."""

    id: str
    tenant: str
    created: float
    state: State = "waiting"
    model: str | None = None
    endpoint: str | None = None
    priority: str | None = None
    worker: str | None = None  # the newest that has begun with it
    epoch: int = 0  # workers that have held it
    position: int | None = None
    wait: float | None = None
    model_state: str | None = None
    progress: int | None = None
    prompt_tokens: int = 0
    first_token: float | None = None
    took: float | None = None
    reason: str | None = None  # how it ended: its finish reasons, or the code of its error
    tokens: Counter[int] = field(default_factory=Counter)  # by choice

    def shown(self) -> dict[str, Any]:
        """The fields that have a value, as JSON."""
        values = {name: getattr(self, name) for name in self.__slots__ if name not in ("tokens", "epoch")}
        values |= {"tokens": self.tokens.total(), "takeovers": max(0, self.epoch - 1)}
        return {name: value for name, value in values.items() if value is not None}


class RequestBoard:
    """Knows what it has heard while the block of `following` runs; `now` returns Unix seconds."""

    def __init__(self, broker: Broker, subjects: Subjects, now: Callable[[], float] = time.time) -> None:
        self._broker, self._subjects, self._now = broker, subjects, now
        self._open: OrderedDict[Key, RequestRow] = OrderedDict()  # the oldest first
        self._ended: OrderedDict[Key, RequestRow] = OrderedDict()

    @contextlib.asynccontextmanager
    async def following(self) -> AsyncIterator[None]:
        """Raises `BrokerUnavailable`."""
        root = self._subjects.root
        heard = (STREAM, f"{root}.stream.>", self.hear_output), (EVENTS, f"{root}.events.>", self.hear_event)
        async with contextlib.AsyncExitStack() as ending:
            ending.callback(self._forget)
            for _, subject, hear in heard:
                ending.push_async_callback((await self._broker.listen(subject, hear)).close)
            newest = {used.name: used.last for used in await self._broker.usage()}
            for stream, subject, hear in heard:
                for message in await self._broker.replay(stream, subject, max(0, newest.get(stream, 0) - BACK)):
                    hear(message)
            yield

    def hear_event(self, message: Message) -> None:
        """Take an event; the subject is `<root>.events.<tenant>.<bridge>.<request>`."""
        _, _, tenant, _, request = message.subject.split(".")
        if tenant == CANARY:
            return
        try:
            event = codec.decode_event(message.data)
        except codec.DecodeError:
            return  # of another release
        key = tenant, request
        if (row := self._row(key)) is not None:
            self._take(key, row, event, message.time or self._now())

    def hear_output(self, message: Message) -> None:
        """Take a worker's outputs; the subject is `<root>.stream.<partition>.<tenant>.<request>`."""
        if _STARTED not in message.data:
            return
        _, _, _, tenant, request = message.subject.split(".")
        if tenant == CANARY:
            return
        try:
            outputs = codec.decode_outputs(message.data)
        except codec.DecodeError:
            return
        hops = parse_hops(message.headers.get(HOPS))
        for output in outputs:
            if isinstance(output, Started) and (row := self._row((tenant, request))) is not None:
                if output.epoch >= row.epoch:
                    row.epoch, row.endpoint, row.priority = output.epoch, output.endpoint, output.priority
                    row.model = row.model or output.model
                    row.prompt_tokens = output.prompt_tokens
                    row.worker = next((hop.more["worker"] for hop in reversed(hops) if "worker" in hop.more), None)
                    row.created = hops[0].at if hops else row.created
                _runs(row)

    def counts(self) -> Counter[State]:
        """How many requests are in each state, of those that are known."""
        return Counter(row.state for rows in (self._open, self._ended) for row in rows.values())

    def shown(self) -> dict[str, dict[str, Any]]:
        """The requests to show, by `tenant/id`."""
        found: dict[State, list[RequestRow]] = {"waiting": [], "running": []}
        for row in self._open.values():
            found[row.state].append(row)
        waiting = sorted(found["waiting"], key=_turn)[:MOST_SHOWN]
        rows = [*waiting, *found["running"][-MOST_SHOWN:], *self._ended.values()]
        return {f"{row.tenant}/{row.id}": row.shown() for row in rows}

    def _row(self, key: Key) -> RequestRow | None:
        """The request of an event; None if it has ended already."""
        if key in self._ended:
            return None
        if (row := self._open.get(key)) is None:
            tenant, request = key
            row = self._open[key] = RequestRow(request, tenant, self._now())
            if len(self._open) > MOST_OPEN:
                self._open.popitem(last=False)
        return row

    def _take(self, key: Key, row: RequestRow, event: Event, at: float) -> None:
        match event:
            case Accepted():
                if not event.created <= row.created < event.created + 1:  # which is in whole seconds
                    row.created = float(event.created)
                row.model, row.prompt_tokens = event.model, event.prompt_tokens
            case Queued() if row.state == "waiting":
                row.position, row.wait = event.position, event.wait
                row.model_state, row.progress = event.model, event.progress
            case Token():
                row.tokens[event.choice] = max(row.tokens[event.choice], event.index + len(event.token_ids))
                if row.first_token is None and event.index == 0:
                    row.first_token = _since(row, at)
                _runs(row)
            case Done():
                row.tokens = Counter({0: event.usage.completion_tokens})
                self._end(key, "completed", ", ".join(dict.fromkeys(event.finish_reasons)), at)
            case Cancelled():
                row.tokens = Counter({0: event.usage.completion_tokens})
                self._end(key, "cancelled", None, at)
            case Failed():
                self._end(key, "failed", event.error.code, at)
            case Expired():
                self._end(key, "expired", event.error.code, at)
            case _:
                _runs(row)  # a response, whose turns are requests of their own

    def _end(self, key: Key, state: State, reason: str | None, at: float) -> None:
        row = self._ended[key] = self._open.pop(key)
        _runs(row)
        row.state, row.reason, row.took = state, reason, _since(row, at)
        if len(self._ended) > MOST_ENDED:
            self._ended.popitem(last=False)

    def _forget(self) -> None:
        self._open.clear()
        self._ended.clear()


def _turn(row: RequestRow) -> tuple[int, float]:
    """Whose turn comes first; what has no position yet comes last."""
    return row.position or MOST_OPEN, row.created


def _runs(row: RequestRow) -> None:
    if row.state == "waiting":
        row.state = "running"
        row.position = row.wait = row.model_state = row.progress = None


def _since(row: RequestRow, at: float) -> float:
    return round(max(0.0, at - row.created), 3)
