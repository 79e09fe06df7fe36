"""Reads back from the broker what became of a turn."""

from __future__ import annotations

import asyncio

from ...schemas.events import FINAL, Done, Event, Token
from ...schemas.wire import codec
from ...streams.topology import EVENTS
from ..contract import Pipe

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
