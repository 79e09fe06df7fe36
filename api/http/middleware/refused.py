"""A budget for bodies that are refused: to read and check a large one costs the server more than to answer it."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ....schemas.bounds import LONG
from ....schemas.errors import QuotaExceeded
from ....schemas.events import ErrorBody
from ..answers import error_response
from .counting import network

BUDGET = 32 << 20  # bytes of refused bodies that a client may send at once
RATE = 256 << 10  # bytes of the budget that come back in a second
LONGEST = 60.0  # seconds for which a client is refused, whatever it has sent
MOST_CLIENTS = 10_000  # of those that were refused lately, the ones whose budgets are remembered
_FAULTS = frozenset({400, 404, 405, 413, 415, 422})


class RefusedBodies:
    """ASGI middleware, behind the keys: a client whose large bodies were refused again and again gets 429 for further
    large ones, before they are read. A client is a tenant, or an address where no keys are used."""

    def __init__(self, app: ASGIApp, clock: Callable[[], float] = time.monotonic) -> None:
        self.app = app
        self._clock = clock
        self._spent: OrderedDict[str, tuple[float, float]] = OrderedDict()  # bytes and when, the latest last

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope) if scope["type"] == "http" else {}
        declared = headers.get("content-length", "0")[:20]
        if "transfer-encoding" not in headers and not (declared.isdecimal() and int(declared) > LONG):
            await self.app(scope, receive, send)
            return
        client = scope.get("state", {}).get("tenant") or f"[{network(scope['client'])}]"
        spent = self._now(client)
        if spent > BUDGET:
            refusal = QuotaExceeded(
                f"Large requests of yours with {BUDGET >> 20} MiB in all were refused a moment ago: see their errors, "
                "and send the next one later.",
                code="refused_too_often",
                retry_after=(spent - BUDGET) / RATE + 1.0,
            )
            await error_response(ErrorBody.of(refusal))(scope, receive, send)
            return
        size, status = 0, 0

        async def counting() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            return message

        async def seen(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        await self.app(scope, counting, seen)
        if status in _FAULTS and size > LONG:
            self._spent[client] = min(self._now(client) + size, BUDGET + LONGEST * RATE), self._clock()
            self._spent.move_to_end(client)
            if len(self._spent) > MOST_CLIENTS:
                self._spent.popitem(last=False)

    def _now(self, client: str) -> float:
        """The bytes of its budget that the client has spent."""
        spent, when = self._spent.get(client, (0.0, 0.0))
        return max(0.0, spent - RATE * (self._clock() - when))
