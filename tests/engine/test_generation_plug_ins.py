"""Generation plug-ins: what they change, that they change nothing else, and what becomes of faulty ones."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plug_ins import install
from pydantic import ByteSize
from torch import Tensor

from penstock.engine import (
    CleanUp,
    Context,
    EngineConfig,
    EngineRequest,
    GenerationOutput,
    GenerationParams,
    InferenceEngine,
    LogitsProcessor,
    StoppingCriterion,
    find_plug_ins,
)
from penstock.engine.choice import Choice
from penstock.engine.plug_ins.found import GROUP
from penstock.schemas.errors import GenerationFailed, InvalidRequest
from penstock.schemas.events import Delta
from penstock.schemas.params import Grammar

MakeModel = Callable[[str], Path]
BLOCKS = 12  # of a cache that is too small for a batch


class Again(LogitsProcessor):
    """Favours the tokens of the answer that came an odd number of times: its state is that of all tokens."""

    interface = 1

    def __init__(self, context: Context, by: float = 3.0) -> None:
        super().__init__(context)
        if by < 0:
            raise ValueError("by must not be negative")
        self._by, self._odd = by, set[int]()

    def accept(self, token: int) -> None:
        self._odd ^= {token}

    def process(self, tokens: Sequence[int], scores: Tensor) -> Tensor:
        assert self._odd == {token for token in tokens if tokens.count(token) % 2}, "it has seen every token once"
        scores[list(self._odd)] += self._by
        return scores


class NotTwice(LogitsProcessor):
    """As transformers' `NoRepeatNGramLogitsProcessor` for two tokens, prompt included."""

    interface = 1

    def process(self, tokens: Sequence[int], scores: Tensor) -> Tensor:
        every = [*self.context.prompt, *tokens]
        scores[[after for before, after in pairwise(every) if before == every[-1]]] = -torch.inf
        return scores


class Level(LogitsProcessor):
    """Makes all tokens equally likely, also those that something has forbidden."""

    interface = 1

    def process(self, tokens: Sequence[int], scores: Tensor) -> Tensor:
        return torch.zeros_like(scores)


class Vowels(StoppingCriterion):
    """Ends an answer behind a number of vowels."""

    interface = 1

    def __init__(self, context: Context, count: int) -> None:
        super().__init__(context)
        self._count, self._seen = count, 0

    def stops(self, tokens: Sequence[int], text: str) -> bool:
        self._seen += 1
        assert self._seen == len(tokens), "it is asked for each token once"
        return sum(letter in "aeiou" for letter in text) >= self._count


class Lines(CleanUp):
    """Joins lines: runs of white space become one blank, which is held back until something follows."""

    interface = 1

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._held = False

    def push(self, text: str) -> str:
        found = ""
        for letter in text:
            if letter.isspace():
                self._held = True
            else:
                found, self._held = found + " " * self._held + letter, False
        return found

    def flush(self) -> str:
        return "." if self._held else ""


class Faulty(LogitsProcessor):
    interface = 1

    def __init__(self, context: Context, way: str) -> None:
        super().__init__(context)
        if way == "made":
            raise RuntimeError
        self._way = way

    def accept(self, token: int) -> None:
        if self._way == "accept":
            raise RuntimeError

    def process(self, tokens: Sequence[int], scores: Tensor) -> Any:
        match self._way:
            case "raise":
                raise RuntimeError("it has a fault")
            case "none":
                return None
            case "short":
                return scores[1:]
            case "nan":
                return scores * torch.nan
            case "endless":
                return scores + torch.inf
            case "nothing":
                return torch.full_like(scores, -torch.inf)
        return scores


class FaultyStop(StoppingCriterion):
    interface = 1

    def stops(self, tokens: Sequence[int], text: str) -> bool:
        raise RuntimeError


class FaultyText(CleanUp):
    interface = 1

    def __init__(self, context: Context, at: str = "push") -> None:
        super().__init__(context)
        self._at = at

    def push(self, text: str) -> Any:
        return 1 if self._at == "push" else text

    def flush(self) -> str:
        raise RuntimeError


PLUG_INS: dict[str, Any] = {
    "again": Again,
    "not-twice": NotTwice,
    "level": Level,
    "vowels": Vowels,
    "lines": Lines,
    "faulty": Faulty,
    "faulty-stop": FaultyStop,
    "faulty-text": FaultyText,
}
AGAIN: dict[str, Any] = {"logits_processors": ["again"]}


def load(directory: Path, **values: Any) -> InferenceEngine:
    fields: dict[str, Any] = {"dtype": "float32", "device": "cpu", "kv_cache_memory": ByteSize(16 << 20)}
    return InferenceEngine(EngineConfig(model=str(directory), **fields | values), plug_ins=PLUG_INS)


@pytest.fixture(scope="module", params=["paged", "hf"])
def engine(model_directory: MakeModel, request: pytest.FixtureRequest) -> Iterator[InferenceEngine]:
    with load(model_directory("llama"), backend=request.param) as engine:
        yield engine


@pytest.fixture(scope="module")
def cramped(model_directory: MakeModel) -> Iterator[dict[str, InferenceEngine]]:
    """A model with guessed tokens and without, in a cache too small for a batch."""
    room = {"kv_cache_memory": ByteSize(BLOCKS * 16 * 2 * 2 * 2 * 32 * 2), "max_batch_size": 4, "dtype": "bfloat16"}
    with (
        load(model_directory("llama"), **room) as guessing,
        load(model_directory("llama"), speculation="off", **room) as plain,
    ):
        yield {"guessing": guessing, "plain": plain}


def params(**values: Any) -> GenerationParams:
    return GenerationParams(**{"max_tokens": 24, "temperature": 0.0} | values)


def test_a_processor_equals_that_of_transformers(
    engine: InferenceEngine, reference_of: Callable[[str], Any], prompts: list[list[int]]
) -> None:
    """In a batch of all, the same tokens as `generate` with its own processor, one by one."""
    from transformers import LogitsProcessorList, NoRepeatNGramLogitsProcessor

    theirs = LogitsProcessorList([NoRepeatNGramLogitsProcessor(2)])
    outputs = engine.generate(prompts, params(max_tokens=32, logits_processors=["not-twice"]))
    changed = 0
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = torch.tensor([prompt])
        given: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 32, "do_sample": False}
        expected = reference_of("llama").generate(ids, logits_processor=theirs, **given)[0, len(prompt) :].tolist()
        assert list(output.token_ids) == expected
        changed += expected != list(engine.generate(prompt, params(max_tokens=32)).token_ids)
    assert changed > 2, "the processor does something"


def streamed(engine: InferenceEngine, request: EngineRequest) -> list[Delta]:
    """All deltas of a request."""

    async def run() -> list[Delta]:
        handle, found = engine.open(request), list[Delta]()
        while not handle.finished:
            found += await handle.take()
        return found

    return asyncio.run(run())


def by_token(engine: InferenceEngine, request: EngineRequest, tokens: Sequence[int]) -> list[Delta]:
    """What a worker that chooses `tokens` sends, as it would if its reader were never slow: nothing is merged."""
    made = engine._plug_ins.make(request.params, engine.tokenizer, request.prompt)
    choice = Choice(request, 0, engine.tokenizer, engine._backend.info, plug_ins=made)
    return [delta for delta in map(choice.append, tokens) if delta is not None]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_answer_goes_on_after_a_takeover(
    engine: InferenceEngine, prompts: list[list[int]], temperature: float
) -> None:
    """Wherever its worker died: the same tokens, text and end; the state of plug-ins is that of the tokens so far."""
    own = params(
        temperature=temperature,
        logprobs=1,
        logits_processors=["again", "not-twice"],
        stopping_criteria=[{"name": "vowels", "arguments": {"count": 12}}],
        clean_ups=["lines"],
    )
    request = EngineRequest("r", tuple(prompts[3]), own, seed=5)
    output = engine.generate(prompts[3], own.model_copy(update={"seed": 5}))
    assert len(output.token_ids) > 4 and output.finish_reason in ("stop", "length")
    whole = by_token(engine, request, output.token_ids)
    assert "".join(delta.text for delta in whole) == output.text
    for cut in range(1, len(whole)):
        tokens = tuple(token for delta in whole[:cut] for token in delta.token_ids)
        rest = streamed(engine, EngineRequest("r", request.prompt, own, seed=5, epoch=2, generated=(tokens,)))
        assert [each for d in rest for each in d.token_ids] == [each for d in whole[cut:] for each in d.token_ids]
        assert "".join(d.text for d in rest) == "".join(d.text for d in whole[cut:])
        assert (rest[-1].finish_reason, rest[-1].stop_reason) == (whole[-1].finish_reason, whole[-1].stop_reason)


GRAMMAR = Grammar(kind="regex", text="(yes|no|maybe)( (yes|no|maybe)){5}")
KINDS: list[dict[str, Any]] = [
    {},
    AGAIN,
    AGAIN | {"temperature": 1.0},
    AGAIN | {"grammar": GRAMMAR},
    AGAIN | {"grammar": GRAMMAR, "temperature": 1.0, "logprobs": 2},
    AGAIN | {"logprobs": 1, "n": 2, "repetition_penalty": 1.3, "logit_bias": {7: 4.0}},
    {"logits_processors": ["not-twice", {"name": "again", "arguments": {"by": 9}}], "clean_ups": ["lines"]},
    {"stopping_criteria": [{"name": "vowels", "arguments": {"count": 5}}], "min_tokens": 9, "ignore_eos": True},
]


def seen(output: GenerationOutput) -> list[Any]:
    return [(each.token_ids, each.text, each.finish_reason, each.logprobs) for each in output.choices]


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(each=st.lists(st.tuples(st.integers(1, 30), st.sampled_from(KINDS), st.integers(0, 3)), min_size=1, max_size=6))
def test_batches_guesses_and_preemptions_change_nothing(
    cramped: dict[str, InferenceEngine], each: list[tuple[int, dict[str, Any], int]]
) -> None:
    """Beside any others, and though its memory is taken away: what a request gets alone and without guessed tokens."""
    asked = [([5, 9, 11, 13] * length, params(max_tokens=40, seed=seed, **kind)) for length, kind, seed in each]
    alone = [seen(cramped["plain"].generate(prompt, own)) for prompt, own in asked]

    async def together(engine: InferenceEngine) -> list[GenerationOutput]:
        return await asyncio.gather(*(engine.agenerate(prompt, own) for prompt, own in asked))

    for engine in cramped.values():
        assert [seen(output) for output in asyncio.run(together(engine))] == alone


def test_what_is_forbidden_stays_so(engine: InferenceEngine) -> None:
    own: dict[str, Any] = {"logits_processors": ["level"], "temperature": 1.0, "seed": 3}
    for output in engine.generate([[5, 6], [7]], params(max_tokens=64, grammar=GRAMMAR, **own)):
        assert {*output.text.split()} <= {"yes", "no", "maybe"} and output.finish_reason == "stop"
    ended = engine.generate([5, 6], params(min_tokens=20, logits_processors=["level"]))
    assert len(ended.token_ids) >= 20


def test_the_cramped_engines_do_guess_and_preempt(cramped: dict[str, InferenceEngine]) -> None:
    outputs = cramped["guessing"].generate([[5, 9, 11, 13] * 12] * 4, params(max_tokens=100, ignore_eos=True, **AGAIN))
    stats = cramped["guessing"].stats().cache
    assert len(outputs) == 4 and stats is not None
    assert stats.num_preemptions
    assert stats.speculation.num_draft_tokens or stats.speculation.off


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (
            {"logits_processors": [{"name": "faulty", "arguments": {"way": "raise"}}]},
            "'faulty' failed on this request (R",
        ),
        (
            {"logits_processors": [{"name": "faulty", "arguments": {"way": "accept"}}]},
            "'faulty' failed on this request (R",
        ),
        ({"logits_processors": [{"name": "faulty", "arguments": {"way": "none"}}]}, "it returned NoneType, not scores"),
        ({"logits_processors": [{"name": "faulty", "arguments": {"way": "short"}}]}, "not scores of (512,)"),
        ({"logits_processors": [{"name": "faulty", "arguments": {"way": "nan"}}]}, "scores that are no numbers"),
        ({"logits_processors": [{"name": "faulty", "arguments": {"way": "endless"}}]}, "scores that are no numbers"),
        ({"logits_processors": [{"name": "faulty", "arguments": {"way": "nothing"}}]}, "forbids every token"),
        ({"stopping_criteria": ["faulty-stop"]}, "The stopping criterion 'faulty-stop' failed"),
        ({"clean_ups": ["faulty-text"]}, "The clean-up 'faulty-text' failed on this request (it returned int"),
        ({"clean_ups": [{"name": "faulty-text", "arguments": {"at": "flush"}}]}, "The clean-up 'faulty-text' failed"),
    ],
)
def test_a_faulty_plug_in_fails_its_own_request_by_name(
    engine: InferenceEngine, prompts: list[list[int]], use: dict[str, Any], message: str
) -> None:
    async def run() -> list[GenerationOutput]:
        each = [params(temperature=1.0, seed=1), params(temperature=1.0, seed=1, **use), params(**AGAIN)]
        return await asyncio.gather(*(engine.agenerate(prompts[4], own) for own in each))

    good, bad, other = asyncio.run(run())
    assert bad.finish_reason == "error" and bad.error is not None and message in bad.error.message
    assert seen(good) == seen(engine.generate(prompts[4], params(temperature=1.0, seed=1)))
    assert seen(other) == seen(engine.generate(prompts[4], params(**AGAIN)))


@pytest.mark.parametrize(
    ("use", "code", "message"),
    [
        (
            {"logits_processors": ["agian"]},
            "unknown_plug_in",
            "no logits processor 'agian' .*; known: again, faulty, level",
        ),
        ({"clean_ups": ["again"]}, "unknown_plug_in", "no clean-up 'again' .*; known: faulty-text, lines"),
        (
            {"logits_processors": [{"name": "again", "arguments": {"to": 1}}]},
            "invalid_plug_in_arguments",
            r"unexpected keyword argument 'to' \(it takes: by: 'float' = 3.0\)",
        ),
        ({"stopping_criteria": ["vowels"]}, "invalid_plug_in_arguments", "missing a required argument: 'count'"),
        (
            {"logits_processors": [{"name": "again", "arguments": {"by": -1}}]},
            "invalid_plug_in_arguments",
            "by must not be negative",
        ),
    ],
)
def test_what_cannot_be_used_is_refused_before_anything_runs(
    engine: InferenceEngine, use: dict[str, Any], code: str, message: str
) -> None:
    before = engine.stats().num_requests
    with pytest.raises(InvalidRequest, match=message) as refused:
        engine.generate([5, 6], params(**use))
    assert (refused.value.code, refused.value.param) == (code, next(iter(use)))
    assert engine.stats().num_requests == before


def test_one_that_cannot_be_made_fails_the_request_by_name(engine: InferenceEngine) -> None:
    with pytest.raises(GenerationFailed, match=r"The logits processor 'faulty' failed on this request .RuntimeError"):
        engine.generate([5], params(logits_processors=[{"name": "faulty", "arguments": {"way": "made"}}]))


def test_a_criterion_ends_the_answer_and_a_clean_up_changes_its_text() -> None:
    """On the echo backend, which has no logits to process."""
    with InferenceEngine(EngineConfig(model="echo", backend="echo"), plug_ins=PLUG_INS) as echo:
        vowels = [{"name": "vowels", "arguments": {"count": 3}}]
        output = echo.generate("no  one\n goes", params(stopping_criteria=vowels, clean_ups=["lines"]))
        assert (output.text, output.finish_reason) == ("no one", "stop")
        delta = streamed(echo, EngineRequest("r", (*b"aaaa",), params(stopping_criteria=vowels, min_tokens=4), 0))[-1]
        assert (delta.finish_reason, delta.stop_reason, delta.index + len(delta.token_ids)) == ("stop", "vowels", 4)
        assert echo.generate("a \n", params(clean_ups=["lines"])).text == "a."
        assert echo.generate("a \n b", params(clean_ups=["lines"], stop=["a b"])).finish_reason == "stop_sequence"
        with pytest.raises(InvalidRequest, match="does not support logits_processors"):
            echo.generate("a", params(**AGAIN))


FILE = """
from penstock.engine import CleanUp

class Loud(CleanUp):
    interface = 1

    def __init__(self, context, mark: str = "!"):
        super().__init__(context)
        self._mark = mark

    def push(self, text):
        return text.upper()

    def flush(self):
        return self._mark

class Old(Loud):
    interface = 0

class Unfinished(CleanUp):
    interface = 1
"""


def test_installed_ones_are_found_by_entry_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And those that cannot be used say why, and trouble nobody else."""
    monkeypatch.syspath_prepend(str(tmp_path))
    entries = {name.lower(): f"ours:{name}" for name in ("Loud", "Old", "Unfinished")}
    install(tmp_path, "ours", GROUP, entries | {"twice": "ours:Loud"}, {"ours.py": FILE})
    broken = {"broken": "theirs:Any", "number": "ours:FILE", "twice": "ours:Loud", "gone": "ours:Gone"}
    install(tmp_path, "theirs", GROUP, broken, {"theirs.py": "raise OSError('it needs a licence')"})
    found = {each.name: each for each in find_plug_ins()}
    assert (found["loud"].param, found["loud"].arguments, found["loud"].package) == (
        "clean_ups",
        "mark: str = '!'",
        "ours 1.0",
    )
    faults = {name: each.fault for name, each in found.items() if each.fault}
    assert faults["old"].startswith("it was written for interface 0 of generation plug-ins, and this Penstock has 1")
    assert faults["unfinished"] == "it lacks push"
    assert faults["broken"] == "importing it failed: OSError: it needs a licence"
    assert faults["twice"] == "ours 1.0 and theirs 1.0 both have it; uninstall one of them"
    assert {"number", "gone"} <= {*faults}
    assert find_plug_ins([])[0].fault == "allowed_plug_ins does not list it"
    fields: dict[str, Any] = {"model": "echo", "backend": "echo"}
    with (
        InferenceEngine(EngineConfig(**fields)) as every,
        InferenceEngine(EngineConfig(**fields, allowed_plug_ins=("broken",))) as few,
    ):
        loud = params(clean_ups=[{"name": "loud", "arguments": {"mark": "?"}}])
        assert every.generate("abc", loud).text == "ABC?"
        with pytest.raises(InvalidRequest, match="There is no clean-up 'loud' for requests here; known: none"):
            few.generate("abc", loud)
        with pytest.raises(
            InvalidRequest, match=r"The clean-up 'broken' of theirs 1.0 cannot be used: importing it fai"
        ):
            few.generate("abc", params(clean_ups=["broken"]))
