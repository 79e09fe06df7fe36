"""Rows of a batch do not notice each other: not when one is cancelled, fails, comes late or is longer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine import EngineConfig, EngineRequest, GenerationParams, InferenceEngine
from penstock.engine.backends.hf import HfBackend
from penstock.engine.choice import Choice

GREEDY = GenerationParams(temperature=0, max_tokens=20, ignore_eos=True)
SHAPES = pytest.mark.parametrize("shape", ["llama", "mistral"])
POISON = 499


class Poisoned(HfBackend):
    """Fails whenever it reads the poison token."""

    def _run(self, **inputs: Any) -> Any:
        if (inputs["input_ids"] == POISON).any():
            raise RuntimeError("poison")
        return super()._run(**inputs)


class Counting(HfBackend):
    """Counts its passes."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.passes = 0

    def _run(self, **inputs: Any) -> Any:
        self.passes += 1
        return super()._run(**inputs)


def backend(directory: Path, kind: type[HfBackend] = HfBackend, **settings: Any) -> HfBackend:
    return kind(EngineConfig(model=str(directory), dtype="float32", device="cpu", **settings))


def add(target: HfBackend, prompt: list[int], params: GenerationParams = GREEDY) -> Choice:
    choice = Choice(EngineRequest("r", tuple(prompt), params, seed=1), 0, target.tokenizer, target.info)
    target.add(choice)
    return choice


def finish(target: HfBackend) -> None:
    while target.num_running or target.num_waiting:
        target.step()


def alone(target: HfBackend, prompt: list[int], params: GenerationParams = GREEDY) -> list[int]:
    choice = add(target, prompt, params)
    finish(target)
    return choice.tokens


class Watching(HfBackend):
    """Keeps the masks of its passes."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.masks: list[torch.Tensor] = []

    def _run(self, **inputs: Any) -> Any:
        self.masks.append(inputs["attention_mask"])
        return super()._run(**inputs)


def test_p5_a_padded_batch_is_as_wide_as_its_longest(model_directory: Callable[[str], Path]) -> None:
    """P5: a padded batch pads to its longest, and every request keeps its original length."""
    target = backend(model_directory("llama"), Watching)
    assert isinstance(target, Watching)

    @settings(max_examples=100, deadline=None)
    @given(st.lists(st.integers(1, 40), min_size=1, max_size=6))
    def check(lengths: list[int]) -> None:
        target.masks.clear()
        one = GREEDY.model_copy(update={"max_tokens": 1})
        rows = [add(target, list(range(3, 3 + length)), one) for length in lengths]
        finish(target)
        (mask,) = target.masks
        assert mask.shape == (len(lengths), max(lengths))
        assert mask.sum(-1).tolist() == lengths
        assert [len(row.tokens) for row in rows] == [1] * len(rows)

    check()


def test_p21_a_batch_gives_as_many_results() -> None:
    """P21: a batch of N yields exactly N results."""
    with InferenceEngine(EngineConfig(model="echo", backend="echo")) as engine:

        @settings(max_examples=100, deadline=None)
        @given(st.lists(st.text("abc", min_size=1, max_size=10), min_size=1, max_size=20))
        def check(prompts: list[str]) -> None:
            assert [output.text for output in engine.generate(prompts, GenerationParams())] == prompts

        check()


@SHAPES
def test_a_cancelled_row_leaves_its_mates_alone(
    shape: str, model_directory: Callable[[str], Path], prompts: list[list[int]]
) -> None:
    """P22 and cancellation in the engine: the mates' answers are those that they give alone."""
    target = backend(model_directory(shape))
    expected = [alone(target, prompt) for prompt in prompts[:6]]
    rows = [add(target, prompt) for prompt in prompts[:6]]
    for _ in range(7):
        target.step()
    longest = rows[5]
    target.remove(longest)
    assert all(delta.token_ids for delta in target.step()) and len(longest.tokens) == 7
    finish(target)
    assert [row.tokens for row in rows[:5]] == expected[:5]
    assert longest.tokens == expected[5][:7]


@SHAPES
def test_newcomers_join_without_waiting(
    shape: str, model_directory: Callable[[str], Path], prompts: list[list[int]]
) -> None:
    target = backend(model_directory(shape))
    expected = [alone(target, prompt) for prompt in prompts[:6]]
    rows = []
    for prompt in reversed(prompts[:6]):
        rows.append(add(target, prompt))
        target.step()
        assert len(rows[-1].tokens) == 1
        target.step()
    finish(target)
    assert [row.tokens for row in reversed(rows)] == expected


def test_newcomers_share_the_next_pass(model_directory: Callable[[str], Path], prompts: list[list[int]]) -> None:
    target = Counting(EngineConfig(model=str(model_directory("llama")), dtype="float32", device="cpu"))
    for prompt in prompts[:3]:
        add(target, prompt)
        target.step()
    before = target.passes
    target.step()
    assert (target.passes - before, target.num_running) == (1, 3)


@SHAPES
def test_rows_of_different_lengths_leave_one_by_one(
    shape: str, model_directory: Callable[[str], Path], prompts: list[list[int]]
) -> None:
    target = backend(model_directory(shape))
    lengths = [GenerationParams(temperature=0, max_tokens=20 - 3 * index, ignore_eos=True) for index in range(6)]
    expected = [alone(target, prompt, params) for prompt, params in zip(prompts[:6], lengths, strict=True)]
    rows = [add(target, prompt, params) for prompt, params in zip(prompts[:6], lengths, strict=True)]
    finish(target)
    assert [row.tokens for row in rows] == expected


def test_a_batch_that_fails_ends_only_the_culprit(
    model_directory: Callable[[str], Path], prompts: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    """P22: one request's failure leaves its batch mates alone."""
    target = backend(model_directory("llama"), Poisoned)
    expected = [alone(target, prompt) for prompt in prompts[:4]]
    rows = [add(target, prompt) for prompt in prompts[:2]]
    culprit = add(target, [3, POISON, 5])
    rows += [add(target, prompt) for prompt in prompts[2:4]]
    errors = []
    while target.num_running or target.num_waiting:
        errors += [delta.error for delta in target.step() if delta.error is not None]
    assert [error.code for error in errors] == ["generation_failed"]
    assert (culprit.finish, culprit.tokens) == ("error", [])
    assert [row.tokens for row in rows] == expected


def test_a_row_that_fails_in_mid_air_leaves_its_mates_alone(
    model_directory: Callable[[str], Path], prompts: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    """P22: the cache is lost with a failed pass, and the mates begin again from their tokens."""
    target = backend(model_directory("llama"), Poisoned)
    expected = [alone(target, prompt) for prompt in prompts[:3]]
    rows = [add(target, prompt) for prompt in prompts[:3]]
    target.step()
    culprit = add(target, [3, 4], GREEDY.model_copy(update={"logit_bias": {POISON: 100.0}}))
    finish(target)
    assert culprit.finish == "error"
    assert [row.tokens for row in rows] == expected


def test_a_row_with_everything_forbidden_fails_alone(llama: InferenceEngine, prompts: list[list[int]]) -> None:
    everything = tuple(range(llama.model_info().vocabulary_size))
    forbidden = EngineRequest("f", (5,), GREEDY.model_copy(update={"stop_token_ids": everything, "min_tokens": 5}), 1)
    output = llama.generate([5], forbidden.params)
    assert output.finish_reason == "error"
    assert output.error is not None and output.error.message.startswith("no token can be chosen")
    assert llama.generate(prompts[1], GREEDY).finish_reason == "length"


def test_rows_are_bounded(model_directory: Callable[[str], Path], prompts: list[list[int]]) -> None:
    target = backend(model_directory("llama"), max_batch_size=4)
    rows = [add(target, prompt) for prompt in prompts[:6]]
    target.step()
    assert (target.num_running, target.num_waiting) == (4, 2)
    target.remove(rows[0])
    target.step()
    assert (target.num_running, target.num_waiting) == (4, 1)
    finish(target)
    assert all(row.finish == "length" for row in rows[1:])


def test_newcomers_wait_while_the_cache_is_full(
    model_directory: Callable[[str], Path], prompts: list[list[int]]
) -> None:
    target = backend(model_directory("llama"), kv_cache_memory=1)
    first = add(target, prompts[0])
    target.step()
    second = add(target, prompts[1])
    target.step()
    assert (target.num_running, target.num_waiting) == (1, 1)
    finish(target)
    assert first.finish == second.finish == "length"


def test_padding_goes_with_the_rows_that_needed_it(
    model_directory: Callable[[str], Path], prompts: list[list[int]]
) -> None:
    target = backend(model_directory("llama"), kv_cache_memory=1 << 30)
    long, short = add(target, prompts[15]), add(target, prompts[0])
    target.step()
    target.remove(long)
    alone_again = backend(model_directory("llama"))
    other = add(alone_again, prompts[0])
    alone_again.step()
    assert target._batches[0].memory() == alone_again._batches[0].memory()
    finish(target)
    finish(alone_again)
    assert short.tokens == other.tokens
