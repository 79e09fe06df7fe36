"""Sends a request to the worker that has the beginning of its prompt in its cache, unless that one has too much to do.

No worker is asked. The strategy remembers which blocks of prompts it sent to which worker, about as many as the
worker's KV cache holds, least recently sent first to be forgotten; a worker that restarts holds nothing any more. So
what it knows is an approximation, and a wrong guess costs a prefill and nothing else. Each copy of the batch stage
knows only what it sent itself and starts with nothing: with several copies a prefix may live on as many workers.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from ...schemas.jobs import ValidatedJob
from .scheduling import ByTurns, Candidate

BLOCK = 64  # tokens; workers' own blocks are smaller, and what is shorter is soon computed
MOST_BLOCKS = 16_384  # that are remembered of a worker, and 1 Mi tokens
LEAST_MATCH = 0.3  # of a prompt; a shorter known beginning is no reason to prefer a worker
CROWDED = 1.25  # times the mean load: a worker above it, and SLACK, gets no request for its cache's sake
SLACK = 2  # requests
WINDOW = 32  # requests for each worker, over which their shares are compared


def prefix_keys(job: ValidatedJob) -> list[bytes]:
    """A key for each whole block of the job's first prompt, of all that the worker must have computed up to its end.

    Keys are shared as workers share blocks: by tenant, model, revision and adapter.
    """
    adapter = (job.adapter.name, job.adapter.digest) if job.adapter else None
    digest = blake2b(repr((job.tenant, job.model, job.revision, adapter)).encode(), digest_size=16)
    try:
        tokens = memoryview(array("I", job.prompts[0])).cast("B")
    except OverflowError:  # what a custom stage made of it is no token, and the worker will refuse it
        return []
    size = BLOCK * array("I").itemsize
    keys = []
    for end in range(size, len(tokens) + 1, size):
        digest.update(tokens[end - size : end])
        for image in job.images:  # the same tokens stand for every image
            if image.offset * size < end * BLOCK and (end - size) * BLOCK < (image.offset + image.length) * size:
                digest.update(image.digest.encode())
        keys.append(digest.digest())
    return keys


class SentPrefixes:
    """Which blocks were sent to which worker. Who holds a block holds all those before it."""

    def __init__(self) -> None:
        self._holders: dict[bytes, set[str]] = {}
        self._sent: dict[str, OrderedDict[bytes, None]] = {}  # by worker, the least recently sent first

    def add(self, worker: str, keys: Sequence[bytes], most: int) -> None:
        """A prompt with these keys goes to `worker`, of whom `most` blocks are remembered."""
        sent = self._sent.setdefault(worker, OrderedDict())
        for key in reversed(keys[:most]):  # so that a block is forgotten after all those that follow it
            sent[key] = None
            sent.move_to_end(key)
            self._holders.setdefault(key, set()).add(worker)
        while len(sent) > most:
            self._drop(worker, sent.popitem(last=False)[0])

    def longest(self, keys: Sequence[bytes]) -> tuple[int, Collection[str]]:
        """How many of the first blocks were sent to one worker, and to which ones."""
        count, found = 0, set[str]()
        for count, key in enumerate(keys):
            holders = self._holders.get(key)
            if holders is None:
                return count, found
            found = holders
        return (count + 1, found) if keys else (0, found)

    def forget(self, worker: str) -> None:
        for key in self._sent.pop(worker, ()):
            self._drop(worker, key)

    def keep(self, workers: Collection[str]) -> None:
        """Forget all others."""
        for worker in self._sent.keys() - set(workers):
            self.forget(worker)

    def check_integrity(self) -> None:
        """Raises `AssertionError` unless both sides say the same."""
        pairs = {(worker, key) for worker, sent in self._sent.items() for key in sent}
        assert pairs == {(worker, key) for key, holders in self._holders.items() for worker in holders}
        assert all(self._holders.values()), "a block that nobody holds is remembered"

    def _drop(self, worker: str, key: bytes) -> None:
        holders = self._holders[key]
        holders.remove(worker)
        if not holders:
            del self._holders[key]


@dataclass(slots=True)
class Shares:
    """How many choices each worker of a model was sent lately."""

    sent: Counter[str] = field(default_factory=Counter)
    _window: deque[tuple[str, int]] = field(default_factory=deque)

    def add(self, worker: str, choices: int, most: int) -> None:
        """`most`: the requests that are remembered."""
        self.sent[worker] += choices
        self._window.append((worker, choices))
        while len(self._window) > most:
            oldest, choices = self._window.popleft()
            self.sent[oldest] -= choices
            if not self.sent[oldest]:
                del self.sent[oldest]


class PrefixAware(ByTurns):
    """The one that was sent the longest beginning of the prompt, unless it is `CROWDED` now or was lately.

    Else the one with the fewest requests, and among equals the one that was sent the fewest lately. So requests with
    the same beginning go together, and one that is asked for more than a worker's share spreads to further workers.
    A choice takes time in proportion to the prompt's blocks and to the workers, and not to both at once.
    """

    picks_each = True

    def __init__(self) -> None:
        self.prefixes = SentPrefixes()
        self._shares: dict[tuple[str, int], Shares] = {}  # by model and revision
        self._incarnations: dict[str, str] = {}  # by worker

    def pick(self, workers: Iterable[Candidate], job: ValidatedJob) -> Candidate:
        workers = list(workers)
        for each in workers:
            if self._incarnations.setdefault(each.worker, each.incarnation) != each.incarnation:
                self._incarnations[each.worker] = each.incarnation
                self.prefixes.forget(each.worker)
        shares = self._shares.setdefault((job.model, job.revision), Shares())
        keys = [] if job.is_pooled else prefix_keys(job)
        favourites = self._favourites(workers, shares, keys, len(job.prompts[0]))
        chosen = min(favourites or workers, key=lambda each: (each.active, shares.sent[each.worker], each.worker))
        most = min(chosen.total_tokens // BLOCK or MOST_BLOCKS, MOST_BLOCKS)
        self.prefixes.add(chosen.worker, keys, most)
        shares.add(chosen.worker, job.choices, WINDOW * len(workers))
        return chosen

    def keep(self, workers: Collection[str]) -> None:
        self.prefixes.keep(workers)
        for worker in self._incarnations.keys() - set(workers):
            del self._incarnations[worker]
        for key in [key for key, shares in self._shares.items() if shares.sent.keys().isdisjoint(workers)]:
            del self._shares[key]

    def _favourites(
        self, workers: Sequence[Candidate], shares: Shares, keys: Sequence[bytes], length: int
    ) -> list[Candidate]:
        """Those that have enough of the prompt and not too much to do."""
        count, holders = self.prefixes.longest(keys)
        if not count or count * BLOCK < LEAST_MATCH * length:
            return []
        most_active = CROWDED * sum(each.active for each in workers) / len(workers) + SLACK
        most_sent = CROWDED * sum(shares.sent[each.worker] for each in workers) / len(workers) + SLACK
        return [
            each
            for each in workers
            if each.worker in holders and each.active <= most_active and shares.sent[each.worker] <= most_sent
        ]
