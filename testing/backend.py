"""The conformance suite of backends: what Penstock relies on beyond the types.

A plug-in's tests subclass it, and pytest runs the rest:

    class TestOurs(BackendConformance):
        config = EngineConfig(model="path/to/a/small/model", backend="ours", dtype="float32")

The model needs a context of at least 128 tokens. What the manifest does not claim is expected to be refused.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import inf
from typing import Any, ClassVar

import pytest

from ..engine import EngineConfig, EngineRequest, GenerationOutput, GenerationParams, InferenceEngine, find_backend
from ..engine.backend import Backend
from ..engine.backends.registry import load_backend
from ..engine.choice import Choice
from ..schemas.errors import GenerationFailed, InvalidRequest
from ..schemas.events import Delta
from ..schemas.params import Grammar, PlugInUse

_LENGTH = 24
_SAMPLED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "seed": 11}


class BackendConformance:
    """Subclass it and set `config`; a fixture may do so, too. Each test needs no more than the model's files."""

    config: ClassVar[EngineConfig]

    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls) -> Iterator[InferenceEngine]:
        with InferenceEngine(cls.config) as engine:
            yield engine

    @pytest.fixture
    def prompts(self, engine: InferenceEngine) -> list[list[int]]:
        texts = ("The first prompt", "Another, which is quite a bit longer than the first one", "Short", "1 2 3 4 5 6")
        return [engine.tokenize(text) for text in texts]

    def params(self, engine: InferenceEngine, **values: Any) -> GenerationParams:
        """Parameters of an answer of fixed length, as far as the backend honours them."""
        own: dict[str, Any] = {"max_tokens": _LENGTH, "temperature": 0.0, "ignore_eos": True} | values
        return GenerationParams(**{name: each for name, each in own.items() if name in engine.manifest.parameters})

    def test_the_manifest_is_found_without_torch(self) -> None:
        code = (
            "import sys; from penstock.engine import find_backend; "
            f"find_backend({self.config.backend!r}); assert 'torch' not in sys.modules, 'it imports torch'"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    def test_the_backend_has_its_own_manifest(self, engine: InferenceEngine) -> None:
        assert engine.manifest == find_backend(self.config.backend, self.config.allowed_backends)

    def test_an_idle_backend_has_nothing_to_do(self, engine: InferenceEngine, prompts: list[list[int]]) -> None:
        engine.generate(prompts, self.params(engine))
        backend = self._backend(engine)
        assert (backend.num_running, backend.num_waiting, backend.delay()) == (0, 0, inf)

    def test_an_answer_does_not_depend_on_its_batch(self, engine: InferenceEngine, prompts: list[list[int]]) -> None:
        for values in ({}, _SAMPLED):
            params = self.params(engine, **values)
            together = [output.token_ids for output in engine.generate(prompts, params)]
            assert together == [engine.generate(prompt, params).token_ids for prompt in prompts]
            assert all(len(tokens) == _LENGTH for tokens in together)

    def test_choices_differ_and_repeat(self, engine: InferenceEngine, prompts: list[list[int]]) -> None:
        params = self.params(engine, n=3, **_SAMPLED)
        first, again = (engine.generate(prompts[0], params) for _ in range(2))
        assert self._tokens(first) == self._tokens(again)
        assert len(first.choices) == 3

    def test_an_answer_goes_on_where_another_worker_stopped(
        self, engine: InferenceEngine, prompts: list[list[int]]
    ) -> None:
        for values in ({}, _SAMPLED):
            params = self.params(engine, n=2, **values)
            whole = self._tokens(engine.generate(prompts[1], params))
            if not self._resumes(engine, params):
                with pytest.raises(GenerationFailed):
                    self._continued(engine, prompts[1], params, whole, 5)
                continue
            for cut in (1, 5, _LENGTH - 1):
                assert self._continued(engine, prompts[1], params, whole, cut) == whole

    def test_deltas_are_in_order_and_end_once(self, engine: InferenceEngine, prompts: list[list[int]]) -> None:
        deltas = asyncio.run(self._stream(engine, prompts[0], self.params(engine, n=2)))
        for choice in range(2):
            own = [delta for delta in deltas if delta.choice == choice]
            assert [delta.finish_reason for delta in own[:-1]] == [None] * (len(own) - 1)
            assert own[-1].finish_reason == "length"
            for before, after in pairwise(own):
                assert after.index == before.index + len(before.token_ids)

    def test_stops_end_an_answer(self, engine: InferenceEngine, prompts: list[list[int]]) -> None:
        whole = engine.generate(prompts[1], self.params(engine))
        if "stop_token_ids" in engine.manifest.parameters:
            last = whole.token_ids[4]
            output = engine.generate(prompts[1], self.params(engine, stop_token_ids=(last,)))
            assert output.token_ids == whole.token_ids[: whole.token_ids.index(last) + 1]
            assert output.finish_reason == "stop"
        if "stop" in engine.manifest.parameters and len(text := whole.text.strip()) >= 4:
            stop = text[2:4]
            output = engine.generate(prompts[1], self.params(engine, stop=(stop,)))
            assert output.text == whole.text[: whole.text.index(stop)]
            assert output.finish_reason == "stop_sequence"

    def test_logprobs_are_those_of_the_tokens(self, engine: InferenceEngine, prompts: list[list[int]]) -> None:
        if "logprobs" not in engine.manifest.parameters:
            return
        plain = engine.generate(prompts[0], self.params(engine))
        output = engine.generate(prompts[0], self.params(engine, logprobs=3))
        assert output.token_ids == plain.token_ids
        assert output.logprobs is not None
        assert [entry.token_id for entry in output.logprobs] == list(output.token_ids)
        assert all(entry.logprob is not None and entry.logprob <= 0 for entry in output.logprobs)
        for entry in output.logprobs:  # the best come first, and a greedy token is the best
            assert [one.logprob for one in entry.top] == sorted((one.logprob for one in entry.top), reverse=True)
            assert not entry.top or entry.top[0].logprob == entry.logprob

    def test_prompts_are_scored(self, engine: InferenceEngine, prompts: list[list[int]]) -> None:
        if not {"prompt_logprobs", "logprobs"} <= engine.manifest.parameters:
            return
        for output, prompt in zip(
            engine.generate(prompts, self.params(engine, logprobs=1, prompt_logprobs=1, max_tokens=2)),
            prompts,
            strict=True,
        ):
            assert output.prompt_logprobs is not None and output.logprobs is not None
            assert [entry.token_id for entry in output.prompt_logprobs] == [*prompt]
            assert [entry.token_id for entry in output.logprobs] == [*output.token_ids]
            first, *others = output.prompt_logprobs
            assert first.logprob is None and all(one.logprob is not None and one.rank is not None for one in others)

    def test_a_grammar_is_kept(self, engine: InferenceEngine, prompts: list[list[int]]) -> None:
        if "grammar" not in engine.manifest.parameters:
            return
        grammar = Grammar(kind="regex", text="(yes|no){3}")
        for values in ({}, _SAMPLED):
            params = GenerationParams(max_tokens=_LENGTH, grammar=grammar, **{"temperature": 0.0} | values)
            for output in engine.generate(prompts, params):
                assert set(output.text.replace("yes", "y").replace("no", "n")) <= {"y", "n"}
                assert output.finish_reason == "stop"

    def test_what_the_manifest_does_not_claim_is_refused(
        self, engine: InferenceEngine, prompts: list[list[int]]
    ) -> None:
        changed: dict[str, Any] = {
            "top_p": 0.5,
            "repetition_penalty": 1.5,
            "logprobs": 1,
            "prompt_logprobs": 0,
            "grammar": Grammar(kind="regex", text="a+"),
            "logit_bias": {1: 1.0},
            "logits_processors": (PlugInUse(name="any"),),
        }
        for name in changed.keys() - engine.manifest.parameters:
            with pytest.raises(InvalidRequest, match=f"does not support {name}"):
                engine.generate(prompts[0], GenerationParams(**{name: changed[name]}))

    def test_a_cancelled_request_leaves_the_others_alone(
        self, engine: InferenceEngine, prompts: list[list[int]]
    ) -> None:
        params = self.params(engine)
        alone = [engine.generate(prompt, params).token_ids for prompt in prompts]

        async def run() -> list[Sequence[int]]:
            handles = [engine.open(self._request(f"r{n}", prompt, params)) for n, prompt in enumerate(prompts)]
            first = await handles[0].take()
            handles[0].cancel()
            tokens: list[Sequence[int]] = []
            for handle in handles:
                deltas = first if handle is handles[0] else []
                while not handle.finished:
                    deltas = deltas + await handle.take()
                tokens.append(tuple(token for delta in deltas for token in delta.token_ids))
            return tokens

        tokens = asyncio.run(run())
        assert tokens[1:] == alone[1:]
        assert tokens[0] == alone[0][: len(tokens[0])]

    def test_a_failure_ends_one_choice_alone(self, engine: InferenceEngine, prompts: list[list[int]]) -> None:
        params = self.params(engine)
        alone = [engine.generate(prompt, params).token_ids for prompt in prompts]
        backend = load_backend(self.config)
        try:
            choices = []
            for number, prompt in enumerate(prompts):
                kind = _Broken if number == 1 else Choice
                choices.append(kind(self._request(f"r{number}", prompt, params), 0, backend.tokenizer, backend.info))
                backend.add(choices[-1])
            while backend.delay() != inf:
                backend.step()
            assert [choice.finish for choice in choices] == ["length", "error", "length", "length"]
            kept = [tuple(choice.tokens) for choice in choices]
            assert (kept[0], *kept[2:]) == (alone[0], *alone[2:])
        finally:
            backend.close()

    def _backend(self, engine: InferenceEngine) -> Backend:
        return engine._backend

    def _tokens(self, output: GenerationOutput) -> list[tuple[int, ...]]:
        return [choice.token_ids for choice in output.choices]

    def _resumes(self, engine: InferenceEngine, params: GenerationParams) -> bool:
        resume = engine.manifest.resume
        return resume == "exact" or (resume == "greedy" and params.temperature == 0)

    def _request(self, name: str, prompt: Sequence[int], params: GenerationParams, **values: Any) -> EngineRequest:
        return EngineRequest(name, tuple(prompt), params, seed=params.seed or 0, **values)

    def _continued(
        self,
        engine: InferenceEngine,
        prompt: Sequence[int],
        params: GenerationParams,
        whole: list[tuple[int, ...]],
        cut: int,
    ) -> list[tuple[int, ...]]:
        async def run() -> list[tuple[int, ...]]:
            begun = tuple(tokens[:cut] for tokens in whole)
            handle = engine.open(self._request("again", prompt, params, generated=begun, epoch=2))
            tokens = [list(each) for each in begun]
            while not handle.finished:
                for delta in await handle.take():
                    assert delta.index == len(tokens[delta.choice])
                    tokens[delta.choice] += delta.token_ids
            return [tuple(each) for each in tokens]

        return asyncio.run(run())

    async def _stream(self, engine: InferenceEngine, prompt: Sequence[int], params: GenerationParams) -> list[Delta]:
        return [delta async for delta in engine.generate_stream(prompt, params)]


class _Broken(Choice):
    """Fails at its third token."""

    def append(self, token: int, logprob: Any = None) -> Delta | None:
        if len(self.tokens) == 2:
            raise RuntimeError("broken on purpose")
        return super().append(token, logprob)
