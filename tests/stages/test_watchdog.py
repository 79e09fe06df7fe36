"""An engine that hangs is not waited for."""

from __future__ import annotations

import asyncio
import threading

import pytest
from memory_pipeline import MODEL, Pipeline

from penstock.schemas.events import Delta


async def test_a_worker_whose_engine_hangs_ends() -> None:
    pipeline = await Pipeline.start(stall_timeout=0.3, heartbeat_interval=0.05)
    released = threading.Event()

    def hang() -> list[Delta]:
        released.wait()
        return []

    pipeline.backend.step = hang  # type: ignore[method-assign]
    asking = asyncio.create_task(pipeline.events({"model": MODEL, "prompt": "Hello!", "max_tokens": 5}))
    worker = pipeline._tasks[-3]
    with pytest.raises(ExceptionGroup) as caught:
        async with asyncio.timeout(60):
            await worker
    assert caught.group_contains(RuntimeError, match=r"no progress for 0\.3 s", depth=None)
    asking.cancel()
    released.set()
    for task in pipeline._tasks:
        task.cancel()
    await asyncio.gather(*pipeline._tasks, return_exceptions=True)
    pipeline.engine.close()


async def test_an_idle_engine_is_not_a_hanging_one() -> None:
    pipeline = await Pipeline.start(stall_timeout=0.05, heartbeat_interval=0.01)
    events = await pipeline.events({"model": MODEL, "prompt": "Hello!", "max_tokens": 5})
    worker = pipeline._tasks[-3]
    with pytest.raises(TimeoutError):  # many heartbeats later it still runs
        async with asyncio.timeout(0.5):
            await asyncio.shield(worker)
    assert events[-1].type == "done"
    await pipeline.stop()
