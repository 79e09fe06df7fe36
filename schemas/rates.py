"""How many requests and tokens a tenant may have a minute: two buckets that fill up steadily, up to a minute's worth.

Times are in Unix seconds by the broker's clock, which all copies share; where one comes late, time stands still, unless
that clock was set back. Knows no broker.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal, NamedTuple, Self

import orjson
from pydantic import Field

from .base import Record
from .errors import QuotaExceeded
from .jobs import SubjectToken

MINUTE = 60.0  # seconds in which an empty bucket fills up
CODE = "rate_limit_exceeded"  # error code
_LEAST = 1e-9  # of a request or token; what is missing of it is a rounding error
REMEMBERED = 300.0  # seconds for which a charge is known: longer than a lost lease, or an election, lasts
MOST_REMEMBERED = 1_000  # charges of a tenant that are known

Kind = Literal["requests", "tokens"]


class Limits(NamedTuple):
    """Most requests and tokens a minute; None is no limit."""

    requests: int | None = None
    tokens: int | None = None

    def __bool__(self) -> bool:
        return self.requests is not None or self.tokens is not None


class Charge(NamedTuple):
    """What the request `id` costs at `at`; the same id costs nothing a second time. What is `owed` was served already,
    and is charged though too little may be left."""

    id: str
    requests: int
    tokens: int
    at: float
    owed: bool = False


class Bucket(Record):
    """`left` of `limit`; below 0 after an answer that was longer than what was left."""

    limit: Annotated[int, Field(ge=1)]
    left: float

    def wait(self, needed: float) -> float:
        """Seconds until so much is there."""
        return max(0.0, (needed - self.left - _LEAST) * MINUTE / self.limit)

    def later(self, seconds: float) -> Bucket:
        return self.model_copy(update={"left": min(float(self.limit), self.left + seconds * self.limit / MINUTE)})


class RateNews(Record):
    """What a tenant has left, published after each change. Of two, the one of the higher `revision` is newer."""

    tenant: SubjectToken
    revision: int
    requests: Bucket | None = None
    tokens: Bucket | None = None


@dataclass(slots=True)
class Account:
    """What a tenant has left at `at`, and which charges were made lately; all set by `charge`."""

    limits: Limits
    at: float
    left: dict[Kind, float] = field(default_factory=dict)  # a bucket that is missing is full
    charged: dict[str, int] = field(default_factory=dict)  # when, by a hash of the id, the oldest first
    made: int = 0  # charges, since it was read or copied

    @classmethod
    def decode(cls, data: bytes, limits: Limits) -> Self:
        """An account as `encode` wrote it; a lowered limit cuts what is left."""
        stored = orjson.loads(data)
        return cls(limits, stored["at"], stored["left"], stored["charged"])

    def turn_back(self, now: float) -> None:
        """Where the broker's clock was set back, count on from `now`; else time would stand still until it is as late
        again."""
        if self.at > now + MINUTE:
            self.at = now
            self.charged = {name: min(at, int(now)) for name, at in self.charged.items()}

    def encode(self) -> bytes:
        return orjson.dumps({"at": self.at, "left": self.left, "charged": self.charged})

    def copy(self) -> Account:
        return Account(self.limits, self.at, dict(self.left), dict(self.charged))

    def buckets(self, at: float = 0.0) -> Mapping[Kind, Bucket]:
        """Those of the limits that are set, at that time or, if it is earlier, at the account's."""
        passed = max(0.0, at - self.at)
        limits: dict[Kind, int | None] = {"requests": self.limits.requests, "tokens": self.limits.tokens}
        return {
            kind: Bucket(limit=limit, left=self.left.get(kind, float(limit))).later(passed)
            for kind, limit in limits.items()
            if limit is not None
        }

    def charge(self, charge: Charge) -> QuotaExceeded | None:
        """Make a charge, unless it was made before, or say why not."""
        buckets = self.buckets(charge.at)
        self.at = max(self.at, charge.at)
        self.left = {kind: bucket.left for kind, bucket in buckets.items()}
        name = _hash(charge.id)
        if name in self.charged:
            return None
        needed: dict[Kind, int] = {"requests": charge.requests, "tokens": charge.tokens}
        if not charge.owed and (refusal := exceeded(buckets, needed)) is not None:
            return refusal
        for kind in buckets:
            self.left[kind] -= needed[kind]
        self.charged[name] = int(self.at)
        self.made += 1
        self._forget()
        return None

    def news(self, tenant: str, revision: int, at: float = 0.0) -> RateNews:
        buckets = self.buckets(at)
        return RateNews(
            tenant=tenant, revision=revision, requests=buckets.get("requests"), tokens=buckets.get("tokens")
        )

    def _forget(self) -> None:
        while self.charged:
            oldest, at = next(iter(self.charged.items()))
            if at > self.at - REMEMBERED and len(self.charged) <= MOST_REMEMBERED:
                return
            del self.charged[oldest]


def exceeded(buckets: Mapping[Kind, Bucket], needed: Mapping[Kind, int]) -> QuotaExceeded | None:
    """The refusal of a request that needs more than is left, by the limit for which it waits longest."""
    waits = {kind: bucket.wait(needed[kind]) for kind, bucket in buckets.items() if needed[kind]}
    slowest = max(waits, key=lambda kind: waits[kind], default=None)
    if slowest is None or waits[slowest] <= 0:
        return None
    bucket, wait = buckets[slowest], math.ceil(waits[slowest] * 1000) / 1000
    has = max(0, math.floor(bucket.left))
    return QuotaExceeded(
        f"You may have {bucket.limit:,} {slowest} a minute; {has:,} are left, and this request needs "
        f"{needed[slowest]:,}. Try again in {wait:.3g} s.",
        code=CODE,
        retry_after=wait,
    )


def _hash(id: str) -> str:
    return base64.b85encode(hashlib.blake2b(id.encode(), digest_size=8).digest()).decode()
