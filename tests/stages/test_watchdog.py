"""An engine that hangs is not waited for."""

from __future__ import annotations

import asyncio
import logging
import threading

import pytest
from memory_pipeline import MODEL, FragileEcho, Pipeline

from penstock.schemas.events import Delta, Failed, Token


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
    pipeline = await Pipeline.start(stall_timeout=0.5, heartbeat_interval=0.01)
    events = await pipeline.events({"model": MODEL, "prompt": "Hello!", "max_tokens": 5})
    worker = pipeline._tasks[-3]
    with pytest.raises(TimeoutError):  # many heartbeats later it still runs
        async with asyncio.timeout(1.5):
            await asyncio.shield(worker)
    assert events[-1].type == "done"
    await pipeline.stop()


async def test_a_machine_that_stood_still_says_nothing_about_its_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A laptop that slept, while a long step ran: the worker's clock has gone on, and nobody has looked."""
    pipeline = await Pipeline.start(stall_timeout=30.0, heartbeat_interval=1.0)
    infer, loop = pipeline.infer, asyncio.get_running_loop()
    pipeline.backend.goes.clear()
    asking = asyncio.create_task(pipeline.events({"model": MODEL, "prompt": "Hello!", "max_tokens": 5}))
    async with asyncio.timeout(60):
        while not infer._seen[1]:
            infer._watch()
            await asyncio.sleep(0.01)
    began = loop.time()

    def look(later: float) -> None:
        monkeypatch.setattr(loop, "time", lambda: began + later)
        assert infer.alive()
        infer._watch()

    look(3600.0)
    look(3601.0)
    for second in range(3602, 3628):
        look(second)
    monkeypatch.setattr(loop, "time", lambda: began + 3630)
    with pytest.raises(RuntimeError, match="no progress"):
        infer._watch()
    assert not infer.alive()
    monkeypatch.undo()
    pipeline.backend.goes.set()
    assert (await asking)[-1].type == "done"
    await pipeline.stop()


class Held(FragileEcho):
    """Never goes on with prompts that begin with `!`."""

    def step(self) -> list[Delta]:
        self._admit()
        held = {one: row for one, row in self._running.items() if one.prompt[0] == ord("!")}
        for one in held:
            del self._running[one]
        deltas = super().step()
        self._running |= held
        return deltas


async def test_a_request_that_hangs_ends_alone_and_gives_its_seats_back(caplog: pytest.LogCaptureFixture) -> None:
    pipeline = await Pipeline.start(stall_timeout=0.1, kind=Held, echo_rate=100)
    (*_, end), mates = await asyncio.gather(
        pipeline.events({"model": MODEL, "prompt": "!", "n": 2}),
        pipeline.events({"model": MODEL, "prompt": "mates"}),
    )
    assert isinstance(end, Failed)
    assert (end.error.status, end.error.code) == (500, "generation_failed")
    assert end.error.message == "The engine made no progress for 0.1 s, twice; send the request again."
    assert mates[-1].type == "done"
    assert "".join(event.text for event in mates if isinstance(event, Token)) == "mates"
    assert [record.levelno for record in caplog.records] == [logging.WARNING, logging.ERROR]
    await pipeline.stop()
    assert pipeline.infer.room.active.total() == 0
