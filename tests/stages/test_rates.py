"""What the pipeline charges a tenant for: a request and its prompt once, its answer once and as it was delivered."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import AsyncIterator
from typing import Any

import pytest
from memory_pipeline import MODEL, Pipeline

from penstock.schemas.errors import Transient
from penstock.schemas.events import Accepted, Cancelled, Done, Event, Failed, Token
from penstock.schemas.jobs import Job
from penstock.schemas.rates import Bucket, RateNews
from penstock.schemas.wire.codec import JOB, encode
from penstock.streams.port import SCHEMA
from penstock.streams.topology import RATES

PROMPT = "x" * 100  # so many tokens
LIMIT = 200


class Metered:
    """A pipeline, and what it said that its tenant has left."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self.news: list[RateNews] = []

    @classmethod
    @contextlib.asynccontextmanager
    async def of(cls, **values: Any) -> AsyncIterator[Metered]:
        pipeline = await Pipeline.start(**{"requests_per_minute": 100, "tokens_per_minute": LIMIT} | values)
        metered = cls(pipeline)
        pipe = pipeline.pipe
        await pipe.broker.listen(pipe.subjects.rates_all(), lambda message: metered.hear(message.data))
        try:
            yield metered
        finally:
            await pipeline.stop()

    def hear(self, data: bytes) -> None:
        self.news.append(RateNews.model_validate_json(data))

    async def ask(self, max_tokens: int = 5, prompt: str = PROMPT) -> list[Event]:
        return await self.pipeline.events({"model": MODEL, "prompt": prompt, "max_tokens": max_tokens})

    async def publish(self, request: str, **body: Any) -> None:
        """As a NATS client, past the bridge."""
        pipe = self.pipeline.pipe
        job = Job(id=request, bridge="test", endpoint="/v1/completions", body={"model": MODEL, "prompt": "x", **body})
        await pipe.broker.publish(
            pipe.subjects.jobs("normal", "default"), encode(job), message_id=uuid.uuid4().hex, headers={SCHEMA: JOB}
        )

    async def ending(self, request: str) -> Event:
        reading = await self.pipeline.bridge._reading(request, "default", None, kept=True, shared=True)
        while not reading.ended:
            await reading.take(30.0)
        reading.close()
        assert reading.final is not None
        return reading.final


def charged(bucket: Bucket | None) -> float:
    assert bucket is not None
    return bucket.limit - bucket.left


async def test_a_request_is_charged_with_its_prompt_and_then_its_answer() -> None:
    async with Metered.of() as metered:
        await metered.ask(max_tokens=50)
        first, *_, last = metered.news
        assert (charged(first.requests), charged(first.tokens)) == (1, 100)
        assert 100 < charged(last.tokens) <= 150  # less what has come since
        assert len({news.revision for news in metered.news}) == 2


async def test_what_a_cancelled_answer_has_delivered_is_charged() -> None:
    async with Metered.of(echo_rate=50.0) as metered:
        job = Job(id="r", bridge="test", endpoint="/v1/completions", body={"model": MODEL, "prompt": PROMPT})
        reading = await metered.pipeline.bridge.open(job, priority="normal", tenant="default")
        events: list[Event] = []
        while not any(isinstance(event, Token) for event in events):
            events += await reading.take(30.0)
        await reading.cancel()
        reading.close()
        assert isinstance(reading.final, Cancelled)
        told = reading.final.usage.completion_tokens
        before, after = metered.news[-2].tokens, metered.news[-1].tokens
        assert before is not None and after is not None and 0 < told < 100
        assert before.left - told <= after.left < before.left - told + LIMIT / 60 * 5  # what came meanwhile


async def test_a_job_over_nats_is_refused_by_an_event_that_says_when() -> None:
    async with Metered.of(requests_per_minute=2) as metered:
        for number in range(3):
            await metered.publish(f"r{number}", max_tokens=1)
        endings = [await metered.ending(f"r{number}") for number in range(3)]
        assert [type(event) for event in endings].count(Done) == 2
        (refused,) = (event for event in endings if isinstance(event, Failed))
        assert (refused.error.status, refused.error.code) == (429, "rate_limit_exceeded")
        assert refused.error.retry_after is not None and 0 < refused.error.retry_after <= 30


async def test_a_job_that_comes_again_is_charged_once() -> None:
    async with Metered.of() as metered:
        for _ in range(3):
            await metered.publish("r", max_tokens=1)
        await metered.ending("r")
        await metered.ask(max_tokens=1)
        assert metered.news[-1].revision == 4  # each has a beginning and an end


async def test_a_job_that_comes_again_when_its_charge_is_forgotten_is_not_charged_either() -> None:
    async with Metered.of() as metered:
        await metered.publish("r", max_tokens=1)
        await metered.ending("r")
        for book in metered.pipeline.pipe.rates._books.values():  # type: ignore[union-attr]
            assert book.account is not None
            book.account.charged.clear()
        await metered.publish("r", max_tokens=1)
        await metered.ask(max_tokens=1)
        assert metered.news[-1].revision == 4  # each has a beginning and an end


@pytest.mark.parametrize("is_stored", [False, True])
async def test_a_redelivery_is_charged_once(is_stored: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    async with Metered.of() as metered:
        pipe = metered.pipeline.pipe
        publish, failures = pipe.broker.publish, 0

        async def interrupted(subject: str, *arguments: Any, **more: Any) -> Any:
            nonlocal failures
            if not subject.startswith(f"{pipe.subjects.root}.queue.") or failures == 2:
                return await publish(subject, *arguments, **more)
            failures += 1
            if is_stored:
                await publish(subject, *arguments, **more)
            raise Transient("the answer of the broker was lost", delay=0.0)

        monkeypatch.setattr(pipe.broker, "publish", interrupted)
        await metered.publish("r", max_tokens=1)
        assert isinstance(await metered.ending("r"), Done)
        assert failures >= 1
        assert [news.revision for news in metered.news if news.revision <= 1] and metered.news[-1].revision <= 2
        assert all(charged(news.requests) <= 1 for news in metered.news)


async def test_a_prompt_larger_than_the_limit_is_told_that_it_never_passes() -> None:
    async with Metered.of(tokens_per_minute=50) as metered:
        (final,) = await metered.ask()
        assert isinstance(final, Failed) and "it can never be served" in final.error.message
        assert (final.error.status, final.error.code) == (400, "prompt_exceeds_rate_limit")
        assert metered.news == []


async def test_without_limits_nothing_is_read_or_written() -> None:
    async with Metered.of(requests_per_minute=None, tokens_per_minute=None) as metered:
        broker: Any = metered.pipeline.pipe.broker
        del broker._buckets[RATES]
        assert isinstance((await metered.ask())[0], Accepted)
        assert metered.news == []
