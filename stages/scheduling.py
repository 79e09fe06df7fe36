"""Which worker gets a batch. A strategy is a small object with a memory of its own and no view of the broker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..schemas.registry import WorkerCard


class Strategy(Protocol):
    def pick(self, workers: Sequence[WorkerCard]) -> WorkerCard:
        """Choose one of `workers`, which is never empty."""


class RoundRobin:
    """Each worker in turn, whichever come and go in between."""

    def __init__(self) -> None:
        self._last = ""  # id of the worker picked last; set by pick

    def pick(self, workers: Sequence[WorkerCard]) -> WorkerCard:
        ordered = sorted(workers, key=lambda worker: worker.id)
        chosen = next((worker for worker in ordered if worker.id > self._last), ordered[0])
        self._last = chosen.id
        return chosen
