"""The requests of a scenario: when they come and what they ask, drawn from its seed."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate
from math import exp, log
from random import Random
from typing import NamedTuple

from .scenario import Lengths, Tenant

_LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"


class Ask(NamedTuple):
    """A request: its prompt, of which each character is a token, and the tokens of its answer."""

    at: float
    prompt: str
    answer: int


class Traffic:
    """Of one entry among a scenario's tenants."""

    def __init__(self, tenant: Tenant, seed: int, number: int) -> None:
        self.tenant = tenant
        self._moments = Random(f"{seed}/{number}/moments")
        self._asks = Random(f"{seed}/{number}/asks")
        self._count = 0
        self._number = number
        self._prefixes: list[str] = []
        self._weights: list[float] = []
        if (prefixes := tenant.prefixes) is not None:
            texts = Random(f"{seed}/{tenant.name}/prefixes")
            self._prefixes = ["".join(texts.choices(_LETTERS, k=prefixes.tokens)) for _ in range(prefixes.count)]
            self._weights = list(accumulate(rank**-prefixes.zipf for rank in range(1, prefixes.count + 1)))

    def asks(self) -> Iterator[Ask]:
        """All requests in order of their moments; endless where the tenant does not end."""
        tenant, now = self.tenant, self.tenant.begins
        if not tenant.rate:
            return
        while True:
            even = 1 / tenant.rate
            now += self._moments.expovariate(tenant.rate) if tenant.arrivals == "poisson" else even
            if tenant.ends is not None and now >= tenant.ends:
                return
            yield self.ask(now)

    def ask(self, at: float) -> Ask:
        """One more request."""
        self._count += 1
        length = self._length(self.tenant.prompt)
        prefix = ""
        if self._prefixes:
            where = self._asks.random() * self._weights[-1]
            prefix = self._prefixes[min(bisect_left(self._weights, where), len(self._prefixes) - 1)]
        own = f"{self._number}.{self._count} "  # so that only prefixes are shared
        prompt = prefix + (own * (length // len(own) + 1))[: max(1, length - len(prefix))]
        return Ask(at, prompt, self._length(self.tenant.answer))

    def _length(self, lengths: Lengths) -> int:
        if not lengths.spread:
            return round(lengths.mean)
        middle = log(lengths.mean) - lengths.spread**2 / 2
        return min(lengths.max, max(lengths.min, round(exp(self._asks.gauss(middle, lengths.spread)))))
