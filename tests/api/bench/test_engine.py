"""`penstock bench engine` on a tiny model: what it counts, what it shows, what it refuses. No speed is asserted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from penstock.__main__ import app
from penstock.api.bench import engine as bench_engine
from penstock.api.bench import limits
from penstock.engine.choice import Choice
from penstock.engine.paged import backend as paged
from penstock.engine.sampler import choose

FEW = ("--batch=2,1", "--prompt=700,40", "--context=20", "--steps=5", "--rounds=2")


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """The command sets its own for the whole process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def quick_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits from little work, which `test_the_limits_of_this_machine` alone takes in full: no test judges speed."""
    monkeypatch.setattr(limits, "read_size", lambda: 8 << 20)
    monkeypatch.setattr(limits, "SHAPES", ((64, 256, 256),))


def bench(*arguments: object, backend: str = "paged") -> Result:
    words = ["bench", "engine", *map(str, arguments), f"--backend={backend}", "--device=cpu"]
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, words)


def report(result: Result) -> Any:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_the_limits_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    ways = limits.prepare(torch.float32, torch.device("cpu"))
    assert all(size >= 512 << 20 for size, _ in ways["read_bytes"])
    sample = limits.measure(ways)
    assert {name: len(rates) for name, rates in sample.items()} == {"read_bytes": 3, "flops": 4}
    assert all(0 < max(rates) == pytest.approx(limits.limit([sample], name)) for name, rates in sample.items())


def test_shares_of_the_limits_are_measured(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_engine, "SLICE", inf)
    result = bench(tiny_model, *FEW, f"--json={tmp_path}/report.json")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert [line.split("  ")[0] for line in lines[2:6]] == ["prefill 40", "prefill 700", "decode 1", "decode 2"]
    assert all("%" in line for line in lines[2:6])
    assert "GB/s" in lines[1] and "TFLOP/s" in lines[1]
    assert lines[6].startswith("limit: median, range") and lines[6].count(" to ") == 2

    document = json.loads((tmp_path / "report.json").read_text())
    assert (document["benchmark"], document["options"]["engine"]["model"]) == ("engine", str(tiny_model))
    assert len(document["limits"]) == 2 * 2 * 4  # before and after each round
    counts = {name: {(one["passes"], one["tokens"]) for one in rounds} for name, rounds in document["rounds"].items()}
    assert counts == {
        "prefill 40": {(25, 1000)},
        "prefill 700": {(1, 700)},
        "decode 1": {(5, 5)},
        "decode 2": {(5, 10)},
    }
    for name, rounds in document["rounds"].items():
        assert len(rounds) == 2
        for one in rounds:
            assert one["tokens_per_second"] == pytest.approx(one["tokens"] / one["seconds"])
            assert one["flops_per_second"] == pytest.approx(one["flops"] * one["passes"] / one["seconds"])
            assert one["flops_share"] == pytest.approx(one["flops_per_second"] / one["flops_limit"])
            assert all(one[key] > 0 for key in one if key.endswith("_share"))
            assert ("read_bytes" in one) == name.startswith("decode")


def test_limits_are_measured_within_long_rounds_too(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_engine, "SLICE", 0.0)
    document = report(bench(tiny_model, "--batch=1", "--prompt=700", "--steps=5", "--rounds=2", "--json=-"))
    assert len(document["limits"]) == 2 * (1 + 1) + 2 * (5 + 1)  # before each pass, and after the last


def test_bytes_and_operations_are_those_of_the_model(tiny_model: Path) -> None:
    """The tiny model: 2 layers of 4 heads over 2 of keys, 128 wide, 256 in the middle, a vocabulary of 512."""
    document = report(
        bench(tiny_model, "--batch=1,3", "--prompt=10", "--context=16", "--steps=1", "--rounds=1", "--json=-")
    )
    weights, head = 2 * (2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 256), 128 * 512
    medians = document["medians"]
    assert medians["prefill 10"]["flops"] == 2 * (10 * weights + head) + 4 * 2 * 128 * 55
    # after a prompt of 16 and one token of an answer
    assert medians["decode 1"]["read_bytes"] == 2 * (weights + head) + 2 * 2 * 2 * 64 * 17
    assert medians["decode 1"]["flops"] == 2 * (weights + head) + 4 * 2 * 128 * 17
    assert medians["decode 3"]["flops"] >= 3 * medians["decode 1"]["flops"]


def test_the_largest_batch_makes_room_for_itself(tiny_model: Path) -> None:
    document = report(bench(tiny_model, *FEW, "--batch=17", "--rounds=1", "--max-batch-size=4", "--json=-"))
    assert document["options"]["engine"]["max_batch_size"] == 17
    assert document["rounds"]["decode 17"][0]["tokens"] == 5 * 17


@pytest.mark.parametrize(("backend", "more"), [("hf", ()), ("echo", ()), ("paged", ("--no-limits",))])
def test_without_counts_or_limits_there_are_no_shares(tiny_model: Path, backend: str, more: tuple[str, ...]) -> None:
    result = bench(tiny_model, *FEW, "--json=-", *more, backend=backend)
    document = report(result)
    assert document["limits"] == []
    assert document["rounds"]["decode 2"][1]["tokens"] == 10
    assert not any("share" in key for one in document["rounds"]["prefill 40"] for key in one)
    assert "decode 2" in result.stderr and "%" not in result.stderr


def test_it_computes_with_the_threads_of_a_worker(tiny_model: Path) -> None:
    few = ("--batch=1", "--prompt=8", "--context=16", "--steps=1", "--rounds=1", "--json=-")
    assert report(bench(tiny_model, *few))["threads"] == 1  # the model is small
    assert report(bench(tiny_model, *few, "--threads=2"))["threads"] == 2


def test_tokens_are_drawn_as_asked(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: set[tuple[float, float]] = set()

    def spied(logits: Any, rows: list[Choice], *more: Any) -> Any:
        asked.update((row.request.params.temperature, row.request.params.top_p) for row in rows)
        return choose(logits, rows, *more)

    monkeypatch.setattr(paged, "choose", spied)
    few = ("--batch=1", "--prompt=8", "--context=16", "--steps=1", "--rounds=1")
    assert "temperature 0.7, top_p 0.9" in bench(tiny_model, *few, "--temperature=0.7", "--top-p=0.9").stdout
    assert asked == {(0.7, 0.9)}


def test_a_quantized_model_reads_less(tiny_model: Path) -> None:
    few = ("--batch=1", "--prompt=8", "--context=16", "--steps=1", "--rounds=1", "--json=-")
    whole, int8 = (report(bench(tiny_model, *few, *more)) for more in ((), ("--quantization=int8",)))
    assert int8["medians"]["decode 1"]["read_bytes"] < 0.6 * whole["medians"]["decode 1"]["read_bytes"]
    assert int8["medians"]["decode 1"]["flops"] == whole["medians"]["decode 1"]["flops"]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--batch=1,x"], "--batch 1,x: must be whole numbers above 0"),
        (["--prompt=0"], "--prompt 0: must be whole numbers above 0"),
        (["--prompt=8,2048"], "--prompt: 2049 tokens with the answer are above the context of 2048"),
        (["--context=2040", "--steps=8"], "--context and --steps: 2049 tokens with the answer are above the context"),
        (["--json=/nowhere/x.json"], "'--json': '/nowhere/x.json': No such file or directory"),
        (
            ["--batch=8", "--kv-cache-memory=256KiB", "--prompt=8"],
            "rows of 128 tokens do not run together: raise --kv-cache-memory",
        ),
    ],
)
def test_what_cannot_be_measured_is_told(tiny_model: Path, options: list[str], error: str) -> None:
    result = bench(tiny_model, *options)
    assert result.exit_code == 2
    assert error in result.stderr


def test_a_fast_path_that_is_not_taken_is_named(tiny_model: Path, tmp_path: Path) -> None:
    few = ("--batch=1", "--prompt=8", "--context=8", "--steps=2", "--rounds=1", f"--json={tmp_path}/report.json")
    result = bench(tiny_model, *few, "--compile-kernels=false")
    assert "slow: decoding is not compiled: compile_kernels is false" in result.stdout
    assert json.loads((tmp_path / "report.json").read_text())["slow_paths"] == [
        "decoding is not compiled: compile_kernels is false"
    ]


def test_a_model_is_asked_for() -> None:
    result = bench()
    assert result.exit_code == 2
    assert "penstock bench engine MODEL" in result.stderr


def test_a_processor_without_bfloat16_is_measured_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the engine computes it there; oneDNN refuses to pack such a weight."""
    monkeypatch.setattr(limits, "packs_bfloat16", lambda: False)
    monkeypatch.setattr(limits, "read_size", lambda: 1 << 20)
    monkeypatch.setattr(limits, "SHAPES", ((8, 64, 64),))
    ways = limits.prepare(torch.bfloat16, torch.device("cpu"))
    assert {way().dtype for _, way in ways["flops"]} == {torch.float32}
    assert all(rate > 0 for rates in limits.measure(ways).values() for rate in rates)
