"""Guessed tokens: what they are, and that they change nothing but the number of steps."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ByteSize

from penstock.engine import EngineConfig, EngineRequest, GenerationParams
from penstock.engine.choice import Choice
from penstock.engine.grammar.matcher import GrammarCompiler
from penstock.engine.paged.backend import PagedBackend
from penstock.engine.paged.speculation.repeats import Repeats
from penstock.engine.text.tokenizer import Tokenizer
from penstock.schemas.events import Delta
from penstock.schemas.params import Grammar

MakeModel = Callable[[str], Path]
Answer = tuple[Any, ...]

SCHEMA = (
    '{"type": "object", "properties": {"description": {"type": "boolean"}, "temperature": {"type": "integer"}}, '
    '"required": ["description", "temperature"], "additionalProperties": false}'
)
FORM = Grammar(kind="json_schema", text=SCHEMA)
BLOCKS = 12  # of the cramped cache: two long rows do not fit


def load(directory: Path, **values: Any) -> PagedBackend:
    fields: dict[str, Any] = {"dtype": "bfloat16", "device": "cpu", "kv_cache_memory": ByteSize(16 << 20)}
    fields["speculation"] = "auto"
    backend = PagedBackend(EngineConfig(model=str(directory), **fields | values))
    off = backend.speculation_stats().off
    if off and values.get("speculation") != "off":
        pytest.skip(off)
    return backend


@pytest.fixture(scope="module", params=["llama", "mistral"])
def pair(model_directory: MakeModel, request: pytest.FixtureRequest) -> Iterator[tuple[PagedBackend, PagedBackend]]:
    """The same model with guesses and without, in a cache too small for a batch."""
    directory = model_directory(request.param)
    number_bytes = 2 * 2 * 2 * 32 * 2  # two layers' keys and values of two heads
    room: dict[str, Any] = {"kv_cache_memory": ByteSize(BLOCKS * 16 * number_bytes), "max_batch_size": 4}
    if request.param == "mistral":
        room = {"quantization": "int4", "max_batch_size": 4}
    yield load(directory, **room), load(directory, speculation="off", **room)


def requests(backend: PagedBackend, each: Sequence[tuple[tuple[int, ...], GenerationParams, int]]) -> list[Choice]:
    compiler = GrammarCompiler(backend.tokenizer)
    return [
        Choice(EngineRequest(str(number), prompt, params, seed=seed), index, backend.tokenizer, backend.info, matcher)
        for number, (prompt, params, seed) in enumerate(each)
        for index in range(params.n)
        for matcher in [compiler.matcher(params)]
    ]


def run(backend: PagedBackend, choices: list[Choice], arrivals: list[int] | None = None) -> list[Answer]:
    """All that clients see of the choices, which arrive before the steps `arrivals`; the laws hold after each step."""
    deltas: dict[tuple[str, int], list[Delta]] = {(choice.request.id, choice.number): [] for choice in choices}
    waiting = sorted(zip(arrivals or [0] * len(choices), range(len(choices)), strict=True))
    step = 0
    while waiting or backend.delay() <= 0:
        while waiting and (waiting[0][0] <= step or backend.delay() > 0):
            backend.add(choices[waiting.pop(0)[1]])
        for delta in backend.step():
            deltas[delta.request, delta.choice].append(delta)
        backend.check_integrity()
        step += 1
    found = []
    for each in deltas.values():
        ends = [0, *(delta.index + len(delta.token_ids) for delta in each)]
        assert [delta.index for delta in each] == ends[:-1], "tokens are out of order"
        tokens = [token for delta in each for token in delta.token_ids]
        scores = [score for delta in each for score in delta.logprobs or ()]
        last = each[-1]
        found.append((tokens, "".join(delta.text for delta in each), scores, last.finish_reason, last.stop_reason))
    return found


prompts = st.builds(
    lambda piece, times, rest: tuple(piece * times + rest),
    st.lists(st.integers(3, 400), min_size=2, max_size=8),
    st.integers(1, 5),
    st.lists(st.integers(3, 400), max_size=30),
)
free = st.fixed_dictionaries(
    {
        "max_tokens": st.integers(1, 50),
        "temperature": st.sampled_from([0.0, 0.2, 1.0]),
        "n": st.sampled_from([1, 1, 2]),
    },
    optional={
        "top_k": st.sampled_from([1, 3]),
        "top_p": st.sampled_from([0.3, 0.9]),
        "min_p": st.just(0.2),
        "repetition_penalty": st.sampled_from([0.7, 1.2]),
        "frequency_penalty": st.sampled_from([-1.0, 0.5]),
        "presence_penalty": st.just(0.4),
        "logit_bias": st.just({7: 3.0, 11: 2.5}),
        "min_tokens": st.integers(0, 8),
        "ignore_eos": st.booleans(),
        "stop": st.just(("e", "in")),
        "logprobs": st.integers(0, 3),
    },
)
formed = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, 60), "temperature": st.sampled_from([0.0, 0.8]), "grammar": st.just(FORM)},
    optional={"logprobs": st.integers(0, 2), "frequency_penalty": st.just(0.5)},
)


def params_of(values: dict[str, Any]) -> GenerationParams:
    least = {"min_tokens": min(values["min_tokens"], values["max_tokens"])} if "min_tokens" in values else {}
    return GenerationParams(**values | least)


loads = st.lists(
    st.tuples(prompts, (free | formed).map(params_of), st.integers(0, 99)),
    min_size=1,
    max_size=5,
)


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(load=loads, data=st.data())
def test_guesses_change_nothing(pair: tuple[PagedBackend, PagedBackend], load: Any, data: st.DataObject) -> None:
    on, off = (requests(backend, load) for backend in pair)
    arrivals = data.draw(st.lists(st.integers(0, 20), min_size=len(on), max_size=len(on)))
    assert run(pair[0], on, arrivals) == run(pair[1], off)


def test_memory_ran_out_and_guesses_were_right_and_wrong(pair: tuple[PagedBackend, PagedBackend]) -> None:
    """So that the property above says something of each."""
    bias = {7: 8.0, 8: 8.0}
    load = [
        ((5 + row, 6, 7, 8) * 6, GenerationParams(max_tokens=60, temperature=1, logit_bias=bias), row)
        for row in range(4)
    ]
    assert run(pair[0], requests(pair[0], load)) == run(pair[1], requests(pair[1], load))
    stats = pair[0].speculation_stats()
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    assert stats.num_drafts <= stats.num_draft_tokens
    assert pair[1].speculation_stats().num_drafts == 0
    if pair[0].blocks.capacity < 1000:
        assert pair[0].cache_stats().num_preemptions > 0


def test_wrong_guesses_leave_the_oracle_s_tokens(
    model_directory: MakeModel, reference_of: Callable[[str], Any]
) -> None:
    import torch

    prompt = (5, 6, 7, 8) * 10
    backend = load(model_directory("llama"), dtype="float32")
    (choice,) = requests(backend, [(prompt, GenerationParams(max_tokens=60, temperature=0, ignore_eos=True), 0)])
    run(backend, [choice])
    right = reference_of("llama").generate(
        torch.tensor([prompt]), max_new_tokens=60, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert choice.tokens == right[0, len(prompt) :].tolist()
    assert backend.speculation_stats().num_draft_tokens > 0


def test_an_answer_that_repeats_itself_takes_fewer_steps(pair: tuple[PagedBackend, PagedBackend]) -> None:
    params = GenerationParams(max_tokens=60, temperature=0, logit_bias={7: 80.0}, ignore_eos=True)
    before = pair[0].speculation_stats().num_accepted_tokens
    (choice,) = requests(pair[0], [((5, 6), params, 0)])
    pair[0].add(choice)
    steps = 0
    while pair[0].delay() <= 0:
        pair[0].step()
        steps += 1
    assert choice.tokens == [7] * 60
    assert steps == 60 - (pair[0].speculation_stats().num_accepted_tokens - before) < 40


def test_what_a_grammar_forces_comes_in_few_steps(model_directory: MakeModel) -> None:
    backend = load(model_directory("llama"), dtype="float32")
    params = GenerationParams(max_tokens=100, temperature=0, grammar=FORM)
    answers = {}
    for guessing in (backend, load(model_directory("llama"), dtype="float32", speculation="off")):
        (choice,) = requests(guessing, [((5, 6, 7), params, 0)])
        answers[guessing] = run(guessing, [choice])
    first, second = answers.values()
    assert first == second
    assert backend.speculation_stats().num_accepted_tokens > 0


def test_what_is_forced_ends_before_a_character_that_is_not(model_directory: MakeModel) -> None:
    compiler = GrammarCompiler(Tokenizer(model_directory("llama")))
    for pattern, forced in (("a(é|è)", "a"), ("aéb", "aéb"), ("(😀|😁)x", ""), ("a|b", "")):
        matcher = compiler.matcher(GenerationParams(grammar=Grammar(kind="regex", text=pattern)))
        assert matcher is not None and matcher.forced(256) == forced


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar(kind="ebnf", text='root ::= "a" root'),
        Grammar(kind="ebnf", text='root ::= "a"{100000000000}'),
        Grammar(kind="regex", text="a{100000000000}"),
    ],
)
def test_an_answer_that_must_go_on_for_ever_is_not_written_out(model_directory: MakeModel, grammar: Grammar) -> None:
    """Its text would fill the memory, for a request of a few bytes."""
    matcher = GrammarCompiler(Tokenizer(model_directory("llama"))).matcher(GenerationParams(grammar=grammar))
    assert matcher is not None
    assert matcher.forced(8) in {"a" * number for number in range(8, 64)}


@pytest.mark.parametrize(
    ("schema", "forced"),
    [
        ({"properties": {"name": {"const": "one and two"}}}, '{"name": "one and two"}'),
        ({"properties": {"name": {"enum": ["ab", "ac"]}}}, '{"name": "a'),
        ({"properties": {"name": {"type": "array", "items": {"const": 1}, "minItems": 10_000_000}}}, '{"name": [1'),
        ({"properties": {"name": {"type": "array", "items": {"const": 1}, "minItems": 3}}}, '{"name": [1, 1, 1'),
        ({"properties": {"name": {"$ref": "#"}}}, '{"name": {"name": '),
        ({"properties": {"name": {"\\u0024ref": "#"}}}, '{"name": {"name": '),
    ],
)
def test_a_schema_forces_what_it_writes_out_and_no_endless_text(
    model_directory: MakeModel, schema: dict[str, Any], forced: str
) -> None:
    whole = {"type": "object", **schema, "required": ["name"], "additionalProperties": False}
    text = json.dumps(whole).replace("\\\\", "\\")
    grammar = Grammar(kind="json_schema", text=text)
    matcher = GrammarCompiler(Tokenizer(model_directory("llama"))).matcher(GenerationParams(grammar=grammar))
    assert matcher is not None
    found = matcher.forced(8)
    assert found.startswith(forced[:8]) and forced.startswith(found[: len(forced)]) and len(found) < 64


@pytest.mark.parametrize(
    ("values", "reason"),
    [({"speculation": "off"}, "speculation is off"), ({"compile_kernels": False}, "decoding is not compiled")],
)
def test_the_statistics_say_why_nothing_is_guessed(
    model_directory: MakeModel, values: dict[str, Any], reason: str
) -> None:
    config = EngineConfig(
        model=str(model_directory("llama")),
        device="cpu",
        kv_cache_memory=ByteSize(16 << 20),
        **{"speculation": "auto"} | values,
    )
    assert reason in PagedBackend(config).speculation_stats().off


tokens = st.lists(st.integers(0, 3), max_size=40)


@given(prompt=tokens, answer=tokens, count=st.integers(1, 12))
def test_a_place_shares_the_text_s_last_tokens(prompt: list[int], answer: list[int], count: int) -> None:
    repeats = Repeats.of(tuple(prompt))
    repeats.extend(answer)
    text, found = prompt + answer, repeats.propose(count)
    seen = any(text[i : i + 2] == text[-2:] for i in range(len(text) - 2))
    assert bool(found) == (repeats.run > 0) and (not found or len(found) == count)
    if seen:
        assert found
    if found:  # whatever follows `run` of the text's last tokens somewhere, itself repeating
        whole = text + found
        places = [i for i in range(repeats.run, len(text)) if whole[i : i + count] == found]
        assert any(whole[i - repeats.run : i] == text[-repeats.run :] for i in places)


def test_a_text_that_goes_round_is_guessed_beyond_its_end() -> None:
    assert Repeats.of((9, 1, 2, 3, 1, 2)).propose(7) == [3, 1, 2, 3, 1, 2, 3]
    assert Repeats.of((1, 2, 3, 4)).propose(3) == []
