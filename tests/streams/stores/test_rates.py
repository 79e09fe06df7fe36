"""Requests and tokens a minute: what copies that share a tenant's account serve, and what that costs the broker."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.config.settings import Settings
from penstock.schemas.canaries import CANARY
from penstock.schemas.errors import InvalidRequest, QuotaExceeded
from penstock.schemas.rates import MINUTE, MOST_REMEMBERED, Account, RateNews
from penstock.streams.memory.broker import MemoryBroker, MemoryBucket
from penstock.streams.port import Broker, BucketSpec
from penstock.streams.stores.rates import RateLedger
from penstock.streams.topology import RATES, Subjects

START = 1_000.0


class Copies:
    """Copies of the pipeline over one broker, and what they have served."""

    def __init__(self, broker: Broker, number: int, **limits: Any) -> None:
        chosen = Settings(backend="echo", **limits)
        self.broker = broker
        self.ledgers = [RateLedger(broker, Subjects("p"), chosen) for _ in range(number)]
        self.news: list[RateNews] = []

    @classmethod
    async def of(cls, number: int, broker: Broker | None = None, **limits: Any) -> Copies:
        copies = cls(broker or MemoryBroker(), number, **limits)
        await copies.broker.ensure([], [BucketSpec(RATES)])
        await copies.broker.listen("p.control.rates.*", lambda message: copies.hear(message.data))
        return copies

    def hear(self, data: bytes) -> None:
        self.news.append(RateNews.model_validate_json(data))

    async def begin(self, copy: int, request: str, tokens: int, at: float, tenant: str = "ada") -> bool:
        try:
            await self.ledgers[copy].begin(tenant, request, tokens, START + at)
        except QuotaExceeded:
            return False
        finally:
            await asyncio.sleep(0)  # what was published is heard
        return True

    async def account(self) -> Account:
        entry = await (await self.broker.bucket(RATES)).get("ada")
        assert entry is not None
        return Account.decode(entry.value, self.ledgers[0].limits("ada"))


class Step(NamedTuple):
    """A request comes to several copies at once, or comes again; or the answer of one that was served ends."""

    wait: float  # seconds since the step before
    late: float  # seconds by which a copy's message is older than that
    request: int
    copies: tuple[int, ...]
    tokens: int
    ends: bool


STEPS = st.lists(
    st.builds(
        Step,
        st.sampled_from([0.0, 0.0, 0.5, 7.0, 61.0]),
        st.sampled_from([0.0, 0.0, 3.0]),
        st.integers(0, 12),
        st.lists(st.integers(0, 2), min_size=1, max_size=3).map(tuple),
        st.integers(1, 50),
        st.booleans(),
    ),
    max_size=40,
)


@settings(max_examples=100, deadline=None)
@example(  # a repeated message charges nothing, and so does not move the account's clock
    [
        [
            Step(0.0, 0.0, 0, (0,), 1, False),
            Step(61.0, 0.0, 0, (0,), 1, False),
            Step(0.0, 3.0, 2, (0,), 20, False),
            Step(0.0, 0.0, 1, (0,), 1, False),
        ]
    ],
    2,
    20,
)
@given(st.lists(STEPS, min_size=1, max_size=4), st.integers(1, 8), st.integers(20, 100))
def test_no_interleaving_serves_more_than_the_limit_or_charges_twice(
    groups: Sequence[Sequence[Step]], requests: int, tokens: int
) -> None:
    """Of any requests, redelivered to any copies, together or one after the other: what was charged from any time until
    a request was let in never exceeds a full bucket and what came since; and each request and each answer was charged
    once."""

    async def scene() -> None:
        copies = await Copies.of(3, requests_per_minute=requests, tokens_per_minute=tokens)
        now, clock = 0.0, 0.0  # `clock` is the latest time of a message that was charged: the account's
        begun: dict[int, int] = {}  # tokens of the requests that were let in
        ended: dict[int, int] = {}
        charges: list[tuple[float, int, int]] = []  # when, and of how many requests and tokens
        for group in groups:
            for step in group:
                now += step.wait
                at = now - step.late
                cost = begun.get(step.request, min(step.tokens, tokens))
                if step.ends and step.request in begun:
                    if step.request not in ended:
                        clock = max(clock, at)
                        charges.append((clock, 0, step.tokens))
                    cost = ended.setdefault(step.request, step.tokens)
                    ends = [
                        copies.ledgers[copy].end("ada", f"{step.request}", cost, START + at) for copy in step.copies
                    ]
                    await asyncio.gather(*ends)
                    continue
                told = [copies.begin(copy, f"{step.request}", cost, at) for copy in step.copies]
                if any(await asyncio.gather(*told)) and step.request not in begun:
                    clock = max(clock, at) if begun else at
                    begun[step.request] = cost
                    charges.append((clock, 1, cost))
                    of_requests = of_tokens = 0
                    for since, request, spent in reversed(charges):
                        of_requests, of_tokens = of_requests + request, of_tokens + spent
                        minutes = (clock - since) / MINUTE
                        assert of_tokens <= tokens * (1 + minutes) + 1e-6
                        assert of_requests <= requests * (1 + minutes) + 1e-6
        if begun:
            account = await copies.account()
            left = account.buckets()
            # A bucket that was full for a while has lost what came then: so no less was charged than is missing.
            charged = sum(begun.values()) + sum(ended.values())
            assert tokens - left["tokens"].left <= charged + 1e-6
            assert requests - left["requests"].left <= len(begun) + 1e-6
            assert len(account.charged) == len(begun) + len(ended) or now > 200

    asyncio.run(scene())


class Counting(MemoryBroker):
    """Counts writes, each of which takes a turn of the event loop."""

    writes = 0

    async def bucket(self, name: str) -> MemoryBucket:
        found = await super().bucket(name)
        for method in ("create", "update"):
            setattr(found, method, partial(self._counted, partial(getattr(type(found), method), found)))
        return found

    async def _counted(self, write: Callable[..., Awaitable[int | None]], *arguments: Any) -> int | None:
        self.writes += 1
        await asyncio.sleep(0)
        return await write(*arguments)


async def test_charges_at_the_same_time_are_stored_together() -> None:
    broker = Counting()
    copies = await Copies.of(2, broker, requests_per_minute=1_000)
    served = await asyncio.gather(*(copies.begin(number % 2, f"{number}", 1, 0.0) for number in range(400)))
    assert all(served)
    assert len((await copies.account()).charged) == 400
    assert broker.writes < 20
    revision = max(news.revision for news in copies.news)
    assert await copies.begin(0, "7", 1, 1.0)  # again
    assert copies.news[-1].revision == revision


async def test_copies_that_charge_at_once_serve_no_more_than_one_would(broker: Broker) -> None:
    copies = await Copies.of(3, broker, requests_per_minute=40)
    served = await asyncio.gather(*(copies.begin(number % 3, f"{number}", 1, 0.0) for number in range(90)))
    assert sum(served) == 40
    again = await asyncio.gather(*(copies.begin((number + 1) % 3, f"{number}", 1, 0.0) for number in range(90)))
    assert again == served
    assert (await copies.account()).buckets()["requests"].left == 0


async def test_a_refusal_says_when_and_writes_nothing() -> None:
    copies = await Copies.of(2, tokens_per_minute=600)
    assert await copies.begin(0, "a", 590, 0.0)
    revision = copies.news[-1].revision
    with pytest.raises(QuotaExceeded, match=r"600 tokens a minute; 10 are left, and this request needs 40") as refused:
        await copies.ledgers[1].begin("ada", "b", 40, START)
    assert refused.value.retry_after == 3.0 and refused.value.code == "rate_limit_exceeded"
    assert copies.news[-1].revision == revision
    assert await copies.begin(1, "b", 40, 3.0)


async def test_a_known_refusal_costs_nothing_before_it_is_tokenised() -> None:
    copies = await Copies.of(1, requests_per_minute=60)
    for number in range(60):
        assert await copies.begin(0, f"{number}", 1, 0.0)
    with pytest.raises(QuotaExceeded):
        await copies.ledgers[0].check("ada", START)
    await copies.ledgers[0].check("ada", START + 1.0)
    await copies.ledgers[0].check("bob", START)


async def test_an_answer_is_charged_though_nothing_is_left_and_delays_the_next_request() -> None:
    copies = await Copies.of(1, tokens_per_minute=60)
    assert await copies.begin(0, "a", 60, 0.0)
    await copies.ledgers[0].end("ada", "a", 90, START)
    await asyncio.sleep(0)
    assert copies.news[-1].tokens is not None and copies.news[-1].tokens.left == -90
    assert not await copies.begin(0, "b", 1, 90.0)
    assert await copies.begin(0, "b", 1, 91.0)


async def test_what_is_larger_than_the_bucket_is_refused_for_good() -> None:
    copies = await Copies.of(1, tokens_per_minute=60)
    with pytest.raises(InvalidRequest, match=r"61 tokens.*60 a minute: it can never be served"):
        await copies.ledgers[0].begin("ada", "a", 61, START)
    assert copies.news == []


async def test_a_tenant_has_its_own_limits_or_none_and_the_server_s_own_requests_have_none() -> None:
    limits: dict[str, Any] = {"tenant_requests_per_minute": "ada=1,bob=none", "requests_per_minute": 2}
    copies = await Copies.of(1, **limits)
    for tenant, most in (("ada", 1), ("bob", 9), ("eve", 2), (CANARY, 9)):
        served = [await copies.begin(0, f"{number}", 1, 0.0, tenant) for number in range(9)]
        assert sum(served) == most
    assert {news.tenant for news in copies.news} == {"ada", "eve"}


async def test_a_lost_bucket_forgives_nothing_that_is_known() -> None:
    copies = await Copies.of(2, requests_per_minute=2)
    assert await copies.begin(0, "a", 1, 0.0) and await copies.begin(0, "b", 1, 0.0)
    await (await copies.broker.bucket(RATES)).delete("ada")
    assert not await copies.begin(0, "c", 1, 0.0)
    assert await copies.begin(0, "c", 1, 30.0)
    assert not await copies.begin(1, "d", 1, 30.0)  # who knew nothing reads what the other has stored


async def test_an_account_stays_small() -> None:
    copies = await Copies.of(1, requests_per_minute=10_000, tokens_per_minute=10_000_000)
    many = 3 * MOST_REMEMBERED
    await asyncio.gather(*(copies.begin(0, f"{number}", 10_000, number / 1_000) for number in range(many)))
    account = await copies.account()
    assert len(account.charged) <= MOST_REMEMBERED
    assert len(replace(account).encode()) < 40_000


async def test_a_clock_that_was_set_back_locks_nobody_out() -> None:
    """The broker's, by an hour; a minute later there is room again, in a copy that knows the account and in another."""
    copies = await Copies.of(2, requests_per_minute=1)
    copies.broker.now = lambda: START + now  # type: ignore[method-assign]
    now = 0.0
    assert await copies.begin(0, "a", 1, now)
    assert not await copies.begin(0, "b", 1, now)
    assert not await copies.begin(1, "b", 1, now)
    now = -3600.0
    assert not await copies.begin(0, "b", 1, now)
    with pytest.raises(QuotaExceeded):
        await copies.ledgers[1].check("ada", START + now)
    now += MINUTE
    await copies.ledgers[1].check("ada", START + now)
    assert await copies.begin(0, "b", 1, now)
    assert await copies.begin(0, "b", 1, now + 1), "a message that comes again costs nothing"
    assert not await copies.begin(1, "c", 1, now)
    now += MINUTE
    assert await copies.begin(1, "c", 1, now)


async def test_a_message_of_before_the_clock_was_set_back_stops_no_time() -> None:
    copies = await Copies.of(1, requests_per_minute=1)
    copies.broker.now = lambda: START + now  # type: ignore[method-assign]
    now = 0.0
    assert await copies.begin(0, "late", 1, 3600.0)
    now = 3 * MINUTE
    assert await copies.begin(0, "a", 1, now)
