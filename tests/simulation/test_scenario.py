"""What a scenario may say, and that a faulty one is refused with all of its faults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from penstock.schemas.errors import ConfigurationError
from penstock.simulation.costs import StepClock
from penstock.simulation.scenario import BUNDLED_COSTS, Lengths, Tenant, load_scenario, parse_scenario
from penstock.simulation.traffic import Traffic

SCENARIOS = Path(__file__).parents[2] / "deploy" / "scenarios"
SMALL: dict[str, Any] = {"jobs": 3, "workers": [{"count": 1}], "tenants": [{"name": "ada", "rate": 1.0}]}
FIVE_FAULTS = """
jobs = 10
seconds = 5
[settings]
scheduling = "fastest"
[[workers]]
count = 0
[[tenants]]
name = "ada"
rate = 1
model = "other"
[[events]]
at = 1
kill = 1
stop = 1
"""


def faults_of(values: dict[str, Any]) -> tuple[str, ...]:
    with pytest.raises(ConfigurationError) as caught:
        parse_scenario(values)
    return caught.value.faults


def test_a_file_with_five_faults_is_refused_with_all_five(tmp_path: Path) -> None:
    file = tmp_path / "scenario.toml"
    file.write_text(FIVE_FAULTS)
    with pytest.raises(ConfigurationError) as caught:
        load_scenario(file)
    starts = (
        "workers.0.count: ",
        "events.0: name one of ",
        "say how long ",
        "tenants.0.model: ",
        "settings.scheduling: ",
    )
    assert len(caught.value.faults) == 5
    assert all(any(fault.startswith(start) for fault in caught.value.faults) for start in starts)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"workers": [{"count": 1, "costs_from": ["absent.json"]}]}, "absent.json"),
        ({"workers": [{"count": 1, "speeds": 2}]}, "workers.0.speeds"),
        ({"workers": [{"count": 1, "costs": {"prefill_us": 1.0, "decode_ms": {"many": 1.0}}}]}, "many"),
        ({"workers": [{"count": 1}, {"count": 1}]}, "several groups"),
        ({"tenants": [{"name": "ada lovelace", "rate": 1.0}]}, "tenants.0.name"),
        ({"tenants": [{"name": "ada", "rate": 1.0, "prompt": {"mean": 9, "min": 10}}]}, "mean 9"),
        ({"tenants": [{"name": "ada", "rate": 0.0}]}, "no tenant sends"),
        ({"events": [{"at": 1, "burst": 5, "of": "bob"}]}, "'bob'"),
        ({"events": [{"at": 1, "burst": 5}]}, "go together"),
        ({"events": [{"at": 1, "kill": 1, "group": "x"}]}, "called 'x'"),
        ({"settings": {"speed": 1}}, "settings.speed"),
        ({"seed": "one"}, "seed"),
    ],
)
def test_each_fault_names_its_place(change: dict[str, Any], part: str) -> None:
    assert any(part in fault for fault in faults_of(SMALL | change))


@pytest.mark.parametrize("file", sorted(SCENARIOS.iterdir()), ids=lambda file: file.name)
def test_the_examples_have_no_fault(file: Path) -> None:
    assert load_scenario(file).scenario.jobs


def test_what_is_no_toml_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "scenario.toml"
    file.write_text("jobs = [")
    for path, fault in (
        (file, "not valid TOML"),
        (tmp_path / "absent.toml", "no such file; name"),
        (tmp_path, "cannot be read"),
    ):
        with pytest.raises(ConfigurationError, match=f"^{path}: {fault}"):
            load_scenario(path)


def test_a_measurement_says_what_steps_take(tmp_path: Path) -> None:
    """Costs read from a benchmark give the benchmark's own times again, at both of its contexts."""
    each, pair, slope, decode = 20e-6, 5e-8, 3e-7, {1: 1e-3, 8: 2e-3}
    names = []
    for context in (64, 576):
        medians = {f"prefill {n}": {"tokens_per_second": n / (each * n + pair * n * n / 2)} for n in (64, 512)}
        for rows, seconds in decode.items():
            whole = seconds + slope * rows * (context - 64)
            medians[f"decode {rows}"] = {"tokens_per_second": rows / whole, "passes": 32}
        names.append(f"{context}.json")
        document = {"benchmark": "engine", "options": {"context": context}, "medians": medians}
        (tmp_path / names[-1]).write_bytes(orjson.dumps(document))
    scenario = SMALL | {"workers": [{"count": 1, "costs_from": names}]}
    (costs,) = parse_scenario(scenario, tmp_path).costs
    clock = StepClock(costs, speed=2.0)
    for length in (64, 512):
        assert 2 * clock.seconds(length, length**2 / 2, 0, 0) == pytest.approx(each * length + pair * length**2 / 2)
    for context in (80, 592):
        for rows, seconds in decode.items():
            expected = seconds + slope * rows * (context - 80)
            assert 2 * clock.seconds(0, 0, rows, rows * context) == pytest.approx(expected)
    assert 2 * clock.seconds(0, 0, 4, 0) == pytest.approx(1e-3 + 3 * (1e-3 / 7))
    assert clock.seconds(0, 0, 64, 0) > clock.seconds(0, 0, 8, 0)


def test_a_measured_server_says_what_the_rest_of_a_deployment_adds(tmp_path: Path) -> None:
    """A request's way, and so much more for each token; between two numbers of clients, in proportion."""
    engine = {
        "benchmark": "engine",
        "options": {"context": 64},
        "medians": {"prefill 100": {"tokens_per_second": 2000.0}}
        | {f"decode {rows}": {"tokens_per_second": rows / 0.01, "passes": 32} for rows in (1, 2, 3, 16)},
    }
    levels = [
        (1, 0.05 + 0.012, 0.01 * 1.2),  # a prompt takes 50 ms
        (3, 0.3, 0.01 * 1.4 + 0.05 / 20),  # the median client waits for one prompt more
    ]
    served = [
        {
            "concurrency": clients,
            "completed": 10,
            "input_tokens": 1000,
            "output_tokens": 210,
            "ttft_ms": {"p50": 1000 * first},
            "tpot_ms": {"p50": 1000 * each},
        }
        for clients, first, each in levels
    ]
    one_piece = served[0] | {"concurrency": 8, "tpot_ms": {"p50": None}}
    (tmp_path / "engine.json").write_bytes(orjson.dumps(engine))
    (tmp_path / "served.json").write_bytes(orjson.dumps({"benchmark": "serve", "levels": [*served, one_piece]}))
    scenario = SMALL | {"workers": [{"count": 1, "costs_from": ["engine.json", "served.json"]}]}
    (costs,) = parse_scenario(scenario, tmp_path).costs
    assert costs.request_ms == pytest.approx(12.0)
    assert costs.decode_ms == pytest.approx({"1": 12.0, "2": 13.0, "3": 14.0, "16": 14.0})
    with pytest.raises(ConfigurationError, match="a measurement needs prompts"):
        parse_scenario(SMALL | {"workers": [{"count": 1, "costs_from": ["served.json"]}]}, tmp_path)


def test_without_measurements_the_costs_are_those_of_the_bundled_model() -> None:
    assert parse_scenario(SMALL).costs == (BUNDLED_COSTS,)


def test_equal_seeds_ask_the_same_and_others_do_not() -> None:
    tenant = Tenant(name="ada", rate=2.0, prompt=Lengths(mean=50, spread=0.5), ends=60.0)
    first, again, other = (list(Traffic(tenant, seed, 0).asks()) for seed in (1, 1, 2))
    assert first == again != other
    assert all(0 < one.at < 60 and one.prompt and one.answer for one in first)
    assert [one.at for one in first] == sorted(one.at for one in first)


def test_popular_prefixes_come_more_often() -> None:
    values = {"name": "ada", "rate": 1.0, "prompt": {"mean": 64}, "prefixes": {"count": 4, "tokens": 32, "zipf": 1.5}}
    traffic = Traffic(Tenant.model_validate(values), 0, 0)
    heads = [traffic.ask(0.0).prompt[:32] for _ in range(400)]
    counts = sorted((heads.count(head) for head in set(heads)), reverse=True)
    assert len(counts) == 4
    assert counts[0] > 2 * counts[-1]
