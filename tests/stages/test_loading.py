"""A model may be asked for as soon as a worker begins to load it, and no longer once that has failed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from memory_pipeline import MODEL, Pipeline

from penstock.schemas.registry import ModelCard
from penstock.stages import Pipe
from penstock.stages.loading import announced

NEW = ModelCard(name="new", source="new", backend="paged", context_length=100, created=0)


async def test_a_model_is_askable_while_it_loads_and_gone_if_that_fails() -> None:
    pipeline = await Pipeline.start()
    registry = pipeline.pipe.registry

    @contextlib.asynccontextmanager
    async def connect() -> AsyncIterator[Pipe]:
        yield pipeline.pipe

    async def known(name: str) -> bool:
        return await registry.find(name) is not None

    async with announced(connect, NEW), asyncio.timeout(10):
        while not await known("new"):  # noqa: ASYNC110
            await asyncio.sleep(0)
    assert await known("new"), "it has been loaded"
    assert {lanes.model for lanes in registry.lanes.values()} == {MODEL, "new"}
    with pytest.raises(MemoryError):
        async with announced(connect, NEW):
            await asyncio.sleep(0)
            raise MemoryError
    await registry.refresh()
    assert not await known("new")
    for _ in range(2):  # a failure beside a living worker takes nothing away
        with pytest.raises(MemoryError):
            async with announced(connect, registry.workers[0].model):
                await asyncio.sleep(0)
                raise MemoryError
        await registry.refresh()
        assert await known(MODEL)
    await pipeline.stop()
