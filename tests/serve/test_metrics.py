"""What a server tells of itself agrees with what its clients saw, and survives the death of a worker."""

from __future__ import annotations

import asyncio
import json
import time

import httpx
import openai
import psutil
import pytest
import requests
from ports import reserved_port
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from serving import Serve, Served, until

from penstock.api.http.metrics import Snapshot
from penstock.streams.topology import PRIORITIES

PROMPT = "twelve words of which the answer is made, so that there are enough"
LEASED = "penstock_consumer_leased"
FIRST_TOKEN = "vllm:time_to_first_token_seconds"


def counted(url: str, headers: dict[str, str] | None = None) -> Snapshot:
    response = requests.get(f"{url}/metrics", headers=headers, timeout=30)
    assert response.headers["content-type"].startswith("text/plain")
    return Snapshot(text_string_to_metric_families(response.text))


def samples(url: str) -> list[Sample]:
    families = text_string_to_metric_families(requests.get(f"{url}/metrics", timeout=30).text)
    return [sample for family in families for sample in family.samples]


def series(url: str) -> set[str]:
    return {f"{sample.name}{sample.labels}" for sample in samples(url)}


def settled(url: str, completed: float) -> Snapshot:
    """What is counted once the workers' counts have come, too."""

    def all_counted() -> Snapshot | None:
        now = counted(url)
        return now if now.total("vllm:e2e_request_latency_seconds_count") >= completed else None

    return until(all_counted)


@pytest.fixture
def server(serve: Serve) -> Served:
    return serve("--backend", "echo", "--echo-rate", "200")


def test_the_counts_are_those_of_the_clients(server: Served) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    tokens, first = 0, []
    for number in range(30):
        began = time.monotonic()
        stream = client.completions.create(
            model="echo", prompt=PROMPT, max_tokens=1 + number % 7, stream=True, stream_options={"include_usage": True}
        )
        for place, chunk in enumerate(stream):
            if place == 0:
                first.append(time.monotonic() - began)
            tokens += chunk.usage.completion_tokens if chunk.usage else 0
    for _ in range(3):
        with pytest.raises(openai.BadRequestError):
            client.completions.create(model="echo", prompt=PROMPT, max_tokens=0)
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="nobody", prompt=PROMPT)
    with client.completions.create(
        model="echo", prompt=PROMPT, max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
    ) as left:
        next(iter(left))
    assert requests.get(f"{server.url}/no/such/path", timeout=30).status_code == 404

    seen = settled(server.url, completed=31)
    outcomes = {name: seen.total("penstock_requests_total", outcome=name) for name in ("completed", "refused")}
    assert outcomes == {"completed": 30, "refused": 4}
    until(lambda: counted(server.url).total("penstock_requests_total", outcome="cancelled"))
    assert seen.total("penstock_refusals_total", reason="model_not_found") == 1
    assert seen.total("vllm:request_success_total", finished_reason="length") == 30
    assert seen.total("vllm:time_to_first_token_seconds_count", engine="w0", model_name="echo") == 31
    assert seen.total("http_requests_total", handler="/v1/completions", status="200") == 31
    assert "no/such" not in requests.get(f"{server.url}/metrics", timeout=30).text  # a client chooses no label
    mean = seen.mean("vllm:time_to_first_token_seconds")
    assert mean is not None
    assert mean <= max(first)

    stats = requests.get(f"{server.url}/server/stats", timeout=30).json()
    assert stats["requests_total"] == 35
    assert stats["requests"] == {"completed": 30, "refused": 4, "failed": 0, "cancelled": 1, "expired": 0}
    assert stats["requests_active"] == 0
    assert stats["generation_tokens_total"] >= tokens
    assert stats["workers"] == [{"id": "w0", "model": "echo", "capacity": stats["workers"][0]["capacity"]}]
    lines = [line for line in server.process.lines if "path=/v1/completions" in line]
    assert sum("status=200" in line and "completion_tokens=" in line for line in lines) == 30
    assert sum("status=400" in line and "error=invalid_value" in line for line in lines) == 3
    assert sum("disconnected=True" in line for line in lines) == 1
    assert not any("twelve words" in line for line in server.process.lines)


def test_a_takeover_is_seen_and_a_port_of_its_own_needs_no_key(serve: Serve) -> None:
    port = reserved_port()
    keys = "--api-keys", "good=sk-good-tenant,op=sk-operator-key admin"
    server = serve("--backend", "echo", "--echo-rate", "50", "--metrics-port", str(port), *keys)
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="sk-good-tenant", max_retries=0)
    for path in ("/metrics", "/server/stats"):
        given = {key: {"Authorization": f"Bearer {key}"} for key in ("sk-good-tenant", "sk-operator-key")}
        assert requests.get(server.url + path, timeout=30).status_code == 401
        assert requests.get(server.url + path, headers=given["sk-good-tenant"], timeout=30).status_code == 403
        assert requests.get(server.url + path, headers=given["sk-operator-key"], timeout=30).status_code == 200

    stream = client.completions.create(
        model="echo", prompt=PROMPT, max_tokens=200, stream=True, extra_body={"ignore_eos": True}
    )
    texts = [next(iter(stream)).choices[0].text]
    until = time.monotonic() + 30
    while (held := counted(server.url, given["sk-operator-key"])).total(LEASED, stage="infer", priority="") != 1:
        assert time.monotonic() < until
    stages = "validate", "queue", "batch", "infer", "stream", "tools"
    assert all(held.values("penstock_consumer_pending", stage=stage) for stage in stages)
    assert len(held.values(LEASED)) == 4 * len(PRIORITIES) + 2  # one a stream, whatever runs
    (worker,) = [child for child in psutil.Process(server.process.pid).children() if "worker" in child.cmdline()]
    worker.kill()
    texts += [chunk.choices[0].text for chunk in stream]
    assert "".join(texts)
    own = f"http://127.0.0.1:{port}"
    seen = settled(own, completed=1)
    assert seen.total("penstock_takeovers_total") == 1
    assert seen.total("penstock_requests_total", outcome="completed") == 1
    assert seen.total("vllm:request_generation_tokens_sum") == 200
    assert seen.total("penstock_broker_connected") == 1
    until = time.monotonic() + 30
    while not (again := counted(own)).total("penstock_model_state", state="ready"):  # the worker is started again
        assert time.monotonic() < until
    assert again.total("penstock_workers", model_name="echo") == 1


def test_the_server_agrees_with_its_clients_over_500_requests(serve: Serve) -> None:
    """Counts exactly; and no first token has taken longer than its client waited for it."""
    server = serve("--backend", "echo")
    before = series(server.url)
    clients = asyncio.Semaphore(16)

    async def ask(client: httpx.AsyncClient, number: int) -> tuple[float, int, int]:
        body = {"model": "echo", "prompt": PROMPT[: number % 40 + 1], "max_tokens": 4, "ignore_eos": True}
        options = {"stream": True, "stream_options": {"include_usage": True}}
        first = 0.0
        usage: dict[str, int] = {}
        async with clients:
            began = time.monotonic()
            async with client.stream("POST", "/v1/completions", json=body | options) as answer:
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        first = first or time.monotonic() - began
                        usage = json.loads(line[6:]).get("usage") or usage
        return first, usage["prompt_tokens"], usage["completion_tokens"]

    async def load() -> list[tuple[float, int, int]]:
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
            for number in range(20):  # what there is not makes no series
                refused = await client.post("/v1/completions", json={"model": f"model-{number}", "prompt": "p"})
                assert (refused.status_code, (await client.get(f"/path/{number}")).status_code) == (404, 404)
            return await asyncio.gather(*(ask(client, number) for number in range(500)))

    answers = asyncio.run(load())
    seen = settled(server.url, completed=500)
    stats = requests.get(f"{server.url}/server/stats", timeout=30).json()
    assert stats["requests"] == {"completed": 500, "refused": 20, "failed": 0, "cancelled": 0, "expired": 0}
    assert stats["prompt_tokens_total"] == sum(prompt for _, prompt, _ in answers)
    assert stats["generation_tokens_total"] == sum(generated for *_, generated in answers) == 2000
    assert seen.total("vllm:request_success_total", finished_reason="length") == 500
    firsts = [first for first, *_ in answers]
    assert 0 < stats["avg_ttft_ms"] / 1000 <= sum(firsts) / len(firsts)
    bounds = [float(sample.labels["le"]) for sample in samples(server.url) if sample.name == f"{FIRST_TOKEN}_bucket"]
    assert stats["p99_ttft_ms"] / 1000 <= min(bound for bound in bounds if bound >= max(firsts))
    assert {name for name in series(server.url) - before if "model-" in name or "/path" in name} == set()
