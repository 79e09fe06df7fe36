"""Preparers are loaded once in a process, and stay."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from contextvars import ContextVar

import pytest

from penstock.engine.preparing.preparers import PreparerCache, PreparerKey
from penstock.schemas.errors import ModelLoadError
from penstock.schemas.registry import ModelCard


async def test_a_preparer_keeps_nothing_of_the_request_that_needed_it_first() -> None:
    class Request:
        pass

    current = ContextVar[Request]("current")
    cache = PreparerCache()

    async def ask() -> weakref.ref[Request]:
        current.set(request := Request())
        await cache.start(PreparerKey("echo", "echo", "auto", "auto"))
        return weakref.ref(request)

    kept = await asyncio.create_task(ask())
    await asyncio.sleep(0)  # the loop forgets the task
    gc.collect()
    assert kept() is None


async def test_requests_that_waited_for_the_load_go_before_one_that_comes_as_it_ends() -> None:
    cache, order, tasks = PreparerCache(), list[str](), list[asyncio.Task[None]]()
    card = ModelCard(name="echo", source="echo", backend="echo", context_length=64, created=0)

    async def ask(name: str) -> None:
        await cache.get(card)
        order.append(name)

    load = cache.start(PreparerKey.of(card))
    load.add_done_callback(lambda _: tasks.append(asyncio.create_task(ask("last"))))
    await asyncio.gather(ask("first"), ask("second"))
    await asyncio.gather(*tasks)
    assert order == ["first", "second", "last"]


async def test_requests_that_wait_for_a_load_that_fails_share_its_failure_and_the_next_tries_again() -> None:
    cache = PreparerCache()
    card = ModelCard(name="none", source="/nowhere", backend="native", context_length=64, created=0)
    load = cache.start(PreparerKey.of(card))
    failed = await asyncio.gather(*(cache.get(card) for _ in range(3)), return_exceptions=True)
    assert {type(each) for each in failed} == {type(load.exception())}
    assert cache.idle
    assert cache.start(PreparerKey.of(card)) is not load
    with contextlib.suppress(ModelLoadError):
        await cache.get(card)


async def test_a_load_that_has_panicked_is_tried_again() -> None:
    """The panic was every later request's, until the process ended."""

    class PanicException(BaseException):
        pass

    faults = [PanicException("of the test")]

    def loaded() -> None:
        if faults:
            raise faults.pop()

    cache = PreparerCache(loaded)
    card = ModelCard(name="echo", source="echo", backend="echo", context_length=64, created=0)
    with pytest.raises(PanicException):
        await cache.get(card)
    assert await cache.get(card)
