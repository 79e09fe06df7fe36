"""What must hold of every run, checked while it runs: `Ledger` follows each request from its client's side.

Knows no broker and no clock: events and times in, broken laws out.
"""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ..schemas.events import FINAL, Done, Event, Expired, Failed, Token
from ..schemas.jobs import Priority
from ..schemas.registry import OUTPUT_WEIGHT
from .scenario import Laws

MOST_REPORTED = 20  # of broken laws; the others are counted
LEAST_BEGUN = 30  # requests of a tenant in a window; fewer say nothing of its share


class Source(NamedTuple):
    """Whose requests are told apart in what is found: tenants by priority and model."""

    tenant: str
    priority: Priority
    model: str


@dataclass(slots=True)
class Life:
    """Of a request, in seconds since the beginning; `answer` tokens are expected."""

    source: Source
    prompt: int
    answer: int
    sent: float
    tokens: int = 0
    first: float | None = None
    ended: float | None = None
    outcome: str = ""  # "done", or the code of its error


def _numbers() -> array[float]:
    return array("d")


@dataclass(slots=True)
class Tally:
    """Of one source since the beginning."""

    sent: int = 0
    begun: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    first: array[float] = field(default_factory=_numbers)  # seconds until the first token
    first_at: array[float] = field(default_factory=_numbers)  # and when each came
    total: array[float] = field(default_factory=_numbers)  # seconds until the end, of those that were answered

    @property
    def ended(self) -> int:
        return self.outcomes.total()


class _Stretch(NamedTuple):
    """Where a source stood when a window began."""

    waiting: int
    begun: int
    served: int


class Ledger:
    """`token_at` tells the token that every answer has at an index, but at its end."""

    def __init__(self, laws: Laws, weights: Mapping[str, float], token_at: Callable[[int], int]) -> None:
        self.broken: list[str] = []
        self.num_broken = 0
        self.running: dict[str, Life] = {}  # by request, the one sent first at the beginning
        self.tallies: defaultdict[Source, Tally] = defaultdict(Tally)
        self.served: Counter[Source] = Counter()  # weighted tokens
        self.lowest_share: float | None = None  # of the windows in which somebody's share could be told
        self._laws = laws
        self._weights = weights
        self._token_at = token_at
        self._over: dict[str, str] = {}  # outcomes by request
        self._idle_since: dict[str, float] = {}  # by model, when too many seats were free that requests waited for
        self._windows: dict[Source, _Stretch] = {}
        self._window_began = 0.0

    def sent(self, request: str, life: Life) -> None:
        self.running[request] = life
        self.tallies[life.source].sent += 1

    def refused(self, request: str, code: str, now: float) -> None:
        """The broker did not take it."""
        self._end(request, self.running[request], code, now)

    def hear(self, event: Event, now: float) -> None:
        request = event.request
        life = self.running.get(request)
        if life is None:
            if request in self._over:
                self._break(f"{request}: {type(event).__name__} came behind its end ({self._over[request]})")
            else:
                self._break(f"{request}: {type(event).__name__} of a request that nobody sent")
            return
        if isinstance(event, Token):
            self._read(life, event, now)
        elif isinstance(event, Done):
            if life.tokens != life.answer:
                self._break(f"{request}: it ended with {life.tokens} of {life.answer} tokens")
            if event.usage.completion_tokens != life.answer:
                self._break(f"{request}: {event.usage.completion_tokens} of {life.answer} tokens are counted")
            self._end(request, life, "done", now)
        elif isinstance(event, Failed | Expired):
            self._end(request, life, event.error.code or event.error.type, now)
        elif isinstance(event, FINAL):
            self._end(request, life, type(event).__name__.lower(), now)

    def look(self, now: float) -> None:
        """Check what only time shows; call it about once a second."""
        longest = self._laws.longest_wait
        for request, life in self.running.items():
            if now - life.sent <= longest:
                break
            if life.first is None:
                self._break(f"{request} of {life.source.tenant}: no token after {now - life.sent:.1f} s")
                life.first = now  # said once
        if now - self._window_began >= self._laws.fair_window:
            self._close_window()
            self._window_began = now
            self._windows = {
                source: _Stretch(tally.sent - tally.begun - self._unbegun(tally), tally.begun, self.served[source])
                for source, tally in self.tallies.items()
            }

    def see_seats(self, seats: Mapping[str, tuple[int, int]], now: float) -> None:
        """Check that requests wait for want of seats alone: by model, how many there are, and how many are free. Call
        it about once a second."""
        waiting = Counter(life.source.model for life in self.running.values() if life.first is None)
        for model, (number, free) in seats.items():
            if waiting[model] < number or free <= self._laws.idle_share * number:
                self._idle_since.pop(model, None)
            elif now - self._idle_since.setdefault(model, now) >= self._laws.idle_window:
                self._idle_since[model] = now
                self._break(
                    f"{model}: {waiting[model]} requests wait, and more than {self._laws.idle_share:.0%} of {number} "
                    f"seats have been free for {self._laws.idle_window:g} s, {free} of them now"
                )

    def finish(self) -> None:
        """Nothing more will come."""
        for request, life in self.running.items():
            self._break(f"{request} of {life.source.tenant}: it never ended, after {life.tokens} tokens")

    def _unbegun(self, tally: Tally) -> int:
        """Requests that ended without a token."""
        return tally.outcomes.total() - tally.outcomes["done"]

    def _read(self, life: Life, event: Token, now: float) -> None:
        if life.first is None:
            life.first = now
            tally = self.tallies[life.source]
            tally.begun += 1
            tally.first.append(now - life.sent)
            tally.first_at.append(now)
            self.served[life.source] += life.prompt
        if event.index != life.tokens:
            what = "a gap" if event.index > life.tokens else "tokens twice"
            self._break(f"{event.request}: {what}, index {event.index} where {life.tokens} comes next")
        for index, token in enumerate(event.token_ids, event.index):
            if index < life.answer - 1 and token != self._token_at(index):
                self._break(f"{event.request}: another token at index {index}")
        count = len(event.token_ids)
        life.tokens += count
        self.tallies[life.source].tokens += count
        self.served[life.source] += OUTPUT_WEIGHT * count

    def _end(self, request: str, life: Life, outcome: str, now: float) -> None:
        life.ended, life.outcome = now, outcome
        del self.running[request]
        self._over[request] = outcome
        tally = self.tallies[life.source]
        tally.outcomes[outcome] += 1
        if outcome == "done":
            tally.total.append(now - life.sent)

    def _close_window(self) -> None:
        """Compare those of whom something waited all through the window: more than they were given."""
        shares: defaultdict[tuple[Priority, str], dict[str, float]] = defaultdict(dict)
        for source, before in self._windows.items():
            begun = self.tallies[source].begun - before.begun
            if begun >= LEAST_BEGUN and before.waiting > begun:
                served = (self.served[source] - before.served) / self._weights.get(source.tenant, 1.0)
                shares[source.priority, source.model][source.tenant] = served
        for (priority, model), by_tenant in shares.items():
            if len(by_tenant) < 2:
                continue
            least, most = min(by_tenant, key=by_tenant.__getitem__), max(by_tenant, key=by_tenant.__getitem__)
            share = by_tenant[least] / by_tenant[most]
            self.lowest_share = share if self.lowest_share is None else min(self.lowest_share, share)
            if share < self._laws.fair_share:
                self._break(
                    f"{least} got {share:.2f} of what {most} got of {model} ({priority}) in "
                    f"{self._laws.fair_window:g} s, and both had requests waiting"
                )

    def _break(self, text: str) -> None:
        self.num_broken += 1
        if len(self.broken) < MOST_REPORTED:
            self.broken.append(text)
