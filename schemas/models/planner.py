"""The planner: what a host loads and unloads next. Pure: it has no clock, and knows no broker and no process.

- A device loads one revision at a time. All requests for a revision share its load.
- What does not fit waits for others to be unloaded: the least recently used that is neither pinned, nor busy, nor
  waited for. What can never fit is refused at once.
- A revision stays `least_residency` seconds, and until its first dispatch if requests wait for it. Queues of others
  collect meanwhile; one that has waited `longest_wait` is overdue: it comes before all that are not, and busy ones
  drain for it, so that none starves.
- A failed load fails those who wait, and is tried again after a wait that doubles. It changes nothing else.
- A model with `preload` is loaded unasked; so is one with `preload` or `pin` whose worker or host has ended unasked.
- A swap loads the new revision beside the old one. Where both cannot be there together, the old one is drained for it
  once it is idle, or the swap is overdue; it is loaded again for the requests that are bound to it.
- Requests have the first replica of a model loaded. The others follow where there is room: nothing makes room for
  them, and they go first. A host that has one leaves the next to others for `spread` seconds. While one serves, no
  request is refused because of another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ..jobs import Priority
from .catalogue import CatalogueEntry, RevisionKey
from .model_state import RESIDENT, ModelState, start_draining
from .placement import Action, Drain, Enqueue, Load, PlacementRules, Refuse, Unload, View, displacing

_RANKS: Mapping[Priority, int] = {"high": 0, "normal": 1, "low": 2}


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
            RevisionKey(entry.name, number, replica): entry
            for entry in view.catalogue.entries
            for number in entry.sources
            for replica in range(entry.num_replicas if number <= entry.revision else 1)
        }
        self._states = dict(view.states)  # and what `release` changes
        self._replicas: dict[RevisionKey, list[RevisionKey]] = {}  # of each revision, those that have a state
        for key in view.states:
            self._replicas.setdefault(key.first, []).append(key)

    def release(self) -> list[Action]:
        """What can go without anything else wanting its memory, which `load` then counts on."""
        actions: list[Action] = []
        for key, state in self._held().items():
            if state.status == "draining" and key not in self._view.busy:
                actions.append(Unload(key))
            elif state.status == "ready" and not self._in_use(key) and (reason := self._needless(key)):
                actions.append(Drain(key, reason))
                self._states[key] = start_draining(state, self._now, reason)
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
                if waiting and not self._is_spare(key):
                    yield Refuse(key, f"{key.name} was removed from the models that are served")
            elif not self._wanted(key) or key.first not in self._view.needs:
                continue
            elif state.status == "failed" and state.retry_at is not None and self._now < state.retry_at:
                if waiting and not self._is_spare(key):
                    reason = f"{key.name} could not be loaded: {state.reason}"
                    yield Refuse(key, reason, state.retry_at - self._now)
            elif refusal := self._impossible(key, self._device(key)):
                if (waiting and not self._is_spare(key)) or self._is_candidate(key):
                    yield refusal
            elif not (state.status == "failed" and self._is_candidate(key)):  # the old revision goes on serving
                yield Enqueue(key)

    def load(self) -> Iterator[Action]:
        queued: dict[str, list[RevisionKey]] = {device: [] for device in self._view.devices}
        taken = dict.fromkeys(self._view.devices, 0)
        wanted = [
            key
            for key, state in self._view.states.items()
            if state.status == "queued" and self._wanted(key) and key.first in self._view.needs
        ]
        for key in sorted(wanted, key=self._rank):
            device = self._device(key, taken)
            queued[device].append(key)
            taken[device] += self._memory(key)
        for device, keys in queued.items():
            if not any(state.status == "loading" for state in self._on(device).values()):
                yield from self._load_on(device, keys)

    def _load_on(self, device: str, queued: list[RevisionKey]) -> Iterator[Action]:
        for key in queued:
            if refusal := self._impossible(key, device):
                if not self._is_spare(key):
                    yield refusal
                continue
            if self._is_for_others(key):
                continue
            missing = self._memory(key) - self._room(device)
            if missing <= 0:
                yield Load(key, device)
                return
            missing -= self._leaving(device)
            if missing <= 0:
                return
            if victims := self._victims(key, device, missing):
                yield from (Drain(victim, displacing(key.name), key) for victim in victims)
                return
            if self._is_overdue(key):  # a smaller one that fits beside would only delay it further
                return

    def _device(self, key: RevisionKey, taken: Mapping[str, int] | None = None) -> str:
        """The best device for a replica, of those that it may have: one where it can ever fit, then one where it fits
        now beside those that have `taken` some, or soon; then one without another of its kind; then the emptiest."""

        def rank(device: str) -> tuple[object, ...]:
            missing = self._memory(key) - self._room(device) + (taken or {}).get(device, 0)
            alike = sum(other.first == key.first for other in self._on(device))
            impossible, soon = self._impossible(key, device) is not None, missing <= self._leaving(device)
            return impossible, missing > 0, not soon and not self._victims(key, device, missing), alike, missing

        devices = self._view.needs[key.first].devices
        return devices[0] if len(devices) == 1 else min(devices, key=rank)

    def _is_for_others(self, key: RevisionKey) -> bool:
        """Whether to leave a replica to other hosts for now, as this one has another of its model."""
        if not self._view.has_peers or not self._is_spare(key) or self._waited(key) >= self._rules.spread:
            return False
        return any(other.first == key.first for other in self._held())

    def _rank(self, key: RevisionKey) -> tuple[object, ...]:
        """What is overdue comes first, longest wait first; then swaps; then by priority; last what none waits for."""
        if self._is_overdue(key):
            return (0, 0, -self._waited(key), key)
        demand = None if self._is_spare(key) else self._view.demand.get(key.first)
        rank = _RANKS[demand.priority] if demand else len(_RANKS)
        rank = -1 if self._is_candidate(key) else rank  # else the revision that made room for it might come first
        return (1, rank, -self._waited(key), key)

    def _waited(self, key: RevisionKey) -> float:
        """Seconds for which it has been queued: its oldest request may have waited through an earlier residency."""
        return self._now - self._state(key).since

    def _is_overdue(self, key: RevisionKey) -> bool:
        return self._may_evict(key) and self._waited(key) >= self._rules.longest_wait

    def _may_evict(self, key: RevisionKey) -> bool:
        """Whether others make room for it: not for what is loaded ahead of any need, or beside another of its kind."""
        needed = self._waiting(key) or self._state(key).requested
        return self._is_candidate(key) or (needed and not self._is_spare(key))

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
        for other in sorted(free, key=lambda each: (self._in_use(each), not self._is_spare(each), self._used(each))):
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

    def _impossible(self, key: RevisionKey, device: str) -> Refuse | None:
        need, capacity = self._memory(key), self._view.devices[device].capacity
        kept = sum(self._memory(other) for other in self._on(device) if self._is_kept(other, key))
        if need <= capacity - kept:
            return None
        held = f", {kept:,} of them held by models that must stay" if kept else ""
        return Refuse(
            key,
            f"{key.name} needs {need:,} bytes of memory on {device}, where models may take {capacity:,}{held}: choose "
            "a smaller kv_cache_memory or a quantization, or unpin another model",
            elsewhere=True,
        )

    def _is_kept(self, other: RevisionKey, key: RevisionKey) -> bool:
        """Whether `other` stays, though `key` needs its memory: a pinned model, or what `key` is to replace."""
        if not self._is_current(other):
            return False
        if other.name != key.name:
            return self._entries[other].pin
        if not self._is_candidate(key) or self._is_spare(other):  # it is for a former revision, whose requests must end
            return False
        device = self._states[other].device
        assert device is not None, "what is resident has a device"
        pinned = sum(self._memory(each) for each in self._on(device) if each != other and self._is_kept(each, key))
        return self._memory(key) + self._memory(other) + pinned <= self._view.devices[device].capacity

    def _needless(self, key: RevisionKey) -> str:
        """Why an idle replica need not stay loaded; empty if it may."""
        entry = self._entries.get(key)
        if entry is None:
            is_left = key.first in self._entries
            return "fewer replicas are wanted" if is_left else "it was removed from the models that are served"
        alike = [each for each in self._replicas[key.first] if self._view.states[each].status == "ready"]
        idle = self._now - max(map(self._used, alike))
        if key.revision < entry.revision:  # those who validate requests learn of a newer one a little later
            return "a newer revision serves instead" if idle >= self._rules.least_residency else ""
        if entry.pin or entry.keep_alive is None or self._is_candidate(key):
            return ""
        if any(self._in_use(each) for each in self._replicas[key.first]):
            return ""
        was_used = any(self._view.states[each].last_used is not None for each in alike)
        limit = entry.keep_alive if was_used else max(entry.keep_alive, self._rules.least_residency)
        return "it was idle for longer than its keep_alive" if idle >= limit else ""

    def _wanted(self, key: RevisionKey) -> bool:
        entry = self._entries.get(key)
        if entry is None:
            return False
        state = self._state(key)
        if state.requested or self._is_candidate(key):
            return True
        if self._is_spare(key):
            return self._is_current(key)
        is_first = entry.preload and not state.loads
        returns = (entry.preload or entry.pin) and state.loads > 0 and state.lost
        ahead = self._is_current(key) and (is_first or returns)
        return key.replica == 0 and (self._waiting(key) or ahead)

    def _is_spare(self, key: RevisionKey) -> bool:
        """Whether another replica of its revision serves, or will soon, so that nobody depends on this one."""
        others = {each: self._states[each].status for each in self._replicas.get(key.first, ()) if each != key}
        match self._state(key).status:
            case "ready":
                return any(status == "ready" and each < key for each, status in others.items())
            case "draining":
                return "ready" in others.values()
            case _:
                return any(status in ("loading", "ready") for status in others.values())

    def _is_candidate(self, key: RevisionKey) -> bool:
        return key in self._entries and key.revision == self._entries[key].candidate

    def _is_current(self, key: RevisionKey) -> bool:
        return key in self._entries and key.revision == self._entries[key].revision

    def _waiting(self, key: RevisionKey) -> bool:
        demand = self._view.demand.get(key.first)
        return demand is not None and demand.waiting > 0

    def _in_use(self, key: RevisionKey) -> bool:
        return key in self._view.busy or self._waiting(key)

    def _used(self, key: RevisionKey) -> float:
        state = self._view.states[key]
        return state.since if state.last_used is None else state.last_used

    def _state(self, key: RevisionKey) -> ModelState:
        return self._states.get(key) or ModelState(name=key.name, revision=key.revision, replica=key.replica)

    def _held(self) -> dict[RevisionKey, ModelState]:
        """What takes memory on this host."""
        return {
            key: state
            for key, state in self._states.items()
            if state.status in RESIDENT and state.agent == self._view.agent
        }

    def _on(self, device: str) -> dict[RevisionKey, ModelState]:
        return {key: state for key, state in self._held().items() if state.device == device}

    def _memory(self, key: RevisionKey) -> int:
        need = self._view.needs.get(key.first)
        return need.memory if need else 0

    def _leaving(self, device: str) -> int:
        """Bytes of what drains."""
        return sum(self._memory(key) for key, state in self._on(device).items() if state.status == "draining")

    def _room(self, device: str) -> int:
        """Bytes for one more; workers take their keys and values late, so what they may still take is not free."""
        capacity, free = self._view.devices[device]
        return min(free, capacity - sum(map(self._memory, self._on(device))))
