"""Charges tenants for requests and tokens, once for each, in accounts that all copies of the pipeline share.

An account is one entry, changed by compare-and-set, so a charge and the note that it was made are stored together: who
repeats it, after a lost lease or a crash, finds the note. Charges of one tenant that come while one is stored are
stored together, so that a process has one write in flight for each tenant, however many requests end at once.

A refusal changes nothing and so costs no write, nor does it need a read: others can only have charged more meanwhile.
"""

from __future__ import annotations

import asyncio
import random
from collections import OrderedDict
from dataclasses import dataclass, field

from ...config import metrics
from ...config.settings import Settings
from ...schemas.canaries import CANARY
from ...schemas.errors import InvalidRequest, QuotaExceeded
from ...schemas.rates import MINUTE, Account, Charge, Limits, RateNews, exceeded
from ..port import Broker
from ..topology import RATES, Subjects

MOST_ACCOUNTS = 10_000  # that this process remembers
PAUSE = 0.002  # seconds; longest wait for the second try after another copy was faster, doubled for each further one
LONGEST_PAUSE = 0.1
TOO_LARGE = "prompt_exceeds_rate_limit"  # error code


@dataclass(slots=True, eq=False)
class _Pending:
    """A charge that is to be stored; `is_made` once it was decided, with the refusal if there is one."""

    charge: Charge
    is_made: bool = False
    refusal: QuotaExceeded | None = None


@dataclass(slots=True)
class _Book:
    """A tenant's account as this process knows it, and the charges that come next."""

    account: Account | None = None
    revision: int = 0  # of the entry; 0 where there is none
    pending: list[_Pending] = field(default_factory=list)
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


class RateLedger:
    """Of the tenants that have limits; all others cost nothing."""

    def __init__(self, broker: Broker, subjects: Subjects, settings: Settings) -> None:
        self._broker = broker
        self._subjects = subjects
        self._limits = settings.rate_limits
        self._books: OrderedDict[str, _Book] = OrderedDict()  # by tenant, the least recently used first

    @classmethod
    def of(cls, broker: Broker, subjects: Subjects, settings: Settings) -> RateLedger | None:
        """None where no tenant has a limit."""
        return cls(broker, subjects, settings) if settings.rate_limits else None

    def limits(self, tenant: str) -> Limits:
        """The tenant's limits; false if it has none."""
        return Limits() if tenant == CANARY else self._limits.get(tenant, self._limits[""])

    async def check(self, tenant: str, at: float) -> None:
        """Raises `QuotaExceeded` where this process knows that a new request has no chance, before it costs more."""
        book = self._books.get(tenant)
        if book is not None and book.account is not None:
            book.account.turn_back(self._broker.now())
            refusal = exceeded(book.account.buckets(at), {"requests": 1, "tokens": 1})
            if refusal is not None:
                metrics.RATE_REFUSALS.labels("stage").inc()
                await self._publish(book.account.news(tenant, book.revision, at))
                raise refusal

    async def begin(self, tenant: str, request: str, tokens: int, at: float) -> None:
        """Charge a tenant for a request with so many prompt tokens, which came `at` (by the broker's clock).

        Raises `QuotaExceeded`, `InvalidRequest` for what can never pass, and as the broker does.
        """
        limits = self.limits(tenant)
        if not limits:
            return
        if limits.tokens is not None and tokens > limits.tokens:
            raise InvalidRequest(
                f"The prompt has {tokens:,} tokens, but you may have {limits.tokens:,} a minute: it can never be "
                "served. Shorten it, or ask for a higher limit.",
                code=TOO_LARGE,
            )
        refusal = await self._make(tenant, Charge(f"{request} begin", 1, tokens, at))
        if refusal is not None:
            metrics.RATE_REFUSALS.labels("stage").inc()
            raise refusal

    async def end(self, tenant: str, request: str, tokens: int, at: float) -> None:
        """Charge a tenant for an answer of so many tokens, which ended `at`. Raises as the broker does."""
        if tokens and self.limits(tenant).tokens is not None:
            await self._make(tenant, Charge(f"{request} end", 0, tokens, at, owed=True))

    async def _make(self, tenant: str, charge: Charge) -> QuotaExceeded | None:
        book = self._books.setdefault(tenant, _Book())
        self._books.move_to_end(tenant)
        own = _Pending(charge)
        book.pending.append(own)
        try:
            async with book.turn:
                if not own.is_made:
                    await self._store(tenant, book)
        finally:
            if not own.is_made:
                book.pending.remove(own)
            if len(self._books) > MOST_ACCOUNTS:
                self._drop_idle()
        return own.refusal

    async def _store(self, tenant: str, book: _Book) -> None:
        """Decide on all that is pending, and store the account unless it stays as it is."""
        bucket = await self._broker.bucket(RATES)
        if book.account is None:
            await self._read(tenant, book)
        pause = PAUSE
        while True:
            pending, now = list(book.pending), self._broker.now()
            charges = [each.charge._replace(at=min(each.charge.at, now + MINUTE)) for each in pending]
            if book.account is not None:
                book.account.turn_back(now)
            account = book.account.copy() if book.account else Account(self.limits(tenant), charges[0].at)
            refusals = [account.charge(charge) for charge in charges]
            if account.made:
                data = account.encode()
                written = await (
                    bucket.update(tenant, data, book.revision) if book.revision else bucket.create(tenant, data)
                )
                if written is None:  # another copy was faster, or the broker has lost the entry
                    metrics.RATE_CONFLICTS.inc()
                    await self._read(tenant, book)
                    await asyncio.sleep(random.uniform(0.0, pause))
                    pause = min(LONGEST_PAUSE, 2 * pause)
                    continue
                book.account, book.revision = account, written
            break
        for each, refusal in zip(pending, refusals, strict=True):
            each.is_made, each.refusal = True, refusal
        book.pending = [each for each in book.pending if not each.is_made]
        await self._publish(account.news(tenant, book.revision))

    async def _publish(self, news: RateNews) -> None:
        await self._broker.notify(self._subjects.rates(news.tenant), news.model_dump_json().encode())

    async def _read(self, tenant: str, book: _Book) -> None:
        """Read the account. Where the broker has lost it, what this process knows counts on."""
        entry = await (await self._broker.bucket(RATES)).get(tenant)
        book.revision = entry.revision if entry else 0
        if entry is not None:
            book.account = Account.decode(entry.value, self.limits(tenant))

    def _drop_idle(self) -> None:
        for tenant, book in self._books.items():
            if not book.turn.locked() and not book.pending:
                del self._books[tenant]
                return
