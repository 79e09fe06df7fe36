"""The state machine of a model's revision: what may follow what, and what each transition sets."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import get_args

import pytest

from penstock.schemas.models.catalogue import RevisionKey
from penstock.schemas.models.model_state import (
    TRANSITIONS,
    IllegalTransition,
    ModelState,
    ModelStatus,
    RetryRules,
    abandon,
    become_ready,
    enqueue,
    fail,
    may_dispatch,
    report_progress,
    start_draining,
    start_loading,
    touch,
    unload,
)

RULES = RetryRules(first=1.0, longest=8.0, steady=5.0)
STATUSES: tuple[ModelStatus, ...] = get_args(ModelStatus)
MOVES: dict[ModelStatus, Callable[[ModelState], ModelState]] = {
    "queued": lambda state: enqueue(state, 1.0),
    "loading": lambda state: start_loading(state, 1.0, agent="host", device="cpu"),
    "ready": lambda state: become_ready(state, 1.0, incarnations=("w1",)),
    "draining": lambda state: start_draining(state, 1.0, "room"),
    "failed": lambda state: fail(state, 1.0, "broken", RULES),
    "unloaded": lambda state: unload(state, 1.0),
}


def loading() -> ModelState:
    return start_loading(enqueue(ModelState(name="qwen"), 1.0, requested=True), 2.0, agent="host", device="cpu")


def ready(now: float = 3.0) -> ModelState:
    return become_ready(loading(), now, incarnations=("w1", "w2"))


@pytest.mark.parametrize("before", STATUSES)
@pytest.mark.parametrize("after", STATUSES)
def test_only_the_transitions_of_the_table_are_allowed(before: ModelStatus, after: ModelStatus) -> None:
    state = ModelState(name="qwen", status=before)
    if after in TRANSITIONS[before]:
        assert MOVES[after](state).status == after
        assert MOVES[after](state).since == 1.0
    else:
        with pytest.raises(IllegalTransition, match=f"revision 1 of qwen is {before} and cannot become {after}"):
            MOVES[after](state)


def test_the_table_is_the_picture() -> None:
    arrows = {(before, after) for before, found in TRANSITIONS.items() for after in found}
    main = ("unloaded", "queued", "loading", "ready", "draining", "unloaded")
    assert arrows == {
        *pairwise(main),
        *((status, "failed") for status in ("queued", "loading", "ready")),
        ("failed", "queued"),
        *((status, "unloaded") for status in ("queued", "loading", "failed")),
    }


def test_a_load_has_an_owner_and_progress() -> None:
    state = report_progress(loading(), 40)
    assert (state.agent, state.device, state.progress, state.requested) == ("host", "cpu", 40, True)
    state = become_ready(state, 3.0, incarnations=("w1",))
    assert (state.progress, state.loads, state.requested, state.last_used) == (100, 1, False, None)
    with pytest.raises(IllegalTransition, match="only a load has progress"):
        report_progress(state, 50)


def test_only_a_ready_incarnation_gets_requests() -> None:
    assert may_dispatch(ready(), "w2")
    assert not may_dispatch(ready(), "w3")
    assert not may_dispatch(start_draining(ready(), 4.0, "room"), "w2")
    assert not may_dispatch(loading(), "w2")


def test_use_is_of_the_present_workers() -> None:
    state = touch(ready(), 4.0)
    assert state.last_used == 4.0
    drained = unload(touch(start_draining(state, 5.0, "room"), 6.0), 7.0)
    assert (drained.last_used, drained.reason, drained.incarnations, drained.agent) == (6.0, "room", (), None)
    again = start_loading(enqueue(drained, 8.0), 9.0, agent="host", device="cpu")
    assert again.last_used is None
    with pytest.raises(IllegalTransition, match="no workers that could be busy"):
        touch(again, 10.0)


def test_loads_are_retried_after_a_wait_that_doubles() -> None:
    state, waits = loading(), []
    for _ in range(6):
        state = fail(state, 10.0, "no such file", RULES)
        waits.append((state.retry_at or 0.0) - 10.0)
        state = start_loading(enqueue(state, 20.0), 20.0, agent="host", device="cpu")
    assert waits == [1.0, 2.0, 4.0, 8.0, 8.0, 8.0]
    state = fail(state.model_copy(update={"attempts": 10_000}), 10.0, "no such file", RULES)
    assert state.retry_at == 18.0


def test_a_cancelled_load_is_no_reason_to_forget_failures() -> None:
    state = unload(enqueue(fail(loading(), 10.0, "no such file", RULES), 20.0), 21.0)
    assert (state.status, state.attempts, state.retry_at) == ("unloaded", 1, None)
    ran = become_ready(start_loading(enqueue(state, 22.0), 22.0, agent="h", device="cpu"), 23.0, incarnations=("w",))
    assert unload(start_draining(ran, 24.0, "room"), 25.0).attempts == 0


def test_workers_that_die_soon_are_not_restarted_for_ever() -> None:
    early = fail(ready(3.0), 7.9, "the worker was killed", RULES)
    assert (early.attempts, early.retry_at, early.incarnations) == (1, 8.9, ())
    steady = fail(ready(3.0).model_copy(update={"attempts": 4}), 8.0, "the worker was killed", RULES)
    assert (steady.attempts, steady.retry_at) == (1, 8.0)


@pytest.mark.parametrize("status", STATUSES)
def test_the_state_of_a_dead_agent_is_abandoned(status: ModelStatus) -> None:
    state = abandon(ready().model_copy(update={"status": status}), 9.0)
    lost = status in ("loading", "ready")
    assert state == ModelState(name="qwen", since=9.0, reason="its host has stopped", loads=1, lost=lost)
    assert abandon(state, 10.0).lost == lost


def test_a_state_survives_json() -> None:
    state = touch(ready(), 4.0)
    assert ModelState.model_validate_json(state.model_dump_json()) == state
    assert state.key == RevisionKey("qwen", 1)
