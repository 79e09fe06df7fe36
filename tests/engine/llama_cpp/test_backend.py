"""The backend on a tiny model: many requests at once, long prompts, resuming, memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gguf_files import write_gguf
from pydantic import ByteSize

from penstock.engine import EngineConfig, EngineRequest, GenerationParams, InferenceEngine
from penstock.engine.choice import Choice
from penstock.schemas.errors import ConfigurationError, InvalidRequest

pytest.importorskip("llama_cpp", reason="needs pip install 'penstock[llama-cpp]'")
GREEDY = GenerationParams(max_tokens=24, temperature=0, ignore_eos=True)
SAMPLED = GREEDY.model_copy(update={"temperature": 0.9, "top_p": 0.9, "seed": 5})


@pytest.fixture(scope="session")
def path(model_directory: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(model_directory("llama"), path, "llama", lambda _, values: "Q8_0" if values.ndim == 2 else None)
    return path


def config(path: Path, **values: Any) -> EngineConfig:
    return EngineConfig(**{"model": str(path), "backend": "llama_cpp"} | values)


@pytest.fixture(scope="module")
def engine(path: Path) -> Iterator[InferenceEngine]:
    with InferenceEngine(config(path, max_batch_size=4)) as engine:
        yield engine


def test_more_requests_than_places_get_what_each_gets_alone(engine: InferenceEngine, prompts: list[list[int]]) -> None:
    for params in (GREEDY, SAMPLED):
        alone = [engine.generate(prompt, params).token_ids for prompt in prompts]
        assert [output.token_ids for output in engine.generate(prompts, params)] == alone
    assert engine.stats().cache is not None and engine.stats().cache.usage == 0  # type: ignore[union-attr]


def test_prompts_in_small_pieces_give_the_same_tokens(
    path: Path, engine: InferenceEngine, prompts: list[list[int]]
) -> None:
    whole = [output.token_ids for output in engine.generate(prompts, GREEDY)]
    for values in ({"prefill_chunk_size": 1}, {"prefill_chunk_size": 3}, {"enable_chunked_prefill": False}):
        with InferenceEngine(config(path, max_batch_size=4, **values)) as other:
            assert [output.token_ids for output in other.generate(prompts, GREEDY)] == whole


def test_a_prompt_longer_than_a_call_and_an_answer_up_to_the_end(path: Path) -> None:
    with InferenceEngine(config(path)) as engine:
        length = engine.model_info().context_length
        prompt = [5 + index % 400 for index in range(length - 3)]
        output = engine.generate(prompt, GREEDY)
        assert len(output.token_ids) == 3 and output.finish_reason == "length"


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "seeded"])
def test_any_other_worker_goes_on_with_the_very_next_token(
    params: GenerationParams, path: Path, engine: InferenceEngine, prompts: list[list[int]]
) -> None:
    """The other one has a larger batch, and other requests in it."""
    whole = [engine.generate(prompt, params).token_ids for prompt in prompts]

    async def resume(other: InferenceEngine, cut: int) -> list[tuple[int, ...]]:
        handles = []
        for number, (prompt, tokens) in enumerate(zip(prompts, whole, strict=True)):
            begun = (tokens[:cut],)
            request = EngineRequest(f"r{number}", tuple(prompt), params, seed=params.seed or 0, generated=begun)
            handles.append(other.open(request))
        found = []
        for handle in handles:
            rest: list[int] = []
            while not handle.finished:
                rest += [token for delta in await handle.take() for token in delta.token_ids]
            found.append(tuple(rest))
        return found

    seeded = params.model_copy(update={"seed": None})
    with InferenceEngine(config(path, max_batch_size=7)) as other:
        for cut in (1, 11, 23):
            assert asyncio.run(resume(other, cut)) == [tokens[cut:] for tokens in whole]
        assert len(other.generate(prompts[0], seeded).token_ids) == 24


def test_places_are_reserved_for_urgent_requests(path: Path) -> None:
    from penstock.engine.llama_cpp.backend import LlamaCppBackend

    backend = LlamaCppBackend(config(path, max_batch_size=3, reserved_batch_size=1))
    try:
        for number, priority in enumerate((1, 1, 1, 1, 0)):
            if number == 4:
                assert {delta.request for delta in backend.step()} == {"r0", "r1"}
            request = EngineRequest(f"r{number}", (7, 8, 9), GREEDY, seed=0, priority=priority)
            backend.add(Choice(request, 0, backend.tokenizer, backend.info))
        assert {delta.request for delta in backend.step()} == {"r0", "r1", "r4"}
        assert (backend.num_running, backend.num_waiting) == (3, 2)
    finally:
        backend.close()


def test_one_request_does_not_take_all_places(path: Path) -> None:
    from penstock.engine.llama_cpp.backend import LlamaCppBackend

    backend = LlamaCppBackend(config(path, max_batch_size=4))
    try:
        request = EngineRequest("many", (7, 8, 9), GREEDY.model_copy(update={"n": 6}), seed=0)
        for index in range(6):
            backend.add(Choice(request, index, backend.tokenizer, backend.info))
        backend.step()
        assert (backend.num_running, backend.num_waiting) == (3, 3)
    finally:
        backend.close()


def test_memory_is_divided_among_places(path: Path) -> None:
    with InferenceEngine(config(path, max_batch_size=2)) as engine:
        cache = engine.stats().cache
        assert cache is not None
        needed = cache.memory
    with pytest.raises(ConfigurationError, match=r"2 sequences of 256 tokens take \d+ bytes; set at least that"):
        InferenceEngine(config(path, max_batch_size=2, kv_cache_memory=ByteSize(1000)))
    with pytest.raises(ConfigurationError, match="kv_cache_memory"):
        InferenceEngine(config(path, max_batch_size=64, kv_cache_memory=ByteSize(needed)))


def test_what_it_lacks_is_refused(engine: InferenceEngine, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="no prefix cache"):
        engine.save_prefixes(tmp_path / "prefixes")
    with pytest.raises(InvalidRequest, match="no adapters"):
        engine.load_adapter("one", tmp_path)


def test_a_failed_call_begins_anew_and_changes_no_token(
    path: Path, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock.engine.llama_cpp.model import LlamaModel

    with InferenceEngine(config(path, max_batch_size=4)) as engine:
        expected = [output.token_ids for output in engine.generate(prompts[:4], GREEDY)]
        advance, calls = LlamaModel.advance, iter(range(1_000_000))

        def fail_once(model: LlamaModel, pieces: Any) -> Any:
            if len(pieces) == 4 and next(calls) == 5:
                raise RuntimeError("broken on purpose")
            return advance(model, pieces)

        monkeypatch.setattr(LlamaModel, "advance", fail_once)
        assert [output.token_ids for output in engine.generate(prompts[:4], GREEDY)] == expected
        assert next(calls) > 6
