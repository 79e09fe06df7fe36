"""Reads back from the broker what became of a turn."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict

from ...schemas.events import FINAL, Done, Event, Token
from ...schemas.loops import Begun, Items, Turned, TurnId
from ...schemas.openai.responses.request import ResponsesRequest, parse_responses
from ...schemas.openai.responses.turns import TurnItems
from ...schemas.wire import codec
from ...streams.stores.responses import Stored
from ...streams.topology import EVENTS
from ..contract import Pipe
from .calls import waits

POLL_INTERVAL = 0.2  # seconds
PATIENCE = 30.0  # seconds until all events can be read: longer than an election in the broker takes


async def answer_of(pipe: Pipe, tenant: str, request: str) -> tuple[list[Token], Event | None]:
    """The tokens of a turn that has ended, in order, and its final event; None instead if the events have expired."""
    clock = asyncio.get_running_loop().time
    until = clock() + PATIENCE
    while True:
        tokens, final = await _stored(pipe, tenant, request)
        if final is not None or clock() >= until:
            return tokens, final
        await asyncio.sleep(POLL_INTERVAL)


def items_said(asked: ResponsesRequest, begun: Begun, turn: TurnId, tokens: Sequence[Token], final: Done) -> Items:
    """What a turn has said, as items; its calls wait."""
    fold = TurnItems(
        str(turn),
        begun.callable,
        namespaced=asked.namespaced,
        custom=asked.custom_names,
        built_in=asked.built_in_names,
        logprobs=asked.wants_logprobs,
    )
    for token in tokens:
        fold.feed(token)
    fold.finish(final.finish_reasons[0])
    return fold.items


def turned_by(turn: TurnId, final: Done, items: Items, index: int) -> Turned:
    """The turn's end, for the log; `index` is that of the response's next event."""
    reason, usage = final.finish_reasons[0], asdict(final.usage)
    return Turned(turn=turn.turn, items=items, reason=reason, usage=usage, index=index, fallback=final.fallback)


async def ended_turn(pipe: Pipe, stored: Stored, turn: TurnId) -> Turned | None:
    """A turn that has ended, where it is too late for calls: those of a turn that the deadline has cut are left out;
    None where others wait."""
    tokens, final = await answer_of(pipe, stored.begun.job.tenant, str(turn))
    if not isinstance(final, Done):
        return None
    said = items_said(parse_responses(stored.begun.job.body), stored.begun, turn, tokens, final)
    items = [item for item in said if not waits(item)]
    if len(items) < len(said) and final.finish_reasons[0] != "deadline":
        return None
    return turned_by(turn, final, items, stored.index + turn.attempt + 1)


async def was_accepted(pipe: Pipe, tenant: str, request: str) -> bool:
    """Whether a turn has come further than to a refusal: its client has had an answer that names the response."""
    stored = await pipe.broker.replay(EVENTS, pipe.subjects.events_at(tenant, request))
    return any(not isinstance(codec.decode_event(message.data), FINAL) for message in stored)


async def _stored(pipe: Pipe, tenant: str, request: str) -> tuple[list[Token], Event | None]:
    """`answer_of` for the events that can be read now; no final event if some tokens cannot be read yet."""
    tokens: list[Token] = []
    final: Event | None = None
    for message in await pipe.broker.replay(EVENTS, pipe.subjects.events_at(tenant, request)):
        event = codec.decode_event(message.data)
        if isinstance(event, Token):
            tokens.append(event)
        elif isinstance(event, FINAL):
            final = event
    ordered: list[Token] = []
    index = 0
    for token in sorted(tokens, key=lambda token: token.index):  # an outage can reorder or duplicate them
        if token.index == index and not (ordered and ordered[-1].finish_reason):
            ordered.append(token)
            index += len(token.token_ids)
    if isinstance(final, Done) and index != final.usage.completion_tokens:
        final = None
    return ordered, final
