"""The handle of a request between the engine's thread and an event loop."""

from __future__ import annotations

import asyncio
from dataclasses import fields, replace
from itertools import cycle
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine import handle as module
from penstock.engine.handle import RequestHandle
from penstock.engine.request import EngineRequest
from penstock.engine.text.answer_reader import AnswerReader
from penstock.schemas.events import Delta, ErrorBody, FinishReason, TokenLogprob, Usage
from penstock.schemas.jobs import Form
from penstock.schemas.params import GenerationParams


def handle_of() -> RequestHandle:
    return RequestHandle(EngineRequest(id="r", prompt=(1,), params=GenerationParams(), seed=0), lambda: None)


def delta(index: int, reason: FinishReason | None = None) -> Delta:
    return Delta("r", 1, 0, index, (index,), "x", None, reason)


def test_joined_deltas_keep_every_field() -> None:
    one, two = (TokenLogprob(text, id, -1.0, (id,)) for id, text in enumerate("ab"))
    first = Delta("r", 2, 3, 7, (1,), "a", (one,), prompt_logprobs=(two,))
    last = Delta("r", 2, 3, 8, (2, 4), "b", (two, one), "error", 5, ErrorBody(500, "no", "server_error"), "stop")
    (joined,) = module.merge([first, last])
    assert joined == Delta(
        **{field.name: getattr(last, field.name) for field in fields(Delta)}
        | {"index": 7, "token_ids": (1, 2, 4), "text": "ab", "logprobs": (one, two, one), "prompt_logprobs": (two,)}
    )
    assert [field.name for field in fields(Delta) if getattr(joined, field.name) == field.default] == ["type"]


@settings(deadline=None)
@given(st.lists(st.booleans(), min_size=1))
def test_how_many_tokens_are_a_thoughts_does_not_depend_on_when_they_are_taken(pauses: list[bool]) -> None:
    async def counted() -> int:
        handle = RequestHandle(replace(handle_of().request, border="</think>"), lambda: None)
        reader, pausing = AnswerReader("r", Form(reasoning_format="think"), 1), cycle(pauses)
        for place, text in enumerate(["<think>", "\n", "hm", "hm", "</", "think>", "\n", "Yes", "</think>", "."]):
            handle.put(Delta("r", 1, 0, place, (place,), text, None, "stop" if text == "." else None))
            if text == "." or next(pausing):
                for delta in await handle.take():
                    reader.read(delta)
        return reader.usage(Usage(1, 10, 11)).reasoning_tokens

    assert asyncio.run(counted()) == 6


async def test_a_reader_takes_what_comes_as_it_begins_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's thread wakes only who waits: one that puts a delta just before leaves it to be seen."""
    handle, clear, woken = handle_of(), asyncio.Event.clear, list[bool]()

    def clear_and_put(event: asyncio.Event) -> None:
        clear(event)
        handle.put(delta(0))
        woken.append(handle.needs_wake)

    monkeypatch.setattr(asyncio.Event, "clear", clear_and_put)
    async with asyncio.timeout(20):
        assert [one.index for one in await handle.take()] == [0]
    assert woken == [False]


async def test_a_handle_tells_when_the_first_and_the_newest_taken_tokens_of_a_choice_came(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handle, clock = handle_of(), iter((1.0, 3.0, 4.0, 9.0, 10.0))
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    handle.put(delta(0))
    handle.put(delta(1))
    handle.put(Delta("r", 1, 1, 0, (5,), "x"))
    await handle.take()
    handle.put(delta(2))
    assert handle.times == {0: (1.0, 3.0), 1: (4.0, 4.0)}
    await handle.take()
    handle.put(Delta("r", 1, 0, 3, (), "", None, "cancelled"))
    await handle.take()
    assert handle.times == {0: (1.0, 9.0), 1: (4.0, 4.0)}


async def test_a_reader_that_pauses_is_left_alone_until_the_end() -> None:
    handle = handle_of()
    waiting = asyncio.create_task(handle.take())
    await asyncio.sleep(0)
    handle.put(delta(0))
    assert handle.needs_wake
    handle.wake()
    assert [one.index for one in await waiting] == [0]
    handle.put(delta(1))
    assert not handle.needs_wake
    handle.put(delta(2, "stop"))
    assert handle.needs_wake
    assert [one.token_ids for one in await handle.take()] == [(1, 2)]
