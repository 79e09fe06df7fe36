"""Rankings in the library: the scores are those of sentence-transformers' cross-encoders, whatever is scored beside."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rerankers import decoder, encoder, untyped_encoder

from penstock.api.library.adapter import OpenAIAdapter
from penstock.engine import EngineConfig, GenerationParams, InferenceEngine
from penstock.engine.planning.discovery import find_backends, why_not
from penstock.schemas.errors import ConfigurationError, InvalidRequest, ModelLoadError
from penstock.schemas.jobs import Endpoint

QUERY = "What does a fox jump over?"
DOCUMENTS = [
    "hello",
    "a",
    "Ünïcödé — 世界",
    "The quick brown fox jumps over the lazy dog. " * 5,
    "x y [SEP] z",
    "Hello",
]
PATH: Endpoint = "/v1/rerank"
KINDS: dict[str, Callable[[Path], Path]] = {
    "encoder": encoder,
    "untyped encoder": untyped_encoder,
    "encoder of logits": lambda root: encoder(
        root, sentence_transformers={"activation_fn": "torch.nn.modules.linear.Identity"}
    ),
    "decoder": decoder,
    "decoder with a prompt": lambda root: decoder(root, {"own": "Is the document of use"}),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def model(kind: str) -> Path:
        return made.setdefault(kind, KINDS[kind](tmp_path_factory.mktemp("reranker")))

    return model


def engine_of(model: Path, **values: Any) -> InferenceEngine:
    own: dict[str, Any] = {"backend": "sentence_transformers", "dtype": "float32", "device": "cpu"}
    return InferenceEngine(EngineConfig(model=str(model), **own | values))


@pytest.fixture(scope="module")
def engine(models: Callable[[str], Path]) -> Any:
    with engine_of(models("encoder")) as engine:
        yield engine


def reference(model: Path, query: str, documents: Sequence[str]) -> Any:
    from sentence_transformers import CrossEncoder

    return CrossEncoder(str(model), device="cpu").predict([(query, document) for document in documents])


@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_the_library_s_alone_and_together(models: Callable[[str], Path], kind: str) -> None:
    expected = reference(models(kind), QUERY, DOCUMENTS)
    assert np.ptp(expected) > 1e-4
    with engine_of(models(kind)) as engine:
        assert engine.score(QUERY, DOCUMENTS) == pytest.approx(expected, abs=1e-5)
        for document, score in zip(DOCUMENTS, expected, strict=True):
            assert engine.score(QUERY, [document]) == pytest.approx([score], abs=1e-5)


def test_equal_documents_have_equal_scores_whatever_is_scored_beside(engine: InferenceEngine) -> None:
    texts = [text for count in range(1, 9) for text in ("hello", "x y " * count, "Hello")]  # in lower case to the model
    found = engine.score(QUERY, texts)
    assert len({score for text, score in zip(texts, found, strict=True) if text.lower() == "hello"}) == 1
    assert len(set(found)) == 9


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_documents_are_cut_where_the_caller_says_so(models: Callable[[str], Path], kind: str) -> None:
    words = [f"word{number} " for number in range(40)]
    with engine_of(models(kind)) as engine:
        tokens = engine.tokenizer.encode(words[0], add_special_tokens=False)
        most = 3 * len(tokens)
        found = engine.score(QUERY, ["".join(words), words[0]], max_tokens_per_doc=most)
        assert found == pytest.approx(engine.score(QUERY, ["".join(words[:3]).strip(), words[0]]), abs=1e-5)
        assert engine.score(QUERY, ["a " * 200_000], max_tokens_per_doc=9) == pytest.approx(
            engine.score(QUERY, ["a " * 9]), abs=1e-5
        )


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_documents_are_cut_to_what_the_context_takes(models: Callable[[str], Path], kind: str) -> None:
    with engine_of(models(kind)) as engine:
        adapter = OpenAIAdapter(engine)
        asked = {"query": QUERY, "documents": ["fox " * 5000, "fox"], "truncate": True}
        found = {one["index"]: one["relevance_score"] for one in adapter.create(asked, PATH)["results"]}
        most = next(n for n in range(999) if _fails(engine, "fox " * (n + 1)))
        assert [found[0], found[1]] == pytest.approx(engine.score(QUERY, ["fox " * most, "fox"]), abs=1e-5)
        with pytest.raises(InvalidRequest, match="leaves no room for a document") as refused:
            adapter.create({**asked, "query": "what " * 400}, PATH)
        assert refused.value.param == "query"


def _fails(engine: InferenceEngine, document: str) -> bool:
    try:
        engine.score(QUERY, [document])
    except InvalidRequest:
        return True
    return False


@pytest.mark.parametrize(
    ("query", "documents", "most", "param", "message"),
    [
        (" ", ["a"], None, "query", "is blank"),
        ("a", [], None, "documents", "at least 1 item"),
        ("a", ["b", "\n"], None, "documents[1]", "is blank"),
        ("a", ["b", "c " * 200], None, "documents[1]", "together have 204 tokens, .* is 128 tokens"),
        ("a", ["c " * 200_000], None, "documents[0]", "prompt is too long: more than"),
        ("a " * 200_000, ["b"], None, "query", "prompt is too long: more than"),
        ("a " * 130, ["b"], 5, "documents[0]", "together have 134 tokens"),
        ("a [SEP] b", ["c"], None, "query", "has \\[SEP\\] in it"),
        ("a", ["b"], 0, "max_tokens_per_doc", "greater than or equal to 1"),
        ("a", ["b"] * 2049, None, "documents", "2049 documents; send at most 2048"),
    ],
)
def test_what_cannot_be_ranked_is_refused(
    engine: InferenceEngine, query: str, documents: list[str], most: int | None, param: str, message: str
) -> None:
    before = engine.stats().num_requests
    with pytest.raises(InvalidRequest, match=message) as refused:
        engine.score(query, documents, max_tokens_per_doc=most)
    assert refused.value.param == param
    assert engine.stats().num_requests == before


def test_a_request_has_an_end(models: Callable[[str], Path]) -> None:
    with (
        engine_of(models("decoder")) as engine,
        pytest.raises(InvalidRequest, match="more than 300000 tokens") as refused,
    ):
        engine.score("a " * 100, ["b " * 100] * 2048)
    assert refused.value.param == "documents"


def test_a_reranker_does_nothing_else(engine: InferenceEngine) -> None:
    with pytest.raises(InvalidRequest, match="call score"):
        engine.embed(["a"])
    with pytest.raises(InvalidRequest, match="serves only"):
        engine.generate("a", GenerationParams())
    adapter = OpenAIAdapter(engine, name="judge")
    for body, endpoint in (
        ({"input": "a"}, "/v1/embeddings"),
        ({"messages": [{"role": "user", "content": "a"}]}, "/v1/chat/completions"),
    ):
        with pytest.raises(InvalidRequest, match=r"judge only ranks documents; send .* to /v1/rerank"):
            adapter.create(body, endpoint)  # type: ignore[arg-type]


def test_nothing_else_ranks() -> None:
    echo = EngineConfig(model="echo", backend="echo")
    with InferenceEngine(echo) as engine, pytest.raises(InvalidRequest, match="ranks no documents; ask a reranker"):
        engine.score("a", ["b"])


def test_the_adapter_answers_as_over_http(engine: InferenceEngine) -> None:
    adapter = OpenAIAdapter(engine, name="judge")
    scores = engine.score(QUERY, DOCUMENTS)
    documents = [{"text": document, "title": "T"} for document in DOCUMENTS]
    answer = adapter.create({"query": QUERY, "documents": documents, "top_n": 3, "return_documents": True}, PATH)
    best = sorted(range(len(scores)), key=lambda index: (-scores[index], index))[:3]
    assert [one["index"] for one in answer["results"]] == best
    given = [one["relevance_score"] for one in answer["results"]]
    assert given == pytest.approx([scores[one] for one in best], abs=1e-5)
    assert [one["document"] for one in answer["results"]] == [documents[one] for one in best]
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] > 0


def test_models_that_do_not_rank_are_refused_with_the_reason(models: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="gives 3 scores a pair"):
        engine_of(encoder(tmp_path / "classifier", num_labels=3))
    own = decoder(tmp_path / "decoder")
    file = own / "sentence_bert_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"processing_kwargs": {"text": {"max_length": 4}}}))
    with pytest.raises(ModelLoadError, match="reads pairs in a form that is not supported"):
        engine_of(own)


def test_other_backends_say_why_they_do_not_rank(models: Callable[[str], Path]) -> None:
    reasons = {found.id: why_not(found.manifest, str(models("encoder"))) for found in find_backends() if found.manifest}
    assert reasons["sentence_transformers"] == ""
    assert "'paged' ranks no documents" in reasons["paged"] and "'hf' ranks no documents" in reasons["hf"]
    with pytest.raises(ConfigurationError, match="use the backend 'sentence_transformers'"):
        engine_of(models("encoder"), backend="hf")
