"""Every architecture that the packed engine claims, against transformers' own generation of one prompt at a time.

The oracle is eager attention in float32, unpadded. Prompts are 1 to 70 tokens long, around the edges of blocks of 16
tokens and beyond the sliding windows, which are 16 wide. Nothing here may depend on what runs beside a request, on how
its prompt was cut, on what the cache still held, or on how often it was preempted.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from greedy import greedy_answer, greedy_answers
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine import EngineConfig, EngineRequest, GenerationParams, InferenceEngine
from penstock.engine.backend import Backend
from penstock.engine.backends.registry import load_backend
from penstock.engine.choice import Choice
from penstock.engine.paged import verdicts
from penstock.engine.paged.backend import PagedBackend
from penstock.engine.paged.quantization.quantize import dequantized, linear_maker, quantizable
from penstock.engine.planning.model_files import LEAST_STATES, STATES, ModelFiles
from penstock.schemas.errors import ConfigurationError, InvalidRequest

BACKEND = "paged"
DEVICE = os.environ.get("PENSTOCK_TEST_DEVICE", "cpu")
FAR = 1e-4 if DEVICE == "cpu" else 5e-4  # of a log-probability from the oracle's

BLOCK = 16  # tokens
COUNT = 24  # tokens generated
SOME = ["llama", "mistral", "gemma2", "gemma4_text", "qwen3_moe", "qwen3_next", "qwen3_5_text", "gpt_oss"]
MORE = [
    "bloom",
    "cohere",
    "deepseek_v3",
    "deepseek_v32",
    "ernie4_5",
    "falcon",
    "falcon_rw",
    "gemma3_text",
    "glm",
    "glm4",
    "glm_moe_dsa",
    "gpt2",
    "gpt_neo",
    "gptj",
    "granite",
    "helium",
    "hunyuan_v1_moe",
    "llama4_text",
    "longcat_flash",
    "mellum",
    "ministral3",
    "mixtral",
    "mpt",
    "olmo2",
    "phi3",
    "qwen2",
    "qwen3",
    "smollm3",
    "stablelm",
]
STATEFUL = {
    *("qwen3_next", "qwen3_5_text", "bamba", "falcon_h1", "granitemoehybrid"),
    *("lfm2", "lfm2_moe", "lfm3", "nemotron_h"),
    *("bailing_hybrid", "falcon_mamba", "jamba", "kimi_linear", "mamba", "mamba2", "olmo_hybrid"),
}
_BIASES = {"bloom": 3, "falcon_rw": 2, "mpt": 3}  # numbers of keys that are biases by position
ALONE = {"falcon_mamba", "mamba", "mamba2"}  # of which no layer attends
all_shapes = pytest.mark.parametrize("shape", [*SOME, *MORE, *sorted(STATEFUL - {*SOME})])
some_shapes = pytest.mark.parametrize("shape", SOME)

GREEDY = GenerationParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
SAMPLED = GenerationParams(temperature=0.8, top_p=0.9, top_k=50, seed=11, max_tokens=COUNT, ignore_eos=True)

Tokens = tuple[int, ...]
StartEngine = Callable[..., InferenceEngine]


def made_up(length: int, salt: int = 0) -> list[int]:
    """A prompt; two that differ in length or salt have no beginning in common."""
    return [3 + (7 * length + 131 * salt + index * index) % 500 for index in range(length)]


PROMPTS = [made_up(length) for length in (1, 15, 16, 17, 33, 70)]


class Oracle:
    """transformers' own models and what they said, each computed once."""

    def __init__(self, directory_of: Callable[[str], Path]) -> None:
        self._directory_of = directory_of
        self._models: dict[str, Any] = {}
        self._answers: dict[tuple[str, Tokens, int], Tokens] = {}

    def model(self, shape: str) -> Any:
        if shape not in self._models:
            from transformers import AutoModelForCausalLM

            attention = "sdpa" if shape == "falcon_rw" else "eager"  # with which Falcon adds its biases twice
            model: Any = AutoModelForCausalLM.from_pretrained(
                self._directory_of(shape), dtype="float32", attn_implementation=attention
            )
            self._models[shape] = model
        return self._models[shape]

    def tokens(self, shape: str, prompt: Sequence[int], said: Sequence[int] = (), count: int = COUNT) -> Tokens:
        """`said` is what an engine answered: to see that it is right takes less time than to generate it.

        So is one that differs from what was generated, where the model's logits in one pass leave no doubt of it: of
        two experts that are as good as equal, another step may have taken the other.
        """
        key = (shape, tuple(prompt), count)
        found = self._answers.get(key)
        if found is None or (said and found != tuple(said)):
            found = self._answers[key] = greedy_answer(self.model(shape), prompt, count, said)
        return found

    def all_tokens(self, shape: str, prompts: list[list[int]], said: list[Tokens]) -> list[Tokens]:
        return [self.tokens(shape, *each) for each in zip(prompts, said, strict=True)]

    def logprobs(self, shape: str, prompt: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
        """Log-probabilities under which each token of the answer was chosen, [len(answer), V]."""
        with torch.no_grad():
            logits = self.model(shape)(torch.tensor([[*prompt, *answer]])).logits[0]
        result: torch.Tensor = logits[len(prompt) - 1 : -1].log_softmax(-1)
        return result

    def memory(self, shape: str, blocks: int, rows: int) -> int:
        """Keys and values of so many blocks in all layers, and the states that so many rows need, in float32."""
        config = self.model(shape).config
        if shape == "gemma4_text":  # its layers differ, and the last ones attend to keys of earlier ones
            own = [config.per_layer_config[i] for i in range(config.num_hidden_layers - config.num_kv_shared_layers)]
            return sum(blocks * BLOCK * 2 * one.num_key_value_heads * one.head_dim * 4 for one in own)
        if shape in ALONE:
            files = ModelFiles.of(EngineConfig(model=str(self._directory_of(shape)), dtype="float32", device="cpu"))
            return files.cache(blocks * BLOCK, 1) + rows * files.states() * LEAST_STATES // STATES
        heads: int = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        if getattr(config, "kv_lora_rank", None):  # latent attention, whose values are cached as wide as its keys
            head_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
            head_dim += -(-getattr(config, "index_head_dim", 0) // heads)
        head_dim += _BIASES.get(shape, 0)
        layers, states = config.num_hidden_layers, 0
        if shape in STATEFUL:
            layers = sum(kind in ("full_attention", "sliding_attention", "hybrid") for kind in config.layer_types)
            files = ModelFiles.of(EngineConfig(model=str(self._directory_of(shape)), dtype="float32", device="cpu"))
            states = rows * files.states()
        keys: int = blocks * BLOCK * layers * 2 * heads * head_dim * 4
        # Of what is left besides, states take more than they need, up to half of all.
        return keys + (states if states <= keys else states * LEAST_STATES // STATES)


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checked")


@pytest.fixture(autouse=True)
def verdict_cache(checked: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model is checked by the first engine that has it with given settings, as on a user's machine."""
    monkeypatch.setattr(verdicts, "user_cache", lambda: checked)
    return checked


@pytest.fixture(scope="session")
def oracle(model_directory: Callable[[str], Path]) -> Oracle:
    return Oracle(model_directory)


@pytest.fixture(scope="session")
def config_of(model_directory: Callable[[str], Path]) -> Callable[..., EngineConfig]:
    def make(shape: str, **changes: Any) -> EngineConfig:
        model = str(model_directory(shape))
        return EngineConfig(model=model, backend=BACKEND, dtype="float32", device=DEVICE, **changes)

    return make


@pytest.fixture
def start(config_of: Callable[..., EngineConfig]) -> Iterator[StartEngine]:
    """A new engine, its cache cold."""
    with ExitStack() as stack:
        yield lambda shape, **changes: stack.enter_context(InferenceEngine(config_of(shape, **changes)))


def answers(engine: InferenceEngine, prompts: list[list[int]], params: GenerationParams = GREEDY) -> list[Tokens]:
    """What the engine makes of the prompts together, its first choices."""
    return [output.token_ids for output in engine.generate(prompts, params)]


@all_shapes
def test_the_oracle_says_something(shape: str, oracle: Oracle) -> None:
    assert len(set(oracle.tokens(shape, PROMPTS[-1]))) >= 5


@all_shapes
def test_a_batch_equals_the_oracle(shape: str, start: StartEngine, oracle: Oracle) -> None:
    outputs = start(shape).generate(PROMPTS, GREEDY)
    found = [output.token_ids for output in outputs]
    expected = oracle.all_tokens(shape, PROMPTS, found)
    assert found == expected
    assert mean(len(set(tokens)) for tokens in expected) >= 8
    assert {(output.finish_reason, output.stats.cached_tokens) for output in outputs} == {("length", 0)}


@pytest.mark.parametrize(
    "shape",
    [
        *("llama", "gemma4_text", "ministral3", "mistral", "olmo2", "qwen2", "qwen3", "qwen3_5_text"),
        *("codegen", "ernie4_5", "glm4", "lfm2", "lfm2_moe", "nemotron", "smollm3"),
    ],
)
def test_without_kernels_a_batch_equals_the_oracle(shape: str, start: StartEngine, oracle: Oracle) -> None:
    """What is compiled computes these shapes' steps everywhere else in this file, but for old ones."""
    engine = start(shape, compile_kernels=False, prefill_chunk_size=60)
    found = answers(engine, PROMPTS)
    assert found == oracle.all_tokens(shape, PROMPTS, found)


@all_shapes
def test_chunks_of_a_prompt_equal_the_whole(shape: str, start: StartEngine, oracle: Oracle) -> None:
    engine = start(shape, enable_chunked_prefill=True, prefill_chunk_size=7, max_batch_size=len(PROMPTS))
    found = answers(engine, PROMPTS)
    assert found == oracle.all_tokens(shape, PROMPTS, found)


@all_shapes
def test_prefix_hits_change_nothing(shape: str, start: StartEngine, oracle: Oracle) -> None:
    engine, count = start(shape), 9  # with which the answer of 40 tokens goes beyond a block
    params = GREEDY.model_copy(update={"max_tokens": count})
    base = made_up(40)
    first = engine.generate(base, params)
    prompts = [
        base,
        [*base, *made_up(30)],
        [*base, *first.token_ids, *made_up(3)],  # the next turn of a conversation
        [*base[:33], *made_up(9)],
        base[:32],  # nothing but whole blocks, of which the last token must be computed all the same
    ]
    for prompt in prompts:
        output = engine.generate(prompt, params)
        assert output.token_ids == oracle.tokens(shape, prompt, output.token_ids, count)
        # A state after 16 tokens is only kept once it was missed.
        has_state = shape not in STATEFUL or prompt is not prompts[-1]
        assert has_state <= output.stats.cached_tokens < len(prompt)
    assert engine.generate(prompts[-1], params).stats.cached_tokens == 16
    assert answers(engine, prompts, params) == [oracle.tokens(shape, prompt, (), count) for prompt in prompts]
    assert first.token_ids == oracle.tokens(shape, base, (), count)
    assert first.stats.cached_tokens == 0


@some_shapes
@pytest.mark.parametrize("changes", [{}, {"prefill_chunk_size": 16}, {"enable_chunked_prefill": False}], ids=str)
def test_a_prompt_is_scored_as_the_oracle_has_it(
    shape: str, changes: dict[str, Any], start: StartEngine, oracle: Oracle
) -> None:
    """Together, in chunks, and where the beginning is cached already."""
    far = FAR if shape != "qwen3_5_text" else 5e-4  # what transformers computes in one pass, and in chunks
    engine = start(shape, **changes)
    prompts = [*PROMPTS, made_up(300)]
    answers(engine, prompts)
    params = GREEDY.model_copy(update={"logprobs": 2, "prompt_logprobs": 2, "max_tokens": 2})
    for prompt, output in zip(prompts, engine.generate(prompts, params), strict=True):
        assert output.prompt_logprobs is not None and output.logprobs is not None
        told = output.prompt_logprobs + output.logprobs
        assert [entry.token_id for entry in told] == [*prompt, *output.token_ids]
        assert (told[0].logprob, told[0].top) == (None, ())
        raw = oracle.logprobs(shape, prompt[:1], [*prompt[1:], *output.token_ids])
        chosen = raw[range(len(raw)), [entry.token_id for entry in told[1:]]]
        assert [entry.logprob for entry in told[1:]] == pytest.approx(chosen.tolist(), abs=far)
        best = [[rival.logprob for rival in entry.top] for entry in told[1:]]
        assert best == [pytest.approx(row, abs=far) for row in raw.topk(2).values.tolist()]
        highest, lowest = ((raw > chosen[:, None] + by).sum(-1).tolist() for by in (far, -far))
        for entry, most, least in zip(output.prompt_logprobs[1:], highest, lowest, strict=False):
            assert entry.rank is not None and most < entry.rank <= least
        assert output.stats.cached_tokens == 0


@some_shapes
def test_equal_prompts_arriving_together_change_nothing(shape: str, start: StartEngine, oracle: Oracle) -> None:
    base = made_up(40)
    prompts = [base, base, base[:32], [*base, 5, 6], base]
    found = answers(start(shape), prompts)
    assert found == oracle.all_tokens(shape, prompts, found)


@all_shapes
def test_preemption_changes_nothing(shape: str, start: StartEngine, oracle: Oracle) -> None:
    """Five requests begin with 3 blocks and end with 5, or hold 2 or 3 where all layers slide; there is room for 6."""
    memory = oracle.memory(shape, 6, 5)
    engine = start(
        shape, kv_cache_memory=memory, max_sequence_length=6 * BLOCK, prefill_chunk_size=16, max_batch_size=5
    )
    prompts = [made_up(45, salt) for salt in range(5)]
    found = answers(engine, prompts)
    assert found == oracle.all_tokens(shape, prompts, found)
    cache = engine.stats().cache
    assert cache is not None and cache.num_preemptions > 0


@pytest.mark.parametrize(
    "shape", [*("bloom", "deepseek_v32", "falcon", "falcon_rw", "glm_moe_dsa", "gpt_neo", "gptj", "mpt", "stablelm")]
)
def test_a_successor_gives_the_same_tokens(shape: str, config_of: Callable[..., EngineConfig], oracle: Oracle) -> None:
    """Models whose layers call the runner in ways of their own, beside another request."""
    backend = PagedBackend(config_of(shape))
    whole, other = (oracle.tokens(shape, prompt) for prompt in (PROMPTS[-1], PROMPTS[1]))
    for count in (1, COUNT - 1):
        requests = [
            EngineRequest("taken over", tuple(PROMPTS[-1]), GREEDY, seed=1, generated=(whole[:count],)),
            EngineRequest("beside", tuple(PROMPTS[1]), GREEDY, seed=1),
        ]
        choices = [Choice(request, 0, backend.tokenizer, backend.info) for request in requests]
        for choice in choices:
            backend.add(choice)
        while backend.num_running or backend.num_waiting:
            backend.step()
        assert [tuple(choice.tokens) for choice in choices] == [whole, other]
    backend.close()


@some_shapes
def test_seeded_draws_depend_on_nothing_else(shape: str, start: StartEngine, oracle: Oracle) -> None:
    alone = start(shape, max_batch_size=1)
    expected = [alone.generate(prompt, SAMPLED).token_ids for prompt in PROMPTS]
    assert expected != [oracle.tokens(shape, prompt) for prompt in PROMPTS]
    company = start(shape)
    assert answers(company, PROMPTS, SAMPLED) == expected
    assert answers(company, PROMPTS, SAMPLED) == expected  # this time the prompts are cached
    memory = oracle.memory(shape, 6, 6)
    short = start(shape, kv_cache_memory=memory, max_sequence_length=96, prefill_chunk_size=7, max_batch_size=6)
    assert answers(short, PROMPTS, SAMPLED) == expected


@some_shapes
def test_choices_depend_on_nothing_else(shape: str, start: StartEngine) -> None:
    params = SAMPLED.model_copy(update={"n": 3})
    expected = start(shape, max_batch_size=1).generate(PROMPTS[4], params).choices
    assert len({choice.token_ids for choice in expected}) == 3
    assert start(shape).generate(PROMPTS, params)[4].choices == expected


@all_shapes
def test_logprobs_are_the_oracles(shape: str, start: StartEngine, oracle: Oracle) -> None:
    params = SAMPLED.model_copy(update={"logprobs": 2, "logit_bias": {7: 3.0}})
    for prompt, output in zip(PROMPTS, start(shape).generate(PROMPTS, params), strict=True):
        raw = oracle.logprobs(shape, prompt, output.token_ids)
        assert output.logprobs is not None and len(output.logprobs) == COUNT
        chosen = [row[token].item() for row, token in zip(raw, output.token_ids, strict=True)]
        far = 1e-4 if shape not in STATEFUL else 5e-4  # what transformers computes in one pass, and token by token
        assert [entry.logprob for entry in output.logprobs] == pytest.approx(chosen, abs=far)
        top = [value for entry in output.logprobs for value in (best.logprob for best in entry.top)]
        assert top == pytest.approx(raw.topk(2).values.flatten().tolist(), abs=far)


def test_a_gemma_4_that_sees_says_what_transformers_says_of_text(
    model_directory: Callable[[str], Path], tmp_path: Path, config_of: Callable[..., EngineConfig]
) -> None:
    """As published ones do; a token that stands for a part of an image is another one in a text."""
    from transformers import AutoModelForCausalLM, Gemma4Config, Gemma4ForConditionalGeneration

    text = AutoModelForCausalLM.from_pretrained(model_directory("gemma4_text"), dtype="float32")
    tower: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    tower |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
    tower |= {"patch_size": 4, "position_embedding_size": 64}
    tokens: dict[str, Any] = {"image_token_id": 9, "video_token_id": None, "audio_token_id": 10}
    tokens |= {"vision_config": tower, "audio_config": None, "tie_word_embeddings": False}
    config = Gemma4Config(text_config=text.config.to_dict(), **tokens)
    torch.manual_seed(0)
    model: Any = Gemma4ForConditionalGeneration(config)
    model.model.language_model.load_state_dict(text.model.state_dict())
    model.lm_head.load_state_dict(text.lm_head.state_dict())
    directory = shutil.copytree(model_directory("gemma4_text"), tmp_path / "model")
    model.save_pretrained(directory)
    prompt = made_up(17)
    prompts = [prompt, [*prompt[:8], 9, 10, *prompt[8:]], [*prompt[:8], 10, 9, *prompt[8:]], [9, *made_up(40)]]
    own = config_of("gemma4_text").model_copy(update={"model": str(directory)})
    with InferenceEngine(own) as engine:
        assert DEVICE != "cpu" or engine.model_info().slow_paths == ()
        assert answers(engine, prompts) == greedy_answers(model, prompts, COUNT)


def test_rotations_that_follow_the_longest_request_are_left_to_hf(
    model_directory: Callable[[str], Path], tmp_path: Path, config_of: Callable[..., EngineConfig]
) -> None:
    """longrope, as in Phi: beyond the original context all keys change, those of neighbours and in the cache too."""
    directory = shutil.copytree(model_directory("phi3"), tmp_path / "model")
    config = json.loads((directory / "config.json").read_text())
    config["rope_parameters"] |= {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [8.0] * 4}
    config |= {"original_max_position_embeddings": 48, "sliding_window": None}
    config["rope_parameters"]["original_max_position_embeddings"] = 48
    (directory / "config.json").write_text(json.dumps(config))
    own = config_of("phi3").model_copy(update={"model": str(directory)})
    with InferenceEngine(own) as engine:
        assert engine.model_info().context_length == 48
        with pytest.raises(InvalidRequest, match="48"):
            engine.generate(made_up(48), GREEDY)
    with pytest.raises(ConfigurationError, match="set at most 48, or use --backend hf"):
        load_backend(own.model_copy(update={"max_sequence_length": 100}))


@dataclass(frozen=True)
class Arrival:
    """One request of a schedule: it comes once `after` deltas were seen, or when nothing else runs.

    It is cancelled after `patience` steps of the engine, waiting or in the middle of its prompt as it may be.
    """

    prompt: int
    after: int
    max_tokens: int
    patience: int | None


BASE = made_up(40)
POOL = [BASE[:1], BASE[:16], BASE[:17], BASE, [*BASE[:16], *made_up(7)], [*BASE[:32], *made_up(5)], made_up(21)]
SCHEDULES = st.lists(
    st.builds(
        Arrival,
        prompt=st.integers(0, len(POOL) - 1),
        after=st.integers(0, 30),
        max_tokens=st.integers(1, 10),
        patience=st.none() | st.integers(0, 14),
    ),
    min_size=1,
    max_size=6,
)


class Play:
    """A schedule, played step by step on a backend, with no thread in between."""

    def __init__(self, backend: Backend, schedule: list[Arrival]) -> None:
        self._backend = backend
        self._pending = sorted(schedule, key=lambda arrival: arrival.after)
        self._impatient: dict[Choice, int] = {}  # steps that each will still wait
        self.sent: dict[Choice, list[int]] = {}
        self.arrivals: dict[Choice, Arrival] = {}

    def run(self) -> None:
        try:
            self._run()
        finally:
            for choice in self.arrivals:
                self._backend.remove(choice)

    def _run(self) -> None:
        num_deltas = num_steps = 0
        while self._pending or self._busy():
            while self._pending and (self._pending[0].after <= num_deltas or not self._busy()):
                self._add(self._pending.pop(0))
            for choice in [choice for choice, steps in self._impatient.items() if steps == 0]:
                del self._impatient[choice]
                if choice.finish is None:
                    self._backend.remove(choice)
                    choice.end("cancelled")
            self._impatient = {choice: steps - 1 for choice, steps in self._impatient.items()}
            by_id = {choice.request.id: choice for choice in self.arrivals}
            for delta in self._backend.step():
                num_deltas += 1
                self.sent[by_id[delta.request]] += delta.token_ids
            num_steps += 1
            assert num_steps < 1000, "the backend makes no progress"

    def _busy(self) -> bool:
        return bool(self._backend.num_running or self._backend.num_waiting)

    def _add(self, arrival: Arrival) -> None:
        params = GREEDY.model_copy(update={"max_tokens": arrival.max_tokens})
        request = EngineRequest(f"r{len(self.arrivals)}", tuple(POOL[arrival.prompt]), params, seed=1)
        choice = Choice(request, 0, self._backend.tokenizer, self._backend.info)
        self._backend.add(choice)
        self.arrivals[choice] = arrival
        self.sent[choice] = []
        if arrival.patience is not None:
            self._impatient[choice] = arrival.patience


@pytest.fixture(scope="module")
def cramped(config_of: Callable[..., EngineConfig], oracle: Oracle) -> Iterator[Callable[[str, bool], Backend]]:
    """One backend a shape: three rows, short chunks, hardly more room than one request needs."""
    with ExitStack() as stack:
        loaded: dict[tuple[str, bool], Backend] = {}

        def load(shape: str, ahead: bool) -> Backend:
            if (shape, ahead) not in loaded:
                changes: dict[str, Any] = {"max_batch_size": 3}
                changes |= {"kv_cache_memory": oracle.memory(shape, 6, 3), "max_sequence_length": 64}
                changes |= {"enable_chunked_prefill": True, "prefill_chunk_size": 5}
                backend = loaded[shape, ahead] = PagedBackend(config_of(shape, **changes), ahead=ahead)
                stack.callback(backend.close)
            return loaded[shape, ahead]

        yield load


@pytest.mark.parametrize("ahead", [False, True], ids=["read", "ahead"])
@some_shapes
@given(schedule=SCHEDULES)
@settings(max_examples=40, deadline=None)
def test_arrivals_and_cancels_change_nothing(
    shape: str, ahead: bool, cramped: Callable[[str, bool], Backend], oracle: Oracle, schedule: list[Arrival]
) -> None:
    """A request that is left alone gives the oracle's tokens, a cancelled one the first of them.

    So it is where each step is launched before the tokens of the last are read.
    """
    backend = cramped(shape, ahead)
    play = Play(backend, schedule)
    play.run()
    assert len(play.arrivals) == len(schedule)
    for choice, arrival in play.arrivals.items():
        expected = oracle.tokens(shape, POOL[arrival.prompt])[: arrival.max_tokens]
        sent = tuple(play.sent[choice])
        assert sent == tuple(choice.tokens)
        if choice.finish == "cancelled":
            assert sent == expected[: len(sent)]
        else:
            assert (choice.finish, sent) == ("length", expected)
    packed: Any = backend
    packed.check_integrity()


def replace_weights(model: Any, quantization: str) -> Any:
    """A copy of the model that computes in float32 with what the quantised weights stand for."""
    copy = deepcopy(model)
    experts = [one for name, one in copy.named_parameters() if name.endswith("_proj") and "experts" in name]
    for weights in experts:  # [E, I, O], as in gpt-oss
        for weight in weights.data:
            weight.copy_(dequantized(weight.T.contiguous(), quantization).T)
    linears = list(quantizable(copy, quantization))
    assert {method for *_, method in linears} <= {quantization, "int8"}
    for name, linear, method in linears:
        weight = dequantized(linear.weight.detach(), method)
        assert weight.shape == linear.weight.shape and weight.dtype == torch.float32, name
        assert not torch.equal(weight, linear.weight), name
        linear.weight = torch.nn.Parameter(weight, requires_grad=False)  # an embedding tied to it stays as it is
    return copy


@pytest.mark.skipif(DEVICE != "cpu", reason="quantisation runs only on a CPU")
@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("shape", ["llama", "gemma2", "gpt2", "gpt_oss", "phi3"])
def test_quantised_weights_equal_what_they_stand_for(
    shape: str, quantization: str, start: StartEngine, oracle: Oracle
) -> None:
    """The kernels, not the loss: the oracle runs the same, dequantised weights."""
    model = replace_weights(oracle.model(shape), quantization)
    engine = start(shape, quantization=quantization)
    found = answers(engine, PROMPTS)
    expected = [greedy_answer(model, *each) for each in zip(PROMPTS, [COUNT] * len(PROMPTS), found, strict=True)]
    assert found == expected
    assert [engine.generate(prompt, GREEDY).token_ids for prompt in PROMPTS] == expected  # few rows: another kernel
    in_pieces = start(shape, quantization=quantization, prefill_chunk_size=7, max_batch_size=7)
    assert [in_pieces.generate(prompt, GREEDY).token_ids for prompt in PROMPTS] == expected  # steps without logits


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("shape", [(64, 64), (33, 40), (5, 17), (1, 1)])
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_odd_weights_are_multiplied_like_others(quantization: str, shape: tuple[int, int], rows: int) -> None:
    """In bfloat16, without compiled kernels: torch's own read beyond a row whose length is no multiple of 16."""
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(one, generator=generator).bfloat16() for one in (shape, (rows, shape[1])))
    product = linear_maker(quantization, torch.device("cpu"))(weight, None)(x).float()
    expected = x.float() @ dequantized(weight, quantization).T
    assert (product - expected).norm() <= 0.02 * expected.norm()
