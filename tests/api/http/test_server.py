"""How the HTTP server ends."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import uvicorn

from penstock.api.http import server


async def test_it_ends_as_soon_as_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async def application(scope: Any, receive: Any, send: Any) -> None:
        raise NotImplementedError

    monkeypatch.setattr(server, "until_beat", lambda interval: 1e6)
    serving = server.Server(uvicorn.Config(application, log_config=None))
    running = asyncio.create_task(serving.main_loop())
    await asyncio.sleep(0)
    assert not running.done()
    serving.end()
    async with asyncio.timeout(30):
        await running
