"""Notices a server of a cluster that is cut off from the others: it answers pings, but JetStream behind it nothing."""

from __future__ import annotations

from collections.abc import Callable

PATIENCE = 10.0  # seconds; an election takes up to nine
MOST_PATIENCE = 60.0  # while no server has an answer, each is given twice as long as the one before, up to this


class Isolation:
    """What JetStream was asked and has answered, by one connection; `clock` is in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since: float | None = None  # when the first question came that has no answer yet, nor any later one
        self._patience = PATIENCE

    def asked(self, ago: float = 0.0) -> None:
        """Something was asked `ago` seconds ago that changes what JetStream holds: others, a lone server answers."""
        if self._since is None:
            self._since = self._clock() - ago

    def answered(self) -> None:
        self._since, self._patience = None, PATIENCE

    def is_due(self) -> bool:
        """Whether to try another server now. Asked again, it says so for the next one."""
        if self._since is None or self._clock() - self._since < self._patience:
            return False
        self._since, self._patience = self._clock(), min(2 * self._patience, MOST_PATIENCE)
        return True
