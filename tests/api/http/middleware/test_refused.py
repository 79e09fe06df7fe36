"""A client whose large bodies are refused again and again is refused before they are read, for a while."""

from __future__ import annotations

import pytest
from asgi import Response, ask
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from penstock.api.http.middleware import refused
from penstock.api.http.middleware.refused import BUDGET, LONGEST, RATE, RefusedBodies

MIB = 1 << 20


class Door:
    """Answers with the status that the path names, and notes how many bytes it has read."""

    def __init__(self) -> None:
        self.now = 0.0
        self.read = 0
        self.app = RefusedBodies(self._answer, lambda: self.now)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.read += len(await Request(scope, receive).body())
        await send({"type": "http.response.start", "status": int(scope["path"][1:]), "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    async def ask(
        self, status: int, size: int, tenant: str = "", address: str = "10.0.0.1", **headers: str
    ) -> Response:
        async def addressed(scope: Scope, receive: Receive, send: Send) -> None:
            state = {"tenant": tenant} if tenant else {}
            await self.app({**scope, "client": (address, 1), "state": state}, receive, send)

        given = {"content-length": str(size)} | headers
        return await ask(addressed, "POST", f"/{status}", b" " * size, given)


@pytest.mark.parametrize("headers", [{}, {"transfer-encoding": "chunked"}])
async def test_large_bodies_are_refused_unread_after_many_that_were_faulty(headers: dict[str, str]) -> None:
    door = Door()
    while (answer := await door.ask(400, 4 * MIB, "bad", **headers)).status == 400:
        assert door.read <= BUDGET + 4 * MIB
    assert answer.status == 429
    assert answer.error["code"] == "refused_too_often"
    read, pause = door.read, int(answer.headers["retry-after"])
    assert (await door.ask(200, 4 * MIB, "bad", **headers)).status == 429
    assert door.read == read
    assert (await door.ask(200, 1_000, "bad")).status == 200, "small ones cost little"
    assert (await door.ask(200, 4 * MIB, "good")).status == 200
    door.now += pause
    assert (await door.ask(200, 4 * MIB, "bad")).status == 200


async def test_what_is_answered_is_not_counted() -> None:
    door = Door()
    for status in (200, 401, 409, 429, 503):
        for _ in range(20):
            assert (await door.ask(status, 4 * MIB, "good")).status == status


async def test_without_keys_it_is_the_address_that_counts() -> None:
    door = Door()
    while (await door.ask(413, 4 * MIB, address="2001:db8::1")).status == 413:
        pass
    assert (await door.ask(200, MIB, address="2001:db8::2")).status == 429, "of the same network"
    assert (await door.ask(200, MIB, address="2001:db8:1::1")).status == 200


async def test_nobody_is_refused_for_longer_than_a_while() -> None:
    door = Door()
    await door.ask(400, BUDGET + int(3 * LONGEST * RATE), "bad")
    assert int((await door.ask(200, MIB, "bad")).headers["retry-after"]) <= LONGEST + 1
    door.now += LONGEST
    assert (await door.ask(200, MIB, "bad")).status == 200


async def test_the_clients_remembered_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refused, "MOST_CLIENTS", 3)
    door = Door()
    for tenant in "abac":
        await door.ask(400, MIB, tenant)
    assert list(door.app._spent) == ["b", "a", "c"]
    await door.ask(400, MIB, "d")
    assert list(door.app._spent) == ["a", "c", "d"], "who was refused last is remembered longest"
