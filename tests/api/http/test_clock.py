"""Deadlines are by the broker's clock, whatever the bridge's machine says."""

from __future__ import annotations

import asyncio
import json
import time

import pytest
from applications import Script
from asgi import ask

from penstock.streams.memory.broker import MemoryBroker
from penstock.streams.port import DEADLINE


@pytest.mark.parametrize("behind", [7200.0, -7200.0])
async def test_a_deadline_is_by_the_brokers_clock(behind: float) -> None:
    script = await Script.start(MemoryBroker(now=lambda: time.time() + behind))
    body = json.dumps({"model": "echo", "prompt": "hello", "timeout": 60}).encode()
    asking = asyncio.create_task(ask(script.app, "POST", "/v1/completions", body))
    await script.job()
    assert float(script.jobs[-1].headers[DEADLINE]) == pytest.approx(script.broker.now() + 60, abs=30)
    for _ in range(10):
        await asyncio.sleep(0)
    assert not asking.done(), "the bridge waits until then"
    asking.cancel()
