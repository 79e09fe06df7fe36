"""The engine notices a request without progress, and leaves alone those that only wait for their turn."""

from __future__ import annotations

import asyncio
import logging

import pytest

from penstock.engine import EngineConfig, EngineRequest, GenerationParams, InferenceEngine, ModelInfo
from penstock.engine.backends.echo import EchoBackend
from penstock.engine.choice import Choice
from penstock.engine.stalls import Stall, StallClock
from penstock.engine.text.byte_tokenizer import ByteTokenizer
from penstock.engine.vision.layout import ImageLayout
from penstock.schemas.events import Delta

TOKENIZER = ByteTokenizer()
INFO = ModelInfo("bytes", "Echo", context_length=100, vocabulary_size=259, eos_token_ids=TOKENIZER.eos_token_ids)
CONFIG = EngineConfig(model="echo", backend="echo", max_batch_size=8, stall_timeout=0.05)
ENDLESS = GenerationParams(ignore_eos=True, max_tokens=100_000)


class Clock:
    """Eight checks in the 8 seconds of the limit."""

    def __init__(self) -> None:
        self.now = 0.0
        self.stalls = StallClock(8.0, lambda: self.now)

    def checks(self, times: int, *unfinished: Choice, moving: tuple[Choice, ...] = ()) -> list[Stall]:
        found = []
        for _ in range(times):
            self.now += 1.0
            assert self.stalls.is_due
            for one in moving:
                one.append(97)
            found += self.stalls.check([*unfinished, *moving])
            assert not self.stalls.is_due
        return found


def make_choice(*, is_waiting: bool = False) -> Choice:
    one = Choice(EngineRequest("r", tuple(b"abc"), ENDLESS, seed=0), 0, TOKENIZER, INFO)
    one.is_waiting = is_waiting
    return one


def test_one_that_stands_still_among_others_stalls_alone_and_again() -> None:
    clock, still, mate = Clock(), make_choice(), make_choice()
    assert clock.checks(8, still, moving=(mate,)) == []
    assert clock.checks(1, still, moving=(mate,)) == [(still, True)]
    assert clock.checks(7, still, moving=(mate,)) == []
    assert clock.checks(1, still, moving=(mate,)) == [(still, False)]


def test_a_token_or_a_piece_of_the_prompt_is_progress() -> None:
    clock, one = Clock(), make_choice()
    clock.checks(7, one)
    one.append(97)
    clock.checks(7, one)
    one.num_computed += 16
    assert clock.checks(8, one) == []
    assert clock.checks(1, one) == [(one, True)]


def test_a_part_of_a_picture_is_progress() -> None:
    """A picture of many parts may take longer than the limit, and its request waits until all are encoded."""
    clock, one = Clock(), make_choice(is_waiting=True)
    one.layout = ImageLayout("", (), [], None)
    for _ in range(3):
        assert clock.checks(7, one) == []
        one.layout.num_encoded += 1
    assert clock.checks(8, one) == []
    assert clock.checks(1, one) == [(one, True)]


def test_one_that_waits_behind_others_does_not_stall() -> None:
    clock, waiting, mate = Clock(), make_choice(is_waiting=True), make_choice()
    assert clock.checks(50, waiting, moving=(mate,)) == []
    assert clock.checks(8, waiting) == []  # since the mate has ended
    assert clock.checks(1, waiting) == [(waiting, True)]


def test_one_that_does_not_wait_stalls() -> None:
    clock, waiting = Clock(), make_choice(is_waiting=True)
    clock.checks(8, waiting)
    assert clock.checks(1, waiting, make_choice(is_waiting=True)) == [(waiting, True)]  # one that comes is no progress


def test_a_step_that_takes_long_is_no_stall_of_those_it_leaves_out() -> None:
    clock, left_out = Clock(), make_choice()
    for _ in range(3):
        clock.now += 20.0
        assert clock.stalls.check([left_out]) == []
        if clock.now == 40.0:
            left_out.append(97)


class Stubborn(EchoBackend):
    """Stops at prompts that begin with `!`, the first `times` that they run."""

    def __init__(self, times: int, config: EngineConfig = CONFIG) -> None:
        super().__init__(config)
        self.times = times

    def step(self) -> list[Delta]:
        self._admit()
        held = {one: row for one, row in self._running.items() if self.times and one.prompt[0] == ord("!")}
        for one in held:
            if len(one.tokens) >= 2:
                del self._running[one]
        deltas = super().step()
        self._running |= {one: row for one, row in held.items() if one.finish is None}
        return deltas

    def remove(self, choice: Choice) -> None:
        self.times -= choice in self._running and choice.prompt[0] == ord("!")
        super().remove(choice)


async def answer(engine: InferenceEngine, prompt: str, name: str) -> list[Delta]:
    handle = engine.open(EngineRequest(name, tuple(prompt.encode()), GenerationParams(), seed=0))
    deltas: list[Delta] = []
    while not handle.finished:
        deltas += await handle.take()
    return deltas


async def test_a_request_that_stalls_begins_again_and_misses_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with InferenceEngine(CONFIG, backend=Stubborn(1)) as engine:
        mate = engine.open(EngineRequest("mate", tuple(b"abc"), ENDLESS, seed=0))
        deltas = await answer(engine, "!held up", "held")
        assert "".join(delta.text for delta in deltas) == "!held up"
        assert deltas[0].index == 0 and deltas[-1].finish_reason == "stop"
        assert not mate.finished and engine.stats().num_running == 1
        mate.cancel()
    assert [record.getMessage() for record in caplog.records] == [
        "request held made no progress for 0.05 s, restarting it"
    ]


async def test_a_request_that_begins_again_may_wait_for_its_turn() -> None:
    config = CONFIG.model_copy(update={"max_batch_size": 1})
    with InferenceEngine(config, backend=Stubborn(1, config)) as engine:
        held = asyncio.create_task(answer(engine, "!held up", "held"))
        await asyncio.sleep(0)
        mate = EngineRequest("mate", tuple(b"abc"), GenerationParams(ignore_eos=True, max_tokens=20_000), seed=0)
        handle = engine.open(mate)  # runs many times as long as a request may stand still
        while not handle.finished:
            await handle.take()
        assert "".join(delta.text for delta in await held) == "!held up"


async def test_a_request_that_stalls_twice_ends_and_spares_the_others(caplog: pytest.LogCaptureFixture) -> None:
    with InferenceEngine(CONFIG, backend=Stubborn(5)) as engine:
        mate = engine.open(EngineRequest("mate", tuple(b"abc"), ENDLESS, seed=0))
        deltas = await answer(engine, "!held up", "held")
        assert "".join(delta.text for delta in deltas) == "!h"
        error = deltas[-1].error
        assert deltas[-1].finish_reason == "error" and error is not None
        assert (error.status, error.code) == (500, "generation_failed")
        assert error.message == "The engine made no progress for 0.05 s, twice; send the request again."
        assert not mate.finished and engine.healthy and engine.stats().num_running == 1
        mate.cancel()
    assert [record.levelno for record in caplog.records] == [logging.WARNING, logging.ERROR]


async def test_a_request_that_the_backend_forgets_is_missed() -> None:
    class Forgetful(EchoBackend):
        """Loses the first choice that it gets."""

        has_lost = False

        def add(self, choice: Choice) -> None:
            if self.has_lost:
                super().add(choice)
            self.has_lost = True

    with InferenceEngine(CONFIG, backend=Forgetful(CONFIG)) as engine:  # and its thread has nothing to do
        deltas = await answer(engine, "abc", "lost")
        assert "".join(delta.text for delta in deltas) == "abc"
