"""What clients over HTTP see of the requests and tokens that they may have a minute, and how they wait for more."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import anthropic
import httpx2
import openai
import pytest
from asgi import ask
from memory_pipeline import MODEL, Pipeline
from starlette.types import ASGIApp

from penstock.api.bridge.rates import HeardRates
from penstock.api.http.app import create_app
from penstock.api.http.middleware.rates import openai as openai_headers
from penstock.schemas.errors import QuotaExceeded
from penstock.schemas.rates import Bucket, RateNews

BODY: dict[str, Any] = {"model": MODEL, "prompt": "x" * 40, "max_tokens": 1}
KINDS = ("requests", "tokens")


class Office:
    """A pipeline behind HTTP."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        pipe = pipeline.pipe
        self.app: ASGIApp = create_app(pipeline.bridge, pipe.broker, pipe.registry, pipe.settings, "0")

    @classmethod
    @contextlib.asynccontextmanager
    async def of(cls, **values: Any) -> AsyncIterator[Office]:
        limits = {"requests_per_minute": 5, "tokens_per_minute": 600}
        pipeline = await Pipeline.start(context_length=2_048, **limits | values)
        try:
            yield cls(pipeline)
        finally:
            await pipeline.stop()

    @property
    def http(self) -> Any:
        return httpx2.AsyncClient(transport=httpx2.ASGITransport(self.app), base_url="http://localhost")


async def test_the_official_client_waits_as_it_is_told_and_then_succeeds() -> None:
    async with Office.of(tokens_per_minute=1_200) as office, office.http as http:
        spent: dict[str, Any] = {"model": MODEL, "prompt": "x" * 1_190, "max_tokens": 1}
        patient = openai.AsyncOpenAI(api_key="none", base_url="http://localhost/v1", http_client=http, max_retries=2)
        eager = patient.with_options(max_retries=0)
        await eager.completions.create(**spent)
        with pytest.raises(openai.RateLimitError) as refused:
            await eager.completions.create(**BODY)
        headers = refused.value.response.headers
        assert refused.value.code == "rate_limit_exceeded" and refused.value.type == "rate_limit_error"
        assert int(headers["retry-after"]) >= 1 and 0 < int(headers["retry-after-ms"]) <= 1_600
        assert 0 <= int(headers["x-ratelimit-remaining-tokens"]) < 41
        answer = await patient.completions.with_raw_response.create(**BODY)
        assert answer.retries_taken >= 1
        assert answer.parse().choices[0].text


@pytest.mark.parametrize("streams", [False, True])
async def test_every_answer_says_what_is_left(streams: bool) -> None:
    async with Office.of() as office:
        for number in range(1, 3):
            answer = await ask(office.app, "POST", "/v1/completions", BODY | {"stream": streams})
            assert answer.status == 200
            assert answer.headers["x-ratelimit-limit-requests"] == "5"
            assert answer.headers["x-ratelimit-remaining-requests"] == str(5 - number)
            assert re.fullmatch(r"[0-9]+(\.[0-9]+)?s", answer.headers["x-ratelimit-reset-requests"])
            assert answer.headers["x-ratelimit-limit-tokens"] == "600"
            assert 500 < int(answer.headers["x-ratelimit-remaining-tokens"]) < 600
        other = await ask(office.app, "GET", "/v1/models")
        assert not any(name.startswith("x-ratelimit") for name in other.headers)


async def test_anthropic_s_client_gets_its_own_headers_and_error() -> None:
    async with Office.of(requests_per_minute=1) as office, office.http as http:
        client = anthropic.AsyncAnthropic(api_key="none", base_url="http://localhost", http_client=http, max_retries=0)
        asked: Any = {"model": MODEL, "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}
        answer = await client.messages.with_raw_response.create(**asked)
        with pytest.raises(anthropic.RateLimitError) as refused:
            await client.messages.create(**asked)
        assert isinstance(refused.value.body, dict) and refused.value.body["error"]["type"] == "rate_limit_error"
        for headers in (answer.headers, refused.value.response.headers):
            assert headers["anthropic-ratelimit-requests-limit"] == "1"
            assert headers["anthropic-ratelimit-requests-remaining"] == "0"
            full = datetime.strptime(headers["anthropic-ratelimit-requests-reset"], "%Y-%m-%dT%H:%M:%SZ")
            assert 0 < (full.replace(tzinfo=UTC) - datetime.now(UTC)).total_seconds() <= 61
            assert headers["anthropic-ratelimit-tokens-limit"] == "600"
            assert not any(name.startswith("x-ratelimit") for name in headers)
        assert 0 < int(refused.value.response.headers["retry-after"]) <= 60


async def test_a_response_is_charged_for_its_turn_and_refused_like_the_rest() -> None:
    async with Office.of(requests_per_minute=2) as office:
        body = {"model": MODEL, "input": "x", "max_output_tokens": 2}
        answers = [await ask(office.app, "POST", "/v1/responses", body) for _ in range(3)]
        assert [answer.status for answer in answers] == [200, 200, 429]
        assert answers[1].headers["x-ratelimit-remaining-requests"] == "0"
        assert answers[2].error["code"] == "rate_limit_exceeded"


async def test_the_bridge_refuses_early_what_the_pipeline_would_refuse() -> None:
    async with Office.of(requests_per_minute=1) as office:
        assert (await ask(office.app, "POST", "/v1/completions", BODY)).status == 200
        jobs: list[object] = []
        await office.pipeline.pipe.broker.listen(office.pipeline.pipe.subjects.jobs_all(), jobs.append)
        assert (await ask(office.app, "POST", "/v1/completions", BODY)).status == 429
        await asyncio.sleep(0)
        assert jobs == []


async def test_the_pipeline_refuses_through_a_bridge_that_knows_nothing() -> None:
    async with Office.of(requests_per_minute=1) as office:
        assert (await ask(office.app, "POST", "/v1/completions", BODY)).status == 200
        office.pipeline.bridge.rates._heard.clear()
        refused = await ask(office.app, "POST", "/v1/completions", BODY)
        assert (refused.status, refused.error["code"]) == (429, "rate_limit_exceeded")
        assert 1 < int(refused.headers["retry-after"]) <= 60
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"


async def test_without_limits_there_are_no_headers() -> None:
    async with Office.of(requests_per_minute=None, tokens_per_minute=None) as office:
        answer = await ask(office.app, "POST", "/v1/completions", BODY)
        assert answer.status == 200 and not any("ratelimit" in name for name in answer.headers)


def news(revision: int, left: float) -> bytes:
    return RateNews(tenant="ada", revision=revision, requests=Bucket(limit=60, left=left)).model_dump_json().encode()


def test_older_figures_count_only_when_the_newer_ones_are_out_of_date() -> None:
    now = [0.0]
    rates = HeardRates(lambda: now[0])
    rates.check("ada")
    rates.hear(news(7, 0.0))
    rates.hear(news(6, 9.0))
    rates.hear(b"{}")
    with pytest.raises(QuotaExceeded) as refused:
        rates.check("ada")
    assert refused.value.retry_after == 1.0
    now[0] = 1.0
    rates.check("ada")
    now[0] = 61.0
    rates.hear(news(1, 0.5))  # of a broker that has lost the account
    assert rates.buckets("ada")["requests"].left == 0.5


@pytest.mark.parametrize(
    ("left", "said"), [(60, "0ms"), (59.88, "120ms"), (59, "1s"), (52.34, "7.66s"), (0, "1m0s"), (-61.5, "2m1.5s")]
)
def test_durations_are_written_as_openai_writes_them(left: float, said: str) -> None:
    assert dict(openai_headers({"requests": Bucket(limit=60, left=left)}))["x-ratelimit-reset-requests"] == said
