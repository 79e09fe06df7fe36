"""What comes of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from .laws import Ledger
from .scenario import Scenario


class Moment(NamedTuple):
    """How it stands at a second: counts since the beginning, but for `waiting` and `running`."""

    at: float
    sent: int
    ended: int
    tokens: int
    waiting: int  # sent, without a first token
    running: int  # in the workers' engines
    workers: int
    busy: float  # seconds of all workers


@dataclass(slots=True)
class Found:
    """What came of a run; `seconds` are virtual."""

    scenario: Scenario
    ledger: Ledger
    began: float = 0.0  # loop time of the first moment at which requests may come
    seconds: float = 0.0
    moments: list[Moment] = field(default_factory=list)
    happened: list[tuple[float, str]] = field(default_factory=list)
    takeovers: int = 0
    preemptions: int = 0
    looked_up: int = 0  # tokens of prompts
    cached: int = 0  # of these, found in a worker's cache
    busy: float = 0.0  # seconds, of all workers
    lived: float = 0.0
