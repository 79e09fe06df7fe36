"""Adapters in running engines: the tokens of the merged model, whatever else the batch holds, and nothing shared.

The oracle is transformers' own model with W + scale · B A in place of W, one prompt at a time, in float32.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from greedy import greedy_answer
from lora import linear_sizes, make_adapter, matrices, merged, write_adapter
from pydantic import ByteSize
from transformers import AutoModelForCausalLM

from penstock.engine import EngineConfig, EngineRequest, GenerationParams, InferenceEngine
from penstock.engine.paged.quantization.quantize import dequantized, quantizable
from penstock.schemas.errors import InvalidRequest, ModelNotFound

COUNT = 16
GREEDY = GenerationParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
SAMPLED = GenerationParams(temperature=0.9, seed=5, max_tokens=COUNT, ignore_eos=True)
PROMPTS = [[3 + (7 * length + index * index) % 500 for index in range(length)] for length in (1, 17, 40)]
NAMES = (None, "one", "two", "attention")
Start = Callable[..., InferenceEngine]


class World:
    """A tiny model of one shape, its adapters on disk, and what transformers makes of both."""

    def __init__(self, directory: Path, root: Path) -> None:
        self.directory = directory
        self.model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype="float32", attn_implementation="eager")
        sizes = linear_sizes(self.model)
        some = {name: size for name, size in sizes.items() if "attn" in name}
        self.paths = {
            "one": make_adapter(root / "one", sizes, rank=4, seed=1),
            "two": make_adapter(root / "two", sizes, rank=20, seed=2),
            "attention": make_adapter(root / "attention", some, rank=8, seed=3),
        }
        self._answers: dict[Any, tuple[int, ...]] = {}
        self.merge()

    def merge(self) -> None:
        """Make the merged models of the base as it is now."""
        self.merged = {name: merged(self.model, path) for name, path in self.paths.items()}

    def greedy(
        self, prompt: list[int], adapter: str | None, count: int = COUNT, said: tuple[int, ...] = ()
    ) -> tuple[int, ...]:
        """`said` is what an engine answered: to see that it is right takes less time than to generate it."""
        key = (tuple(prompt), adapter, count)
        if key not in self._answers:
            model = self.model if adapter is None else self.merged[adapter]
            self._answers[key] = greedy_answer(model, prompt, count, said)
        return self._answers[key]

    def load(self, engine: InferenceEngine) -> InferenceEngine:
        for name, path in self.paths.items():
            engine.load_adapter(name, path)
        return engine


@pytest.fixture(scope="module")
def world_of(
    model_directory: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], World]:
    worlds: dict[str, World] = {}

    def make(shape: str) -> World:
        if shape not in worlds:
            worlds[shape] = World(model_directory(shape), tmp_path_factory.mktemp(f"adapters-{shape}"))
        return worlds[shape]

    return make


@pytest.fixture(scope="module")
def world(world_of: Callable[[str], World]) -> World:
    return world_of("llama")


@pytest.fixture
def start() -> Iterator[Start]:
    with ExitStack() as stack:

        def start(world: World, **settings: Any) -> InferenceEngine:
            fields: dict[str, Any] = {"dtype": "float32", "device": "cpu", "kv_cache_memory": ByteSize(16 << 20)}
            config = EngineConfig(model=str(world.directory), **fields | settings)
            return stack.enter_context(InferenceEngine(config))

        yield start


@pytest.fixture
def engine(start: Start, world: World) -> InferenceEngine:
    return world.load(start(world))


def together(
    engine: InferenceEngine, asked: list[tuple[list[int], str | None]], params: GenerationParams = GREEDY
) -> list[tuple[int, ...]]:
    """The answers to prompts with adapters, all in one batch."""

    async def run() -> list[tuple[int, ...]]:
        outputs = await asyncio.gather(*(engine.agenerate(prompt, params, adapter) for prompt, adapter in asked))
        return [output.token_ids for output in outputs]

    return asyncio.run(run())


MIXED = [(prompt, name) for prompt in PROMPTS for name in NAMES]


@pytest.mark.parametrize(
    ("shape", "backend"),
    [
        (shape, "paged")
        for shape in (
            *("llama", "qwen2", "qwen3", "gpt2", "gemma2", "gemma4_text", "phi3", "glm4", "qwen3_5_text", "lfm2"),
            *("granite", "granitemoehybrid", "bamba", "ernie4_5", "helium"),
        )
    ]
    + [("llama", "hf"), ("gpt2", "hf")],
)
def test_tokens_are_the_merged_models(world_of: Callable[[str], World], start: Start, shape: str, backend: str) -> None:
    """Alone, and mixed in one batch with the other adapters and the base; the base's are its own all along."""
    world = world_of(shape)
    engine = start(world, backend=backend)
    slow = engine.model_info().slow_paths  # adapters take the same paths as the base
    world.load(engine)
    found = together(engine, MIXED)
    expected = [world.greedy(prompt, name, said=said) for (prompt, name), said in zip(MIXED, found, strict=True)]
    assert found == expected
    assert len(set(expected)) == len(expected)
    alone = MIXED[4:8]
    assert [engine.generate(prompt, GREEDY, name).token_ids for prompt, name in alone] == expected[4:8]
    assert engine.model_info().slow_paths == slow


@pytest.mark.parametrize("shape", ["mixtral", "gpt_oss"])
def test_attention_beside_experts(world_of: Callable[[str], World], start: Start, shape: str) -> None:
    """Layers that every token passes can be changed; experts are no linear layers, and refused."""
    world = world_of(shape)
    engine = world.load(start(world))
    assert together(engine, MIXED) == [world.greedy(prompt, name) for prompt, name in MIXED]
    bad = make_adapter(world.directory / "bad", {"model.layers.0.mlp.experts": (64, 64)})
    with pytest.raises(InvalidRequest, match=r"changes model\.layers\.0\.mlp\.experts"):
        engine.load_adapter("bad", bad)


@pytest.mark.parametrize(
    "settings",
    [
        {"compile_kernels": False},
        {"prefill_chunk_size": 4, "max_batch_size": 4},
        {"enable_chunked_prefill": False},
        {"kv_cache_memory": ByteSize(6 * 32768), "max_sequence_length": 64, "max_batch_size": 12},
    ],
    ids=["torch", "chunks", "whole prompts", "preemption"],
)
def test_tokens_do_not_depend_on_how_the_engine_runs(world: World, start: Start, settings: dict[str, Any]) -> None:
    engine, count = world.load(start(world, **settings)), 24
    params = GREEDY.model_copy(update={"max_tokens": count})
    assert together(engine, MIXED, params) == [world.greedy(prompt, name, count) for prompt, name in MIXED]
    if "max_sequence_length" in settings:
        stats = engine.stats().cache
        assert stats is not None and stats.num_preemptions > 0


@pytest.mark.parametrize("method", ["int8", "int4"])
def test_quantized_weights_below_adapters(
    world_of: Callable[[str], World], start: Start, method: str, tmp_path: Path
) -> None:
    world = World(world_of("llama").directory, tmp_path)
    with torch.no_grad():
        for _, module, own in quantizable(world.model, method):
            module.weight.copy_(dequantized(module.weight, own))
    world.merge()
    engine = world.load(start(world, quantization=method))
    assert together(engine, MIXED) == [world.greedy(prompt, name) for prompt, name in MIXED]


def test_a_pattern_of_ranks(world: World, start: Start, tmp_path: Path) -> None:
    sizes = linear_sizes(world.model)
    ranks = {name: 3 for name in sizes if name.endswith("k_proj")}
    tensors = matrices(sizes, 8, seed=9, ranks=ranks)
    settings = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "rank_pattern": {"k_proj": 3}}
    settings |= {"alpha_pattern": {"k_proj": 3}}
    world.paths["ranks"] = write_adapter(tmp_path, tensors, settings)
    world.merged["ranks"] = merged(world.model, tmp_path, scale=1.0)
    engine = start(world)
    assert engine.load_adapter("ranks", tmp_path).rank == 8
    assert engine.generate(PROMPTS[1], GREEDY, "ranks").token_ids == world.greedy(PROMPTS[1], "ranks")
    del world.paths["ranks"]


def test_draws_with_a_seed_are_the_same_in_any_batch(engine: InferenceEngine) -> None:
    mixed = together(engine, MIXED, SAMPLED)
    assert mixed == [engine.generate(prompt, SAMPLED, name).token_ids for prompt, name in MIXED]
    assert len(set(mixed)) == len(mixed)


def test_log_probabilities_of_prompt_and_answer(world: World, engine: InferenceEngine) -> None:
    params = GenerationParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=1, prompt_logprobs=1)
    output = engine.generate(PROMPTS[1], params, "one")
    assert output.prompt_logprobs is not None and output.logprobs is not None
    ids = [*PROMPTS[1], *output.token_ids]
    with torch.no_grad():
        scores = world.merged["one"](torch.tensor([ids])).logits[0].log_softmax(-1)
    expected = [float(scores[index, token]) for index, token in enumerate(ids[1:])]
    told = output.prompt_logprobs + output.logprobs
    assert [entry.logprob for entry in told[1:]] == pytest.approx(expected, abs=1e-4)


def test_another_worker_resumes_with_the_same_tokens(world: World, engine: InferenceEngine) -> None:
    async def resume(params: GenerationParams, tokens: tuple[int, ...], count: int) -> tuple[int, ...]:
        request = EngineRequest(
            "r", tuple(PROMPTS[2]), params, seed=5, epoch=2, generated=(tokens[:count],), adapter="two"
        )
        handle, found = engine.open(request), list(tokens[:count])
        while not handle.finished:
            for delta in await handle.take():
                assert delta.index == len(found)
                found += delta.token_ids
        return tuple(found)

    for params in (GREEDY, SAMPLED):
        whole = engine.generate(PROMPTS[2], params, "two").token_ids
        for count in (1, 5, COUNT - 1):
            assert asyncio.run(resume(params, whole, count)) == whole


def test_a_grammar_restricts_an_adapters_answer(engine: InferenceEngine) -> None:
    params = GenerationParams(temperature=0, max_tokens=8, grammar={"kind": "regex", "text": "(yes|no)"})  # type: ignore[arg-type]
    assert engine.generate(PROMPTS[1], params, "one").text in ("yes", "no")


class TestPrefixes:
    PROMPT = PROMPTS[2]  # two full blocks, and a bit

    def cached(self, engine: InferenceEngine, adapter: str | None) -> int:
        output = engine.generate(self.PROMPT, GREEDY, adapter)
        return output.stats.cached_tokens

    def test_hits_do_not_cross_adapters(self, world: World, engine: InferenceEngine) -> None:
        assert [self.cached(engine, name) for name in NAMES] == [0, 0, 0, 0]
        assert [self.cached(engine, name) for name in NAMES] == [32, 32, 32, 32]
        for name in NAMES:
            assert engine.generate(self.PROMPT, GREEDY, name).token_ids == world.greedy(self.PROMPT, name)

    def test_the_content_counts_not_the_name(self, world: World, engine: InferenceEngine) -> None:
        assert self.cached(engine, "one") == 0
        engine.load_adapter("again", world.paths["one"])
        assert self.cached(engine, "again") == 32
        engine.unload_adapter("one")
        engine.load_adapter("one", world.paths["two"])
        assert self.cached(engine, "one") == 0

    def test_cached_answers_are_the_adapters_own(self, world: World, start: Start) -> None:
        engine = world.load(start(world, cache_answers=True))
        for _ in range(2):
            for name in NAMES:
                assert engine.generate(self.PROMPT, GREEDY, name).token_ids == world.greedy(self.PROMPT, name)
        assert engine.stats().num_generated_tokens == 2 * len(NAMES) * COUNT


class TestHot:
    """Adapters come and go while requests run."""

    LONG = GREEDY.model_copy(update={"max_tokens": 200})

    def test_running_requests_go_on(self, world: World, start: Start) -> None:
        engine = start(world)

        async def run() -> None:
            base = engine.generate_stream(PROMPTS[1], self.LONG)
            found = list((await anext(base)).token_ids)
            await asyncio.to_thread(engine.load_adapter, "one", world.paths["one"])
            own = engine.generate_stream(PROMPTS[1], self.LONG, adapter="one")
            kept = list((await anext(own)).token_ids)
            assert engine.stats().num_running >= 1  # the first one may have ended where loading took long
            engine.unload_adapter("one")
            with pytest.raises(ModelNotFound, match="no adapter 'one' is loaded"):
                await engine.agenerate(PROMPTS[0], GREEDY, "one")
            assert engine.stats().adapter_memory > 0
            for stream, tokens, name in ((base, found, None), (own, kept, "one")):
                async for delta in stream:
                    tokens += delta.token_ids
                assert tuple(tokens) == world.greedy(PROMPTS[1], name, 200)

        asyncio.run(run())
        gc.collect()
        assert engine.stats().adapter_memory == 0

    def test_a_replaced_adapter_ends_what_it_began(self, world: World, engine: InferenceEngine) -> None:
        async def run() -> None:
            stream = engine.generate_stream(PROMPTS[1], self.LONG, adapter="one")
            tokens = list((await anext(stream)).token_ids)
            await asyncio.to_thread(engine.load_adapter, "one", world.paths["two"])
            later = await engine.agenerate(PROMPTS[1], GREEDY, "one")
            assert later.token_ids == world.greedy(PROMPTS[1], "two")
            async for delta in stream:
                tokens += delta.token_ids
            assert tuple(tokens) == world.greedy(PROMPTS[1], "one", 200)

        asyncio.run(run())

    def test_a_refused_adapter_changes_nothing(self, world: World, engine: InferenceEngine, tmp_path: Path) -> None:
        before = engine.adapters(), engine.stats().adapter_memory
        sizes = {name: (size[0] + 2, size[1]) for name, size in linear_sizes(world.model).items()}
        with pytest.raises(InvalidRequest, match="for another model"):
            engine.load_adapter("one", make_adapter(tmp_path / "other", sizes))
        infinite = matrices(linear_sizes(world.model))
        next(iter(infinite.values()))[0, 0] = torch.inf
        path = write_adapter(tmp_path / "infinite", infinite, {"peft_type": "LORA", "r": 4, "lora_alpha": 8})
        with pytest.raises(InvalidRequest, match="not finite"):
            engine.load_adapter("one", path)
        assert (engine.adapters(), engine.stats().adapter_memory) == before
        assert engine.generate(PROMPTS[1], GREEDY, "one").token_ids == world.greedy(PROMPTS[1], "one")

    def test_what_is_loaded(self, world: World, engine: InferenceEngine) -> None:
        infos = engine.adapters()
        assert [(info.name, info.rank) for info in infos] == [("attention", 8), ("one", 4), ("two", 20)]
        assert engine.stats().adapter_memory == sum(info.memory for info in infos) > 0
        assert infos[1].source == str(world.paths["one"])
        assert infos[1].num_modules == len(linear_sizes(world.model))
        for info in infos:
            engine.unload_adapter(info.name)
        gc.collect()
        assert engine.adapters() == [] and engine.stats().adapter_memory == 0

    @pytest.mark.parametrize("call", ["unload", "generate", "stream"])
    def test_unknown_names(self, engine: InferenceEngine, call: str) -> None:
        async def stream() -> None:
            async for _ in engine.generate_stream(PROMPTS[0], GREEDY, adapter="none"):
                raise AssertionError("it runs")

        calls: dict[str, Callable[[], object]] = {
            "unload": partial(engine.unload_adapter, "none"),
            "generate": partial(engine.generate, PROMPTS[0], GREEDY, "none"),
            "stream": lambda: asyncio.run(stream()),
        }
        with pytest.raises(
            ModelNotFound, match=r"no adapter 'none' is loaded \(loaded: attention, one, two\)"
        ) as caught:
            calls[call]()
        assert caught.value.param == "adapter"


def test_a_backend_without_adapters_says_so(echo: InferenceEngine, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="runs no adapters; use the backend 'paged'"):
        echo.load_adapter("one", tmp_path)
