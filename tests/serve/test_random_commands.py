"""Random commands to the models of real processes, and the laws by which `deploy/walk_models.py` judges them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from walk_laws import Asked, Laws

from penstock.schemas.models.catalogue import Catalogue, CatalogueEntry
from penstock.schemas.models.model_state import ModelState, abandon, enqueue, start_draining, start_loading

PROGRAM = Path(__file__).parents[2] / "deploy" / "walk_models.py"
QUEUED = enqueue(ModelState(name="a"), 1.0)
LOADING = start_loading(QUEUED, 2.0, agent="host", device="cpu")


def test_random_commands_break_no_law() -> None:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "--steps", "12", "--seed", "51"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert {"kill", "restart", "swap"} <= {*done.stdout.replace(",", "").split()}, "the seed draws what matters"


def laws() -> Laws:
    """Those of a host with room for one model, whose catalogue changes from the source "new" to none."""
    found = Laws({"a": 4, "b": 4}, {"host": 6})
    entry = CatalogueEntry(name="a", source="old", pin=True)
    offered = Catalogue().add(entry)
    found.see_catalogue(offered, 0.0)
    found.see_catalogue(offered.swap("a", "new").promote(QUEUED.key._replace(revision=2)), 100.0)
    found.see_catalogue(Catalogue(), 200.0)
    return found


@pytest.mark.parametrize(
    ("states", "broken"),
    [
        ([QUEUED, LOADING, abandon(LOADING, 3.0), QUEUED], ""),
        ([LOADING], "states change along the table"),
        ([QUEUED, LOADING, LOADING.model_copy(update={"status": "draining"})], "states change along the table"),
        (
            [QUEUED, LOADING, QUEUED.model_copy(update={"name": "b"}), LOADING.model_copy(update={"name": "b"})],
            "models fit",
        ),
    ],
)
def test_what_states_may_do(states: list[ModelState], broken: str) -> None:
    found = laws()
    for state in states:
        found.see_state(state, 0)
    assert [law for law in found.broken if not broken or not law.startswith(broken)] == []
    assert bool(found.broken) == bool(broken)


def test_an_update_that_was_missed_breaks_no_law_if_the_table_has_a_way() -> None:
    found = laws()
    found.see_state(LOADING, 1)
    assert not found.broken


def test_what_is_pinned_stays() -> None:
    found = laws()
    found.catalogues.pop()
    state = LOADING.model_copy(update={"revision": 2, "status": "ready"})
    found.states[state.key] = state
    found.see_state(start_draining(state, 5.0, "a needs its memory"), 0)
    assert not found.broken
    found.states[state.key] = state
    found.see_state(start_draining(state, 5.0, "b needs its memory"), 0)
    assert [law.partition(":")[0] for law in found.broken] == ["what is pinned stays"]


@pytest.mark.parametrize(
    ("sent", "answer", "broken"),
    [
        (10.0, {"text": "of old"}, ""),
        (99.5, {"text": "of new"}, ""),
        (103.0, {"text": "of old"}, ""),  # not every part has heard of the new one
        (10.0, {"text": "of new"}, "an answer is of one revision"),
        (110.0, {"text": "of old"}, "an answer is of one revision"),
        (10.0, {"text": "of ol"}, "an answer is of one revision"),
        (10.0, {"text": "of old", "finish": None}, "answers are whole"),
        (10.0, {"status": 503, "code": "server_busy"}, "only what cannot be served is refused"),
        (10.0, {"status": 404, "code": "model_not_found"}, "only what cannot be served is refused"),
        (210.0, {"status": 404, "code": "model_not_found"}, ""),
        (10.0, {"text": "of", "code": "cut off"}, "only what cannot be served is refused"),
        (10.0, {"code": "cut off", "given_up": True}, ""),
    ],
)
def test_what_answers_may_be(sent: float, answer: dict[str, object], broken: str) -> None:
    found = laws()
    values = {"status": 200, "finish": "length"} | answer
    asked = Asked("a", "prompt", 3, sent, ended=sent + 1.0, **values)  # type: ignore[arg-type]
    found.judge(asked, {"old": "of old", "new": "of new"})
    assert [law.partition(":")[0] for law in found.broken] == ([broken] if broken else [])
