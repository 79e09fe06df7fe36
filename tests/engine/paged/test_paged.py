"""The paged backend beyond its tokens: what fails alone, what is remembered, what is counted and what is refused."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ByteSize

from penstock.engine import EngineConfig, EngineRequest, GenerationParams, InferenceEngine
from penstock.engine.backends.answer_cache import AnswerCache
from penstock.engine.backends.registry import load_backend
from penstock.engine.choice import Choice
from penstock.engine.paged.backend import PagedBackend
from penstock.schemas.errors import ConfigurationError, InvalidRequest
from penstock.stages.degradation import Slots, slots

GREEDY = GenerationParams(temperature=0, max_tokens=8, ignore_eos=True)
POISON, RAISING = 499, 498
Load = Callable[..., PagedBackend]


def config(directory: Path, **values: Any) -> EngineConfig:
    fields: dict[str, Any] = {"dtype": "float32", "device": "cpu", "kv_cache_memory": ByteSize(16 << 20)}
    return EngineConfig(model=str(directory), **fields | values)


@pytest.fixture
def load(model_directory: Callable[[str], Path]) -> Load:
    def load(shape: str = "llama", ahead: bool = False, **values: Any) -> PagedBackend:
        return PagedBackend(config(model_directory(shape), **values), ahead=ahead)

    return load


def add(
    backend: PagedBackend | AnswerCache, prompt: list[int], params: GenerationParams = GREEDY, salt: str = ""
) -> Choice:
    request = EngineRequest("r", tuple(prompt), params, seed=1, cache_salt=salt)
    choice = Choice(request, 0, backend.tokenizer, backend.info)
    backend.add(choice)
    return choice


def finish(backend: PagedBackend | AnswerCache) -> int:
    """Run to the end; how many steps it took."""
    steps = 0
    while backend.delay() <= 0:
        backend.step()
        steps += 1
    return steps


def finish_step(backend: PagedBackend) -> bool:
    """Run one more step; returns whether anything is left to run."""
    backend.step()
    return backend.delay() <= 0


def poison(backend: PagedBackend) -> Any:
    """From now on a step with the token POISON has numbers that are none; how steps were run before."""
    run = backend.runner.forward

    def poisoned(segments: Any, chosen: torch.Tensor | None = None) -> Any:
        if not any(POISON in segment.tokens for segment in segments):
            return run(segments, chosen)
        weight = backend.runner._decoder.embedding  # type: ignore[union-attr]
        saved = weight[POISON].clone()
        weight[POISON] = torch.nan
        try:
            return run(segments, chosen)
        finally:
            weight[POISON] = saved

    backend.runner.forward = poisoned  # type: ignore[method-assign]
    return run


class TestFailures:
    """P22, within a step: the culprit fails, and the others get the tokens that they get alone."""

    prompts = ([5, 6, 7], [8] * 20, [9, 10])

    @pytest.fixture(params=[False, True], ids=["read", "ahead"])
    def load(self, load: Load, request: pytest.FixtureRequest) -> Load:
        return partial(load, ahead=request.param)

    def alone(self, load: Load) -> list[list[int]]:
        backend = load()
        rows = []
        for prompt in self.prompts:
            rows.append(add(backend, prompt))
            finish(backend)
        return [row.tokens for row in rows]

    def test_a_step_that_fails_ends_only_the_culprit(self, load: Load) -> None:
        expected = self.alone(load)
        backend = load()
        forward = backend.runner.forward

        def fail(segments: Any, chosen: torch.Tensor | None = None) -> Any:
            if any(POISON in segment.tokens for segment in segments):
                raise torch.OutOfMemoryError("too much")
            return forward(segments, chosen)

        backend.runner.forward = fail  # type: ignore[method-assign]
        rows = [add(backend, prompt) for prompt in self.prompts]
        backend.step()
        culprit = add(backend, [1, POISON, 2])
        finish(backend)
        assert culprit.finish == "error" and [row.tokens for row in rows] == expected
        backend.check_integrity()
        assert backend.blocks.usage == 0

    def test_numbers_that_are_none_do_not_spread(self, load: Load) -> None:
        """Neither to rows of the same step, nor to the next holder of the blocks, nor to a prompt like it."""
        expected = self.alone(load)
        backend = load(kv_cache_memory=ByteSize(24 * 16384))
        run = poison(backend)
        rows = [add(backend, prompt) for prompt in self.prompts]
        culprit = add(backend, [*range(40, 60), POISON, *range(40, 60)])
        finish(backend)
        assert culprit.finish == "error" and [row.tokens for row in rows] == expected
        backend.runner.forward = run  # type: ignore[method-assign]
        heirs = [add(backend, prompt) for prompt in [*self.prompts, list(culprit.prompt), list(range(100, 300))]]
        finish(backend)
        assert [row.tokens for row in heirs[:3]] == expected
        assert all(row.finish == "length" for row in heirs)
        assert heirs[3].cached_tokens == 0

    def test_any_culprits_leave_any_mates_alone(self, load: Load) -> None:
        """However many fail, by an exception or by numbers that are none, and whenever each of them comes."""
        expected = self.alone(load)
        backend = load()
        poison(backend)
        forward = backend.runner.forward

        def fail(segments: Any, chosen: torch.Tensor | None = None) -> Any:
            if any(RAISING in segment.tokens for segment in segments):
                raise torch.OutOfMemoryError("too much")
            return forward(segments, chosen)

        backend.runner.forward = fail  # type: ignore[method-assign]
        kinds = [*self.prompts, [1, RAISING, 2], [1, 2, POISON]]
        arrivals = st.tuples(st.integers(0, len(kinds) - 1), st.integers(0, 3))  # who, and how many steps later

        @settings(max_examples=20, deadline=None)
        @given(st.lists(arrivals, min_size=2, max_size=5))
        def check(arrivals: list[tuple[int, int]]) -> None:
            rows = []
            for kind, steps in arrivals:
                for _ in range(steps):
                    backend.step()
                rows.append((kind, add(backend, kinds[kind])))
            finish(backend)
            for kind, row in rows:
                if kind < len(expected):
                    assert row.tokens == expected[kind]
                else:
                    assert row.finish == "error"
            backend.check_integrity()
            assert backend.blocks.usage == 0

        check()

    def test_what_others_hold_stays_as_it_is(self, load: Load) -> None:
        """One shares the beginning, whose numbers are good, with another whose end is none."""
        beginning = [n + 40 for n in range(32)]
        backend = load(prefill_chunk_size=32, max_batch_size=4)
        poison(backend)
        culprit = add(backend, [*beginning, *range(100, 150), POISON])
        backend.step()
        heir = add(backend, [*beginning, 7, 8])
        finish(backend)
        assert (culprit.finish, heir.cached_tokens) == ("error", 32)
        reference = load()
        alone = add(reference, [*beginning, 7, 8])
        finish(reference)
        assert heir.tokens == alone.tokens

    def test_a_cancelled_request_leaves_its_blocks_cached(self, load: Load) -> None:
        backend = load()
        prompt = list(range(40, 104))
        row = add(backend, prompt)
        backend.step()
        backend.remove(row)
        backend.check_integrity()
        again = add(backend, prompt)
        finish(backend)
        assert again.cached_tokens == 48, "all but the block of the last token"


@pytest.fixture(scope="module")
def backends(model_directory: Callable[[str], Path]) -> Iterator[tuple[PagedBackend, PagedBackend]]:
    yield tuple(PagedBackend(config(model_directory("gemma2"))) for _ in range(2))  # type: ignore[misc]


class TestPrefixes:
    @settings(max_examples=100, deadline=None)
    @given(st.lists(st.lists(st.integers(3, 400), min_size=1, max_size=60), min_size=1, max_size=3))
    def test_entries_survive_a_file(
        self, backends: tuple[PagedBackend, PagedBackend], tmp_path_factory: pytest.TempPathFactory, prompts: Any
    ) -> None:
        """P12: cache entries survive serialise → deserialise unchanged: keys, order of use, and every number."""
        first, second = backends
        path = tmp_path_factory.getbasetemp() / "prefixes"
        for backend in backends:
            for pool in backend.blocks.pools:
                pool.clear_cached(pool.num_cached)
        for prompt in prompts:
            add(first, prompt, GenerationParams(temperature=0, max_tokens=1))
        finish(first)
        saved = first.save_prefixes(path)
        assert second.load_prefixes(path) == saved == sum(pool.num_cached for pool in first.blocks.pools)
        for group, (pool, twin) in enumerate(zip(first.blocks.pools, second.blocks.pools, strict=True)):
            assert [key for key, _ in pool.cached()] == [key for key, _ in twin.cached()]
            where, there = ([block for _, block in one.cached()] for one in (pool, twin))
            for memory, copy in zip(first.runner.pools(group), second.runner.pools(group), strict=True):
                assert torch.equal(memory.blocks(where), copy.blocks(there))

    def test_a_restarted_engine_knows_what_the_last_one_knew(
        self, model_directory: Callable[[str], Path], tmp_path: Path
    ) -> None:
        prompt = list(range(40, 90))
        with InferenceEngine(config(model_directory("llama"))) as engine:
            expected = engine.generate(prompt, GREEDY)
            assert engine.save_prefixes(tmp_path / "file") == 3
        with InferenceEngine(config(model_directory("llama"))) as engine:
            assert engine.load_prefixes(tmp_path / "file") == 3
            again = engine.generate(prompt, GREEDY)
            assert again.token_ids == expected.token_ids and again.stats.cached_tokens == 48
        with InferenceEngine(config(model_directory("qwen2"))) as engine:
            with pytest.raises(ConfigurationError, match="is for another model"):
                engine.load_prefixes(tmp_path / "file")
            (tmp_path / "file").write_bytes(b"nothing")
            with pytest.raises(ConfigurationError, match="cannot load prefixes from"):
                engine.load_prefixes(tmp_path / "file")
            with pytest.raises(OSError):
                engine.save_prefixes(tmp_path / "missing" / "file")
            assert engine.generate(prompt, GREEDY).finish_reason == "length", "the engine still works"

    def test_other_backends_say_that_they_have_none(self, echo: InferenceEngine, tmp_path: Path) -> None:
        with pytest.raises(InvalidRequest, match="no prefix cache"):
            echo.save_prefixes(tmp_path / "file")

    def test_tenants_do_not_share(self, load: Load) -> None:
        backend = load()
        prompt = list(range(40, 90))
        for salt, cached in (("one", 0), ("other", 0), ("one", 48)):
            row = add(backend, prompt, salt=salt)
            finish(backend)
            assert row.cached_tokens == cached


class TestAnswers:
    @pytest.fixture
    def cache(self, load: Load) -> AnswerCache:
        return AnswerCache(load())

    def test_the_same_question_costs_one_step(self, cache: AnswerCache) -> None:
        first = add(cache, [5, 6, 7])
        assert finish(cache) > 1
        again = add(cache, [5, 6, 7])
        assert finish(cache) == 1
        assert (again.tokens, again.finish) == (first.tokens, first.finish)

    @pytest.mark.parametrize(
        "change",
        [
            {"salt": "another tenant"},
            {"prompt": [5, 6, 8]},
            {"params": GREEDY.model_copy(update={"max_tokens": 7})},
            {"params": GREEDY.model_copy(update={"temperature": 1.0, "seed": 1})},
            {"params": GREEDY.model_copy(update={"logprobs": 1})},
        ],
    )
    def test_any_other_question_is_computed(self, cache: AnswerCache, change: dict[str, Any]) -> None:
        question: dict[str, Any] = {"prompt": [5, 6, 7], "params": GREEDY, "salt": ""}
        add(cache, **question)
        finish(cache)
        add(cache, **question | change)
        assert finish(cache) > 1

    def test_what_was_cut_short_is_no_answer(self, cache: AnswerCache) -> None:
        row = add(cache, [5, 6, 7])
        cache.step()
        cache.remove(row)
        row.end("cancelled")
        again = add(cache, [5, 6, 7])
        assert finish(cache) > 1 and len(again.tokens) == 8

    def test_a_successor_goes_on_in_the_middle(self, cache: AnswerCache) -> None:
        first = add(cache, [5, 6, 7])
        finish(cache)
        request = EngineRequest("s", (5, 6, 7), GREEDY, seed=1, generated=(tuple(first.tokens[:3]),))
        successor = Choice(request, 0, cache.tokenizer, cache.info)
        cache.add(successor)
        deltas = cache.step()
        assert [token for delta in deltas for token in delta.token_ids] == first.tokens[3:]

    @pytest.mark.parametrize("is_given", [True, False])
    def test_memory_is_bounded_and_the_least_used_goes_first(
        self, load: Load, is_given: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """By default to a twentieth of what the process may have, which can be far less than the machine has."""
        backend, room = load(), 2 * (300 + 40 * 8)
        with monkeypatch.context() as patch:
            patch.setattr(resource, "getrlimit", lambda _: (20 * room, 20 * room))
            cache = AnswerCache(backend, memory=room if is_given else None)
        for prompt in ([5], [6], [5], [7]):
            add(cache, prompt)
            finish(cache)
        for prompt, known in (([5], True), ([7], True), ([6], False)):
            add(cache, prompt)
            assert (finish(cache) == 1) is known

    def test_the_setting(self, model_directory: Callable[[str], Path]) -> None:
        assert isinstance(load_backend(config(model_directory("llama"), cache_answers=True)), AnswerCache)
        with InferenceEngine(config(model_directory("llama"), cache_answers=True)) as engine:
            first, second = (engine.generate([5, 6, 7], GREEDY) for _ in range(2))
            assert first.token_ids == second.token_ids
            assert second.stats.cached_tokens == 3


def test_stats_count_the_cache(model_directory: Callable[[str], Path]) -> None:
    small = config(model_directory("llama"), kv_cache_memory=ByteSize(6 * 16384), max_batch_size=16)
    with InferenceEngine(small) as engine:
        engine.generate([[n] * 40 for n in range(3, 9)], GREEDY.model_copy(update={"max_tokens": 40}))
        cache = engine.stats().cache
        assert cache is not None and cache.num_blocks == 6 and cache.memory == 6 * 16384
        assert cache.num_preemptions > 0 and cache.num_evictions > 0 and cache.usage == 0


def test_pressure_evicts_prefixes_from_080_on_and_refuses_work_from_090_on(load: Load) -> None:
    """Spec §2, on the way of an engine from empty to full: 20 blocks of 16 tokens."""
    backend = load(kv_cache_memory=ByteSize(20 * 16384), max_batch_size=4)
    add(backend, [7] * 32)
    finish(backend)  # leaves two blocks that can be found
    long = GREEDY.model_copy(update={"max_tokens": 200})
    add(backend, [9] * 100, long)
    seen = {}
    while finish_step(backend):
        usage = backend.cache_stats().usage
        kept = any(pool._unheld for pool in backend.blocks.pools)
        seen[round(usage, 2)] = kept, slots(usage, 4, 1)
        backend.check_integrity()
    usual, half, urgent, none = Slots(5, 4), Slots(5, 2), Slots(5, 0), Slots(0, 0)
    assert [seen[at] for at in (0.5, 0.75, 0.8, 0.9, 0.95)] == [
        (True, usual),
        (True, half),
        (False, half),
        (False, urgent),
        (False, none),
    ]


def test_the_context_is_what_the_budget_holds(model_directory: Callable[[str], Path]) -> None:
    with InferenceEngine(config(model_directory("llama"), kv_cache_memory=ByteSize(6 * 16384))) as engine:
        assert engine.model_info().context_length == 96
        with pytest.raises(InvalidRequest, match="96"):
            engine.generate(list(range(3, 99)), GREEDY)
        assert len(engine.generate(list(range(3, 98)), GREEDY).token_ids) == 1


def test_a_chunk_smaller_than_the_batch_is_refused(load: Load) -> None:
    with pytest.raises(ConfigurationError, match=r"prefill_chunk_size=8: each of max_batch_size=16"):
        load(prefill_chunk_size=8, max_batch_size=16)


def test_no_stream_waits_longer_than_a_chunk(load: Load) -> None:
    """A long prompt is computed in pieces, and in each of these steps every stream gets its token."""
    backend = load(prefill_chunk_size=32, max_batch_size=4)
    streams = [add(backend, [n], GREEDY.model_copy(update={"max_tokens": 64})) for n in (5, 6, 7)]
    backend.step()
    long = add(backend, [n % 400 + 3 for n in range(600)])
    while not long.tokens:
        before = [row.index for row in streams]
        backend.step()
        assert [row.index for row in streams] == [index + 1 for index in before]
    assert streams[0].index >= 600 // 32
