"""Which worker gets a batch. A strategy sees what workers say of themselves, and knows no broker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ...schemas.jobs import ValidatedJob


@dataclass(frozen=True, slots=True)
class Candidate:
    """A live worker with room: `active` requests are there, and `free_tokens` more fit into its KV cache."""

    worker: str
    active: int
    free_tokens: int


class Strategy(Protocol):
    def needs(self, job: ValidatedJob) -> int:
        """Tokens that a worker's whole KV cache must hold, or this strategy will never pick it for the job."""

    def pick(self, workers: Sequence[Candidate], tokens: int) -> Candidate | None:
        """Choose one of `workers`, which is never empty, for a request of `tokens`; None: the request must wait."""


def most_tokens(job: ValidatedJob) -> int:
    """At most what the job keeps in a worker's cache at a time."""
    if job.endpoint == "/v1/embeddings":  # its inputs take turns
        return max(map(len, job.prompts))
    return job.prompt_tokens + job.choices * job.params.max_tokens


class _ByTurns:
    """Fits where the longest prompt and a first token do: the engine lets choices wait for each other."""

    def needs(self, job: ValidatedJob) -> int:
        return max(map(len, job.prompts)) + (job.endpoint != "/v1/embeddings")


class RoundRobin(_ByTurns):
    """Each worker in turn, whichever come and go in between."""

    def __init__(self) -> None:
        self._last = ""  # the worker picked last; set by pick

    def pick(self, workers: Sequence[Candidate], tokens: int) -> Candidate | None:
        ordered = sorted(workers, key=lambda candidate: candidate.worker)
        chosen = next((candidate for candidate in ordered if candidate.worker > self._last), ordered[0])
        self._last = chosen.worker
        return chosen


class LeastLoaded(_ByTurns):
    """One of those with the fewest requests; among equals, each in turn."""

    def __init__(self) -> None:
        self._among = RoundRobin()

    def pick(self, workers: Sequence[Candidate], tokens: int) -> Candidate | None:
        fewest = min(candidate.active for candidate in workers)
        return self._among.pick([candidate for candidate in workers if candidate.active == fewest], tokens)


class MemoryAware:
    """The one with the most room in its KV cache, if the request fits there."""

    def needs(self, job: ValidatedJob) -> int:
        return most_tokens(job)

    def pick(self, workers: Sequence[Candidate], tokens: int) -> Candidate | None:
        roomiest = max(workers, key=lambda candidate: (candidate.free_tokens, -candidate.active))
        return roomiest if roomiest.free_tokens >= tokens else None


STRATEGIES: dict[str, type[Strategy]] = {
    "round_robin": RoundRobin,
    "least_loaded": LeastLoaded,
    "memory_aware": MemoryAware,
}
