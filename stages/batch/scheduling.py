"""Which worker gets a batch. A strategy sees what workers say of themselves, and knows no broker."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Protocol

from ...schemas.jobs import ValidatedJob


@dataclass(frozen=True, slots=True)
class Candidate:
    """A live worker with room: `active` requests are there, and `free_tokens` more fit into its KV cache.

    That holds `total_tokens` when it is empty; 0 if the worker does not say. `incarnation` names its process.
    """

    worker: str
    active: int
    free_tokens: int
    total_tokens: int = 0
    incarnation: str = ""


class Candidates(Protocol):
    """At least one worker. To iterate visits all, in order of their names; the methods visit few."""

    def __iter__(self) -> Iterator[Candidate]: ...

    def after(self, worker: str) -> Candidate:
        """The first behind this name; behind the last name comes the first."""

    def least_active(self, after: str) -> Candidate:
        """Of those with the fewest requests, the first behind this name; behind the last name comes the first."""

    def roomiest(self) -> Candidate:
        """The one with the most room in its KV cache, and among equals with the fewest requests."""


class Strategy(Protocol):
    picks_each: bool  # it picks for every request; else those behind one go along, while they fit there

    def needs(self, job: ValidatedJob) -> int:
        """Tokens that a worker's whole KV cache must hold, or this strategy will never pick it for the job."""

    def pick(self, workers: Candidates, job: ValidatedJob) -> Candidate | None:
        """Choose the worker to which the job then goes; None: the job must wait."""

    def keep(self, workers: Collection[str]) -> None:
        """These live: what the strategy remembers of others may be forgotten."""


def most_tokens(job: ValidatedJob) -> int:
    """At most what the job keeps in a worker's cache at a time."""
    if job.is_pooled:  # its inputs take turns
        return max(map(len, job.prompts))
    return job.prompt_tokens + job.choices * job.params.max_tokens


class _Forgetful:
    """Remembers nothing of workers, and has those that wait together sent together."""

    picks_each = False

    def keep(self, workers: Collection[str]) -> None:
        pass


class ByTurns(_Forgetful):
    """Fits where the longest prompt and a first token do: the engine lets choices wait for each other."""

    def needs(self, job: ValidatedJob) -> int:
        return max(map(len, job.prompts)) + (not job.is_pooled)


class RoundRobin(ByTurns):
    """Each worker in turn, whichever come and go in between."""

    def __init__(self) -> None:
        self._last = ""  # the worker picked last; set by pick

    def pick(self, workers: Candidates, job: ValidatedJob) -> Candidate:
        chosen = workers.after(self._last)
        self._last = chosen.worker
        return chosen


class LeastLoaded(ByTurns):
    """One of those with the fewest requests; among equals, each in turn."""

    def __init__(self) -> None:
        self._last = ""  # the worker picked last; set by pick

    def pick(self, workers: Candidates, job: ValidatedJob) -> Candidate:
        chosen = workers.least_active(self._last)
        self._last = chosen.worker
        return chosen


class MemoryAware(_Forgetful):
    """The one with the most room in its KV cache, if the request fits there."""

    def needs(self, job: ValidatedJob) -> int:
        return most_tokens(job)

    def pick(self, workers: Candidates, job: ValidatedJob) -> Candidate | None:
        roomiest = workers.roomiest()
        return roomiest if roomiest.free_tokens >= most_tokens(job) else None
