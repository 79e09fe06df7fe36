"""Whole runs: the laws hold of the real stages whatever happens, a broken stage is seen, and equal runs are equal."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.schemas.events import Event, Token
from penstock.simulation.figures import document
from penstock.simulation.found import Found
from penstock.simulation.plots import write_plots
from penstock.simulation.run import STAGES, simulate
from penstock.simulation.scenario import parse_scenario
from penstock.stages.batch.stage import Batch
from penstock.stages.contract import Pipe
from penstock.stages.stream import Stream
from penstock.streams.port import Delivery

SCENARIOS = Path(__file__).parents[2] / "deploy" / "scenarios"
COSTS = {"prefill_us": 60.0, "decode_ms": {"1": 20.0, "16": 30.0}}
WORKERS = {"count": 4, "seats": 4, "kv_tokens": 2048, "costs": COSTS}
ADA = {"name": "ada", "rate": 20.0, "prompt": {"mean": 60, "spread": 0.5}, "answer": {"mean": 12, "spread": 0.5}}
SCENARIO: dict[str, Any] = {"jobs": 60, "workers": [WORKERS], "tenants": [ADA]}
kinds = st.one_of(
    st.fixed_dictionaries({"kill": st.integers(1, 2), "back_after": st.floats(0.5, 4)}),
    st.fixed_dictionaries({"cut": st.integers(1, 3), "lasts": st.floats(0.5, 12)}),
    st.fixed_dictionaries({"slow": st.integers(1, 4), "factor": st.floats(1, 20)}),
    st.fixed_dictionaries({"stop": st.integers(1, 1)}),
    st.fixed_dictionaries({"start": st.integers(1, 2)}),
    st.fixed_dictionaries({"burst": st.integers(1, 60), "of": st.just("bob")}),
)
happenings = st.lists(st.builds(lambda at, kind: {"at": at, **kind}, st.floats(0, 4), kinds), max_size=4).filter(
    lambda events: sum("stop" in event for event in events) < 3  # or else nobody may be left to answer
)


def run(**change: Any) -> Found:
    return simulate(parse_scenario(SCENARIO | change))


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    st.sampled_from(["round_robin", "least_loaded", "memory_aware", "prefix_aware"]),
    happenings,
    st.integers(0, 99),
    st.sampled_from([0.01, 0.5]),
)
def test_every_request_ends_once_whatever_happens(
    scheduling: str, events: list[dict[str, Any]], seed: int, relay: float
) -> None:
    bob = ADA | {"name": "bob", "rate": 10.0, "priority": "low", "prefixes": {"count": 3, "tokens": 40}}
    found = run(
        settings={"scheduling": scheduling, "relay_interval": relay}, tenants=[ADA, bob], events=events, seed=seed
    )
    assert found.ledger.broken == []
    assert {code for tally in found.ledger.tallies.values() for code in tally.outcomes} == {"done"}


def test_a_run_of_so_many_requests_leaves_nothing_behind(caplog: pytest.LogCaptureFixture) -> None:
    """What would have sent more is ended, and its end is read."""
    assert run(tenants=[ADA, ADA | {"name": "bob"}]).ledger.broken == []
    gc.collect()
    assert "never retrieved" not in caplog.text


def test_the_laws_hold_at_the_rate_of_a_hundred_workers_of_whom_ten_die() -> None:
    """And no request leaves a cycle behind: garbage is seldom collected in a run."""
    loaded = parse_scenario(
        {
            "jobs": 1300,
            "settings": {"relay_interval": 1.0},
            "workers": [WORKERS | {"count": 100, "seats": 16}],
            "tenants": [
                ADA | {"rate": 500.0},
                ADA | {"name": "bob", "rate": 50.0, "priority": "high"},
                ADA | {"name": "flood", "rate": 400.0, "begins": 1.0, "ends": 2.0},
            ],
            "events": [{"at": 1.0, "kill": 10, "back_after": 1.0}],
        }
    )
    cycles: list[int] = []
    gc.disable()
    try:
        found = simulate(loaded, lambda moment: cycles.append(gc.collect()))
    finally:
        gc.enable()
    assert found.ledger.broken == []
    assert found.takeovers > 0
    assert {code for tally in found.ledger.tallies.values() for code in tally.outcomes} == {"done"}
    assert sum(cycles[1:]) < 2000  # those that began leave some, and those that died


def test_requests_that_wait_for_their_turn_leave_no_cycles_either() -> None:
    """In a process that runs for long, they would hold their bodies until garbage is collected."""
    cycles: list[int] = []
    loaded = parse_scenario(
        SCENARIO
        | {
            "jobs": 600,
            "workers": [WORKERS | {"count": 2}],
            "tenants": [ADA | {"rate": 2000.0, "name": name} for name in ("ada", "bob")],
        }
    )
    gc.collect()  # what earlier runs have left
    gc.disable()
    try:
        found = simulate(loaded, lambda moment: cycles.append(gc.collect() if len(cycles) % 4 == 0 else 0))
    finally:
        gc.enable()
    assert max(moment.waiting for moment in found.moments) > 200
    assert sum(cycles) < 400


def test_what_waits_behind_in_a_long_lane_is_renewed() -> None:
    """It comes once more when its turn comes, and not whenever a lease would expire."""
    attempts: list[int] = []

    class Counting(Batch):
        async def handle(self, delivery: Delivery) -> None:
            attempts.append(delivery.attempt)
            await super().handle(delivery)

    tenants = [ADA | {"rate": 3000.0, "name": name} for name in ("ada", "bob")]
    loaded = parse_scenario(SCENARIO | {"jobs": 1100, "workers": [WORKERS | {"count": 3}], "tenants": tenants})
    found = simulate(loaded, stages=tuple(Counting if kind is Batch else kind for kind in STAGES))
    assert found.ledger.broken == []
    assert max(tally.first[-1] for tally in found.ledger.tallies.values()) > 15
    assert sum(attempt == 2 for attempt in attempts) > 300
    assert max(attempts) <= 3


def test_a_worker_that_is_cut_off_to_the_end_holds_nothing_up() -> None:
    found = run(events=[{"at": 0.5, "cut": 1, "lasts": 100.0}])
    assert found.ledger.broken == []
    assert found.seconds < 100


def test_a_killed_workers_requests_are_taken_over_in_the_time_of_a_lease() -> None:
    found = run(jobs=200, events=[{"at": 2.0, "kill": 2, "back_after": 1.0}])
    assert found.takeovers > 0
    assert found.ledger.broken == []
    quiet = run(jobs=200)
    assert quiet.takeovers == 0
    assert max(found.ledger.tallies[source].total[-1] for source in found.ledger.tallies) > 0
    longest, usual = (max(each.ledger.tallies.popitem()[1].total) for each in (found, quiet))
    assert longest > usual + 3  # the cards of dead workers live for so long


class LossyPipe(Pipe):
    """Loses some of a client's tokens."""

    __slots__ = ()
    _count = count()

    async def emit(self, event: Event, **values: Any) -> bool:
        if isinstance(event, Token) and next(self._count) % 7 == 3:
            return False
        return await super().emit(event, **values)


class Forgetful(Stream):
    def __init__(self, pipe: Pipe) -> None:
        super().__init__(
            LossyPipe(pipe.broker, pipe.subjects, pipe.settings, pipe.registry, pipe.cancellations, pipe.now)
        )


def test_a_stage_that_loses_events_is_seen() -> None:
    stages = tuple(Forgetful if kind is Stream else kind for kind in STAGES)
    found = simulate(parse_scenario(SCENARIO), stages=stages)
    assert any("a gap" in line or "it ended with" in line for line in found.ledger.broken)


def test_who_floods_gets_no_more_than_his_share() -> None:
    flood, steady = ADA | {"name": "flood", "rate": 150.0}, ADA | {"rate": 40.0}
    laws = {"fair_window": 4.0, "fair_share": 0.7}
    found = run(jobs=900, workers=[WORKERS | {"count": 2}], tenants=[flood, steady], laws=laws)
    assert found.ledger.broken == []
    assert found.ledger.lowest_share is not None


def test_seats_are_not_kept_for_a_flood_that_is_over() -> None:
    """The other tenant has much waiting by then, and gets most of what the flood had."""
    costs = {"prefill_us": 50.0, "decode_ms": {"1": 60.0, "32": 120.0}}
    lengths = {"prompt": {"mean": 16}, "answer": {"mean": 16}}
    found = run(
        jobs=700,
        settings={"relay_interval": 1.0},
        workers=[{"count": 4, "seats": 10, "costs": costs}],
        tenants=[
            {"name": "steady", "rate": 38.0, **lengths},
            {"name": "flood", "rate": 18.0, "begins": 1.0, "ends": 8.0, **lengths},
        ],
        laws={"idle_share": 0.4},
    )
    assert max(moment.waiting for moment in found.moments) > 100
    assert found.ledger.broken == []


@pytest.mark.parametrize(("rate", "prompt"), [(40.0, 56), (3.0, 800)])
def test_a_flood_hardly_delays_who_asks_for_little(rate: float, prompt: int) -> None:
    """A step of 32 of the flood's requests takes 70 ms, and one with its prompts beside them 150."""
    costs = {"prefill_us": 580.0, "decode_ms": {"1": 9.0, "8": 25.0, "32": 70.0}}
    answer = {"mean": 32}
    flood = {"name": "flood", "rate": rate, "begins": 4.0, "prompt": {"mean": prompt}, "answer": answer}
    quiet = {"name": "quiet", "rate": 4.0, "arrivals": "even", "prompt": {"mean": 56}, "answer": answer}
    workers = [{"count": 1, "seats": 32, "prefill_chunk": 256, "costs": costs}]
    first = []
    for jobs, tenants in ((80, [quiet]), (int(16 * rate) + 80, [flood, quiet])):
        sources = document(run(jobs=jobs, settings={"queue_limit": 100}, workers=workers, tenants=tenants))["sources"]
        assert set(sources[-1]["outcomes"]) == {"done"} and sources[-1]["tenant"] == "quiet"
        first.append(sources[-1]["ttft"])
    alone, beside = first
    assert beside["p50"] < 2 * alone["p50"] and beside["p90"] < 4 * alone["p90"], (alone, beside)


class Partial(Batch):
    """Knows weights of tenants that nobody has set."""

    def __init__(self, pipe: Pipe) -> None:
        super().__init__(replace(pipe, settings=pipe.settings.model_copy(update={"tenant_weights": ("ada=6",)})))


def test_a_stage_that_prefers_a_tenant_is_seen() -> None:
    tenants = [ADA | {"name": name, "rate": 200.0} for name in ("ada", "bob")]
    loaded = parse_scenario(SCENARIO | {"jobs": 700, "tenants": tenants, "laws": {"fair_window": 4.0}})
    assert simulate(loaded).ledger.broken == []
    found = simulate(loaded, stages=tuple(Partial if kind is Batch else kind for kind in STAGES))
    assert any(line.startswith("bob got ") for line in found.ledger.broken)


def test_refusals_are_counted_by_their_code() -> None:
    found = run(jobs=400, settings={"queue_limit": 20}, tenants=[ADA | {"rate": 2000.0}])
    (tally,) = found.ledger.tallies.values()
    assert tally.outcomes["queue_full"] > 0
    assert tally.outcomes.total() == 400
    assert found.ledger.broken == []


def test_small_caches_preempt_and_prefixes_are_found() -> None:
    tenants = [ADA | {"prefixes": {"count": 2, "tokens": 48, "zipf": 1.0}, "answer": {"mean": 60}}]
    found = run(workers=[WORKERS | {"count": 1, "kv_tokens": 288}], tenants=tenants)
    assert found.preemptions > 0
    assert 0 < found.cached < found.looked_up
    assert found.ledger.broken == []


def test_more_workers_answer_sooner() -> None:
    few, many = (run(workers=[WORKERS | {"count": count}], tenants=[ADA | {"rate": 60.0}]) for count in (1, 8))
    assert document(many)["sources"][0]["ttft"]["p90"] < document(few)["sources"][0]["ttft"]["p90"]


@pytest.mark.parametrize("name", ["cluster.toml"])
def test_the_example_runs_and_is_the_same_in_every_process(name: str, tmp_path: Path) -> None:
    documents = []
    for seed in ("1", "2"):
        command = [
            sys.executable,
            "-m",
            "penstock",
            "simulate",
            str(SCENARIOS / name),
            "--json",
            f"{seed}.json",
            "--jobs",
            "300",
        ]
        command += ["--plots", "plots"] if seed == "1" else []
        env = os.environ | {"PYTHONHASHSEED": seed}
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env)
        assert done.returncode == 0, done.stderr + done.stdout
        documents.append((tmp_path / f"{seed}.json").read_bytes())
    assert documents[0] == documents[1]
    figures = orjson.loads(documents[0])
    assert figures["laws"]["broken"] == 0
    assert sum(figures["outcomes"].values()) == figures["requests"] >= 300
    assert {file.suffix for file in (tmp_path / "plots").iterdir()} == {".svg", ".html"}


def test_a_request_is_on_its_way_without_keeping_its_worker_busy() -> None:
    """The first token comes later by that time, and as many tokens are computed in the same time."""
    one = {"jobs": 40, "tenants": [ADA | {"arrivals": "even"}]}
    near, far = (
        document(run(**one, workers=[WORKERS | {"costs": COSTS | {"request_ms": way}}])) for way in (0.0, 250.0)
    )
    assert far["sources"][0]["ttft"]["p50"] - near["sources"][0]["ttft"]["p50"] == pytest.approx(0.25, abs=0.05)
    assert far["utilisation"] * far["seconds"] == pytest.approx(near["utilisation"] * near["seconds"], rel=0.2)


def test_plots_show_every_tenant(tmp_path: Path) -> None:
    found = run(tenants=[ADA, ADA | {"name": "bob"}], events=[{"at": 1.0, "kill": 1, "back_after": 1.0}])
    page = write_plots(found, tmp_path)[-1].read_text("utf-8")
    plot = (tmp_path / "first-tokens.svg").read_text("utf-8")
    assert "first-tokens.svg" in page
    assert "ada normal m" in plot and "bob normal m" in plot and "kill: w-" in plot


def test_a_broken_law_fails_the_command(tmp_path: Path) -> None:
    file = tmp_path / "scenario.toml"
    file.write_text(
        "jobs = 40\nlaws = { longest_wait = 0.5 }\nworkers = [{ count = 1, seats = 1, speed = 0.001 }]\n"
        'tenants = [{ name = "ada", rate = 100 }]\n'
    )
    done = subprocess.run(
        [sys.executable, "-m", "penstock", "simulate", str(file)], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 1, done.stderr
    assert "no token after" in done.stderr


def test_a_log_shows_how_far_it_is(tmp_path: Path) -> None:
    file = tmp_path / "scenario.toml"
    file.write_text('seconds = 4\nworkers = [{ count = 1 }]\ntenants = [{ name = "ada", rate = 10 }]\n')
    often = (
        "from penstock.api.terminal import simulate; simulate.LINE = 0.0; from penstock.__main__ import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", often, "simulate", str(file)], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    lines = re.findall(r"^simulated (\d+) s, \d+ of \d+ requests, \d+ wait$", done.stderr, re.MULTILINE)
    assert len(lines) >= 3 and lines == sorted(lines)
