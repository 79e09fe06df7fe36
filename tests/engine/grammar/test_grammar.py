"""Answers held to a grammar: always valid where they finish, whoever else runs, and whoever goes on with them."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import psutil
import pytest
import torch
from json_schemas import BY_HAND, generate
from pydantic import ByteSize

from penstock.engine import EngineConfig, EngineRequest, GenerationParams, InferenceEngine
from penstock.engine.grammar import matcher
from penstock.engine.grammar.json_schema import any_json_object, choice_grammar, ebnf_grammar, json_schema_grammar
from penstock.engine.grammar.json_schema import regex_grammar as regex
from penstock.engine.grammar.matcher import GrammarCompiler
from penstock.engine.text.tokenizer import Tokenizer
from penstock.schemas.errors import GenerationFailed, InvalidRequest
from penstock.schemas.params import Grammar

DIGITS = regex("[0-9]{40}")
PERSON = json_schema_grammar(BY_HAND["person"], path="p")
FORMATS = jsonschema.FormatChecker(["date", "ipv4", "ipv6", "uuid"])


@pytest.fixture(scope="module")
def tight(model_directory: Callable[[str], Path]) -> Iterator[InferenceEngine]:
    """An engine that has to chunk prompts and to preempt."""
    config = EngineConfig(
        model=str(model_directory("llama")),
        dtype="float32",
        device="cpu",
        max_batch_size=16,
        kv_cache_memory=ByteSize(1 << 18),
        max_sequence_length=160,
        prefill_chunk_size=16,
    )
    with InferenceEngine(config) as engine:
        yield engine


def seeded(grammar: Grammar | None, seed: int, **others: Any) -> GenerationParams:
    return GenerationParams(**{"max_tokens": 60, "grammar": grammar, "seed": seed} | others)


async def answers(
    engine: InferenceEngine, asked: list[tuple[list[int], GenerationParams]]
) -> list[list[tuple[int, ...]]]:
    """All at once; of each its choices' tokens."""
    outputs = await asyncio.gather(*(engine.agenerate(prompt, params) for prompt, params in asked))
    return [[choice.token_ids for choice in output.choices] for output in outputs]


async def test_every_finished_answer_validates(llama: InferenceEngine) -> None:
    """200 schemas at temperature 1, by a model that says nothing sensible."""
    schemas = [*BY_HAND.values(), *(generate(seed) for seed in range(200 - len(BY_HAND)))]
    params = [
        GenerationParams(max_tokens=400, seed=7, grammar=json_schema_grammar(schema, path="p")) for schema in schemas
    ]
    outputs = await asyncio.gather(*(llama.agenerate("Give me JSON:", one) for one in params))
    finished = 0
    for schema, output in zip(schemas, outputs, strict=True):
        (choice,) = output.choices
        if choice.finish_reason == "stop":
            finished += 1
            jsonschema.Draft202012Validator(schema, format_checker=FORMATS).validate(json.loads(choice.text))
        else:
            assert choice.finish_reason == "length" and len(choice.token_ids) == 400
    assert finished >= 190


def test_a_cut_document_says_so(llama: InferenceEngine) -> None:
    for seed in range(5):
        output = llama.generate("x", seeded(PERSON, seed, max_tokens=6))
        assert output.choices[0].finish_reason == "length"


def test_the_last_token_allowed_may_complete_it(llama: InferenceEngine) -> None:
    whole = llama.generate("x", seeded(PERSON, 3, max_tokens=200)).choices[0]
    assert whole.finish_reason == "stop" and whole.text.endswith("}")
    again = llama.generate("x", seeded(PERSON, 3, max_tokens=len(whole.token_ids))).choices[0]
    assert (again.finish_reason, again.text) == ("stop", whole.text)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_other_kinds(llama: InferenceEngine, temperature: float) -> None:
    def texts(grammar: Grammar) -> list[str]:
        choices = [llama.generate("x", seeded(grammar, seed, temperature=temperature)).choices[0] for seed in range(4)]
        assert {choice.finish_reason for choice in choices} == {"stop"}
        return [choice.text for choice in choices]

    assert all(re.fullmatch(r"(ab|c){2,3}-\d", text) for text in texts(regex(r"^(ab|c){2,3}-\d$")))
    assert set(texts(choice_grammar(["yes", 'n"o', "é"]))) <= {"yes", 'n"o', "é"}
    assert all(
        re.fullmatch(r"(\(){0,9}x(\)){0,9}", text) for text in texts(ebnf_grammar('root ::= "x" | "(x)" | "((x))"'))
    )
    tag = {
        "type": "structural_tag",
        "format": {
            "type": "sequence",
            "elements": [
                {"type": "const_string", "value": "<a>"},
                {"type": "regex", "pattern": "[xy]{3}"},
                {"type": "const_string", "value": "</a>"},
            ],
        },
    }
    assert all(
        re.fullmatch("<a>[xy]{3}</a>", text) for text in texts(Grammar(kind="structural_tag", text=json.dumps(tag)))
    )


def test_an_answer_that_could_go_on_goes_on_until_an_end_token(llama: InferenceEngine) -> None:
    texts = set()
    for seed in range(12):
        choice = llama.generate("x", seeded(regex("[a-z]+"), seed, max_tokens=30)).choices[0]
        assert re.fullmatch("[a-z]+", choice.text)
        texts.add(choice.text)
    assert len(texts) > 1


def test_greedy_equals_a_slow_reference(
    llama: InferenceEngine, reference_of: Callable[[str], Any], prompts: list[list[int]]
) -> None:
    import xgrammar

    tokenizer = llama.tokenizer
    assert isinstance(tokenizer, Tokenizer)
    vocabulary = xgrammar.TokenizerInfo.from_huggingface(
        tokenizer.huggingface, vocab_size=tokenizer.vocabulary_size, stop_token_ids=list(tokenizer.eos_token_ids)
    )
    compiled = xgrammar.GrammarCompiler(vocabulary).compile_json_schema(PERSON.text, any_whitespace=False)
    control = [token for token, text in enumerate(vocabulary.decoded_vocab) if min(text, default=32) < 32]
    hidden = [*(tokenizer.special_token_ids - set(tokenizer.eos_token_ids)), *control]
    bits = xgrammar.allocate_token_bitmask(1, tokenizer.vocabulary_size)
    for prompt in prompts[3:5]:
        matcher = xgrammar.GrammarMatcher(compiled)
        expected: list[int] = []
        while len(expected) < 40:
            logits = reference_of("llama")(torch.tensor([prompt + expected])).logits[:, -1].detach()
            matcher.fill_next_token_bitmask(bits)
            xgrammar.apply_token_bitmask_inplace(logits, bits)
            logits[:, hidden] = -torch.inf
            token = int(logits.argmax())
            if token in tokenizer.eos_token_ids:
                break
            assert matcher.accept_token(token)
            expected.append(token)
        output = llama.generate(prompt, GenerationParams(max_tokens=40, temperature=0, grammar=PERSON))
        assert list(output.choices[0].token_ids) == expected


async def test_mates_change_nothing(llama: InferenceEngine, prompts: list[list[int]]) -> None:
    grammars = [PERSON, None, DIGITS, None, any_json_object(), regex("[ab]{3}")]
    asked = [
        (
            prompts[place],
            seeded(grammar, place, n=3 if place == 2 else 1, temperature=0 if place == 5 else 1, min_p=0.001 * place),
        )
        for place, grammar in enumerate(grammars)
    ]
    alone = [(await answers(llama, [one]))[0] for one in asked]
    assert await answers(llama, asked) == alone
    assert len(set(alone[2])) == 3


async def test_chunks_and_preemption_change_nothing(
    tight: InferenceEngine, llama: InferenceEngine, prompts: list[list[int]]
) -> None:
    asked = [(prompts[place], seeded(PERSON if place % 2 else DIGITS, place)) for place in range(8, 16)]
    alone = [(await answers(llama, [one]))[0] for one in asked]
    assert await answers(tight, asked) == alone
    cache = tight.stats().cache
    assert cache is not None and cache.num_preemptions > 0


async def test_another_worker_goes_on_where_one_stopped(llama: InferenceEngine) -> None:
    params = seeded(PERSON, 11, n=2, max_tokens=200)
    whole = await llama.agenerate([5, 6, 7], params)
    tokens = [choice.token_ids for choice in whole.choices]
    for done in (1, 9, len(tokens[0])):
        generated = (tokens[0][:done], tokens[1][:4])
        handle = llama.open(EngineRequest("r", (5, 6, 7), params, seed=11, epoch=2, generated=generated))
        rest: dict[int, tuple[int, ...]] = {0: (), 1: ()}
        finish = {}
        while not handle.finished:
            for delta in await handle.take():
                rest[delta.choice] += delta.token_ids
                finish[delta.choice] = delta.finish_reason
        assert [generated[place] + rest[place] for place in (0, 1)] == tokens
        assert set(finish.values()) == {"stop"}


def test_logprobs_stay_those_of_the_raw_distribution(llama: InferenceEngine) -> None:
    params = seeded(choice_grammar(["zz"]), 1, logprobs=2, max_tokens=1)
    (entry,) = llama.generate([4, 5], params).choices[0].logprobs or ()
    free = llama.generate([4, 5], seeded(None, 1, logprobs=2, max_tokens=1)).choices[0].logprobs or ()
    assert [one.token_id for one in entry.top] == [one.token_id for one in free[0].top]
    assert entry.logprob is not None and entry.logprob < entry.top[1].logprob


@pytest.mark.parametrize("others", [{"ignore_eos": True}, {"min_tokens": 3}, {"stop_token_ids": (5,)}])
def test_what_a_grammar_excludes_is_refused(llama: InferenceEngine, others: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        llama.generate("x", seeded(PERSON, 1, **others))
    assert caught.value.param == next(iter(others))


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar(kind="regex", text="("),
        Grammar(kind="ebnf", text="root ::= nothing"),
        Grammar(kind="ebnf", text="root ::= root"),
        Grammar(kind="json_schema", text="{"),
        Grammar(kind="json_schema", text='{"type": "strin"}'),
        Grammar(kind="structural_tag", text='{"type": "x"}'),
    ],
)
async def test_a_bad_grammar_is_the_clients_fault_and_harms_nobody(llama: InferenceEngine, grammar: Grammar) -> None:
    mate = asyncio.create_task(llama.agenerate([3, 4], seeded(DIGITS, 1)))
    for attempt in (llama.prepare(seeded(grammar, 1)), llama.agenerate("x", seeded(grammar, 1))):
        with pytest.raises(InvalidRequest) as caught:
            await attempt
        assert (caught.value.code, caught.value.param) == ("invalid_grammar", "response_format")
        assert "/project/" not in str(caught.value)
    assert (await mate).choices[0].finish_reason == "stop"
    assert llama.healthy


# The first takes long to say what may come next, the second to take what came.
@pytest.mark.parametrize(
    "grammar", [Grammar(kind="regex", text="((a*)*)*b"), ebnf_grammar("root ::= s\ns ::= s s s | s s | [a-z]")]
)
async def test_a_grammar_that_would_hold_up_the_engine_ends_alone(llama: InferenceEngine, grammar: Grammar) -> None:
    token = llama.tokenize("a", add_special_tokens=False)[0]
    ambiguous = GenerationParams(grammar=grammar, max_tokens=1500, logit_bias={token: 100})
    mate = seeded(DIGITS, 1)
    alone = llama.generate("mate", mate)
    async with asyncio.timeout(60):
        bad, good = await asyncio.gather(llama.agenerate("x", ambiguous), llama.agenerate("mate", mate))
    assert bad.error is not None and "too ambiguous" in bad.error.message
    assert good.token_ids == alone.token_ids


def test_backends_without_grammars_refuse(echo: InferenceEngine) -> None:
    with pytest.raises(InvalidRequest, match="does not support grammar"):
        echo.generate("x", seeded(DIGITS, 1))


def test_special_tokens_are_shown_and_allowed_only_on_demand(llama: InferenceEngine) -> None:
    tokenizer = llama.tokenizer
    (start,) = tokenizer.encode("<|im_start|>")
    assert start in tokenizer.special_token_ids
    grammar = choice_grammar(["<|im_start|>a"])
    bias = {start: 100.0}
    spelt = llama.generate("x", seeded(grammar, 1, logit_bias=bias)).choices[0]
    assert spelt.text == "<|im_start|>a" and start not in spelt.token_ids
    whole = llama.generate("x", seeded(grammar, 1, logit_bias=bias, visible_token_ids=(start,))).choices[0]
    assert whole.text == "<|im_start|>a" and whole.token_ids[0] == start
    free = llama.generate("x", seeded(None, 1, logit_bias=bias, visible_token_ids=(start,), max_tokens=2)).choices[0]
    assert free.text == "<|im_start|>" * 2
    hidden = llama.generate("x", seeded(None, 1, logit_bias=bias, max_tokens=2)).choices[0]
    assert hidden.text == ""


def test_an_answer_whose_grammar_takes_long_on_average_ends(model_directory: Callable[[str], Path]) -> None:
    """Each token alone takes less than one may."""
    tokenizer = Tokenizer(model_directory("llama"))
    strict = GrammarCompiler(tokenizer).matcher(GenerationParams(grammar=regex("[a-z]*")))
    assert strict is not None
    for token in tokenizer.encode("a", False) * 9:
        strict.accept(token)
    strict._spent = 0.15
    with pytest.raises(GenerationFailed, match="it takes 15 ms a token"):
        strict.accept(tokenizer.encode("a", False)[0])


def test_an_answer_where_looking_ahead_took_long_does_without(
    model_directory: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = GrammarCompiler(Tokenizer(model_directory("llama")))
    for most, again in ((60.0, True), (-1.0, False)):
        monkeypatch.setattr(matcher, "_MAX_LOOK_SECONDS", most)
        strict = compiler.matcher(GenerationParams(grammar=PERSON))
        assert strict is not None and strict.forced(8) != ""
        assert (strict.forced(8) != "") == again


def test_a_grammar_that_somebody_holds_is_not_compiled_again(model_directory: Callable[[str], Path]) -> None:
    compiler = GrammarCompiler(Tokenizer(model_directory("llama")), cache_bytes=1)  # forgets each for the next
    held = compiler.compile(PERSON)
    compiler.compile(DIGITS)
    assert compiler.compile(PERSON) is held


def test_a_grammar_that_would_fill_the_memory_is_refused(model_directory: Callable[[str], Path]) -> None:
    compiler = GrammarCompiler(Tokenizer(model_directory("llama")), max_bytes=4 << 10)
    compiler.compile(regex("[0-9]"))
    with pytest.raises(InvalidRequest, match=r"the grammar takes \d+ KiB when it is compiled, and may take 4; make it"):
        compiler.compile(regex("[0-9]a" * 100))


def test_grammars_are_remembered_up_to_a_bound(model_directory: Callable[[str], Path]) -> None:
    compiler = GrammarCompiler(Tokenizer(model_directory("llama")), cache_bytes=8 << 20)

    def memory_after(numbers: range) -> int:
        for number in numbers:
            names = [f"p{number}_{place}" for place in range(60)]
            schema = {"type": "object", "properties": {name: {"type": "integer"} for name in names}}
            compiler.compile(Grammar(kind="json_schema", text=json.dumps(schema)))
        return int(psutil.Process().memory_info().rss)

    full = memory_after(range(60))
    assert memory_after(range(60, 360)) - full < 40 << 20
    assert compiler._compiler().get_cache_size_bytes() > 0
