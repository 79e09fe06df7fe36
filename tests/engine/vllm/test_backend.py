"""The backend on a tiny model in float32: tokens, parameters, takeover, and an engine that fails."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from pydantic import ByteSize

from penstock.engine import EngineConfig, EngineRequest, GenerationParams, InferenceEngine
from penstock.engine.choice import Choice
from penstock.engine.vllm.parameters import sampling_of
from penstock.schemas.errors import ConfigurationError, GenerationFailed, ModelLoadError
from penstock.schemas.params import Grammar

pytest.importorskip("vllm", reason="needs pip install 'penstock[vllm]'")
pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own
GREEDY = GenerationParams(max_tokens=24, temperature=0, ignore_eos=True)


@pytest.fixture(scope="session")
def path(model_directory: Callable[[str], Path]) -> Path:
    return model_directory("llama")


def config(path: Path, **values: Any) -> EngineConfig:
    default: dict[str, Any] = {"backend": "vllm", "dtype": "float32", "kv_cache_memory": ByteSize(64 << 20)}
    return EngineConfig(**{"model": str(path)} | default | values)


@pytest.fixture(scope="module")
def engine(path: Path) -> Iterator[InferenceEngine]:
    with InferenceEngine(config(path, max_batch_size=6)) as engine:
        yield engine


@pytest.fixture(scope="module")
def reference(path: Path) -> Iterator[InferenceEngine]:
    with InferenceEngine(config(path, backend="hf", device="cpu")) as engine:
        yield engine


def test_greedy_tokens_are_those_of_transformers(
    engine: InferenceEngine, reference_of: Callable[[str], Any], prompts: list[list[int]]
) -> None:
    """Alone, and sixteen in six places."""
    model = reference_of("llama")
    expected = []
    for prompt in prompts:
        ids = model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False, eos_token_id=None)
        expected.append(tuple(ids[0, len(prompt) :].tolist()))
    assert [output.token_ids for output in engine.generate(prompts, GREEDY)] == expected
    assert [engine.generate(prompt, GREEDY).token_ids for prompt in prompts[::5]] == expected[::5]
    assert engine.stats().cache.usage == 0  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "values",
    [
        {"repetition_penalty": 1.4},
        {"frequency_penalty": 0.8, "presence_penalty": 0.6},
        {"repetition_penalty": 1.2, "frequency_penalty": 0.5, "presence_penalty": -0.5, "logit_bias": {9: 4.0, 11: -9}},
        {"logit_bias": {12: 6.0}},
        {"logit_bias": {12: 100.0}, "stop_token_ids": (12,), "min_tokens": 5},
    ],
    ids=["repetition", "output", "together", "bias", "minimum"],
)
def test_parameters_mean_what_they_mean_here(
    values: dict[str, Any], engine: InferenceEngine, reference: InferenceEngine, prompts: list[list[int]]
) -> None:
    params = GREEDY.model_copy(update=values)
    found, expected = engine.generate(prompts[:8], params), reference.generate(prompts[:8], params)
    assert [output.token_ids for output in found] == [output.token_ids for output in expected]
    assert [output.finish_reason for output in found] == [output.finish_reason for output in expected]
    plain = reference.generate(prompts[:8], GREEDY)
    assert [output.token_ids for output in found] != [output.token_ids for output in plain]


def test_draws_keep_within_what_is_allowed(engine: InferenceEngine, prompts: list[list[int]]) -> None:
    for values in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        sampled = GREEDY.model_copy(update={"temperature": 1.5, "seed": 3} | values)
        for output, best in zip(
            engine.generate(prompts[:4], sampled), engine.generate(prompts[:4], GREEDY), strict=True
        ):
            assert output.token_ids == best.token_ids


def test_log_probabilities_are_those_of_the_raw_distribution(
    engine: InferenceEngine, reference: InferenceEngine, prompts: list[list[int]]
) -> None:
    """Penalties choose another token, but change no log-probability."""
    params = GREEDY.model_copy(update={"logprobs": 1, "repetition_penalty": 1.4})
    for found, expected in zip(
        engine.generate(prompts[:4], params), reference.generate(prompts[:4], params), strict=True
    ):
        assert found.logprobs is not None and expected.logprobs is not None
        for one, other in zip(found.logprobs, expected.logprobs, strict=True):
            assert (one.token_id, one.token, one.rank) == (other.token_id, other.token, other.rank)
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert [top.token_id for top in one.top] == [top.token_id for top in other.top]


def test_grammars_are_kept_by_each_row_whoever_leaves(engine: InferenceEngine, prompts: list[list[int]]) -> None:
    """Seven grammars and a free row in six places: rows move as shorter answers end."""
    texts = [f"[{letter}]{{{length}}}" for letter, length in zip("abcdefg", (3, 30, 9, 40, 2, 17, 25), strict=True)]
    params = [
        GREEDY.model_copy(update={"max_tokens": 60, "ignore_eos": False, "grammar": regex(text)}) for text in texts
    ]
    free = engine.generate(prompts[7], GREEDY)

    async def run() -> list[str]:
        asked = [*params[:3], GREEDY, *params[3:]]
        for each in params:
            await engine.prepare(each)
        handles = [
            engine.open(EngineRequest(f"r{number}", tuple(prompts[7]), each, seed=0))
            for number, each in enumerate(asked)
        ]
        return ["".join(delta.text for delta in await rest(handle)) for handle in handles]

    found = asyncio.run(run())
    assert found.pop(3) == free.text
    assert found == [letter * length for letter, length in zip("abcdefg", (3, 30, 9, 40, 2, 17, 25), strict=True)]


def regex(text: str) -> Grammar:
    return Grammar(kind="regex", text=text)


def test_an_answer_within_a_grammar_goes_on_after_another_workers_tokens(
    engine: InferenceEngine, reference: InferenceEngine, prompts: list[list[int]]
) -> None:
    grammar = regex("(yes|no|[0-9]{2,3}-)+end")
    params = GREEDY.model_copy(update={"ignore_eos": False, "grammar": grammar, "max_tokens": 40})
    whole = engine.generate(prompts[5], params).token_ids
    assert whole == reference.generate(prompts[5], params).token_ids

    async def run(cut: int) -> tuple[int, ...]:
        begun = (whole[:cut],)
        handle = engine.open(EngineRequest("r", tuple(prompts[5]), params, seed=0, generated=begun))
        return tuple(token for delta in await rest(handle) for token in delta.token_ids)

    for cut in (1, 7):
        assert asyncio.run(run(cut)) == whole[cut:]


def test_prompts_are_scored_as_by_the_model(
    engine: InferenceEngine, reference_of: Callable[[str], Any], prompts: list[list[int]]
) -> None:
    prompt = prompts[7]
    scored = engine.generate(prompt, GREEDY.model_copy(update={"prompt_logprobs": 2, "max_tokens": 1}))
    assert scored.prompt_logprobs is not None and scored.prompt_logprobs[0].logprob is None
    logits = reference_of("llama")(torch.tensor([prompt])).logits[0].log_softmax(-1)
    for row, token, found in zip(logits, prompt[1:], scored.prompt_logprobs[1:], strict=False):
        assert found.logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert found.rank == int((row > row[token]).sum()) + 1
        assert [top.token_id for top in found.top] == row.topk(2).indices.tolist()


def test_any_other_worker_goes_on_with_the_very_next_token(
    path: Path, engine: InferenceEngine, prompts: list[list[int]]
) -> None:
    """The other one has a smaller batch; a penalty on repetition counts the tokens of the first."""

    async def resume(other: InferenceEngine, params: GenerationParams, whole: list[tuple[int, ...]], cut: int) -> Any:
        handles = [
            other.open(EngineRequest(f"r{number}", tuple(prompt), params, seed=0, generated=(tokens[:cut],)))
            for number, (prompt, tokens) in enumerate(zip(prompts, whole, strict=True))
        ]
        return [tuple(token for delta in await rest(handle) for token in delta.token_ids) for handle in handles]

    with InferenceEngine(config(path, max_batch_size=3)) as other:
        for params in (GREEDY, GREEDY.model_copy(update={"repetition_penalty": 1.4})):
            whole = [output.token_ids for output in engine.generate(prompts, params)]
            for cut in (1, 11, 23):
                assert asyncio.run(resume(other, params, whole, cut)) == [tokens[cut:] for tokens in whole]


async def rest(handle: Any) -> list[Any]:
    deltas = []
    while not handle.finished:
        deltas += await handle.take()
    return deltas


def test_a_penalty_that_would_forget_another_workers_tokens_ends_the_request(engine: InferenceEngine) -> None:
    params = GREEDY.model_copy(update={"frequency_penalty": 0.5})

    async def run() -> Any:
        return await rest(engine.open(EngineRequest("r", (7, 8, 9), params, seed=0, generated=((5, 6),))))

    (delta,) = asyncio.run(run())
    assert delta.finish_reason == "error" and "does not continue answers with frequency_penalty" in delta.error.message


def test_a_stop_string_is_cut_and_vllm_stops_with_it(engine: InferenceEngine, prompts: list[list[int]]) -> None:
    whole = engine.generate(prompts[3], GREEDY)
    stop = whole.text[5:9]
    output = engine.generate(prompts[3], GREEDY.model_copy(update={"stop": (stop,), "max_tokens": 2000}))
    assert (output.text, output.finish_reason) == (whole.text[: whole.text.index(stop)], "stop_sequence")
    assert engine.stats().cache.usage == 0  # type: ignore[union-attr]


def test_places_are_reserved_for_urgent_requests_and_one_does_not_take_all(path: Path) -> None:
    from penstock.engine.vllm.backend import VllmBackend

    backend = VllmBackend(config(path, max_batch_size=4, reserved_batch_size=1))
    try:
        many = EngineRequest("many", (7, 8, 9), GREEDY.model_copy(update={"n": 6}), seed=0, priority=1)
        for index in range(6):
            backend.add(Choice(many, index, backend.tokenizer, backend.info))
        backend.step()
        assert (backend.num_running, backend.num_waiting) == (3, 3)
        urgent = Choice(EngineRequest("urgent", (7, 8), GREEDY, seed=0), 0, backend.tokenizer, backend.info)
        backend.add(urgent)
        deltas = backend.step()
        assert {delta.request for delta in deltas} == {"many", "urgent"}
        assert (backend.num_running, urgent.is_waiting, urgent.num_computed) == (4, False, 2)
    finally:
        backend.close()


def test_requests_wait_for_memory_and_all_end(path: Path, prompts: list[list[int]]) -> None:
    """Two blocks of cache and one that vLLM keeps: what does not fit waits, or is computed again."""
    with InferenceEngine(config(path, max_batch_size=8, kv_cache_memory=ByteSize(4 * 2 * 2 * 64 * 4 * 128))) as engine:
        long = GREEDY.model_copy(update={"max_tokens": 100})
        outputs = engine.generate(prompts[:8], long)
        assert [len(output.token_ids) for output in outputs] == [100] * 8
        assert engine.model_info().context_length < 2048


def test_prefixes_are_shared_within_a_salt_alone(engine: InferenceEngine) -> None:
    prompt = tuple(5 + index % 400 for index in range(300))

    async def run(salt: str) -> int:
        handle = engine.open(EngineRequest(f"r-{salt}", prompt, GREEDY, seed=0, cache_salt=salt))
        return int((await rest(handle))[-1].cached_tokens)

    assert [asyncio.run(run(salt)) > 0 for salt in ("ada", "ada", "bob")] == [False, True, False]


def test_a_request_that_vllm_refuses_ends_alone(
    engine: InferenceEngine, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoil(choice: Choice) -> dict[str, Any]:
        return sampling_of(choice) | ({"top_p": 7.0} if len(choice.prompt) == 5 else {})

    monkeypatch.setattr("penstock.engine.vllm.backend.sampling_of", spoil)
    outputs = engine.generate(prompts[:3], GREEDY)
    assert [output.finish_reason for output in outputs] == ["length", "error", "length"]
    assert outputs[1].error is not None and "vLLM refuses the request: top_p" in outputs[1].error.message


def test_an_engine_that_fails_ends_its_requests_with_the_reason(
    path: Path, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing hangs, and the worker knows that it must end."""
    from vllm.v1.engine.llm_engine import LLMEngine

    engine = InferenceEngine(config(path, max_batch_size=2))
    step, calls = LLMEngine.step, iter(range(1_000_000))

    def fail(self: Any) -> Any:
        if next(calls) == 3:
            raise RuntimeError("broken on purpose")
        return step(self)

    monkeypatch.setattr(LLMEngine, "step", fail)
    outputs = engine.generate(prompts[:4], GREEDY)
    assert [output.finish_reason for output in outputs] == ["error"] * 4
    assert {output.error.message for output in outputs if output.error} == {
        "vLLM's engine failed (RuntimeError), and this worker with it."
    }
    engine._driver._thread.join(60)
    assert not engine.healthy and isinstance(engine.error, GenerationFailed)
    with pytest.raises(GenerationFailed):
        engine.generate(prompts[0], GREEDY)
    assert engine.close()


def test_a_model_that_does_not_load_says_why_and_the_next_one_loads(path: Path, prompts: list[list[int]]) -> None:
    with pytest.raises(ModelLoadError, match=r"vLLM cannot load .*KV cache"):
        InferenceEngine(config(path, max_sequence_length=2048, kv_cache_memory=ByteSize(300_000)))
    with pytest.raises(ConfigurationError, match="this vLLM has no engine argument nothing"):
        InferenceEngine(config(path, backend_options=("nothing=1",)))
    with InferenceEngine(config(path)) as engine:
        assert len(engine.generate(prompts[0], GREEDY).token_ids) == 24


PARALLEL = """
import json, psutil, sys
from penstock.engine import EngineConfig, GenerationParams, InferenceEngine
from pydantic import ByteSize

if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    memory = ByteSize(64 << 20)
    options = ("tensor_parallel_size=2",)
    config = EngineConfig(
        model=asked["model"], backend="vllm", dtype="float32", kv_cache_memory=memory, backend_options=options
    )
    with InferenceEngine(config) as engine:
        params = GenerationParams(max_tokens=24, temperature=0, ignore_eos=True)
        outputs = engine.generate(asked["prompts"], params)
        parts = [one for one in psutil.Process().children() if "resource_tracker" not in " ".join(one.cmdline())]
        assert "grammar" not in engine.manifest.parameters
        print(json.dumps([[output.token_ids for output in outputs], [part.pid for part in parts]]), flush=True)
        if sys.stdin.readline() == "lose one\\n":
            parts[0].kill()
            print({output.error.message for output in engine.generate(asked["prompts"], params)}, flush=True)
    print(len(psutil.wait_procs(parts, timeout=60)[1]), "left", flush=True)
    sys.stdin.readline()
"""


@pytest.mark.parametrize("end", ["close", "lose one", "kill"])
def test_tensor_parallel_processes_give_the_same_tokens_and_end_with_the_engine(
    end: str, path: Path, engine: InferenceEngine, prompts: list[list[int]], tmp_path: Path
) -> None:
    script = tmp_path / "parallel.py"
    script.write_text(PARALLEL)
    command = [sys.executable, str(script), json.dumps({"model": str(path), "prompts": prompts[:4]})]
    bound = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}  # or else it wants a NUMA node for each process
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=os.environ | bound, **pipes) as running:
        assert running.stdin is not None and running.stdout is not None
        tokens, pids = next(json.loads(line) for line in running.stdout if line.startswith("[["))
        parts = [psutil.Process(pid) for pid in pids]
        assert len(parts) == 2
        assert [tuple(each) for each in tokens] == [output.token_ids for output in engine.generate(prompts[:4], GREEDY)]
        if end != "kill":
            running.stdin.write(f"{end}\n")
            running.stdin.flush()
            if end == "lose one":
                assert "vLLM's engine failed" in running.stdout.readline()
            assert "0 left\n" in iter(running.stdout.readline, "")
        running.kill()
        assert not psutil.wait_procs(parts, timeout=60)[1]
