"""The scripts that measure: what they compare is what they say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from agreement import Answer, count_agreeing, first_difference, judgement_of
from rotation import largest_difference, random_basis
from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]
NANO = ROOT / "deploy" / "nano" / "model"


def run(script: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "deploy" / script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def test_tokens_count_until_the_first_near_tie_and_agree_until_the_first_difference() -> None:
    answer = Answer((5, 6, 7, 8), (2.0, 0.5, 0.05, 3.0), (1, 1, 1, 1))
    assert first_difference(answer.ids, (5, 6, 9, 8)) == 2
    assert count_agreeing(answer, (5, 6, 9, 8), tie=0.1) == (2, 2)  # they part where it does not count
    assert count_agreeing(answer, (5, 6, 9, 8), tie=0.01) == (4, 2)
    assert count_agreeing(answer, (5, 1, 7, 8), tie=0.1) == (2, 1)
    assert count_agreeing(answer, answer.ids, tie=0.01) == (4, 4)


@pytest.mark.parametrize("other", [(5, 6), (5, 6, 7, 8, 9)], ids=["shorter", "longer"])
def test_an_answer_that_ends_elsewhere_differs_there(other: tuple[int, ...]) -> None:
    answer = Answer((5, 6, 7, 8), (2.0, 2.0, 2.0, 2.0), (1, 1, 1, 1))
    assert first_difference(answer.ids, other) == min(4, len(other))


def test_the_noise_is_what_the_distance_of_the_best_two_moves_by() -> None:
    """Behind the first side's tokens, also where the other's best token is another."""
    answers = [Answer((5, 6), (1.0, 0.5), (7, 8)), Answer((9,), (0.2,), (3,))]
    told = [[{5: -0.5, 7: -1.8, 1: -9.0}, {6: -1.0, 8: -1.2, 1: -9.0}], [{3: -1.0, 9: -1.1}]]
    judged = judgement_of(answers, told)  # the distances move by 0.3, -0.3 and -0.3
    assert (judged.steps, judged.same, judged.widest) == (3, 2, 0.2)
    assert judged.noise == pytest.approx(0.2828, abs=1e-4)
    unknown = judgement_of([Answer((5, 5), (1.0, 1.0), (7, 7))], [[{5: -0.5, 1: -4.5}, {5: -0.5, 7: -1.5}]])
    assert unknown.noise == pytest.approx(1.5), "a token that is not told is no likelier than those that are"


def test_a_rotated_model_answers_the_same_from_other_weights(tmp_path: Path) -> None:
    done = run("rotation.py", NANO, tmp_path / "rotated", "--dtype", "float32", "--seed", "3")
    assert done.returncode == 0, done.stderr
    assert largest_difference(NANO, tmp_path / "rotated") < 0.001
    before, after = (load_file(path / "model.safetensors") for path in (NANO, tmp_path / "rotated"))
    changed = [name for name, weight in before.items() if not torch.equal(weight.float(), after[name])]
    assert all(name in changed for name in before if name.endswith("_proj.weight") or "embed" in name)
    assert (
        "lm_head.weight" in after and json.loads((tmp_path / "rotated/config.json").read_text())["dtype"] == "float32"
    )


def test_a_basis_is_orthogonal_and_its_seeds_own() -> None:
    basis = random_basis(48, seed=1)
    torch.testing.assert_close(basis @ basis.T, torch.eye(48, dtype=torch.float64))
    assert torch.equal(basis, random_basis(48, seed=1)) and not torch.equal(basis, random_basis(48, seed=2))


def test_a_model_whose_norms_stand_elsewhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gemma3_text"}')
    done = run("rotation.py", tmp_path, tmp_path / "rotated")
    assert done.returncode == 1 and "gemma3_text: must be llama, mistral, qwen2 or qwen3" in done.stderr
