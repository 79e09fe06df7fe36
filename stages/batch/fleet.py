"""The live workers of one revision of a model, kept in the orders that strategies pick by: a choice visits the first of
them that fit, however many there are.

Knows no broker and no clock.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Hashable, Iterable, Iterator
from functools import partial
from itertools import chain
from typing import Any

from ...schemas.registry import WorkerCard
from .scheduling import Candidate
from .seats import Seats

Fits = Callable[[WorkerCard, Seats], bool]
Key = tuple[Any, ...]  # of what a worker is ordered by, and its name
_QUESTIONS = 64  # whose refusals are remembered
_FEW = 16  # times as many are sorted as may fit: then only those are looked at


class Fleet:
    """Seats tell it of every change; it sorts those workers anew when the next choice is made."""

    def __init__(self, members: Iterable[tuple[WorkerCard, Seats]]) -> None:
        """In order of the workers' names."""
        self.members = {card.id: (card, seats) for card, seats in members}
        self._changed = set(self.members)
        self._with_room: dict[str, Candidate] = {}  # those with a free seat for anybody
        self._by_name = _Order(lambda one: (one.worker,))
        self._by_load = _Order(lambda one: (one.active, one.worker))
        self._by_memory = _Order(lambda one: (-one.free_tokens, one.active, one.worker))
        self._largest: int | None = None  # of the caches, in tokens; None: to be found anew
        self._open: dict[Hashable, set[str]] = {}  # by question, those with a free seat that were not refused since
        for worker, (_, seats) in self.members.items():
            seats.changed = partial(self._note, worker)

    @property
    def largest(self) -> int:
        """The tokens of the largest KV cache; 0 if there is no worker, or one does not say."""
        if self._largest is None:
            sizes = [seats.room.total_tokens for _, seats in self.members.values()]
            self._largest = max(sizes, default=0) if all(size > 0 for size in sizes) else 0
        return self._largest

    def fitting(self, fits: Fits, question: Hashable) -> Fitting:
        """Those with a free seat of whom `fits` says so, as they are now.

        `question` is all that `fits` goes by beside the worker: one that it has refused is not asked about again until
        it changes. Or else a thousand full workers would be looked at for each seat that becomes free.
        """
        orders = self._by_name, self._by_load, self._by_memory
        for worker in self._changed:
            card, seats = self.members[worker]
            candidate = seats.candidate(card) if seats.has_any else None
            if candidate is None:
                self._with_room.pop(worker, None)
                for among in self._open.values():
                    among.discard(worker)
            else:
                self._with_room[worker] = candidate
                for among in self._open.values():
                    among.add(worker)
            for order in orders:
                order.put(worker, candidate)
        self._changed.clear()
        if question not in self._open:
            if len(self._open) >= _QUESTIONS:
                self._open.clear()
            self._open[question] = set(self._with_room)
        return Fitting(self, fits, self._open[question])

    def _note(self, worker: str, resized: bool) -> None:
        self._changed.add(worker)
        if resized:
            self._largest = None


class Fitting:
    """Implements `Candidates`, until the next change of the fleet."""

    def __init__(self, fleet: Fleet, fits: Fits, among: set[str]) -> None:
        self._fleet = fleet
        self._fits = fits
        self._among = among  # the others were refused

    def __bool__(self) -> bool:
        while self._among:
            if self._does_fit(next(iter(self._among))):  # else it is one of these no more
                return True
        return False

    def __iter__(self) -> Iterator[Candidate]:
        return self._those(self._fleet._by_name.sorted(self._among))

    def after(self, worker: str) -> Candidate:
        return next(self._those(behind((worker,), self._fleet._by_name.sorted(self._among))))

    def least_active(self, after: str) -> Candidate:
        return next(self._those(in_levels(after, self._fleet._by_load.sorted(self._among))))

    def roomiest(self) -> Candidate:
        return next(self._those(self._fleet._by_memory.sorted(self._among)))

    def _those(self, keys: Iterable[Key]) -> Iterator[Candidate]:
        candidates = self._fleet._with_room
        for key in keys:
            worker = key[-1]
            if worker in self._among and self._does_fit(worker):
                yield candidates[worker]

    def _does_fit(self, worker: str) -> bool:
        if self._fits(*self._fleet.members[worker]):
            return True
        self._among.discard(worker)
        return False


class _Order:
    """Candidates sorted by a key that ends with the worker's name."""

    def __init__(self, key: Callable[[Candidate], Key]) -> None:
        self._key = key
        self._changed: dict[str, Candidate | None] = {}
        self._keys: dict[str, Key] = {}
        self._sorted: list[Key] = []

    def put(self, worker: str, candidate: Candidate | None) -> None:
        self._changed[worker] = candidate

    def sorted(self, among: set[str]) -> list[Key]:
        """At least those of `among`, where these are few no others."""
        if self._changed:
            self._sort()
        if _FEW * len(among) < len(self._sorted):
            return sorted(self._keys[worker] for worker in among if worker in self._keys)
        return self._sorted

    def _sort(self) -> None:
        if len(self._changed) > len(self._keys) // 4:  # to sort all is faster than to move each
            self._keys.update((one, self._key(new)) for one, new in self._changed.items() if new is not None)
            for worker in [worker for worker, new in self._changed.items() if new is None]:
                self._keys.pop(worker, None)
            self._sorted = sorted(self._keys.values())
        else:
            for worker, candidate in self._changed.items():
                if (old := self._keys.pop(worker, None)) is not None:
                    del self._sorted[bisect_left(self._sorted, old)]
                if candidate is not None:
                    self._keys[worker] = self._key(candidate)
                    insort(self._sorted, self._keys[worker])
        self._changed.clear()


def behind(key: Key, keys: list[Key]) -> Iterable[Key]:
    """All, from the first behind `key` around to it."""
    start = bisect_right(keys, key)
    return chain(keys[start:], keys[:start])


def in_levels(worker: str, keys: list[Key]) -> Iterator[Key]:
    """All, the lowest level first; in each from the first behind `worker` around to it."""
    first = 0
    while first < len(keys):
        level = keys[first][0]
        end = bisect_left(keys, (level + 1,), first)
        start = bisect_right(keys, (level, worker), first, end)
        yield from keys[start:end]
        yield from keys[first:start]
        first = end
