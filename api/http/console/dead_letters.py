"""`/server/dead-letters`: the messages that failed for good, to read, retry and drop."""

from __future__ import annotations

from typing import Any

import orjson
from fastapi import FastAPI, Request

from ....schemas.errors import StreamNotFound
from ....streams.port import Message
from ....streams.stores.dead_letters import DeadLetters, summary
from ..models.catalogue import check_admin
from ..openapi import refusals
from ..requests import Gateway


class DeadLetterRoutes:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def add_to(self, app: FastAPI) -> None:
        errors = refusals(403, 404, 409, 503)
        app.get("/server/dead-letters", tags=["operations"], responses=refusals(403, 503))(self.listed)
        app.get("/server/dead-letters/{number}", tags=["operations"], responses=errors)(self.show)
        app.post("/server/dead-letters/{number}/retry", tags=["operations"], responses=errors)(self.retry)
        app.delete("/server/dead-letters/{number}", tags=["operations"], responses=errors)(self.drop)

    async def listed(self, request: Request) -> Any:
        """The dead letters, the oldest first: the stage that gave up, why, and which requests are in them."""
        check_admin(request)
        return {"object": "list", "data": [summary(letter) for letter in await (await self._letters()).all()]}

    async def show(self, number: str, request: Request) -> Any:
        """One dead letter with its headers, and with its payload where the server runs with `--show-prompts`."""
        check_admin(request)
        letters = await self._letters()
        letter = await self._find(letters, number)
        shown = summary(letter) | {"headers": dict(letter.headers), "payload": None, "payload_hidden": True}
        if self._gateway.settings.show_prompts:
            whole = await letters.whole(letter)
            shown |= {"payload": _payload(whole.data) if whole else None, "payload_hidden": False}
        return shown

    async def retry(self, number: str, request: Request) -> Any:
        """Send the requests of a dead letter on their way again, under new ids."""
        check_admin(request)
        letters = await self._letters()
        letter = await self._find(letters, number)
        return {"number": letter.sequence, "requests": await letters.retry(letter, self._gateway.settings)}

    async def drop(self, number: str, request: Request) -> Any:
        """Delete a dead letter for good."""
        check_admin(request)
        letters = await self._letters()
        letter = await self._find(letters, number)
        await letters.drop(letter)
        return {"number": letter.sequence, "deleted": True}

    async def _letters(self) -> DeadLetters:
        return await DeadLetters.of(self._gateway.broker, self._gateway.bridge.subjects)

    async def _find(self, letters: DeadLetters, number: str) -> Message:
        wanted = int(number) if number.isdecimal() and number.isascii() and len(number) < 16 else 0
        found = await letters.all(wanted - 1) if wanted else []
        if not found or found[0].sequence != wanted:
            raise StreamNotFound("There is no such dead letter; it may have been retried or dropped.", param="number")
        return found[0]


def _payload(data: bytes) -> Any:
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        return data.decode(errors="replace")
