"""Reads back what a turn's model said."""

from __future__ import annotations

import asyncio

from ...schemas import codec
from ...schemas.events import FINAL, Done, Event, Token
from ...streams.topology import EVENTS
from ..contract import Pipe

LOOK = 0.2  # seconds between two looks
PATIENCE = 30.0  # seconds for all that was said to be readable: longer than the broker's elections take


async def answer_of(pipe: Pipe, tenant: str, request: str) -> tuple[list[Token], Event | None]:
    """What the model of a turn that has ended said, in order, and how it ended; None where that is kept no more."""
    clock = asyncio.get_running_loop().time
    until = clock() + PATIENCE
    while True:
        tokens, final = await _stored(pipe, tenant, request)
        if final is not None or clock() >= until:
            return tokens, final
        await asyncio.sleep(LOOK)


async def _stored(pipe: Pipe, tenant: str, request: str) -> tuple[list[Token], Event | None]:
    """No end, where the tokens are fewer than it says."""
    tokens: list[Token] = []
    final: Event | None = None
    for message in await pipe.broker.replay(EVENTS, pipe.subjects.events_at(tenant, request)):
        event = codec.decode_event(message.data)
        if isinstance(event, Token):
            tokens.append(event)
        elif isinstance(event, FINAL):
            final = event
    said: list[Token] = []
    index = 0
    for token in sorted(tokens, key=lambda token: token.index):  # an outage may change their order, or repeat one
        if token.index == index and not (said and said[-1].finish_reason):
            said.append(token)
            index += len(token.token_ids)
    if isinstance(final, Done) and index != final.usage.completion_tokens:
        final = None
    return said, final
