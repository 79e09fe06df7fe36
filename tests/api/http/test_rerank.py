"""`/v1/rerank` of real processes, in Jina's form and in Cohere's, over NATS and in batches."""

from __future__ import annotations

import asyncio
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from rerankers import encoder
from serving import Served, serving

QUERY = "What does a fox jump over?"
DOCUMENTS = ["hello", "Ünïcödé — 世界", "The quick brown fox jumps over the lazy dog."]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("rerank")
    arguments = "--backend", "sentence_transformers", "--dtype", "float32", "--served-model-name", "judge"
    with serving(root / "state", str(encoder(root / "model")), *arguments) as served:
        yield served


@pytest.fixture
def client(server: Served) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=server.url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def scores(server: Served, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """sentence-transformers' own."""
    from sentence_transformers import CrossEncoder

    source = httpx2.get(f"{server.url}/v1/models").json()["data"][0]["root"]
    return list(map(float, CrossEncoder(source, device="cpu").predict([(QUERY, one) for one in DOCUMENTS])))


def ask(client: httpx2.Client, path: str = "/v1/rerank", **body: Any) -> dict[str, Any]:
    response = client.post(path, json={"model": "judge", "query": QUERY, "documents": DOCUMENTS} | body)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


@pytest.mark.parametrize(("path", "shown"), [("/v1/rerank", True), ("/rerank", True), ("/v2/rerank", False)])
def test_documents_come_by_their_relevance(client: httpx2.Client, scores: list[float], path: str, shown: bool) -> None:
    found = ask(client, path)
    best = sorted(range(3), key=lambda index: -scores[index])
    assert found.keys() == {"id", "object", "model", "results", "usage"}
    assert [one["index"] for one in found["results"]] == best
    given = [one["relevance_score"] for one in found["results"]]
    assert given == pytest.approx([scores[one] for one in best], abs=1e-5)
    assert [one.get("document") for one in found["results"]] == [
        {"text": DOCUMENTS[one]} if shown else None for one in best
    ]
    turned = ask(client, path, top_n=1.0, return_documents=not shown)["results"]
    assert len(turned) == 1 and ("document" in turned[0]) is not shown


@pytest.mark.parametrize("shown", [False, True])
def test_text_embeddings_inference_s_form(client: httpx2.Client, scores: list[float], shown: bool) -> None:
    body = {"query": QUERY, "texts": [*DOCUMENTS, "fox " * 5000], "return_text": shown, "truncate": True}
    found = client.post("/rerank", json=body).json()
    assert [one["score"] for one in found] == sorted((one["score"] for one in found), reverse=True)
    by_index = {one["index"]: one for one in found}
    assert [by_index[index]["score"] for index in range(3)] == pytest.approx(scores, abs=1e-5)
    assert [by_index[index].get("text") for index in range(3)] == [one if shown else None for one in DOCUMENTS]


def test_what_the_docs_show(client: httpx2.Client) -> None:
    page = (Path(__file__).parents[3] / "docs" / "http-api.md").read_text(encoding="utf-8")
    [(body, answer)] = re.findall(r"/v1/rerank -d '(.+)'\n```\n```json\n(.+)\n", page)
    found = client.post("/v1/rerank", content=body).json()
    shown = json.loads(re.sub(r"0\.99…", "0.99", answer))
    assert found.keys() == shown.keys()
    assert found["results"][0].keys() == shown["results"][0].keys()
    assert found["usage"].keys() == shown["usage"].keys()


def test_the_model_says_what_it_gives(client: httpx2.Client) -> None:
    [model] = client.get("/v1/models").json()["data"]
    assert model["architecture"]["output_modalities"] == ["scores"]


@pytest.mark.parametrize(
    ("change", "param", "message"),
    [
        ({"query": None}, "query", "valid string"),
        ({"documents": "a"}, "documents", "should be an array"),
        ({"documents": ["a", {"title": "b"}]}, "documents[1]", "valid string"),
        ({"documents": ["a " * 200]}, "documents[0]", "send max_tokens_per_doc"),
        ({"top_n": 0}, "top_n", "greater than or equal to 1"),
        ({"truncate_prompt_tokens": -1}, "truncate_prompt_tokens", "send max_tokens_per_doc"),
        ({"rank_fields": ["title"]}, "rank_fields", "as one text"),
        ({"texts": ["a"]}, "texts", "send documents"),
        ({"query": "what " * 400, "truncate": True}, "query", "leaves no room for a document"),
    ],
)
def test_a_fault_is_named(client: httpx2.Client, change: dict[str, Any], param: str, message: str) -> None:
    response = client.post("/v1/rerank", json={"model": "judge", "query": QUERY, "documents": DOCUMENTS} | change)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert message in error["message"]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"texts": []}, "texts"),
        ({"texts": [1]}, "texts[0]"),
        ({"raw_scores": True}, "raw_scores"),
        ({"query": 1}, "query"),
    ],
)
def test_a_fault_of_its_form_is_named(client: httpx2.Client, change: dict[str, Any], param: str) -> None:
    response = client.post("/rerank", json={"query": QUERY, "texts": DOCUMENTS} | change)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_a_job_on_nats_has_a_score_a_token(server: Served, scores: list[float]) -> None:
    async def work() -> list[float]:
        import nats

        broker = await nats.connect(server.nats_url)
        try:
            heard = await broker.subscribe("penstock.events.default.ranker.ranked")
            body = {"model": "judge", "query": QUERY, "documents": DOCUMENTS}
            job = {"id": "ranked", "bridge": "ranker", "endpoint": "/v1/rerank", "body": body}
            await broker.jetstream().publish("penstock.jobs.normal.default", json.dumps(job).encode())
            found: dict[int, float] = {}
            async with asyncio.timeout(60):
                while (event := json.loads((await heard.next_msg(60)).data))["type"] != "done":
                    if event["type"] == "token":
                        found[event["choice"]] = float(event["text"])
            return [found[index] for index in range(len(DOCUMENTS))]
        finally:
            await broker.close()

    assert asyncio.run(work()) == pytest.approx(scores, abs=1e-5)


def test_a_batch_of_rankings(server: Served, scores: list[float]) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        body = {"model": "judge", "query": QUERY, "documents": DOCUMENTS, "return_documents": True}
        line = json.dumps({"custom_id": "one", "method": "POST", "url": "/v1/rerank", "body": body})
        file = client.files.create(file=("lines.jsonl", io.BytesIO(line.encode())), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id,
            endpoint="/v1/rerank",  # type: ignore[arg-type]
            completion_window="24h",
        )
        while batch.status not in ("completed", "failed"):
            batch = client.batches.retrieve(batch.id)
        assert batch.output_file_id, batch
        [answer] = [json.loads(each) for each in client.files.content(batch.output_file_id).text.splitlines()]
    best = answer["response"]["body"]["results"][0]
    assert best["relevance_score"] == pytest.approx(max(scores), abs=1e-5)
    assert best["document"] == {"text": DOCUMENTS[best["index"]]}
