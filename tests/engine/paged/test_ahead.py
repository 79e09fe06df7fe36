"""Steps that are launched before the tokens of the last are read, as on CUDA; here by the same code on a CPU.

What is asked must not depend on it: tokens, texts and ends are those of requests that are read at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ByteSize

from penstock.engine import EngineConfig, EngineRequest, GenerationParams
from penstock.engine.choice import Choice
from penstock.engine.grammar.matcher import GrammarCompiler
from penstock.engine.paged.backend import PagedBackend
from penstock.engine.paged.kv.block_pool import chain, root
from penstock.schemas.events import Delta
from penstock.schemas.params import Grammar

BLOCK = 16
BLOCK_BYTES = 16384  # of the tiny llama, in float32
PROMPT = [5, 6, 7]
GREEDY = GenerationParams(temperature=0, max_tokens=8, ignore_eos=True)
Load = Callable[..., PagedBackend]


@pytest.fixture(scope="module")
def load(model_directory: Callable[[str], Path]) -> Load:
    def load(ahead: bool = True, **values: Any) -> PagedBackend:
        fields: dict[str, Any] = {"dtype": "float32", "device": "cpu", "kv_cache_memory": ByteSize(16 << 20)}
        return PagedBackend(EngineConfig(model=str(model_directory("llama")), **fields | values), ahead=ahead)

    return load


def make_choices(backend: PagedBackend, request: EngineRequest) -> list[Choice]:
    grammars = GrammarCompiler(backend.tokenizer)
    return [
        Choice(request, index, backend.tokenizer, backend.info, grammars.matcher(request.params))
        for index in range(request.params.n)
    ]


def add(backend: PagedBackend, prompt: list[int] = PROMPT, params: GenerationParams = GREEDY) -> Choice:
    (choice,) = make_choices(backend, EngineRequest("r", tuple(prompt), params, seed=1))
    backend.add(choice)
    return choice


def finish(backend: PagedBackend) -> list[Delta]:
    deltas = []
    while backend.delay() <= 0:
        deltas += backend.step()
        backend.check_integrity()
    return deltas


def answer(backend: PagedBackend, prompt: list[int] = PROMPT, params: GenerationParams = GREEDY) -> list[int]:
    choice = add(backend, prompt, params)
    finish(backend)
    return choice.tokens


def count_passes(backend: PagedBackend) -> list[int]:
    """The tokens of each pass from now on."""
    forward, passes = backend.runner.forward, list[int]()

    def counted(segments: Any, chosen: torch.Tensor | None = None) -> Any:
        passes.append(sum(len(segment.tokens) for segment in segments))
        return forward(segments, chosen)

    backend.runner.forward = counted  # type: ignore[method-assign]
    return passes


class TestOrder:
    def test_a_step_is_launched_before_the_last_is_read(self, load: Load) -> None:
        backend = load()
        passes = count_passes(backend)
        choice = add(backend)
        for launched in range(1, GREEDY.max_tokens + 1):
            deltas = backend.step()
            assert (len(passes), len(choice.tokens)) == (launched, launched - 1)
            assert sum(len(delta.token_ids) for delta in deltas) == int(launched > 1)
        (last,) = backend.step()
        assert last.finish_reason == "length"
        assert passes == [3, *[1] * 7], "the last token is known to be the last, and nothing is computed after it"
        assert backend.delay() > 0 and backend.blocks.usage == 0

    @pytest.mark.parametrize(
        "bound",
        [
            {"repetition_penalty": 1.2},
            {"presence_penalty": 0.5},
            {"frequency_penalty": 0.5},
            {"grammar": Grammar(kind="regex", text="[a-z]{30}"), "ignore_eos": False},
        ],
    )
    def test_who_needs_the_tokens_before_has_them_read(self, load: Load, bound: dict[str, Any]) -> None:
        backend = load()
        choice = add(backend, params=GREEDY.model_copy(update=bound))
        other = add(backend, [8, 9])
        for number in range(1, 5):
            backend.step()
            assert len(choice.tokens) == len(other.tokens) == number
        assert choice.tokens == answer(load(ahead=False), params=GREEDY.model_copy(update=bound))[:4]

    def test_a_prompt_is_scored_beside_rows_that_decode(self, load: Load) -> None:
        params, prompt = GREEDY.model_copy(update={"logprobs": 1, "prompt_logprobs": 0}), list(range(3, 53))
        told = []
        for ahead in (True, False):
            backend = load(ahead, prefill_chunk_size=16, max_batch_size=4)
            other = add(backend, [8, 9])
            backend.step()
            scored = add(backend, prompt, params)
            deltas = finish(backend)
            both = [*(delta.prompt_logprobs for delta in deltas), *(delta.logprobs for delta in deltas)]
            entries = [entry for some in both for entry in some or ()]
            assert [entry.token_id for entry in entries] == [*prompt, *scored.tokens]
            assert other.tokens == answer(load(ahead=False), [8, 9])
            told.append([entry.logprob for entry in entries])
        assert told[0][0] is None and told[0][1:] == pytest.approx(told[1][1:], abs=1e-5)

    def test_on_a_cpu_every_step_is_read_at_once(self, load: Load) -> None:
        backend = load(ahead=None)
        choice = add(backend)
        backend.step()
        assert len(choice.tokens) == 1


class TestLateEnds:
    """One that turns out to have ended has computed a token more, of which nothing is seen."""

    @pytest.mark.parametrize("length", range(8, 16))
    def test_nothing_of_the_token_too_many_is_seen(self, load: Load, length: int) -> None:
        """Wherever the end falls in a block: the cache holds what was answered, and under its own name."""
        prompt = [n + 40 for n in range(length)]
        known = answer(load(ahead=False), prompt)
        end = next(token for token in known if known.index(token) >= 3)
        params = GREEDY.model_copy(update={"stop_token_ids": (end,), "max_tokens": 20})
        backend = load()
        passes = count_passes(backend)
        choice = add(backend, prompt, params)
        deltas = finish(backend)
        expected = known[: known.index(end) + 1]
        assert choice.tokens == expected and len(passes) == len(expected) + 1
        assert [token for delta in deltas for token in delta.token_ids] == expected
        assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + ["stop"]
        tokens = [*prompt, *expected[:-1]]
        keys = [root("")]
        for begin in range(0, len(tokens) - BLOCK + 1, BLOCK):
            keys.append(chain(keys[-1], tokens[begin : begin + BLOCK]))
        assert [key for key, _ in backend.blocks.pools[0].cached()] == keys[1:]
        assert backend.blocks.usage == 0

    def test_its_blocks_are_the_next_ones(self, load: Load) -> None:
        """Room for one request: the next one writes where the token too many was written."""
        backend = load(kv_cache_memory=ByteSize(2 * BLOCK_BYTES))
        known = answer(load(ahead=False))
        first = add(backend, params=GREEDY.model_copy(update={"stop_token_ids": (known[0],), "max_tokens": 20}))
        others = [add(backend, [n, *PROMPT], GREEDY.model_copy(update={"max_tokens": 20})) for n in range(8, 12)]
        finish(backend)
        assert first.tokens == known[:1]
        reference = load(ahead=False)
        for other in others:
            assert other.tokens == answer(reference, list(other.prompt), other.request.params)

    def test_numbers_of_the_token_too_many_do_not_spread(self, load: Load) -> None:
        """The token that ends one has no numbers; only the step too many computes it, in a block that others get."""
        known = answer(load(ahead=False))
        backend = load(kv_cache_memory=ByteSize(2 * BLOCK_BYTES), compile_kernels=False)  # which read no padding
        backend.runner._decoder.embedding.data[known[0]] = torch.nan  # type: ignore[union-attr]
        first = add(backend, params=GREEDY.model_copy(update={"stop_token_ids": (known[0],), "max_tokens": 20}))
        backend.step()
        assert not backend.step()[0].error and first.finish == "stop" and first.tokens == known[:1]
        heirs = [add(backend, [n], GREEDY.model_copy(update={"max_tokens": 2})) for n in (9, 8)]
        finish(backend)
        assert [heir.finish for heir in heirs] == ["length", "length"]

    def test_a_cancelled_one_gets_no_more(self, load: Load) -> None:
        backend = load()
        choice, other = add(backend), add(backend, [8, 9])
        for _ in range(3):
            backend.step()
        backend.remove(choice)
        choice.end("cancelled")
        backend.check_integrity()
        deltas = finish(backend)
        assert len(choice.tokens) == 2
        assert {delta.choice for delta in deltas if delta.finish_reason} == {other.number}
        assert other.tokens == answer(load(ahead=False), [8, 9])


BASE = [n * n % 400 + 3 for n in range(40)]
POOL = [BASE[:1], BASE[:15], BASE[:16], BASE, [*BASE[:16], 9, 8], [*BASE[:32], 7], BASE[5:26]]


def params_of(max_tokens: int, min_tokens: int, **others: Any) -> GenerationParams:
    return GenerationParams(max_tokens=max_tokens, min_tokens=min(min_tokens, max_tokens), **others)


PARAMS = st.builds(
    params_of,
    temperature=st.sampled_from([0.0, 0.0, 0.9]),
    top_p=st.sampled_from([1.0, 0.9]),
    max_tokens=st.integers(1, 12),
    min_tokens=st.sampled_from([0, 0, 4]),
    stop=st.sampled_from([(), (), ("e",), ("th", " a")]),
    stop_token_ids=st.sampled_from([(), (), tuple(range(3, 500, 6)), tuple(range(0, 500, 2))]),
    repetition_penalty=st.sampled_from([1.0] * 7 + [1.5]),
    logit_bias=st.sampled_from([{}, {}, {70: 3.0}]),
    logprobs=st.sampled_from([None, None, 2]),
    n=st.sampled_from([1, 1, 2, 3]),
)


@dataclass(frozen=True)
class Arrival:
    """A request that comes before the step `at`; its first choice is cancelled after `patience` more."""

    prompt: int
    params: GenerationParams
    at: int
    patience: int | None
    priority: int


ARRIVALS = st.builds(
    Arrival,
    prompt=st.integers(0, len(POOL) - 1),
    params=PARAMS,
    at=st.integers(0, 15),
    patience=st.sampled_from([None, None, 0, 1, 2, 5, 9]),
    priority=st.integers(0, 1),
)


@pytest.fixture(scope="module")
def pair(load: Load) -> Iterator[tuple[PagedBackend, PagedBackend]]:
    """One that launches ahead, with hardly more room than a request needs; one that does not."""
    tight = {"max_batch_size": 3, "prefill_chunk_size": 5, "max_sequence_length": 64}
    backends = load(kv_cache_memory=ByteSize(6 * BLOCK_BYTES), **tight), load(ahead=False)
    yield backends
    for backend in backends:
        backend.close()


Told = tuple[list[int], str, str | None, int]


def told(deltas: list[Delta]) -> Told:
    """Tokens, text, end, and how many log-probabilities."""
    return (
        [token for delta in deltas for token in delta.token_ids],
        "".join(delta.text for delta in deltas),
        deltas[-1].finish_reason if deltas else None,
        sum(len(delta.logprobs or ()) for delta in deltas),
    )


@given(arrivals=st.lists(ARRIVALS, min_size=1, max_size=6))
@settings(max_examples=100, deadline=None)
def test_no_schedule_changes_an_answer(pair: tuple[PagedBackend, PagedBackend], arrivals: list[Arrival]) -> None:
    backend, reference = pair
    live: list[tuple[Arrival, list[Choice]]] = []
    heard: dict[tuple[str, int], list[Delta]] = {}
    cancelled: set[Choice] = set()
    step = 0
    while step <= 30 or backend.delay() <= 0:
        for index, arrival in enumerate(arrivals):
            if arrival.at == step:
                prompt = tuple(POOL[arrival.prompt])
                request = EngineRequest(str(index), prompt, arrival.params, seed=index, priority=arrival.priority)
                live.append((arrival, make_choices(backend, request)))
                for choice in live[-1][1]:
                    backend.add(choice)
                    heard[request.id, choice.number] = []
        for arrival, (first, *_) in live:
            if arrival.patience is not None and arrival.at + arrival.patience == step and first.finish is None:
                backend.remove(first)
                heard[first.request.id, 0].append(first.end("cancelled"))
                cancelled.add(first)
        for delta in backend.step():
            so_far = heard[delta.request, delta.choice]
            assert not so_far or so_far[-1].finish_reason is None, "nothing follows the end"
            assert delta.index == sum(len(other.token_ids) for other in so_far)
            so_far.append(delta)
        backend.check_integrity()
        step += 1
        assert step < 1000, "the backend makes no progress"
    assert backend.blocks.usage == 0 and len(live) == len(arrivals)
    expected: dict[tuple[str, int], list[Delta]] = {key: [] for key in heard}
    for _, choices in live:
        for twin in make_choices(reference, choices[0].request):
            reference.add(twin)
    for delta in finish(reference):
        expected[delta.request, delta.choice].append(delta)
    for _, choices in live:
        for choice in choices:
            key = choice.request.id, choice.number
            tokens, text, end, count = told(heard[key])
            if choice in cancelled:
                assert end == "cancelled" and tokens == told(expected[key])[0][: len(tokens)]
            else:
                assert (tokens, text, end, count) == told(expected[key])
