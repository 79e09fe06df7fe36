"""Deadlines are by the broker's clock, whatever the bridge's machine says."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator

import pytest
from applications import Script
from asgi import ask

from penstock.streams.memory.broker import MemoryBroker
from penstock.streams.port import DEADLINE
from penstock.streams.stores.files import delete_expired_files, find_file, put_file
from penstock.streams.stores.objects import Objects
from penstock.streams.topology import FILES, topology


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


async def test_a_file_expires_by_the_brokers_clock() -> None:
    """A bridge whose clock is ahead deletes nothing early."""
    broker = MemoryBroker(now=lambda: time.time() - 7200)
    await broker.ensure(*topology("penstock", ("queue",)))

    async def data() -> AsyncIterator[bytes]:
        yield b"{}"

    await put_file(await Objects.of(broker, FILES), "one.file-1", data(), "f.jsonl", "batch", 3600)
    await delete_expired_files(broker)
    assert (await find_file(broker, "one", "file-1")).about["expires_at"] == pytest.approx(broker.now() + 3600, abs=30)


@pytest.mark.parametrize("behind", [7200.0, -7200.0])
async def test_a_conversation_lives_by_the_brokers_clock(behind: float) -> None:
    """Its items are renewed when they are old; those of a bridge whose clock is ahead expired, for they seemed new."""
    script = await Script.start(MemoryBroker(now=lambda: time.time() + behind))
    made = json.loads((await ask(script.app, "POST", "/v1/conversations", b"{}")).body)
    assert made["created_at"] == pytest.approx(script.broker.now(), abs=30)
