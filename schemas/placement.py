"""The planner: what a host loads and unloads next. Pure: it has no clock, and knows no broker and no process.

- A device loads one revision at a time. All requests for a revision share its load.
- What does not fit waits for others to be unloaded: the least recently used that is neither pinned, nor busy, nor
  waited for. What can never fit is refused at once.
- A revision stays `least_residency` seconds, and until its first dispatch if requests wait for it. Queues of others
  collect meanwhile; one that has waited `longest_wait` is overdue: it comes before all that are not, and busy ones
  drain for it, so that none starves.
- A failed load fails those who wait, and is tried again after a wait that doubles. It changes nothing else.
- A swap loads the new revision beside the old one. Where both cannot be there together, the old one is drained for it
  once it is idle, or the swap is overdue; it is loaded again for the requests that are bound to it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from .catalogue import Catalogue, CatalogueEntry, RevisionKey
from .jobs import Priority
from .model_state import RESIDENT, ModelState, start_draining

_RANKS: Mapping[Priority, int] = {"high": 0, "normal": 1, "low": 2}


@dataclass(frozen=True, slots=True)
class PlacementRules:
    """How long a revision stays loaded at least, and how long another waits before busy ones drain for it; seconds."""

    least_residency: float = 5.0
    longest_wait: float = 15.0


class Demand(NamedTuple):
    """How many requests wait for a revision, and the highest priority among them; those dispatched do not count."""

    waiting: int
    priority: Priority = "normal"


class Device(NamedTuple):
    """`capacity` is what models may take there together, `free` what is free by measurement, both in bytes."""

    capacity: int
    free: int


class Need(NamedTuple):
    """The device on which a revision is to run, and the bytes that it takes there."""

    device: str
    memory: int


@dataclass(frozen=True, slots=True)
class View:
    """What an agent knows as it plans for its host.

    `states` are those of all hosts. `needs` has the revisions that this host could load, and those that it holds.
    `busy` are the revisions with requests that were dispatched, those on their way included, and have not ended.
    """

    agent: str
    catalogue: Catalogue
    states: Mapping[RevisionKey, ModelState]
    demand: Mapping[RevisionKey, Demand]
    needs: Mapping[RevisionKey, Need]
    devices: Mapping[str, Device]
    busy: Collection[RevisionKey] = ()


class Enqueue(NamedTuple):
    key: RevisionKey


class Load(NamedTuple):
    key: RevisionKey
    device: str


class Drain(NamedTuple):
    """`wanted` is the revision that needs the memory, if one does."""

    key: RevisionKey
    reason: str
    wanted: RevisionKey | None = None


class Unload(NamedTuple):
    """End the workers, which are idle; a queued revision has none."""

    key: RevisionKey


class Refuse(NamedTuple):
    """This host cannot serve those who wait for it: fail them, unless another host may; `retry_after` is in seconds.

    If the revision is queued, unload it with this reason.
    """

    key: RevisionKey
    reason: str
    retry_after: float | None = None


Action = Enqueue | Load | Drain | Unload | Refuse


def displacing(model: str) -> str:
    """Why a revision is drained that makes room for this model."""
    return f"{model} needs its memory"


def plan(view: View, rules: PlacementRules, now: float) -> list[Action]:
    """What to do next. Plan again after it is done, and at least once a second, until nothing is left to do."""
    planner = _Planner(view, rules, now)
    return [*planner.release(), *planner.admit(), *planner.load()]  # in this order: see `release`


class _Planner:
    def __init__(self, view: View, rules: PlacementRules, now: float) -> None:
        self._view = view
        self._rules = rules
        self._now = now
        self._entries: dict[RevisionKey, CatalogueEntry] = {
            RevisionKey(entry.name, number): entry for entry in view.catalogue.entries for number in entry.sources
        }
        self._held = {
            key: state for key, state in view.states.items() if state.status in RESIDENT and state.agent == view.agent
        }

    def release(self) -> list[Action]:
        """What can go without anything else wanting its memory, which `load` then counts on."""
        actions: list[Action] = []
        for key, state in list(self._held.items()):
            if state.status == "draining" and key not in self._view.busy:
                actions.append(Unload(key))
            elif state.status == "ready" and not self._in_use(key) and (reason := self._needless(key, state)):
                actions.append(Drain(key, reason))
                self._held[key] = start_draining(state, self._now, reason)
        for key, state in self._view.states.items():
            if state.status == "queued" and not self._wanted(key):
                actions.append(Unload(key))
        return actions

    def admit(self) -> Iterator[Action]:
        """Queue or refuse what is wanted and not loaded."""
        for key in {**dict.fromkeys(self._entries), **dict.fromkeys(self._view.demand)}:
            state = self._state(key)
            waiting = self._waiting(key)
            if state.status in ("queued", *RESIDENT):
                continue
            if key not in self._entries:
                if waiting:
                    yield Refuse(key, f"{key.name} was removed from the models that are served")
            elif not self._wanted(key) or key not in self._view.needs:
                continue
            elif state.status == "failed" and state.retry_at is not None and self._now < state.retry_at:
                if waiting:
                    reason = f"{key.name} could not be loaded: {state.reason}"
                    yield Refuse(key, reason, state.retry_at - self._now)
            elif refusal := self._impossible(key):
                if waiting or self._is_candidate(key):
                    yield refusal
            elif not (state.status == "failed" and self._is_candidate(key)):  # the old revision goes on serving
                yield Enqueue(key)

    def load(self) -> Iterator[Action]:
        for device in self._view.devices:
            if not any(state.status == "loading" for state in self._on(device).values()):
                yield from self._load_on(device)

    def _load_on(self, device: str) -> Iterator[Action]:
        for key in sorted(self._queued_for(device), key=self._rank):
            if refusal := self._impossible(key):
                yield refusal
                continue
            missing = self._view.needs[key].memory - self._room(device)
            if missing <= 0:
                yield Load(key, device)
                return
            missing -= sum(
                self._memory(other) for other, state in self._on(device).items() if state.status == "draining"
            )
            if missing <= 0:
                return
            if victims := self._victims(key, device, missing):
                yield from (Drain(victim, displacing(key.name), key) for victim in victims)
                return
            if self._is_overdue(key):  # a smaller one that fits beside would only delay it further
                return

    def _queued_for(self, device: str) -> list[RevisionKey]:
        return [
            key
            for key, state in self._view.states.items()
            if state.status == "queued" and self._wanted(key)
            if key in self._view.needs and self._view.needs[key].device == device
        ]

    def _rank(self, key: RevisionKey) -> tuple[object, ...]:
        """What is overdue comes first, longest wait first; then swaps; then by priority; last what none waits for."""
        if self._is_overdue(key):
            return (0, 0, -self._waited(key), key)
        demand = self._view.demand.get(key)
        rank = _RANKS[demand.priority] if demand else len(_RANKS)
        rank = -1 if self._is_candidate(key) else rank  # else the revision that made room for it might come first
        return (1, rank, -self._waited(key), key)

    def _waited(self, key: RevisionKey) -> float:
        """Seconds for which it has been queued: its oldest request may have waited through an earlier residency."""
        return self._now - self._state(key).since

    def _is_overdue(self, key: RevisionKey) -> bool:
        return self._may_evict(key) and self._waited(key) >= self._rules.longest_wait

    def _may_evict(self, key: RevisionKey) -> bool:
        """Whether others make room for it: not for what is loaded ahead of any need."""
        return self._waiting(key) or self._state(key).requested or self._is_candidate(key)

    def _victims(self, key: RevisionKey, device: str, missing: int) -> list[RevisionKey]:
        """What to drain for `missing` bytes, least recently used first; nothing if that would not be enough."""
        if not self._may_evict(key):
            return []
        overdue = self._is_overdue(key)
        free = [
            other
            for other, state in self._on(device).items()
            if state.status == "ready"
            and self._now - state.since >= self._rules.least_residency
            and not self._is_kept(other, key)
            and not self._is_candidate(other)  # it is about to become the current revision
            and not (state.last_used is None and self._waiting(other))
            and (overdue or not self._in_use(other))
        ]
        chosen = []
        for other in sorted(free, key=lambda each: (self._in_use(each), self._used(each))):
            if missing <= 0:
                break
            chosen.append(other)
            missing -= self._memory(other)
        if missing > 0:
            return []
        for other in list(chosen):
            if missing + self._memory(other) <= 0:  # those after it are enough
                chosen.remove(other)
                missing += self._memory(other)
        return chosen

    def _impossible(self, key: RevisionKey) -> Refuse | None:
        device, need = self._view.needs[key]
        capacity = self._view.devices[device].capacity
        kept = sum(self._memory(other) for other in self._on(device) if self._is_kept(other, key))
        if need <= capacity - kept:
            return None
        held = f", {kept:,} of them held by models that must stay" if kept else ""
        return Refuse(
            key,
            f"{key.name} needs {need:,} bytes of memory on {device}, where models may take {capacity:,}{held}: choose "
            "a smaller kv_cache_memory or a quantization, or unpin another model",
        )

    def _is_kept(self, other: RevisionKey, key: RevisionKey) -> bool:
        """Whether `other` stays, though `key` needs its memory: a pinned model, or what `key` is to replace."""
        if not self._is_current(other):
            return False
        if other.name != key.name:
            return self._entries[other].pin
        if not self._is_candidate(key):  # a former revision, whose requests must end
            return False
        device, need = self._view.needs[key]
        pinned = sum(self._memory(each) for each in self._on(device) if each != other and self._is_kept(each, key))
        return need + self._memory(other) + pinned <= self._view.devices[device].capacity

    def _needless(self, key: RevisionKey, state: ModelState) -> str:
        """Why an idle revision need not stay loaded; empty if it may."""
        entry = self._entries.get(key)
        if entry is None:
            return "it was removed from the models that are served"
        if key.revision < entry.revision:  # those who validate requests learn of a newer one a little later
            is_over = self._now - self._used(key) >= self._rules.least_residency
            return "a newer revision serves instead" if is_over else ""
        if entry.pin or entry.keep_alive is None or self._is_candidate(key):
            return ""
        limit = entry.keep_alive if state.last_used is not None else max(entry.keep_alive, self._rules.least_residency)
        return "it was idle for longer than its keep_alive" if self._now - self._used(key) >= limit else ""

    def _wanted(self, key: RevisionKey) -> bool:
        entry = self._entries.get(key)
        if entry is None:
            return False
        state = self._state(key)
        ahead = entry.preload and key.revision == entry.revision and not state.loads
        return self._waiting(key) or state.requested or self._is_candidate(key) or ahead

    def _is_candidate(self, key: RevisionKey) -> bool:
        return key in self._entries and key.revision == self._entries[key].candidate

    def _is_current(self, key: RevisionKey) -> bool:
        return key in self._entries and key.revision == self._entries[key].revision

    def _waiting(self, key: RevisionKey) -> bool:
        demand = self._view.demand.get(key)
        return demand is not None and demand.waiting > 0

    def _in_use(self, key: RevisionKey) -> bool:
        return key in self._view.busy or self._waiting(key)

    def _used(self, key: RevisionKey) -> float:
        state = self._state(key)
        return state.since if state.last_used is None else state.last_used

    def _state(self, key: RevisionKey) -> ModelState:
        return self._view.states.get(key) or ModelState(name=key.name, revision=key.revision)

    def _on(self, device: str) -> dict[RevisionKey, ModelState]:
        return {key: state for key, state in self._held.items() if state.device == device}

    def _memory(self, key: RevisionKey) -> int:
        return self._view.needs[key].memory if key in self._view.needs else 0

    def _room(self, device: str) -> int:
        """Bytes for one more; workers take their keys and values late, so what they may still take is not free."""
        capacity, free = self._view.devices[device]
        return min(free, capacity - sum(map(self._memory, self._on(device))))
