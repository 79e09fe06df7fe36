"""What `penstock bench chaos` asks at the end: whether every seat can be taken, and what a server must refuse."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import count

from ..answers import ReceivedAnswer, Request, ask
from ..load import Client, clock
from .evidence import Rooms
from .judge import Broken

PROBE_LIMIT = 120.0  # seconds in which every seat has to be taken once


async def take_all_seats(
    urls: Sequence[str], rooms: Rooms, model: str, longest: int, patience: float
) -> tuple[list[ReceivedAnswer], int]:
    """Ask for more than all seats until each was taken; also returns how many the batch stage never filled."""
    rooms.peaks.clear()
    body = {"model": model, "max_tokens": longest, "ignore_eos": True, "stream": True}
    body |= {"messages": [{"role": "user", "content": "water"}]}
    clients, answers, indices = [Client(url) for url in urls], list[ReceivedAnswer](), count()
    until = clock() + PROBE_LIMIT

    async def one_after_another() -> None:
        while rooms.never_taken and clock() < until:
            index = next(indices)
            answers.append(await ask(clients, "/v1/chat/completions", body, f"probe-{index}", index, patience))

    async with asyncio.TaskGroup() as group:
        for _ in range(2 * rooms.seats):
            group.create_task(one_after_another())
    for client in clients:
        client.close()
    return answers, rooms.never_taken


async def outlive(url: str, request: Request, timeout: float) -> Broken | None:  # noqa: ASYNC109  (that of the request)
    """What is wrong where a time-out is taken that outlives what a takeover needs."""
    path, body = request
    client = Client(url)
    sample = await client.post(path, body | {"timeout": timeout})
    client.close()
    if (sample.error or "").startswith("HTTP 400"):
        return None
    return Broken("a time-out that outlives the events is refused", f"{timeout:g} s: {sample.error or 'taken'}")
