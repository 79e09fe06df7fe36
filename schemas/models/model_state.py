"""The states of a model's revision: the record that is stored, and the transitions between them. Pure: no clock.

    unloaded → queued → loading → ready → draining → unloaded
                  ↑        ↓        ↓
                  └───── failed ←───┘

A revision is queued by demand or by an operator; the agent that begins to load it claims it. Whoever stores a state
replaces it by compare-and-set, so that of two agents one gets it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from ..base import Record
from ..errors import PenstockError
from ..jobs import SubjectToken
from .catalogue import ModelName, RevisionKey

ModelStatus = Literal["unloaded", "queued", "loading", "ready", "draining", "failed"]

TRANSITIONS: Mapping[ModelStatus, tuple[ModelStatus, ...]] = {
    "unloaded": ("queued",),
    "queued": ("loading", "failed", "unloaded"),
    "loading": ("ready", "failed", "unloaded"),
    "ready": ("draining", "failed"),
    "draining": ("unloaded",),
    "failed": ("queued", "unloaded"),
}
_BEST: tuple[ModelStatus, ...] = ("ready", "loading", "draining", "queued", "failed", "unloaded")
RESIDENT: tuple[ModelStatus, ...] = ("loading", "ready", "draining")  # it takes memory


class ModelState(Record):
    """The state of one replica of a revision of a model, changed only by the functions below.

    `agent` is the process that has claimed it and `device` where it loads; `incarnations` are its worker processes.
    `progress` of a load is in per cent. `reason` says why it failed, or why it was unloaded. `attempts` counts failed
    loads in a row; the next one may begin at `retry_at`. `since` is when it entered `status`, `last_used` when its
    present workers were last busy (None: not yet), both, like `retry_at`, in Unix seconds. `loads` counts completed
    loads. An operator's request to load it, `requested`, needs no waiting client. It is `lost` from when its worker or
    host ended unasked until it is ready again, or unloaded on purpose.
    """

    version: Literal[1] = 1
    name: ModelName
    revision: Annotated[int, Field(ge=1)] = 1
    replica: Annotated[int, Field(ge=0)] = 0
    status: ModelStatus = "unloaded"
    agent: SubjectToken | None = None
    device: str | None = None
    incarnations: Annotated[tuple[str, ...], Field(strict=False)] = ()
    progress: Annotated[int, Field(ge=0, le=100)] = 0
    reason: str | None = None
    attempts: Annotated[int, Field(ge=0)] = 0
    retry_at: float | None = None
    since: float = 0.0
    last_used: float | None = None
    loads: Annotated[int, Field(ge=0)] = 0
    requested: bool = False
    lost: bool = False

    @property
    def key(self) -> RevisionKey:
        return RevisionKey(self.name, self.revision, self.replica)


@dataclass(frozen=True, slots=True)
class RetryRules:
    """When to load again after a failure, in seconds: after `first`, then twice as long each time up to `longest`.

    Workers that die after they were ready for `steady` are replaced at once.
    """

    first: float = 1.0
    longest: float = 60.0
    steady: float = 5.0


class IllegalTransition(PenstockError):
    """The state does not allow this. It may have changed since it was read: read it again, and decide anew."""


def enqueue(state: ModelState, now: float, *, requested: bool = False) -> ModelState:
    """Ask for the revision to be loaded; `requested` by an operator, so that it needs no waiting request."""
    return _move(state, "queued", now, requested=requested, reason=None, agent=None, device=None)


def start_loading(state: ModelState, now: float, *, agent: str, device: str) -> ModelState:
    return _move(state, "loading", now, agent=agent, device=device, progress=0, last_used=None, retry_at=None)


def report_progress(state: ModelState, percent: int) -> ModelState:
    if state.status != "loading":
        raise IllegalTransition(f"{_describe(state)} is {state.status}: only a load has progress")
    return state.model_copy(update={"progress": percent})


def become_ready(state: ModelState, now: float, *, incarnations: tuple[str, ...]) -> ModelState:
    changes = {"incarnations": incarnations, "progress": 100, "loads": state.loads + 1, "requested": False}
    return _move(state, "ready", now, **changes)


def touch(state: ModelState, now: float) -> ModelState:
    """Note that its workers are busy now."""
    if state.status not in ("ready", "draining"):
        raise IllegalTransition(f"{_describe(state)} is {state.status}: it has no workers that could be busy")
    return state.model_copy(update={"last_used": now})


def fail(state: ModelState, now: float, reason: str, rules: RetryRules) -> ModelState:
    """Its load has failed, or its workers have died."""
    was_steady = state.status == "ready" and now - state.since >= rules.steady
    attempts = 1 if was_steady else state.attempts + 1
    delay = 0.0 if was_steady else min(rules.longest, rules.first * 2.0 ** min(attempts - 1, 60))
    changes = {"reason": reason, "attempts": attempts, "retry_at": now + delay, "incarnations": (), "requested": False}
    return _move(state, "failed", now, **changes)


def start_draining(state: ModelState, now: float, reason: str) -> ModelState:
    """Send nothing more to its workers, which finish what they have."""
    return _move(state, "draining", now, reason=reason)


def unload(state: ModelState, now: float, reason: str | None = None) -> ModelState:
    """Its workers have ended, or it is no longer wanted; without `reason` the one of its draining stays."""
    changes = {"agent": None, "device": None, "incarnations": (), "requested": False, "progress": 0, "retry_at": None}
    attempts = 0 if state.status == "draining" else state.attempts  # one that did not run may yet fail again
    return _move(state, "unloaded", now, reason=reason or state.reason, attempts=attempts, **changes)


def abandon(state: ModelState, now: float) -> ModelState:
    """The state after its agent, and with it the workers, have ended; possible in any state."""
    reason, lost = "its host has stopped", state.lost or state.status in ("loading", "ready")
    return ModelState(**state.key._asdict(), since=now, reason=reason, loads=state.loads, lost=lost)


def by_revision(states: Iterable[ModelState]) -> dict[RevisionKey, ModelState]:
    """The state of each revision: that of its replica which can do most for requests."""
    found: dict[RevisionKey, ModelState] = {}
    for state in sorted(states, key=lambda each: (_BEST.index(each.status), each.replica)):
        found.setdefault(state.key.first, state)
    return found


def may_dispatch(state: ModelState, incarnation: str) -> bool:
    """Whether requests may be sent to this worker."""
    return state.status == "ready" and incarnation in state.incarnations


def _move(state: ModelState, status: ModelStatus, now: float, **changes: object) -> ModelState:
    if status not in TRANSITIONS[state.status]:
        raise IllegalTransition(f"{_describe(state)} is {state.status} and cannot become {status}: read it again")
    lost = status == "failed" or (state.lost and status in ("queued", "loading"))
    return state.model_copy(update={"status": status, "since": now, "lost": lost, **changes})


def _describe(state: ModelState) -> str:
    replica = f"replica {state.replica} of " if state.replica else ""
    return f"{replica}revision {state.revision} of {state.name}"
