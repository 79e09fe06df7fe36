"""`penstock bench quality` on a tiny model: its figures are those of a plain computation, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner, Result

from penstock.__main__ import app
from penstock.api.bench.quality import BUNDLED_TEXT
from penstock.engine.paged.quantization.quantize import dequantized, quantizable

LENGTH = 24


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """The command sets its own for the whole process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """More chunks than are read side by side, and a rest."""
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text(BUNDLED_TEXT.read_text("utf-8")[:2000])
    return file


def bench(*arguments: object) -> Result:
    words = ["bench", "quality", *map(str, arguments), "--device=cpu"]
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, words)


def report(result: Result) -> Any:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@torch.inference_mode()
def predicted(model: Any, chunks: Tensor) -> Tensor:
    found: Tensor = model(chunks).logits[:, :-1].log_softmax(-1)
    return found


def test_figures_are_those_of_a_plain_computation(tiny_model: Path, text: Path) -> None:
    ids = AutoTokenizer.from_pretrained(tiny_model)(text.read_text("utf-8"))["input_ids"]
    count = len(ids) // LENGTH
    assert count > 16 and len(ids) % LENGTH
    chunks = torch.tensor(ids[: count * LENGTH]).view(count, LENGTH)
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    right = predicted(model, chunks)
    several = "--quantization=none,int8,int4"
    document = report(bench(tiny_model, "--dtype=float32", several, f"--text={text}", f"--length={LENGTH}", "--json=-"))
    assert document["benchmark"] == "quality"
    assert list(document["results"]) == ["float32", "int8", "int4"]
    for name, found in document["results"].items():
        candidate = deepcopy(model)
        for _, module, method in quantizable(candidate, name) if name != "float32" else ():
            module.weight = torch.nn.Parameter(dequantized(module.weight.detach(), method), requires_grad=False)
        other = predicted(candidate, chunks)
        divergences = (right.exp() * (right - other)).sum(-1).flatten()
        surprise = -other.gather(-1, chunks[:, 1:, None]).mean()
        assert found["positions"] == len(divergences) == count * (LENGTH - 1)
        assert found["divergence"] == pytest.approx(float(divergences.mean()), rel=0.02, abs=1e-6)
        assert found["divergence_p99"] == pytest.approx(
            float(divergences.quantile(0.99, interpolation="higher")), rel=0.05, abs=1e-5
        )
        assert found["divergence_error"] == pytest.approx(
            float(divergences.std()) / len(divergences) ** 0.5, rel=0.05, abs=1e-6
        )
        assert found["perplexity"] == pytest.approx(float(surprise.exp()), rel=1e-4)
        same = (right.argmax(-1) == other.argmax(-1)).float().mean()
        assert found["same_best"] == pytest.approx(float(same), abs=0.01)
        assert found["reference_perplexity"] == pytest.approx(
            float((-right.gather(-1, chunks[:, 1:, None])).mean().exp()), rel=1e-4
        )
    results = document["results"]
    assert results["float32"]["divergence"] < 1e-6 < results["int8"]["divergence"] < results["int4"]["divergence"]
    assert results["int4"]["weight_bytes"] < results["int8"]["weight_bytes"] < results["float32"]["weight_bytes"]


def test_the_bundled_text_and_every_quantization_are_the_default(tiny_model: Path, tmp_path: Path) -> None:
    result = bench(tiny_model, "--length=512", f"--json={tmp_path}/report.json")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert "of the bundled text" in lines[0] and "reference: float32, perplexity" in lines[1]
    assert [line.split()[0] for line in lines[3:]] == ["bfloat16", "int8", "int4"]
    document = json.loads((tmp_path / "report.json").read_text())
    assert document["results"]["int8"]["positions"] % 511 == 0


def test_models_are_compared_with_other_references(tiny_model: Path, text: Path) -> None:
    few = (f"--text={text}", "--length=100", "--json=-", "--quantization=int8")
    against_itself = report(bench(tiny_model, *few, "--against=int8"))["results"]["int8"]
    assert (against_itself["divergence"], against_itself["same_best"]) == (0, 1)
    by_name = report(bench(tiny_model, *few, f"--against={tiny_model}"))
    assert by_name["reference"]["dtype"] == "float32"
    assert by_name["results"] == report(bench(tiny_model, *few))["results"]
    unquantized = report(bench(tiny_model, *few, "--against=none"))
    assert unquantized["reference"]["dtype"] == "bfloat16" and unquantized["reference"]["quantization"] is None


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--quantization=int8,int3"], "--quantization int3: must be none, int8 or int4, or several with commas"),
        (["--text=/nowhere/text"], "--text /nowhere/text: No such file or directory; check the path"),
        (["--text={empty}"], "is empty; give a file with text"),
        (["--text={short}"], "has fewer tokens than one chunk, 256; give a longer text"),
        (["--text={binary}"], "is not UTF-8; convert it"),
        (["--length=4096"], "--length 4096: the context of"),
        (["--against=/nowhere/model"], ": /nowhere/model; check the path"),
        (["--backend=hf"], "--backend hf: only the backend paged is measured; leave --backend out"),
    ],
)
def test_bad_input_has_one_clear_line(tiny_model: Path, tmp_path: Path, options: list[str], error: str) -> None:
    files = {name: tmp_path / name for name in ("empty", "short", "binary")}
    for name, content in (("empty", b" \n"), ("short", b"12345"), ("binary", b"\xff\xfe\x00")):
        files[name].write_bytes(content)
    result = bench(tiny_model, *(option.format(**files) for option in options))
    assert result.exit_code == 2
    assert error in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_model_is_needed() -> None:
    missing, unnamed = bench("/nowhere/model"), bench()
    assert missing.exit_code == unnamed.exit_code == 2
    assert ": /nowhere/model; check the path" in missing.stderr
    assert "penstock bench quality MODEL" in unnamed.stderr


def test_models_with_other_vocabularies_are_not_compared(tiny_model: Path, text: Path, tmp_path: Path) -> None:
    other: Any = AutoModelForCausalLM.from_pretrained(tiny_model)
    other.resize_token_embeddings(520)
    other.save_pretrained(tmp_path / "other")
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path / "other")
    result = bench(tiny_model, f"--text={text}", "--length=100", "--quantization=none", f"--against={tmp_path}/other")
    assert result.exit_code == 2
    assert "compare models with the same tokenizer" in result.stderr
