"""A host with models in virtual time: it does what the planner says, and checks each of its laws while it does."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from penstock.schemas.errors import ModelNotFound
from penstock.schemas.jobs import Priority
from penstock.schemas.models.catalogue import Catalogue, CatalogueEntry, RevisionKey
from penstock.schemas.models.model_state import (
    RESIDENT,
    ModelState,
    RetryRules,
    abandon,
    become_ready,
    enqueue,
    fail,
    may_dispatch,
    start_draining,
    start_loading,
    touch,
    unload,
)
from penstock.schemas.models.placement import (
    Action,
    Demand,
    Device,
    Drain,
    Enqueue,
    Load,
    Need,
    PlacementRules,
    Refuse,
    Unload,
    View,
)
from penstock.schemas.models.planner import plan

RULES = PlacementRules(least_residency=5.0, longest_wait=15.0)
RETRIES = RetryRules(first=1.0, longest=8.0, steady=5.0)
RANKS: dict[Priority, int] = {"high": 0, "normal": 1, "low": 2}


@dataclass
class Waiter:
    key: RevisionKey
    priority: Priority
    arrived: float
    status: Literal["waiting", "active", "served", "refused", "cancelled"] = "waiting"
    replica: int = 0  # that serves it
    reason: str = ""


@dataclass
class Host:
    """`sizes` gives the devices, with commas between them, and the bytes of each model; `capacities` those of the
    devices."""

    sizes: dict[str, tuple[str, int]]
    capacities: dict[str, int]
    now: float = 1_000.0
    catalogue: Catalogue = field(default_factory=Catalogue)
    states: dict[RevisionKey, ModelState] = field(default_factory=dict)
    waiters: list[Waiter] = field(default_factory=list)
    loads: int = 0
    made: int = 0  # incarnations so far

    # What clients and operators do

    def add(self, name: str, **given: object) -> None:
        self.catalogue = self.catalogue.add(
            CatalogueEntry.model_validate({"name": name, "source": f"/models/{name}", **given})
        )

    def ask(self, name: str, priority: Priority = "normal") -> Waiter:
        entry = self.catalogue.find(name)
        self.waiters.append(Waiter(RevisionKey(name, entry.revision), priority, self.now))
        return self.waiters[-1]

    def change_entry(self, name: str, **values: object) -> None:
        found = self.catalogue.find(name)
        changed = found.model_copy(update=values)
        entries = tuple(changed if each is found else each for each in self.catalogue.entries)
        self.catalogue = self.catalogue.model_copy(update={"entries": entries})

    # What workers do

    def end_load(self, key: RevisionKey, ok: bool) -> None:
        entry = self.entry(key)
        before = {other: state for other, state in self.states.items() if other != key}
        if ok:
            self.made += 1
            self.states[key] = become_ready(self.states[key], self.now, incarnations=(f"w{self.made}",))
            if entry is not None and entry.candidate == key.revision:
                self.catalogue = self.catalogue.promote(key.first)
        else:
            self.states[key] = fail(self.states[key], self.now, "the file is broken", RETRIES)
            if entry is not None and entry.candidate == key.revision:
                self.catalogue = self.catalogue.retire(key)
        self.settle()
        if not ok:
            still = {other: state for other, state in self.states.items() if other != key}
            for other, state in before.items():
                if state.status == "ready":
                    has_gone = still[other].status in ("draining", "unloaded")  # for what it had held up
                    # A replica that has gone waits for room again while another of its revision will serve.
                    has_gone |= still[other].status == "queued" and self.is_further(other)
                    assert has_gone or may_dispatch(still[other], state.incarnations[0])
            # Behind a further replica's failure the first one may be queued, or drain: it is loaded again for them.
            if key == key.first and not self.having("loading", "ready", revision=key.first):
                assert not self.waiting(key), "a failed load fails those who wait"
            if entry is not None and key.revision == entry.candidate:
                old = RevisionKey(key.name, entry.revision)
                was_ready = before.get(old, ModelState(name="x")).status == "ready"
                # What the failed load had held up may take its memory now, as if there had been no swap.
                is_for_another = was_ready and any(
                    state.status == "queued" and other.name != key.name and before[old].device in self.devices(other)
                    for other, state in before.items()
                )
                assert not was_ready or still[old].status == "ready" or (is_for_another and not self.waiting(old)), (
                    "a failed swap leaves the old revision serving"
                )

    def dispatch(self, key: RevisionKey) -> None:
        state = self.states[key]
        assert may_dispatch(state, state.incarnations[0])
        for waiter in (waiting := self.waiting(key)):
            waiter.status, waiter.replica = "active", key.replica
        self.states[key] = touch(state, self.now) if waiting else state

    def finish(self, key: RevisionKey) -> None:
        for waiter in (active := self.active(key)):
            waiter.status = "served"
        self.states[key] = touch(self.states[key], self.now) if active else self.states[key]

    def die(self, key: RevisionKey) -> None:
        for waiter in self.active(key):
            waiter.status = "waiting"
        state = self.states[key]
        draining = state.status == "draining"
        self.states[key] = unload(state, self.now) if draining else fail(state, self.now, "it was killed", RETRIES)

    def restart(self) -> None:
        for key, state in self.states.items():
            for waiter in self.active(key):
                waiter.status = "waiting"
            self.states[key] = abandon(state, self.now)

    # What is so

    def entry(self, key: RevisionKey) -> CatalogueEntry | None:
        try:
            found = self.catalogue.find(key.name)
        except ModelNotFound:
            return None
        return found if key.revision in found.sources else None

    def waiting(self, key: RevisionKey) -> list[Waiter]:
        return [waiter for waiter in self.waiters if waiter.key == key.first and waiter.status == "waiting"]

    def active(self, key: RevisionKey) -> list[Waiter]:
        active = [waiter for waiter in self.waiters if waiter.key == key.first and waiter.status == "active"]
        return [waiter for waiter in active if waiter.replica == key.replica]

    def having(
        self, *statuses: str, device: str | None = None, revision: RevisionKey | None = None
    ) -> list[RevisionKey]:
        found = [key for key, state in self.states.items() if state.status in statuses]
        found = [key for key in found if revision in (None, key.first)]
        return sorted(key for key in found if device in (None, self.device(key)))

    def devices(self, key: RevisionKey) -> tuple[str, ...]:
        return tuple(self.sizes[key.name][0].split(","))

    def device(self, key: RevisionKey) -> str:
        """Where it is, or may be: none if it may be at several."""
        devices = self.devices(key)
        return self.states[key].device or (devices[0] if len(devices) == 1 else "")

    def is_further(self, key: RevisionKey) -> bool:
        """Whether another replica serves its revision, or will soon."""
        return any(other != key for other in self.having("loading", "ready", revision=key.first))

    def held(self, device: str) -> int:
        return sum(self.sizes[key.name][1] for key in self.having(*RESIDENT, device=device))

    def is_pinned(self, key: RevisionKey) -> bool:
        entry = self.entry(key)
        return entry is not None and entry.pin and key.revision >= entry.revision

    def _is_candidate(self, key: RevisionKey) -> bool:
        entry = self.entry(key)
        return entry is not None and entry.candidate == key.revision

    def _has_room_beside(self, key: RevisionKey, other: RevisionKey) -> bool:
        """Whether `key` is tried by a swap, and fits beside `other`, which it is to replace."""
        entry = self.entry(key)
        if entry is None or not self._is_candidate(key) or other != RevisionKey(key.name, entry.revision):
            return False
        device, need = self.device(other), self.sizes[key.name][1]
        pinned = [each for each in self.having(*RESIDENT, device=device) if self.is_pinned(each) and each != other]
        return need + sum(self.sizes[each.name][1] for each in (other, *pinned)) <= self.capacities[device]

    def view(self) -> View:
        keys = {RevisionKey(entry.name, number) for entry in self.catalogue.entries for number in entry.sources}
        asked = {waiter.key for waiter in self.waiters if waiter.status == "waiting"}
        demand = {}
        for key in asked:
            priorities = [waiter.priority for waiter in self.waiting(key)]
            demand[key] = Demand(len(priorities), min(priorities, key=lambda each: RANKS[each]))
        return View(
            agent="host",
            catalogue=self.catalogue,
            states=dict(self.states),
            demand=demand,
            needs={
                key: Need(self.devices(key), self.sizes[key.name][1])
                for key in keys | {each.first for each in self.having(*RESIDENT)}
            },
            devices={name: Device(capacity, capacity - self.held(name)) for name, capacity in self.capacities.items()},
            busy={waiter.key._replace(replica=waiter.replica) for waiter in self.waiters if waiter.status == "active"},
        )

    # What the agent does

    def settle(self) -> None:
        """Do what the planner says until it has nothing more to say."""
        for _ in range(100):
            if not (actions := plan(self.view(), RULES, self.now)):
                break
            for action in actions:
                self.do(action)
        else:
            raise AssertionError(f"the planner never rests: {actions}")
        self.check()

    def do(self, action: Action) -> None:
        key = action.key
        state = self.states.get(key, ModelState(**key._asdict()))
        match action:
            case Enqueue():
                self.states[key] = enqueue(state, self.now)
            case Load(device=device):
                self._check_load(key, device)
                self.loads += 1
                self.states[key] = start_loading(state, self.now, agent="host", device=device)
            case Drain(reason=reason, wanted=wanted):
                self._check_drain(key, state, wanted)
                self.states[key] = start_draining(state, self.now, reason)
            case Unload():
                assert not self.active(key), "no worker ends before its requests"
                self.states[key] = unload(state, self.now)
            case Refuse(reason=reason):
                self._check_refusal(key, state, action)
                for waiter in self.waiting(key):
                    waiter.status, waiter.reason = "refused", reason
                if self._is_candidate(key):
                    self.catalogue = self.catalogue.retire(key, reason)
                if state.status == "queued":
                    self.states[key] = unload(state, self.now, reason)

    def _check_load(self, key: RevisionKey, device: str) -> None:
        assert not self.having("loading", device=device), "one load at a time on a device"
        assert self.held(device) + self.sizes[key.name][1] <= self.capacities[device], "it fits"
        others = [other for other in self.having("queued", device=device) if other != key]
        waited = self.now - self.states[key].since
        for other in others:
            if self.now - self.states[other].since >= RULES.longest_wait and self.waiting(other):
                assert waited >= self.now - self.states[other].since, "nothing overtakes what is overdue"

    def _check_drain(self, key: RevisionKey, state: ModelState, wanted: RevisionKey | None) -> None:
        assert not (state.last_used is None and self.waiting(key)), "none goes between ready and the first dispatch"
        assert not self.is_pinned(key) or (wanted and wanted.name == key.name), "pinned stays, for other models"
        if wanted is None:
            assert not self.waiting(key) and not self.active(key), "what is needed stays"
            entry = self.entry(key)
            alike = [self.states[each] for each in self.having("ready", revision=key.first)]
            idle = self.now - max(each.since if each.last_used is None else each.last_used for each in alike)
            dropped = entry is None or key.revision < entry.revision
            assert dropped or (entry is not None and entry.keep_alive is not None and idle >= entry.keep_alive)
            return
        assert self.now - state.since >= RULES.least_residency, "no thrashing"
        assert self.states[wanted].status == "queued" and state.device in self.devices(wanted)
        assert not self.is_further(wanted), "nothing makes room for a further replica"
        entry = self.entry(wanted)
        assert entry is not None
        is_further = any(other < key for other in self.having("ready", revision=key.first))
        assert is_further or not self._has_room_beside(wanted, key), "a swap keeps the old revision where it can"
        device, need = self.device(key), self.sizes[wanted.name][1]
        leaving = sum(self.sizes[other.name][1] for other in self.having("draining", device=device))
        assert self.capacities[device] - self.held(device) + leaving < need, "none goes in vain"
        if self.waiting(key) or self.active(key):
            waited = self.now - self.states[wanted].since
            assert waited >= RULES.longest_wait, "a busy one drains only for an overdue one"

    def _check_refusal(self, key: RevisionKey, state: ModelState, action: Refuse) -> None:
        need = self.sizes[key.name][1]
        assert not self.is_further(key), "one that serves is enough"
        if self.entry(key) is None:
            assert "was removed" in action.reason
        elif "could not be loaded" in action.reason:
            assert state.retry_at is not None and action.retry_after == state.retry_at - self.now > 0
            assert str(state.reason) in action.reason
        else:
            assert f"needs {need:,} bytes" in action.reason and action.elsewhere
            for device in self.devices(key):
                resident = self.having(*RESIDENT, device=device)
                kept = [other for other in resident if self.is_pinned(other) and not self._is_candidate(other)]
                kept = [other for other in kept if other.name != key.name]
                held = sum(self.sizes[other.name][1] for other in kept)
                assert need + held > self.capacities[device], "only what cannot fit is refused"

    def check(self) -> None:
        """What holds whenever the planner rests."""
        for waiter in self.waiters:
            alike = self.having("queued", *RESIDENT, revision=waiter.key)
            if waiter.status == "waiting":
                assert alike, f"lost: {waiter}"
            if waiter.status == "active":
                state = self.states[waiter.key._replace(replica=waiter.replica)]
                assert state.status in ("ready", "draining"), f"cut off: {waiter}, {state}"
        for device in self.capacities:
            self._check_progress(device)

    def _makes_room(self, key: RevisionKey) -> bool:
        return bool(self.waiting(key)) or self.states[key].requested or self._is_candidate(key)

    def _is_overdue(self, key: RevisionKey) -> bool:
        return self._makes_room(key) and self.now - self.states[key].since >= RULES.longest_wait

    def _check_progress(self, device: str) -> None:
        """A queue that could move moves."""
        queued = [key for key in self.having("queued", device=device) if not self.is_further(key)]
        if not queued or self.having("loading", "draining", device=device):
            return
        room = self.capacities[device] - self.held(device)
        for key in sorted(queued, key=lambda each: (not self._is_overdue(each), self.states[each].since)):
            makes_room, is_overdue = self._makes_room(key), self._is_overdue(key)
            evictable = sum(
                self.sizes[other.name][1]
                for other in self.having("ready", device=device)
                if (not self.is_pinned(other) or other.name == key.name)
                and not self._is_candidate(other)
                and not self._has_room_beside(key, other)
                and self.now - self.states[other].since >= RULES.least_residency
                and not (self.states[other].last_used is None and self.waiting(other))
                and (is_overdue or not (self.waiting(other) or self.active(other)))
            )
            assert room + evictable * makes_room < self.sizes[key.name][1], f"{key} could move"
            if is_overdue:
                return  # the others wait for it
