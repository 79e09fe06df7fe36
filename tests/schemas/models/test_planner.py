"""The planner's laws: in any order of requests, loads, deaths, swaps and time, and one by one."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from inspect import isfunction

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from model_host import RETRIES, RULES, Host
from walk_models import COMMANDS

from penstock.schemas.jobs import Priority
from penstock.schemas.models.catalogue import RevisionKey
from penstock.schemas.models.model_state import RESIDENT, ModelState, become_ready, enqueue, fail, start_draining, touch
from penstock.schemas.models.placement import Device, Load, Refuse
from penstock.schemas.models.planner import plan

SIZES = {"a": ("cpu", 4), "b": ("cpu", 4), "c": ("cpu", 5), "d": ("cpu", 2), "huge": ("cpu", 11), "g": ("gpu", 3)}
SIZES |= {"h": ("gpu", 2), "r": ("gpu,gpu2", 2)}
CAPACITIES = {"cpu": 8, "gpu": 4, "gpu2": 3}
GIVEN: dict[str, dict[str, object]] = {"r": {"device": "gpu,gpu2"}}  # so that it has two replicas
MODELS = st.sampled_from(sorted(SIZES))
PRIORITIES: st.SearchStrategy[Priority] = st.sampled_from(["high", "normal", "low"])


class Models(RuleBasedStateMachine):
    """One host with three devices and eight models, of which one fits nowhere, and one has two replicas."""

    def __init__(self) -> None:
        super().__init__()
        self.host = Host(SIZES, CAPACITIES)

    @initialize(pinned=st.booleans(), preload=st.booleans(), keep_alive=st.sampled_from([None, 0.0, 3.0, 20.0]))
    def begin(self, pinned: bool, preload: bool, keep_alive: float | None) -> None:
        self.host.add("a", pin=pinned)
        self.host.add("b", preload=preload)
        self.host.add("c", keep_alive=keep_alive)
        for name in ("d", "huge", "g", "h", "r"):
            self.host.add(name, **GIVEN.get(name, {}))
        self.host.settle()

    @rule(asked=st.lists(st.tuples(MODELS, PRIORITIES), min_size=1, max_size=5))
    def ask(self, asked: list[tuple[str, Priority]]) -> None:
        for name, priority in asked:
            if any(entry.name == name for entry in self.host.catalogue.entries):
                self.host.ask(name, priority)
                self.host.settle()

    @precondition(lambda self: self.host.having("loading"))
    @rule(data=st.data(), ok=st.sampled_from([True, True, False]))
    def end_load(self, data: st.DataObject, ok: bool) -> None:
        self.host.end_load(data.draw(st.sampled_from(self.host.having("loading"))), ok)
        self.host.settle()

    @precondition(lambda self: self.host.having("ready"))
    @rule(data=st.data())
    def dispatch(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(self.host.having("ready")))
        if self.host.waiting(key):
            self.host.dispatch(key)
            self.host.settle()

    @precondition(lambda self: self.host.having("ready", "draining"))
    @rule(data=st.data(), fate=st.sampled_from(["finish", "finish", "die"]))
    def end_work(self, data: st.DataObject, fate: str) -> None:
        key = data.draw(st.sampled_from(self.host.having("ready", "draining")))
        self.host.finish(key) if fate == "finish" else self.host.die(key)
        self.host.settle()

    @rule(seconds=st.sampled_from([0.5, 2.0, 5.0, 16.0, 16.0]))
    def wait(self, seconds: float) -> None:
        self.host.now += seconds
        self.host.settle()

    @precondition(lambda self: any(waiter.status == "waiting" for waiter in self.host.waiters))
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        waiting = [waiter for waiter in self.host.waiters if waiter.status == "waiting"]
        data.draw(st.sampled_from(waiting)).status = "cancelled"
        self.host.settle()

    @rule(name=MODELS)
    def swap(self, name: str) -> None:
        entry = next((entry for entry in self.host.catalogue.entries if entry.name == name), None)
        if entry is not None and entry.candidate is None:
            self.host.catalogue = self.host.catalogue.swap(name, "/models/new")
            self.host.settle()

    @rule(name=MODELS)
    def remove_or_add(self, name: str) -> None:
        if any(entry.name == name for entry in self.host.catalogue.entries):
            self.host.catalogue = self.host.catalogue.remove(name)
        else:
            self.host.add(name, **GIVEN.get(name, {}))
        self.host.settle()

    @rule(name=MODELS)
    def pin(self, name: str) -> None:
        for entry in self.host.catalogue.entries:
            if entry.name == name:
                self.host.change_entry(name, pin=not entry.pin)
        self.host.settle()

    @precondition(lambda self: self.host.having("unloaded", "ready"))
    @rule(data=st.data())
    def operate(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(self.host.having("unloaded", "ready")))
        state = self.host.states[key]
        if state.status == "unloaded" and key.replica:  # none asks for a further one
            return
        if state.status == "unloaded":
            self.host.states[key] = enqueue(state, self.host.now, requested=True)
        else:
            self.host.states[key] = start_draining(state, self.host.now, "asked")
        self.host.settle()

    @rule()
    def restart(self) -> None:
        self.host.restart()
        self.host.settle()

    def teardown(self) -> None:
        """Whatever has happened: every request ends, though one model on each device is asked for all the time."""
        host = self.host
        host.settle()
        begun, waiting = host.now, [each for each in host.waiters if each.status in ("waiting", "active")]
        for entry in host.catalogue.entries:
            if entry.candidate is not None and RevisionKey(entry.name, entry.candidate) not in host.states:
                host.catalogue = host.catalogue.retire(RevisionKey(entry.name, entry.candidate))
        while any(each.status in ("waiting", "active") for each in waiting):
            assert host.now - begun < 20 * (RULES.longest_wait + RULES.least_residency), waiting
            for name in ("a", "g"):
                if any(entry.name == name for entry in host.catalogue.entries):
                    host.ask(name, "high")
            host.settle()
            for key in host.having("loading"):
                host.end_load(key, ok=True)
            for key in host.having("ready"):
                host.dispatch(key)
            host.now += 1.0
            host.settle()
            for key in host.having("ready", "draining"):
                host.finish(key)
            host.settle()


Models.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None, report_multiple_bugs=False)
TestModels = Models.TestCase


def test_the_commands_are_those_that_real_processes_get() -> None:
    """`deploy/walk_models.py` draws the same; there hosts and workers do the rest by themselves, and kills end them."""
    drawn = {name for name, each in vars(Models).items() if isfunction(each) and not name.startswith("_")}
    assert drawn - {"begin", "end_load", "dispatch", "end_work", "teardown"} == COMMANDS.keys() - {"kill"}


def host_of(capacity: int, **given: dict[str, object]) -> Host:
    """One device, on which every model takes 4 bytes."""
    host = Host({name: ("cpu", 4) for name in given}, {"cpu": capacity})
    for name, values in given.items():
        host.add(name, **values)
    host.settle()
    return host


def run(host: Host, until: Callable[[], bool], *, load: float = 3.0, work: float = 1.0, limit: float = 600.0) -> None:
    """Let loads take `load` seconds and requests `work`, in virtual time."""
    end = host.now + limit
    while not until():
        assert host.now < end, host.states
        for key in host.having("ready"):
            host.dispatch(key)
        host.now += work
        for key in host.having("ready", "draining"):
            host.finish(key)
        host.settle()
        for key in host.having("loading"):
            if host.now - host.states[key].since >= load:
                host.end_load(key, ok=True)


@pytest.mark.parametrize("pause", [0.0, 0.1])
def test_random_requests_for_four_models_cause_few_switches(pause: float) -> None:
    draw = random.Random(7)
    host = host_of(8, a={}, b={}, c={}, d={})
    for _ in range(200):
        host.ask(draw.choice("abcd"), draw.choice(["high", "normal", "low"]))
        host.settle()
        if pause:
            run(host, lambda begun=host.now: host.now > begun, work=pause)  # type: ignore[misc]
    run(host, lambda: all(waiter.status == "served" for waiter in host.waiters))
    assert host.loads < 20 if pause else host.loads == 4


def test_the_least_recently_used_goes() -> None:
    host = host_of(8, a={}, b={}, c={})
    for name in ("a", "b", "a"):
        waiter = host.ask(name)
        host.settle()
        run(host, lambda waiter=waiter: waiter.status == "served")  # type: ignore[misc]
    host.now += RULES.least_residency
    host.ask("c")
    host.settle()
    assert host.having("loading", "ready") == [RevisionKey("a", 1), RevisionKey("c", 1)]


def test_a_swap_pushes_out_another_model_before_the_one_that_it_replaces() -> None:
    """Though that one was used earlier: it serves until the new revision does."""
    host = host_of(8, a={}, b={})
    for name in "ab":
        waiter = host.ask(name)
        host.settle()
        run(host, lambda waiter=waiter: waiter.status == "served")  # type: ignore[misc]
    host.now += RULES.least_residency
    host.catalogue = host.catalogue.swap("a", "/models/new")
    host.settle()
    assert host.having("ready") == [RevisionKey("a", 1)] and host.having("loading") == [RevisionKey("a", 2)]


def test_a_small_model_does_not_push_out_two() -> None:
    host = Host({"a": ("cpu", 2), "b": ("cpu", 5), "c": ("cpu", 5)}, {"cpu": 8})
    for name in "abc":
        host.add(name)
    for name in "ab":
        host.ask(name)
        host.settle()
        run(host, lambda name=name: bool(host.having("ready")) and host.waiters[-1].status == "served")  # type: ignore[misc]
    host.now += RULES.least_residency
    host.ask("c")
    host.settle()
    assert host.having("ready") == [RevisionKey("a", 1)], "a was used before b, but b alone makes room"


def test_preload_fills_free_room_only() -> None:
    host = host_of(8, a={"preload": True}, b={"preload": True}, c={"preload": True})
    run(host, lambda: len(host.having("ready")) == 2)
    host.now += 100.0
    host.settle()
    assert host.having("ready") == [RevisionKey("a", 1), RevisionKey("b", 1)]
    assert host.loads == 2
    host.ask("c")
    host.settle()
    assert host.having("loading") == [RevisionKey("c", 1)]
    run(host, lambda: host.waiters[-1].status == "served")
    host.now += 100.0
    host.settle()
    host.states[RevisionKey("c", 1)] = start_draining(host.states[RevisionKey("c", 1)], host.now, "asked")
    host.settle()
    assert len(host.having("ready")) == 1 and host.loads == 3, "what made room once is not preloaded again"


def test_what_is_pinned_or_preloaded_returns_after_its_worker_or_host_has_ended() -> None:
    host = host_of(13, a={"pin": True}, b={"preload": True}, c={})
    for name in "ac":
        host.ask(name)
    host.settle()
    run(host, lambda: len(host.having("ready")) == 3 and all(waiter.status == "served" for waiter in host.waiters))
    host.now += RETRIES.steady
    for name in "abc":
        host.die(RevisionKey(name, 1))
    host.settle()
    run(host, lambda: len(host.having("ready")) == 2)
    host.restart()
    host.restart()  # before any could be loaded again
    host.settle()
    run(host, lambda: len(host.having("ready")) == 2)
    assert [key.name for key in host.having("ready")] == ["a", "b"]
    for name in "ab":
        key = RevisionKey(name, 1)
        host.states[key] = start_draining(host.states[key], host.now, "asked")
    host.settle()
    assert not host.having("ready", "loading", "queued"), "what was unloaded on purpose stays so"
    host.restart()
    host.settle()
    assert not host.having("ready", "loading", "queued")


def test_what_others_hold_is_not_free() -> None:
    host = host_of(8, a={})
    host.ask("a")
    host.settle()
    key = RevisionKey("a", 1)
    host.states[key] = enqueue(host.states[key].model_copy(update={"status": "unloaded"}), host.now)
    view = host.view()
    device = view.devices["cpu"]
    assert plan(view, RULES, host.now) == [Load(key, "cpu")]
    short = {"cpu": device._replace(free=3)}
    assert plan(replace(view, devices=short), RULES, host.now) == []


def test_each_host_plans_for_its_own_devices() -> None:
    host = host_of(4, a={}, b={})
    host.ask("a")
    host.settle()
    run(host, lambda: bool(host.having("ready")))
    for name in "ab":
        host.ask(name)
    host.settle()
    elsewhere = replace(host.view(), agent="other", devices={"cpu": Device(4, 4)})
    assert plan(host.view(), RULES, host.now) == []
    assert plan(elsewhere, RULES, host.now) == [Load(RevisionKey("b", 1), "cpu")], "a serves there, b does not"


def test_a_failed_swap_is_not_tried_again() -> None:
    host = host_of(8, a={})
    host.catalogue = host.catalogue.swap("a", "/models/new")
    host.settle()
    (key,) = host.having("loading")
    assert key == RevisionKey("a", 2)
    host.states[key] = fail(host.states[key], host.now, "the file is broken", RETRIES)
    assert plan(host.view(), RULES, host.now + 1_000.0) == []


def test_a_revision_that_is_being_tried_stays() -> None:
    host = host_of(4, a={}, b={})
    host.catalogue = host.catalogue.swap("a", "/models/new")
    host.settle()
    key = RevisionKey("a", 2)
    host.states[key] = become_ready(host.states[key], host.now, incarnations=("w1",))  # and is not promoted yet
    host.ask("b")
    host.settle()
    host.now += 100.0
    host.settle()
    assert host.having("ready") == [key]
    host.catalogue = host.catalogue.promote(key)
    host.settle()
    assert host.having("loading") == [RevisionKey("b", 1)]


def test_what_is_ready_stays_for_its_first_request() -> None:
    host = host_of(4, a={}, b={})
    for name in "ab":
        host.ask(name)
        host.settle()
    host.end_load(RevisionKey("a", 1), ok=True)
    host.now += 100.0
    host.settle()
    assert host.having("ready") == [RevisionKey("a", 1)], "b is overdue, but a has served nothing yet"
    host.dispatch(RevisionKey("a", 1))
    host.settle()
    assert host.having("draining") == [RevisionKey("a", 1)]


def test_nothing_starves_behind_a_model_that_is_always_asked_for() -> None:
    host = host_of(4, a={}, b={})
    first = host.ask("a")
    host.settle()
    run(host, lambda: first.status == "served")
    waiter = host.ask("b")
    begun = host.now
    while waiter.status != "served":
        assert host.now - begun < RULES.longest_wait + 5.0
        for key in host.having("ready"):
            host.dispatch(key)
        host.ask("a", "high")  # one always waits as another ends
        host.now += 1.0
        for key in host.having("ready", "draining"):
            host.finish(key)
        host.settle()
        for key in host.having("loading"):
            host.end_load(key, ok=True)
    assert host.now - begun >= RULES.longest_wait


def test_memory_that_becomes_free_is_kept_for_what_comes_first() -> None:
    host = Host({"a": ("cpu", 4), "b": ("cpu", 5), "c": ("cpu", 2)}, {"cpu": 8})
    for name in "abc":
        host.add(name)
    first = host.ask("a")
    host.settle()
    run(host, lambda: bool(host.having("ready")))
    key = RevisionKey("a", 1)
    host.dispatch(key)
    host.states[key] = start_draining(host.states[key], host.now, "asked")
    host.ask("b", "high")
    host.ask("c", "low")
    host.settle()
    assert not host.having("loading")
    host.finish(key)
    host.settle()
    assert first.status == "served" and host.having("loading") == [RevisionKey("b", 1)]


def test_a_small_model_does_not_overtake_an_overdue_one() -> None:
    host = Host({"a": ("cpu", 4), "b": ("cpu", 5), "c": ("cpu", 2)}, {"cpu": 8})
    for name in "abc":
        host.add(name)
    host.ask("a")
    host.settle()
    host.ask("b")
    host.settle()
    host.now += RULES.longest_wait
    host.end_load(RevisionKey("a", 1), ok=True)
    host.ask("c")
    host.settle()
    assert host.having("queued") == [RevisionKey("b", 1), RevisionKey("c", 1)], "a may not go yet, and c must wait"


def test_a_model_that_never_fits_names_both_numbers() -> None:
    host = host_of(6, a={"pin": True}, b={})
    first = host.ask("a")
    host.settle()
    run(host, lambda: first.status == "served")
    second = host.ask("b")
    host.settle()
    assert second.reason.startswith(
        "b needs 4 bytes of memory on cpu, where models may take 6, 4 of them held by models that must stay: choose"
    )


@pytest.mark.parametrize(("keep_alive", "idle"), [(0.0, 0.0), (3.0, 3.0), (60.0, 60.0)])
def test_an_idle_model_is_unloaded_after_its_keep_alive(keep_alive: float, idle: float) -> None:
    host = host_of(8, a={"keep_alive": keep_alive})
    waiter = host.ask("a")
    host.settle()
    run(host, lambda: bool(host.having("ready")))
    host.dispatch(RevisionKey("a", 1))
    host.now += 100.0
    host.settle()
    assert host.having("ready"), "it is busy"
    host.finish(RevisionKey("a", 1))
    host.now += idle - 0.1 if idle else 0.0
    host.settle()
    assert bool(host.having("ready")) == (idle > 0)
    host.now += 0.1
    host.settle()
    assert waiter.status == "served" and not host.having(*RESIDENT)
    assert host.states[RevisionKey("a", 1)].reason == "it was idle for longer than its keep_alive"


def test_a_model_loaded_for_an_operator_stays_a_while() -> None:
    host = host_of(8, a={"keep_alive": 0.0})
    key = RevisionKey("a", 1)
    host.states[key] = enqueue(ModelState(name="a"), host.now, requested=True)
    host.settle()
    host.end_load(key, ok=True)
    assert host.having("ready") == [key]
    host.now += RULES.least_residency
    host.settle()
    assert not host.having(*RESIDENT)


def test_a_high_priority_comes_first_until_others_are_overdue() -> None:
    host = host_of(4, a={}, b={}, c={})
    host.ask("a")
    host.settle()  # loading
    host.now += 1.0
    host.ask("b", "low")
    host.settle()
    host.now += 1.0
    host.ask("c", "high")
    host.settle()
    order: list[str] = []

    def seen() -> bool:
        order.extend(key.name for key in host.having("ready") if key.name not in order)
        return len(order) == 3

    run(host, seen)
    assert order == ["a", "c", "b"]


@pytest.mark.parametrize("ok", [True, False])
def test_a_swap_without_room_beside_the_old_revision_takes_turns_with_it(ok: bool) -> None:
    host = host_of(4, a={"pin": True})
    old, new = RevisionKey("a", 1), RevisionKey("a", 2)
    host.ask("a")
    host.settle()
    run(host, lambda: host.waiters[-1].status == "served")
    host.catalogue = host.catalogue.swap("a", "/models/new")
    host.settle()
    while host.having("ready"):
        assert host.now - host.states[old].since <= RULES.least_residency
        host.now += 1.0
        host.settle()
    assert host.having("loading") == [new]
    waiter = host.ask("a")  # of the old one, which still is the current one
    host.settle()
    host.end_load(new, ok=ok)
    run(host, lambda: waiter.status == "served")
    assert waiter.key == old
    later = host.ask("a")
    host.settle()
    run(host, lambda: later.status == "served")
    assert later.key == (new if ok else old)


def test_a_swap_that_cannot_fit_at_all_leaves_the_old_revision_loaded() -> None:
    host = Host({"a": ("cpu", 4), "b": ("cpu", 5)}, {"cpu": 9})
    for name in "ab":
        host.add(name, pin=True)
        host.ask(name)
        host.settle()
        run(host, lambda: host.waiters[-1].status == "served")
    host.sizes["a"] = ("cpu", 6)  # of what it is to be swapped to
    host.catalogue = host.catalogue.swap("a", "/models/larger")
    host.settle()
    assert host.having("ready") == [RevisionKey("a", 1), RevisionKey("b", 1)]
    failed = host.catalogue.find("a").failed_swap
    assert failed is not None and failed.reason.startswith("a needs 6 bytes of memory on cpu")


def test_a_former_revision_stays_until_all_know_the_newer_one() -> None:
    host = host_of(8, a={})
    host.ask("a")
    host.settle()
    run(host, lambda: host.waiters[-1].status == "served")
    host.catalogue = host.catalogue.swap("a", "/models/new")
    host.settle()
    host.states[RevisionKey("a", 1)] = touch(host.states[RevisionKey("a", 1)], host.now)  # as it is replaced
    host.end_load(RevisionKey("a", 2), ok=True)
    assert host.having("ready") == [RevisionKey("a", 1), RevisionKey("a", 2)]
    host.now += RULES.least_residency
    host.settle()
    assert host.having("ready") == [RevisionKey("a", 2)]


def replicated(capacities: dict[str, int], **given: object) -> Host:
    """The model `a` with two replicas of 4 bytes, and the model `b` on `one`."""
    host = Host({"a": ("one,two", 4), "b": ("one", 4)}, capacities)
    host.add("a", **{"device": "one,two"} | given)
    host.add("b")
    host.settle()
    return host


FIRST, SECOND = RevisionKey("a", 1), RevisionKey("a", 1, 1)


def test_replicas_are_on_as_many_devices_as_they_can() -> None:
    host = replicated({"one": 8, "two": 8}, replicas=3)
    host.ask("a")
    host.settle()
    run(host, lambda: len(host.having("ready")) == 3)
    assert sorted(state.device or "" for state in host.states.values()) == ["one", "one", "two"]


def test_the_emptiest_device_is_chosen() -> None:
    host = Host({"a": ("one,two", 4), "b": ("one,two", 4)}, {"one": 8, "two": 9})
    for name in "ab":
        host.add(name)
        host.ask(name)
        host.settle()
    assert [host.states[RevisionKey(name, 1)].device for name in "ab"] == ["two", "one"]


def test_nothing_makes_room_for_a_further_replica_and_it_goes_first() -> None:
    host = replicated({"one": 4, "two": 4})
    host.ask("b")
    host.settle()
    run(host, lambda: host.waiters[-1].status == "served")
    host.ask("a")
    host.settle()
    run(host, lambda: host.waiters[-1].status == "served")
    host.now += 100.0
    host.settle()
    assert host.having("ready") == [FIRST, RevisionKey("b", 1)] and host.having("queued") == [SECOND]
    assert host.states[FIRST].device == "two"
    host.states[RevisionKey("b", 1)] = start_draining(host.states[RevisionKey("b", 1)], host.now, "asked")
    host.settle()
    run(host, lambda: SECOND in host.having("ready"))
    host.now += 100.0
    host.states[SECOND] = touch(host.states[SECOND], host.now - RULES.least_residency)  # more lately than the first
    host.ask("b")
    host.settle()
    assert host.having("loading") == [RevisionKey("b", 1)] and host.having("ready") == [FIRST]


def test_while_one_replica_serves_the_others_fail_nobody() -> None:
    host = replicated({"one": 4, "two": 4})
    waiter = host.ask("a")
    host.settle()
    host.end_load(FIRST, ok=True)
    host.settle()
    assert host.having("loading") == [SECOND]
    host.end_load(SECOND, ok=False)
    host.settle()
    assert waiter.status == "waiting" and host.having("failed") == [SECOND]
    run(host, lambda: host.having("ready") == [FIRST, SECOND])
    host.die(FIRST)  # whose requests the second takes over
    host.ask("a")
    host.settle()
    assert host.waiters[-1].status == "waiting" and host.having("ready") == [SECOND]


def test_replicas_stay_together_as_long_as_one_is_used() -> None:
    host = replicated({"one": 4, "two": 4}, keep_alive=3.0)
    host.ask("a")
    host.settle()
    run(host, lambda: host.having("ready") == [FIRST, SECOND])
    host.ask("a")
    host.dispatch(SECOND)
    host.now += 10.0
    host.settle()
    assert host.having("ready") == [FIRST, SECOND], "the second is busy"
    host.finish(SECOND)
    host.now += 3.0
    host.settle()
    assert not host.having(*RESIDENT, "queued")


def test_a_host_leaves_a_second_replica_to_others_for_a_while() -> None:
    host = replicated({"one": 8, "two": 8})
    host.ask("a")
    host.settle()
    host.end_load(FIRST, ok=True)
    host.states[SECOND] = enqueue(ModelState(name="a", replica=1), host.now)
    view = replace(host.view(), has_peers=True)
    assert plan(view, RULES, host.now) == []
    assert plan(replace(view, has_peers=False), RULES, host.now) == [Load(SECOND, "two")]
    assert plan(view, RULES, host.now + RULES.spread) == [Load(SECOND, "two")]
    other = replace(view, agent="other", devices={name: Device(8, 8) for name in ("one", "two")})
    assert plan(other, RULES, host.now) == [Load(SECOND, "one")]


def test_a_swap_lets_a_further_replica_go_and_keeps_the_first() -> None:
    host = Host({"a": ("one", 4)}, {"one": 8})
    host.add("a", replicas=2)
    host.ask("a")
    host.settle()
    run(host, lambda: host.having("ready") == [FIRST, SECOND])
    host.now += 100.0
    host.catalogue = host.catalogue.swap("a", "/models/new")
    host.settle()
    assert host.having("ready") == [FIRST] and host.having("loading") == [RevisionKey("a", 2)]
    host.end_load(RevisionKey("a", 2), ok=True)
    run(host, lambda: len(host.having("ready")) == 2 and not host.having("ready", revision=FIRST))


def test_a_host_that_cannot_hold_a_further_replica_refuses_nothing() -> None:
    host = replicated({"one": 8, "two": 8})
    waiter = host.ask("a")
    host.settle()
    host.end_load(FIRST, ok=True)
    host.states[SECOND] = enqueue(ModelState(name="a", replica=1), host.now)
    small = replace(host.view(), agent="other", devices={name: Device(3, 3) for name in ("one", "two")})
    assert waiter.status == "waiting" and plan(small, RULES, host.now) == []
    alone = replace(small, states={FIRST: enqueue(ModelState(name="a"), host.now)})
    (refusal,) = plan(alone, RULES, host.now)
    assert isinstance(refusal, Refuse) and refusal.elsewhere, "the first is another matter"


def test_a_further_replica_goes_before_a_model_that_was_used_less_lately() -> None:
    host = Host({name: ("one", 4) for name in "abc"}, {"one": 12})
    host.add("a", replicas=2)
    for name in "bc":
        host.add(name)
    for name in "ba":
        host.ask(name)
        host.settle()
        run(host, lambda: host.waiters[-1].status == "served")
    run(host, lambda: len(host.having("ready")) == 3)
    host.now += RULES.least_residency
    host.ask("c")
    host.settle()
    assert host.having("loading", "ready") == [FIRST, RevisionKey("b", 1), RevisionKey("c", 1)]


def test_what_is_overdue_comes_before_what_is_loaded_ahead_and_was_queued_at_the_same_time() -> None:
    host = Host({"a": ("cpu", 4), "b": ("cpu", 4), "c": ("cpu", 5)}, {"cpu": 8})
    for name in "abc":
        host.add(name, preload=name == "b")
    for name in "ac":
        host.ask(name)
    host.settle()
    host.now += RULES.longest_wait
    host.end_load(host.having("loading")[0], ok=True)
    host.settle()
    assert host.having("loading") == [] and host.having("queued") == [RevisionKey("b", 1), RevisionKey("c", 1)]


def test_what_waits_for_a_model_that_was_removed_is_served_while_a_replica_is_there() -> None:
    host = replicated({"one": 4, "two": 4})
    host.ask("a")
    host.settle()
    run(host, lambda: host.having("ready") == [FIRST, SECOND])
    host.states[FIRST] = start_draining(host.states[FIRST], host.now, "asked")
    waiter = host.ask("a")
    host.catalogue = host.catalogue.remove("a")
    host.settle()
    run(host, lambda: waiter.status == "served")
    host.settle()
    assert not host.having(*RESIDENT, "queued")
