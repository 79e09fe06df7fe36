"""What the checks of a model found is known when it is loaded again."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ByteSize

from penstock.engine import EngineConfig, GenerationParams, InferenceEngine
from penstock.engine.cpu.machine import KERNEL_FLAGS, cpu_flags
from penstock.engine.paged import runner, verdicts
from penstock.engine.paged.compiled.proof import fault
from penstock.engine.paged.decoding.decoder import Decoder
from penstock.engine.paged.verdicts import Verdict, Verdicts

pytestmark = pytest.mark.skipif(not {*cpu_flags().split()} >= KERNEL_FLAGS, reason="the kernels need AVX2")
PARAMS = GenerationParams(temperature=0, max_tokens=8, ignore_eos=True)


class Checks:
    """Counts how often the compiled decoder is compared with float32, and what comes out."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made, self.fault = 0, ""
        monkeypatch.setattr("penstock.engine.paged.runner.fault", self)

    def __call__(self, *given: Any) -> str:
        self.made += 1
        return self.fault or fault(*given)


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> Checks:
    return Checks(monkeypatch)


@pytest.fixture
def model(model_directory: Callable[[str], Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(model_directory("llama"), tmp_path / "model"))


def answer(model: Path, **settings: Any) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """And the fast paths that are not taken."""
    given: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_cache_memory": ByteSize(16 << 20)} | settings
    with InferenceEngine(EngineConfig(model=str(model), **given)) as engine:
        return engine.generate([5, 6, 7], PARAMS).token_ids, engine.model_info().slow_paths


def test_a_model_that_was_checked_is_not_checked_again(model: Path, checks: Checks) -> None:
    first = answer(model)
    assert checks.made == 1
    assert answer(model) == first == (first[0], ())
    assert checks.made == 1


def test_whatever_a_check_depends_on_makes_it_a_new_one(model: Path, checks: Checks) -> None:
    for settings in ({}, {"dtype": "bfloat16"}, {"dtype": "bfloat16", "quantization": "int8"}, {}):
        answer(model, **settings)
    assert checks.made == 3
    os.utime(model / "model.safetensors")
    answer(model)
    assert checks.made == 4


def test_what_failed_is_told_again(model: Path, checks: Checks) -> None:
    checks.fault = "it is wrong"
    for made in (1, 2):
        _, slow_paths = answer(model)
        assert slow_paths == ("decoding is not compiled: it is wrong",) and checks.made == made
    checks.fault = ""
    assert answer(model)[1] == () and checks.made == 3
    assert answer(model)[1] == () and checks.made == 3


def test_a_model_that_is_not_plain_stays_one(
    model_directory: Callable[[str], Path], checks: Checks, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = answer(model_directory("gpt2"))
    monkeypatch.setattr(runner.Runner, "_check", lambda _: pytest.fail("it is known"))
    assert answer(model_directory("gpt2")) == first
    assert "is not a plain decoder" in first[1][0]


def test_attention_that_differs_at_the_end_of_a_long_context_alone_is_seen(
    model_directory: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ministral's grows sharper from a certain token on: a decoder that forgets it must not take the model over."""
    directory = Path(shutil.copytree(model_directory("ministral3"), tmp_path / "model"))
    config = json.loads((directory / "config.json").read_text())
    config["rope_parameters"]["original_max_position_embeddings"] = config["max_position_embeddings"] // 2
    (directory / "config.json").write_text(json.dumps(config))
    assert answer(directory)[1] == ()
    original = Decoder.__init__

    def forgetful(self: Decoder, *given: Any) -> None:
        original(self, *given)
        self._sharpening = None

    monkeypatch.setattr(Decoder, "__init__", forgetful)
    monkeypatch.setattr(verdicts, "user_cache", lambda: tmp_path / "cache")  # nothing is known of the model there
    assert "is not a plain decoder" in answer(directory)[1][0]


def test_damaged_notes_and_a_cache_that_cannot_be_written_cost_checks_alone(
    model: Path, checks: Checks, verdict_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = answer(model)
    (note,) = verdict_cache.glob("verdicts/*")
    for damage in ("", "[]", '{"is_plain": true}', "\xff"):
        note.write_text(damage, "latin-1")
        assert answer(model) == first
    assert checks.made == 5
    monkeypatch.setattr(verdicts, "user_cache", lambda: model / "config.json")
    assert answer(model) == answer(model) == first
    assert checks.made == 7


def test_old_notes_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdicts, "_MOST", 3)
    for index in range(5):
        Verdicts(tmp_path / f"{index}.json").keep(Verdict(True, True))
        os.utime(tmp_path / f"{index}.json", (index, index))
        if index == 2:
            assert Verdicts(tmp_path / "0.json").read(), "and is used now"
    assert {file.stem for file in tmp_path.iterdir()} == {"0", "3", "4"}
